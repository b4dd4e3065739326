"""notebooks/quickstart.ipynb, run whole on four virtual CPU devices with real weights."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.environment import environment

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"
DEVICES = 4


@pytest.fixture(scope="module")
def cells(smollm2_path):
    """Code cells after the run; the model has been fetched."""
    book = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(book, timeout=900, kernel_name="python3").execute(env=environment(DEVICES))
    return [cell for cell in book.cells if cell.cell_type == "code"]


def outputs(cells, source: str) -> list:
    return next(cell.outputs for cell in cells if source in cell.source)


def text(cells, source: str) -> str:
    found = outputs(cells, source)
    return "".join(out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in found)


def test_it_answers_paris(cells):
    assert "Paris" in text(cells, "stream_chat")


def test_it_shows_a_mesh_of_every_device(cells):
    shown = text(cells, "mesh_table")
    assert f"tensor={DEVICES}" in shown
    assert shown.count("0:1") == 1, "each device must hold one head"


@pytest.mark.parametrize("source", ["memory_chart", "latency_plot"])
def test_it_draws(cells, source):
    assert any("image/png" in out.get("data", {}) for out in outputs(cells, source))


def test_it_visualises_a_sharding(cells):
    assert outputs(cells, "visualize_sharding")


def test_nothing_is_written_to_standard_error_but_progress(cells):
    said = [out.text for cell in cells for out in cell.outputs if out.get("name") == "stderr"]
    assert not [line for line in said if "Error" in line or "Traceback" in line]


def test_it_is_stored_without_outputs():
    book = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.outputs and cell.execution_count is None for cell in book.cells if cell.cell_type == "code")
