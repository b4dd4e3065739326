"""The table of the kernel report, and how it knows what is stale."""

import importlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from pallas_kernels.common import sources
from pallas_kernels.common.kernel_report import backend_of
from pallas_kernels.common.report import Cost, Row, table
from pallas_kernels.common.sources import code_digest
from sharding.topologies import KINDS

TEMPORARIES = {"ragged_paged_attention": 0.02, "latent_paged_attention": 0.05}
"""Of the pool; latents of 8 GiB, which queries of 128 heads come near (see test_latent_ahead_of_time.py)."""


@pytest.fixture(scope="module")
def written():
    """The rows of docs/kernels.json."""
    path = Path(__file__).parents[3] / "docs" / "kernels.json"
    return [Row.of(entry) for entry in json.loads(path.read_text())]


def row(spec, pool_bytes, code="abc"):
    cost, fewest = Cost(3_000_000, 2 * 10**9), Cost(2_000_000, 10**9)
    return Row("op", spec, "decode", "v5e", 1.25, 2**20, 512, pool_bytes, cost, fewest, code)


def test_rows_are_sorted_and_ratios_are_over_the_fewest():
    lines = table([row("b", 0, code=""), row("a", 51200)]).splitlines()
    assert lines[2] == "| a | decode | v5e | 1.2 | 1.00 | 1.00% | 3.0 | 1.50x | 2.00 | 2.00x |"
    assert lines[3] == "| b | decode | v5e | - | 1.00 | - | 3.0 | 1.50x | 2.00 | 2.00x |"


def test_rows_come_back_from_json():
    assert Row.of(json.loads(json.dumps(asdict(row("a", 1))))) == row("a", 1)


@pytest.mark.parametrize("op", ["ragged_paged_attention", "grouped_matmul"])
def test_a_digest_is_of_one_platform_and_shape(op):
    digests = [code_digest(op, backend, shape) for backend in ("tpu", "gpu") for shape in ("one", "two")]
    assert len({*digests, code_digest(op, "tpu", "one")}) == 4


def test_a_digest_changes_with_code_and_not_with_comments_or_types(tmp_path, monkeypatch):
    shutil.copytree(sources.FOLDER, tmp_path / "kernels", ignore=shutil.ignore_patterns("*.json", "src", "__pycache__"))
    monkeypatch.setattr(sources, "FOLDER", tmp_path / "kernels")
    path = tmp_path / "kernels" / "quantised_matmul" / "tiles.py"
    text, digests = path.read_text(), []
    for addition in ("", "# a comment", "from typing import Any", "SOMETHING: int = 1", "SOMETHING: Any = 1"):
        path.write_text(f"{text}{addition}\n")
        digests.append(code_digest("grouped_matmul", "tpu", "one"))
    assert digests[0] == digests[1] == digests[2] != digests[3] == digests[4]


@pytest.mark.parametrize("op", [*TEMPORARIES, "grouped_matmul", "quantised_matmul"])
def test_the_written_table_holds_every_shape_for_every_target(written, op):
    report = importlib.import_module(f"pallas_kernels.{op}.report").REPORT
    wanted = {
        (op, spec.name, batch, kind.name)
        for spec in report.shapes
        for kind in KINDS.values()
        for batch in report.batches(spec, backend_of(kind.name))
    }
    assert {row.key for row in written if row.op == op} == wanted


@pytest.mark.parametrize("op", TEMPORARIES)
def test_written_kernels_hold_little_beside_their_pool(written, op):
    rows = [row for row in written if row.op == op]
    assert [row.key for row in rows if row.temp_bytes >= TEMPORARIES[op] * row.pool_bytes] == []
