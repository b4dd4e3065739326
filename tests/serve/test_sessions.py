"""Sessions over HTTP: turns by session_id, listed, saved, loaded and deleted, each key for itself."""

import httpx
import pytest

from tests.serve.serving import MODEL, serving
from trillion_infer.generation.sessions import Sessions
from trillion_infer.serve import auth

KEYS = ("alpha-key", "beta-key")


@pytest.fixture
def served(tmp_path):
    with serving("fine", options={"api_keys": KEYS}) as served:
        generator = served.generator
        generator.sessions = Sessions(generator.engine, generator.reader.tokenizer, "scripted", tmp_path)
        yield served


def call(served, method, path, key=KEYS[0], **options):
    return httpx.request(
        method, f"{served.url}{path}", headers={"Authorization": f"Bearer {key}"}, timeout=60, **options
    )


def turn(served, prompt, session, key=KEYS[0], **more):
    body = {"model": MODEL, "prompt": prompt, "session_id": session, "return_token_ids": True, **more}
    return call(served, "POST", "/v1/completions", key, json=body)


def test_a_session_grows_is_saved_and_comes_back(served, tmp_path):
    first = turn(served, "one", "talk/1").json()["choices"][0]
    more = turn(served, f"one{first['text']}<eos>two", "talk/1").json()["choices"][0]
    assert more["prompt_token_ids"][: len(first["prompt_token_ids"])] == first["prompt_token_ids"]
    saved = call(served, "POST", "/v1/sessions/talk/1/save").json()
    assert saved["id"] == "talk/1"
    assert saved["num_tokens"] == len(more["prompt_token_ids"]) + len(more["token_ids"])
    assert [each["id"] for each in call(served, "GET", "/v1/sessions").json()["data"]] == ["talk/1"]
    assert call(served, "POST", "/v1/sessions/talk/1/load").json()["is_live"]
    assert call(served, "DELETE", "/v1/sessions/talk/1").json()["deleted"]
    assert call(served, "GET", "/v1/sessions").json()["data"] == []
    assert list(tmp_path.iterdir()) == []


def test_chat_and_responses_take_a_session(served):
    message = [{"role": "user", "content": "hello"}]
    for path, body in (("/v1/chat/completions", {"messages": message}), ("/v1/responses", {"input": "hello"})):
        answer = call(served, "POST", path, json={"model": MODEL, "session_id": path, **body})
        assert answer.status_code == 200, answer.text
    assert len(call(served, "GET", "/v1/sessions").json()["data"]) == 2


def test_keys_do_not_see_each_others_sessions_and_delete_only_their_own(served):
    for key in KEYS:
        turn(served, "one", "same", key)
        call(served, "POST", "/v1/sessions/same/save", key)
    assert call(served, "DELETE", "/v1/cache").json()["deleted"]
    assert call(served, "GET", "/v1/sessions").json()["data"] == []
    assert len(call(served, "GET", "/v1/sessions", KEYS[1]).json()["data"]) == 1
    assert auth.Keys(KEYS).tenant(f"Bearer {KEYS[0]}") != auth.Keys(KEYS).tenant(f"Bearer {KEYS[1]}")


def test_what_is_wrong_is_said(served):
    for method, path in (
        ("POST", "/v1/sessions/x/save"),
        ("POST", "/v1/sessions/x/load"),
        ("DELETE", "/v1/sessions/x"),
    ):
        answer = call(served, method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
    assert turn(served, "one", "").status_code == 400
    assert turn(served, ["one", "two"], "s").status_code == 400
    assert turn(served, "one", "s", n=2).status_code == 400
