"""Many clients that stream, hang up and abort: no error, no leak, flat memory."""

import pytest

from trillion_infer.benchmark.server_load import added_latency_ms, load


@pytest.mark.parametrize(
    ("seconds", "streams"),
    [pytest.param(8, 60, id="short"), pytest.param(300, 200, id="long", marks=pytest.mark.slow)],
)
def test_clients_that_come_and_go_leave_nothing_behind(seconds, streams, record_property):
    found = load(seconds, streams)
    record_property("load", f"{found.requests} requests, {found.host_us_per_token:.0f} us of CPU a token")
    assert found.errors == []
    assert found.requests > streams
    assert found.left > 0
    assert found.aborted > 0
    pages = found.idle["tiers"][0]["pages"]
    assert (pages["leased"], found.idle["requests"]) == (0, 0)
    assert pages["free"] + pages["cached"] == pages["total"]
    assert max(found.rss_mb[1:]) <= 1.05 * found.rss_mb[0] + 8


def test_added_latency_is_measured_from_the_engine_to_the_client():
    found = added_latency_ms(streams=4, tokens=20, step_ms=5)
    assert 0 < found["added_p50_ms"] <= found["added_p90_ms"] <= found["added_p99_ms"]
