"""The Grafana board shows figures that the server has."""

import json
import re
from pathlib import Path

from tests.serve.serving import MODEL, serving

BOARD = json.loads((Path(__file__).parents[2] / "deploy/grafana/trillion_infer.json").read_text())
NAME = re.compile(r"\b(?:vllm|trillion_infer):[a-z0-9_]+")


def test_every_figure_on_the_board_is_one_the_server_tells():
    with serving("fine") as served:
        served.post("/v1/completions", {"model": MODEL, "prompt": "ABCD"})
        told = set(NAME.findall(served.get("/metrics").text))
    shown = {name for panel in BOARD["panels"] for target in panel["targets"] for name in NAME.findall(target["expr"])}
    assert len(shown) > 10
    assert shown - told == set()


def test_panels_do_not_overlap():
    taken = [
        (column, row)
        for panel in BOARD["panels"]
        for column in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for row in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(column for column, _ in taken) < 24
