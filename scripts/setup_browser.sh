#!/bin/sh
# Installs chromium for the tests of the status page, where apt and the right to use it are there.
# Run:    scripts/setup_browser.sh
# Expect: chromium on the path; or a line that says why not, and the tests of the page are skipped.
set -u
command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "chromium is not installed and this user cannot install it: tests of the status page will be skipped." >&2
    exit 0
fi
echo "Installing chromium" >&2
{ apt-get -qq install -y --no-install-recommends chromium || { apt-get -qq update &&
    apt-get -qq install -y --no-install-recommends chromium; }; } >/dev/null 2>&1 ||
    echo "chromium could not be installed: tests of the status page will be skipped." >&2
exit 0
