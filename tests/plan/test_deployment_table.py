"""The page of deployments is what its data say, and its data keep within the limit."""

import json
from pathlib import Path

import pytest

from trillion_infer.config.deployment import find_deployment
from trillion_infer.plan.deployment_table import document

DOCS = Path(__file__).parents[2] / "docs"
ROWS = json.loads((DOCS / "deployments.json").read_text())


def test_the_page_is_written_from_its_data():
    assert (DOCS / "deployments.md").read_text() == document(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["config"])
def test_a_row_is_of_a_deployment_and_within_its_limit(row):
    assert find_deployment(row["config"]).hf_config is not None
    assert row["weights_gib"] >= row["once_gib"]
    assert 0 < row["kv_gib"] <= row["limit_gib"]
    assert row["programs"] > 1
