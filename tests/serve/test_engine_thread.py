"""What the engine's end means for those who wait."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serve.serving import MODEL, PLAIN, serving, user
from trillion_infer import SamplingParams
from trillion_infer.core.errors import EngineDeadError, InvalidRequestError
from trillion_infer.core.outputs import RequestOutput
from trillion_infer.serve.engine_thread import EngineThread
from trillion_infer.testing.scripted import scripted_generator


class Breaks:
    """Fails at token 5 of prompts of 50 tokens or more."""

    def __call__(self, index, prompt_len):
        if prompt_len >= 50 and index == 5:
            raise ValueError("shapes do not match")
        return 97


def test_when_the_engine_dies_everyone_gets_an_error_and_nobody_hangs_u46():
    with serving(Breaks()) as served:
        assert served.get("/health").status_code == 200
        bodies = [{"model": MODEL, "messages": user("x" * n), "max_tokens": 2000} for n in (10, 20, 60)]
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda body: served.post("/v1/chat/completions", body), bodies))
        assert {answer.status_code for answer in answers} <= {500, 503}
        assert 500 in {answer.status_code for answer in answers}
        assert all(answer.json()["error"]["message"] for answer in answers)
        health = served.get("/health")
        assert health.status_code == 503
        assert "shapes do not match" in health.json()["error"]["message"]
        later = served.post("/v1/completions", {"model": MODEL, "prompt": "x"})
        assert (later.status_code, later.headers["Retry-After"]) == (503, "1")
        assert served.get("/metrics").status_code == 200


def test_a_stream_that_loses_its_engine_ends_with_an_error_event_u46():
    with serving(Breaks()) as served:
        body = {"model": MODEL, "prompt": "x" * 60, "max_tokens": 100, "stream": True}
        text = served.post("/v1/completions", body).text
    assert '"code":"engine_dead"' in text
    assert text.endswith("data: [DONE]\n\n")


def test_a_step_that_never_ends_makes_health_fail():
    with serving("x", options={"stall_s": 5.0}) as served:
        served.server.thread.step_seconds = lambda: 6.0
        assert served.get("/health").status_code == 503


def run(generator, check):
    async def main():
        thread = EngineThread(generator)
        thread.start()
        try:
            await check(thread)
        finally:
            thread.stop()

    asyncio.run(main())


def test_items_of_a_prompt_are_its_deltas_and_then_its_output():
    async def check(thread):
        items, done = [], asyncio.Event()

        def sink(item):
            items.append(item)
            if isinstance(item, RequestOutput):
                done.set()

        await thread.submit(generator.prepare("r", "ABC", SamplingParams(max_tokens=4)), sink)
        await done.wait()
        assert "".join(item.text for item in items[:-1]) == items[-1].outputs[0].text == "aaaa"

    generator = scripted_generator([97], PLAIN)
    run(generator, check)


def test_a_refusal_reaches_its_caller_only():
    async def check(thread):
        twice = [generator.prepare("r", "ABC", SamplingParams(max_tokens=4)) for _ in range(2)]
        with pytest.raises(InvalidRequestError, match="in use"):
            await thread.call(lambda: [generator.submit(prepared) for prepared in twice])
        assert thread.error is None
        assert await thread.call(lambda: 5) == 5
        generator.abort("r")

    generator = scripted_generator([97], PLAIN, max_running=1)
    generator.step = lambda: []
    run(generator, check)


def test_after_the_end_every_call_fails_at_once():
    async def check(thread):
        thread.stop()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await thread.call(lambda: None)
        thread.abort("r")

    run(scripted_generator([97], PLAIN), check)
