"""Writes files of blocks until it is killed: python -m tests.cache.tiers.crash_writer FOLDER FIRST."""

import sys
from pathlib import Path

from tests.cache.tiers.helpers import MODEL, blocks
from trillion_infer.cache.tiers.disk import DiskTier

if __name__ == "__main__":
    tier = DiskTier(Path(sys.argv[1]), MODEL, 400_000)
    number = int(sys.argv[2])
    while True:
        tier.put(blocks(*range(number, number + 5)))
        print("wrote", flush=True)
        number += 5
