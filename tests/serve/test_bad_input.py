"""Bad requests get an error in OpenAI's shape, with the right status, and change nothing for others."""

import json
import socket
import threading

import httpx
import openai
import pytest

from tests.serve.serving import MODEL, serving, user

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def served():
    with serving("fine", options={"max_body_bytes": 5000}) as served:
        yield served
        served.check_idle()


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (CHAT, b"{", 400, None),
        (CHAT, {"model": MODEL, "messages": user("x"), "max_completion_tokens": 0}, 400, "max_completion_tokens"),
        ("/v1/responses", {"model": MODEL, "input": "x", "max_output_tokens": 0}, 400, "max_output_tokens"),
        ("/v1/responses", {"model": MODEL, "input": []}, 400, "input"),
        (CHAT, b"", 400, None),
        (CHAT, b"[" * 4000, 400, None),
        (CHAT, b"\xff\xfe", 400, None),
        (CHAT, b'{"model": NaN}', 400, None),
        (CHAT, [], 400, None),
        (CHAT, {"messages": user("x")}, 400, "model"),
        (CHAT, {"model": "other", "messages": user("x")}, 404, "model"),
        (CHAT, {"model": MODEL}, 400, "messages"),
        (CHAT, {"model": MODEL, "messages": []}, 400, "messages"),
        (CHAT, {"model": MODEL, "messages": "x"}, 400, "messages"),
        (CHAT, {"model": MODEL, "messages": ["x"]}, 400, "messages"),
        (CHAT, {"model": MODEL, "messages": user("x"), "temprature": 1}, 400, "temprature"),
        (CHAT, {"model": MODEL, "messages": user("x"), "temperature": "hot"}, 400, "temperature"),
        (CHAT, {"model": MODEL, "messages": user("x"), "temperature": -1}, 400, "temperature"),
        (CHAT, {"model": MODEL, "messages": user("x"), "n": True}, 400, "n"),
        (CHAT, {"model": MODEL, "messages": user("x"), "n": 0}, 400, "n"),
        (CHAT, {"model": MODEL, "messages": user("x"), "stop": [1]}, 400, "stop"),
        (CHAT, {"model": MODEL, "messages": user("x"), "logit_bias": [1]}, 400, "logit_bias"),
        (CHAT, {"model": MODEL, "messages": user("x"), "logit_bias": {"a": 1}}, 400, "logit_bias"),
        (CHAT, {"model": MODEL, "messages": user("x"), "stream_options": {}}, 400, "stream_options"),
        (CHAT, {"model": MODEL, "messages": user("x"), "tools": [{}]}, 400, "tools[0].function"),
        (CHAT, {"model": MODEL, "messages": user("x"), "response_format": {"type": "x"}}, 400, "response_format.type"),
        (CHAT, {"model": MODEL, "messages": user("x"), "chat_template_kwargs": {"tools": 1}}, 400, "tools"),
        (CHAT, {"model": MODEL, "messages": user("x"), "temperature": 10**400}, 400, None),
        (CHAT, {"model": MODEL, "messages": user("x"), "logit_bias": {"1": 10**400}}, 400, None),
        (TEXT, {"model": MODEL}, 400, "prompt"),
        (TEXT, {"model": MODEL, "prompt": []}, 400, "prompt"),
        (TEXT, {"model": MODEL, "prompt": {}}, 400, "prompt"),
        (TEXT, {"model": MODEL, "prompt": ["x", 5]}, 400, "prompt"),
        (TEXT, {"model": MODEL, "prompt": [1.5]}, 400, "prompt_token_ids"),
        (TEXT, {"model": MODEL, "prompt": "\ud800"}, 400, None),
        (TEXT, {"model": MODEL, "prompt": "x", "best_of": 3}, 400, "best_of"),
        (TEXT, {"model": MODEL, "prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        (TEXT, b'{"prompt": "' + b"x" * 5000 + b'"}', 413, None),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/detokenize", {"tokens": [-1]}, 400, "prompt_token_ids"),
        ("/nowhere", {}, 404, None),
        ("/health", {}, 405, None),
    ],
)
def test_a_bad_request_is_refused_with_its_reason(served, path, body, status, param):
    answer = served.post(path, body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    good = served.post(TEXT, {"model": MODEL, "prompt": "x"}).json()
    assert good["choices"][0]["text"] == "fine"


def test_fields_that_clients_send_without_effect_are_ignored(served):
    body = {"model": MODEL, "messages": user("x"), "user": "me", "store": False, "metadata": {}, "service_tier": "auto"}
    assert served.post(CHAT, body).status_code == 200


@pytest.mark.parametrize(
    "parameters", [{"type": 5}, {"type": "bogus"}, {"properties": []}, {"properties": {"a": 5}}, {"required": 5}]
)
def test_parameters_that_are_no_schema_are_never_an_internal_error(served, parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for strict in (False, True):
        tools[0]["function"]["strict"] = strict
        body = {"model": MODEL, "messages": user("x"), "tools": tools, "tool_choice": "required", "max_tokens": 3}
        assert served.post(CHAT, body).status_code in (200, 400)


def test_a_body_that_never_arrives_is_given_up():
    with serving("fine", options={"body_timeout_s": 0.1}) as served:
        client = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=20)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert client.recv(4096).startswith(b"HTTP/1.1 408")
        client.close()
        half = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=20)
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        half.close()
        assert served.post(TEXT, {"model": MODEL, "prompt": "x"}).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_whose_request_never_begins_is_closed(sent):
    with serving("fine", options={"body_timeout_s": 0.2}) as served:
        client = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=20)
        client.sendall(sent)
        assert client.recv(4096) == b""
        client.close()


@pytest.mark.parametrize(
    ("sent", "status"), [(b"GARBAGE\r\n\r\n", b"400"), (b"GET /health HTTP/1.1\r\nA: " + b"x" * 200_000, b"431")]
)
def test_a_head_that_is_none_or_too_large_is_refused_as_everything_is(served, sent, status):
    client = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=20)
    client.sendall(sent)
    answer = client.recv(4096)
    assert answer.split()[1] == status
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    client.close()


def test_a_method_that_is_not_taken_names_those_that_are(served):
    answer = served.get(CHAT)
    assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")


@pytest.mark.parametrize(("path", "content"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [65]})])
def test_tokens_of_another_model_are_refused(served, path, content):
    assert served.post(path, {"model": "another", **content}).status_code == 404


def test_a_body_without_a_length_is_limited_too(served):
    def pieces():
        for _ in range(100):
            yield b"x" * 100

    assert httpx.post(served.url + TEXT, content=pieces()).status_code == 413


def test_a_wrong_or_missing_key_is_refused_and_health_stays_open():
    with serving("fine", options={"api_keys": ("one", "two")}) as served:
        for header in ("Bearer three", "Bearer on", "Bearer", "Basic one", "one"):
            answer = served.post(TEXT, {"model": MODEL, "prompt": "x"}, headers={"Authorization": header})
            assert answer.status_code == 401
        assert served.post(TEXT, {}).json()["error"]["type"] == "authentication_error"
        assert served.openai("two").completions.create(model=MODEL, prompt="x").choices[0].text == "fine"
        with pytest.raises(openai.AuthenticationError):
            served.openai("three").models.list()
        assert served.get("/health").status_code == 200


def test_tenants_do_not_share_cached_prefixes():
    with serving("fine", options={"api_keys": ("one", "two")}) as served:

        def cached(key):
            answer = served.openai(key).completions.create(model=MODEL, prompt="z" * 40)
            return answer.usage.prompt_tokens_details.cached_tokens

        assert [cached("one"), cached("one"), cached("two")] == [0, 32, 0]


def test_more_requests_than_the_limit_get_429_with_a_time_to_wait():
    entered, leave = threading.Event(), threading.Event()

    def script(index, prompt_len):
        if prompt_len == 7:
            entered.set()
            assert leave.wait(20)
        return 97

    with serving(script, options={"max_requests": 1, "retry_after_s": 3}) as served:
        body = {"model": MODEL, "prompt": "x" * 7, "max_tokens": 1}
        first = threading.Thread(target=served.post, args=(TEXT, body))
        first.start()
        assert entered.wait(20)
        answer = served.post(TEXT, body)
        leave.set()
        first.join(20)
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "3")
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert served.post(TEXT, body).status_code == 200


def test_a_request_id_comes_back_and_names_the_answer(served):
    answer = served.post(TEXT, {"model": MODEL, "prompt": "x"}, headers={"X-Request-Id": "abc"})
    assert answer.json()["id"] == answer.headers["x-request-id"] == "cmpl-abc"
    assert served.get("/health").json()["status"] == "ok"
