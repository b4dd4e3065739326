"""Figures of the status page: live requests, latencies, KV by tier, the mesh."""

import time
from collections.abc import Mapping
from importlib.resources import files
from statistics import median
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from trillion_infer.serve.jobs import Job
from trillion_infer.serve.metrics import pages_in_use
from trillion_infer.serve.replies import json_reply
from trillion_infer.serve.server import Server

_LIVE_SHOWN = 50


async def page(http: HttpRequest) -> Response:
    """The status page, which needs nothing from elsewhere."""
    html = files("trillion_infer.serve").joinpath("status.html").read_bytes()
    policy = "default-src 'self' 'unsafe-inline'; img-src data:"
    headers = {"Content-Security-Policy": policy, "X-Frame-Options": "DENY"}
    return Response(html, headers=headers, media_type="text/html; charset=utf-8")


async def status(http: HttpRequest) -> Response:
    """The figures, as JSON. No ids and no text of anybody's request."""
    server: Server = http.app.state.server
    stats, jobs = await server.stats(), list(server.jobs.values())
    first = list(server.metrics.recent_first_token_s)
    return json_reply(
        {
            "model": server.options.model_name,
            "max_model_len": server.reader.max_model_len,
            "trouble": server.health(),
            "requests": len(jobs),
            "live": [live(job) for job in jobs[-_LIVE_SHOWN:]],
            "time": time.monotonic(),
            "generated_tokens": server.generated_tokens + sum(job.tokens_so_far for job in jobs),
            "time_to_first_token_s": median(first) if first else None,
            "kv_in_use": pages_in_use(stats),
            "tiers": kv_tiers(stats),
            "meshes": [mesh_of(name, mesh) for name, mesh in server.thread.generator.engine.meshes()],
            "engine": stats,
        }
    )


def live(job: Job) -> dict[str, Any]:
    """A request in flight, by its sizes and its age in seconds."""
    return {
        "prompt_tokens": job.prompt_tokens,
        "generated_tokens": job.tokens_so_far,
        "seconds": round(time.monotonic() - job.began, 1),
    }


def kv_tiers(stats: Mapping[str, float]) -> list[dict[str, Any]]:
    """Where KV lies: device pools in pages, tiers beyond the device in bytes and blocks."""
    found = []
    for name in stats:
        if name.endswith(".pages_total"):
            pool = name.removesuffix(".pages_total")
            pages = {state: int(stats[f"{pool}.pages_{state}"]) for state in ("total", "leased", "cached", "free")}
            found.append({"tier": f"device {pool}", "pages": pages})
    for name in stats:
        if name.startswith("kv_") and name.endswith(".bytes"):
            tier = name.removeprefix("kv_").removesuffix(".bytes")
            figures = {"bytes": stats[name], "blocks": stats.get(f"kv_{tier}.blocks", 0)}
            found.append({"tier": tier, **figures, "hit_tokens": stats.get(f"kv_{tier}.hit_tokens", 0)})
    return found


def mesh_of(name: str, mesh: Any) -> dict[str, Any]:
    """A mesh by its axes above one, and its devices in the mesh's order."""
    devices = list(mesh.devices.flat)
    return {
        "name": name,
        "axes": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "kind": devices[0].device_kind,
        "devices": [device.id for device in devices],
    }
