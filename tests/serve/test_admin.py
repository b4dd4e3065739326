"""Models, tokens and figures."""

import openai
import pytest

from tests.serve.serving import MODEL, serving


@pytest.fixture(scope="module")
def served():
    with serving("fine") as served:
        yield served


def test_models_lists_the_one_model(served):
    client = served.openai()
    assert [card.id for card in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 4096
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_detokenize_undoes_tokenize(served):
    tokens = served.post("/tokenize", {"prompt": "Grüße"}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 7
    assert served.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "Grüße"}


def test_metrics_count_requests_and_tokens_by_vllms_names():
    with serving("fine") as served:
        for _ in range(3):
            served.post("/v1/completions", {"model": MODEL, "prompt": "ABCD"})
        text = served.get("/metrics").text
    label = f'{{model_name="{MODEL}"}}'
    assert f"vllm:prompt_tokens_total{label} 12.0" in text
    assert f"vllm:generation_tokens_total{label} 15.0" in text
    assert f'vllm:request_success_total{{finished_reason="stop",model_name="{MODEL}"}} 3.0' in text
    assert f"vllm:num_requests_running{label} 0.0" in text
    assert f"vllm:prefix_cache_queries_total{label} 12.0" in text
    assert f"vllm:time_to_first_token_seconds_count{label} 3.0" in text
    assert 'trillion_infer:http_requests_total{path="/v1/completions",status="200"} 3.0' in text


def test_the_status_page_needs_nothing_from_elsewhere(served):
    page = served.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "http:" not in page.text
    assert "https:" not in page.text
    assert "src=" not in page.text


def test_status_gives_the_engines_figures(served):
    status = served.get("/status").json()
    assert status["model"] == MODEL
    assert status["trouble"] is None
    assert status["engine"]["scripted.pages_total"] == 512


def test_metrics_have_the_figures_of_every_tier():
    from trillion_infer.serve.metrics import Metrics

    stats = {"kv_host.blocks": 2, "kv_host.hit_tokens": 64, "kv_store.blocks": 0, "kv_store.is_down": 1}
    text = Metrics("m").text(stats).decode()
    assert 'trillion_infer:kv_tier_hit_tokens_total{model_name="m",tier="host"} 64.0' in text
    assert 'trillion_infer:kv_tier_down{model_name="m",tier="store"} 1.0' in text
