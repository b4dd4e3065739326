"""Prometheus figures that come from the engine."""

from trillion_infer.serve.metrics import Metrics


def test_drafts_are_counted_by_drafter():
    stats = {"running": 1, "waiting": 0}
    text = Metrics("m").text(stats).decode()
    assert "spec_decode" not in text
    for name, counts in (("ngram", (3, 9, 4)), ("eagle3", (2, 6, 5))):
        figures = dict(zip(("drafts", "proposed", "accepted", "acceptance_length"), (*counts, 2.0), strict=True))
        stats |= {f"speculate.{name}.{key}": value for key, value in figures.items()}
    text = Metrics("m").text(stats).decode()
    assert 'vllm:spec_decode_num_drafts_total{drafter="ngram",model_name="m"} 3.0' in text
    assert 'vllm:spec_decode_num_draft_tokens_total{drafter="eagle3",model_name="m"} 6.0' in text
    assert 'vllm:spec_decode_num_accepted_tokens_total{drafter="eagle3",model_name="m"} 5.0' in text
