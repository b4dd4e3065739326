"""Rows of JSONL and ArrayRecord files by number, for grain."""

import glob
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trillion_infer.core.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    import grain

ARRAY_RECORD = (".array_record", ".arrayrecord")


class JsonlRows:
    """The lines of a file that are not blank, by number. Holds 8 bytes a line; safe to use from several threads."""

    def __init__(self, path: str):
        self.path = path
        self._starts, position = array("Q"), 0
        with open(path, "rb") as file:
            for line in file:
                if line.strip():
                    self._starts.append(position)
                position += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self._starts[index])
            return file.readline()


def find_files(patterns: str) -> list[str]:
    """Files named by paths and patterns with * and ?, joined by commas; those of a pattern by name.

    Raises ConfigError for one that names no file.
    """
    found = []
    for pattern in patterns.split(","):
        files = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern] * Path(pattern).is_file()
        if not files:
            raise ConfigError(f"--input names {pattern!r}, which is no file; give JSONL or ArrayRecord files.")
        found += files
    return found


def open_rows(files: Sequence[str]) -> "grain.MapDataset":
    """(index, row or the InvalidRequestError that says what is wrong with it) of every row of the files, in order.

    Files that end in .array_record hold a JSON object a record, others one a line. Raises ConfigError for files that
    are not what their name says.
    """
    import grain

    sources = [_array_records(path) if path.endswith(ARRAY_RECORD) else JsonlRows(path) for path in files]
    rows = grain.MapDataset.concatenate([grain.MapDataset.source(source) for source in sources])
    return rows.map_with_index(_parsed)


def _array_records(path: str) -> Any:
    import grain

    try:
        return grain.sources.ArrayRecordDataSource([path])
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{path} is no ArrayRecord file: {str(error).splitlines()[0]}") from error


def _parsed(index: int, line: bytes) -> tuple[int, Any]:
    try:
        return index, json.loads(line)
    except ValueError as error:
        return index, InvalidRequestError(f"row {index} is not JSON: {error}.")
