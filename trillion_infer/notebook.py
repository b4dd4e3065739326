"""Displays for notebooks: the mesh, where a weight lies, memory by holder, KV by tier, latency of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from jax.sharding import Mesh
from rich.markup import escape
from rich.table import Table

from pallas_kernels.quantised_matmul import QuantisedTensor
from trillion_infer.core.errors import ConfigError
from trillion_infer.core.outputs import RequestMetrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from trillion_infer.llm import LLM


def mesh_table(mesh: Mesh) -> Table:
    """A line a device: its place on each axis of the mesh that has more than one, and what it is."""
    axes = [name for name, size in mesh.shape.items() if size > 1]
    title = ", ".join(f"{name}={mesh.shape[name]}" for name in axes) or "one device"
    table = Table("device", "kind", *axes, title=f"Mesh: {title}")
    names = list(mesh.shape)
    for place, device in np.ndenumerate(mesh.devices):
        table.add_row(str(device), device.device_kind, *(str(place[names.index(name)]) for name in axes))
    return table


def sharding_table(llm: LLM, name: str) -> Table:
    """A line a device: which part of parameter `name` it holds, and in how many MB; of a packed weight, which part of
    each of its two arrays.

    Raises ConfigError with the names there are for any other.
    """
    weights = llm.blueprint.abstract_params
    if name not in weights:
        raise ConfigError(f"there is no weight {name!r}; there are {', '.join(weights)}.")
    weight = weights[name]
    arrays = {"part": weight}
    if isinstance(weight, QuantisedTensor):
        arrays = {"packed": weight.packed, "scale": weight.scale}
    shapes = ", ".join(f"{leaf.shape} {leaf.dtype} {getattr(leaf.sharding, 'spec', '')}" for leaf in arrays.values())
    table = Table("device", *arrays, "MB", title=f"{name} {shapes}")
    places = [leaf.sharding.devices_indices_map(leaf.shape) for leaf in arrays.values()]
    for device in places[0]:
        texts, held = [], 0
        for leaf, place in zip(arrays.values(), places, strict=True):
            ranges = [part.indices(size)[:2] for part, size in zip(place[device], leaf.shape, strict=True)]
            held += math.prod(stop - start for start, stop in ranges) * leaf.dtype.itemsize
            texts.append(escape(f"[{', '.join(map(_range, ranges, leaf.shape))}]"))
        table.add_row(str(device), *texts, f"{held / 1e6:.2f}")
    return table


def _range(held: tuple[int, int], size: int) -> str:
    start, stop = held
    return ":" if held == (0, size) else f"{start}:{stop}"


def memory_chart(memory: Mapping[str, int]) -> Figure:
    """Bars of `LLM.memory()`: MB by holder, the largest on top."""
    figure, axes = _figure(height=1.2 + 0.35 * len(memory))
    holders = sorted(memory, key=memory.__getitem__)
    bars = axes.barh(holders, [memory[holder] / 1e6 for holder in holders], color="tab:blue")
    axes.bar_label(bars, fmt="{:,.1f} MB", padding=4)
    axes.margins(x=0.2)
    axes.set(xlabel="MB", title=f"Memory by holder: {sum(memory.values()) / 1e6:,.0f} MB")
    return figure


def kv_tiers_chart(stats: Mapping[str, float]) -> Figure:
    """Tiers of `LLM.stats()`, the fastest on top: what each holds of its budget, and the tokens it was hit for."""
    pools = [name[: -len(".pages_total")] for name in stats if name.endswith(".pages_total")]
    rows = [(f"device {pool}", stats[f"{pool}.pages_total"], "pages") for pool in pools]
    used = [rows[i][1] - stats[f"{pool}.pages_free"] for i, pool in enumerate(pools)]
    tiers = [name[3 : -len(".blocks")] for name in stats if name.startswith("kv_") and name.endswith(".blocks")]
    rows += [(tier, stats[f"kv_{tier}.budget"] or stats[f"kv_{tier}.bytes"], "bytes") for tier in tiers]
    used += [stats[f"kv_{tier}.bytes"] for tier in tiers]
    figure, axes = _figure(height=1.4 + 0.5 * len(rows))
    shares = [have / total if total else 0 for have, (_, total, _) in zip(used, rows, strict=True)]
    found = sum(stats[f"kv_{tier}.hit_tokens"] for tier in tiers)
    on_device = f"{max(0, stats['prefix_hit_tokens'] - found):,.0f}"
    hits = [on_device if i == 0 else "" for i in range(len(pools))]
    hits += [f"{stats[f'kv_{tier}.hit_tokens']:,.0f}" for tier in tiers]
    labels = [
        f"{have:,.0f} of {total:,.0f} {unit}" + (f", {hit} tokens hit" if hit else "")
        for have, (_, total, unit), hit in zip(used, rows, hits, strict=True)
    ]
    bars = axes.barh([name for name, _, _ in rows][::-1], shares[::-1], color="tab:blue")
    axes.bar_label(bars, labels[::-1], padding=4)
    axes.set(xlim=(0, 1.8), xticks=[0, 0.5, 1], xlabel="share in use", title="KV by tier")
    return figure


def token_gaps(metrics: RequestMetrics) -> list[float]:
    """Milliseconds each token was waited for: the first since the request came, others since the one before."""
    times = [metrics.arrival_time, *metrics.token_times]
    return [1e3 * (after - before) for before, after in pairwise(times)]


def latency_plot(requests: Sequence[RequestMetrics] | Mapping[str, RequestMetrics]) -> Figure:
    """Milliseconds a token over its place in the answer, a line a request, with medians. The first token is apart."""
    named = requests if isinstance(requests, Mapping) else {f"request {i}": m for i, m in enumerate(requests)}
    figure, axes = _figure(height=4)
    for name, metrics in named.items():
        first, *later = token_gaps(metrics)
        label = f"median {median(later):.1f} ms" if later else "one token"
        axes.plot(range(2, len(later) + 2), later, marker=".", linewidth=1, label=f"{name}: {label}")
        axes.plot([1], [first], marker="x", color=axes.lines[-1].get_color())
    axes.set(xlabel="token of the answer (x: the first)", ylabel="ms", title="Latency by token")
    axes.set_yscale("log")
    axes.legend()
    return figure


def _figure(height: float):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, figure.subplots()
