#!/bin/sh
# Makes a virtual environment with this project in it.
# Run:    scripts/setup_venv.sh FOLDER [PYTHON] [EXTRAS]
# Expect: FOLDER/bin/python imports trillion_infer; the newest working Python from 3.11 up is used unless one is named.
set -eu
folder=$1 python=${2:-} extras=${3:-}

works() { "$1" -c 'import sys, venv, ssl; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

if [ -n "$python" ]; then
    works "$python" || { echo "error: $python does not run, or is older than 3.11; name another with PYTHON=…" >&2; exit 1; }
else
    for version in 3.14 3.13 3.12 3.11; do
        for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python; do
            if works "$candidate"; then python=$candidate; break 2; fi
        done
    done
    [ -n "$python" ] || { if works python3; then python=python3; fi; }
    [ -n "$python" ] || { echo "error: no Python from 3.11 up was found; name one with PYTHON=…" >&2; exit 1; }
fi

if [ ! -x "$folder/bin/python" ] || ! works "$folder/bin/python"; then
    echo "Making $folder with $("$python" --version)" >&2
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
fi
echo "Installing${extras:+ with extras $extras}" >&2
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".${extras:+[$extras]}"
