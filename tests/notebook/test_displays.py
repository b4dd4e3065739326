"""Displays of trillion_infer.notebook."""

import io

import pytest
from rich.console import Console

from pallas_kernels.quantised_matmul import QuantisedTensor
from sharding.mesh import make_mesh
from trillion_infer import notebook
from trillion_infer.core.errors import ConfigError
from trillion_infer.core.outputs import RequestMetrics


def text_of(table) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(table)
    return out.getvalue()


def test_the_mesh_table_has_a_line_a_device_and_its_place():
    mesh = make_mesh("data=2,tensor=4")
    text = text_of(notebook.mesh_table(mesh))
    assert "data=2, tensor=4" in text
    assert all(str(device) in text for device in mesh.devices.flat)
    assert "expert" not in text


def test_the_sharding_table_shows_each_devices_part(make_llm):
    llm = make_llm("smollm2", mesh="tensor=2", max_running=2, prefill_chunk=16, precompile=False)
    text = text_of(notebook.sharding_table(llm, "embed.table"))
    assert "[0:128, :]" in text
    assert "[128:256, :]" in text
    assert "(256, 72)" in text


def test_the_sharding_table_shows_both_arrays_of_a_packed_weight(make_llm):
    llm = make_llm("kimi_k25", mesh="expert=2", max_running=2, prefill_chunk=16, precompile=False)
    name = next(n for n, p in llm.blueprint.abstract_params.items() if isinstance(p, QuantisedTensor))
    text = text_of(notebook.sharding_table(llm, name))
    assert "packed" in text
    assert "scale" in text
    experts = llm.blueprint.abstract_params[name].shape[1]
    assert text.count(f"0:{experts // 2}, ") == text.count(f"{experts // 2}:{experts}, ") == 2


def test_an_unknown_weight_is_refused_with_the_names_there_are(make_llm):
    llm = make_llm("smollm2", mesh="tensor=2", max_running=2, prefill_chunk=16, precompile=False)
    with pytest.raises(ConfigError, match=r"no weight 'embed'; there are .*embed\.table"):
        notebook.sharding_table(llm, "embed")


def test_the_memory_chart_has_a_bar_a_holder():
    axes = notebook.memory_chart({"weights": 3_000_000, "kv": 1_000_000}).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["kv", "weights"]
    assert [bar.get_width() for bar in axes.patches] == [1.0, 3.0]
    assert "4 MB" in axes.get_title()


def test_gaps_are_milliseconds_between_tokens():
    metrics = RequestMetrics(arrival_time=1.0, token_times=[1.5, 1.625, 1.75])
    assert notebook.token_gaps(metrics) == [500.0, 125.0, 125.0]


def test_the_latency_plot_names_each_request_with_its_median():
    one = RequestMetrics(arrival_time=1.0, token_times=[1.5, 1.625, 1.75])
    only_first = RequestMetrics(arrival_time=1.0, token_times=[1.5])
    axes = notebook.latency_plot({"alone": one, "short": only_first}).axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["alone: median 125.0 ms", "short: one token"]


def test_the_tier_chart_shows_each_tiers_share_and_hits():
    stats = {
        "full.pages_total": 100,
        "full.pages_free": 25,
        "prefix_hit_tokens": 1500,
        "kv_host.blocks": 3,
        "kv_host.bytes": 500,
        "kv_host.budget": 1000,
        "kv_host.hit_tokens": 1000,
        "kv_store.blocks": 1,
        "kv_store.bytes": 10,
        "kv_store.budget": 0,
        "kv_store.hit_tokens": 0,
    }
    axes = notebook.kv_tiers_chart(stats).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [1.0, 0.5, 0.75]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["store", "host", "device full"]
    labels = [text.get_text() for text in axes.texts]
    assert labels[2] == "75 of 100 pages, 500 tokens hit"
    assert labels[1] == "500 of 1,000 bytes, 1,000 tokens hit"
