"""Which prompt prefixes a server says it has."""

from tests.serve.serving import MODEL, letters, serving
from trillion_infer.core.prompt_prefix import BLOCK_BYTES, prefix_hashes, prompt_of, tenant_of
from trillion_infer.serve.block_events import BlockEvents


def names_of(body, key=""):
    return [each.hex() for each in prefix_hashes(prompt_of(body)[0], tenant_of(key).encode())]


def ask(served, letter, length=1500):
    body = {"model": MODEL, "prompt": letter * length, "max_tokens": 2}
    assert served.post("/v1/completions", body).status_code == 200
    served.check_idle()
    return names_of(body)


def told(served, epoch="", count=0):
    return served.get("/blocks", params={"epoch": epoch, "count": count}).json()


def test_prefixes_are_told_once_and_taken_back_when_their_pages_are():
    with serving(letters, num_pages=256, max_model_len=4096) as served:
        first = ask(served, "a")
        events = told(served)
        assert (events["reset"], events["stored"]) == (True, first)
        ask(served, "a")
        assert told(served, events["epoch"], events["count"])["stored"] == []
        for letter in "bcd":
            last = ask(served, letter)
        news = told(served, events["epoch"], events["count"])
        assert not news["reset"]
        assert news["removed"]
        assert not set(news["removed"]) & set(last)
        assert set(last) <= set(news["stored"])


def test_who_missed_too_much_gets_all():
    held = {b"x"}
    events = BlockEvents(held.__contains__, limit=2)
    for number in range(5):
        events.stored([bytes([number])], [b"x"], BLOCK_BYTES, 1)
    state = events.since(events.epoch, 1)
    assert (state["reset"], state["stored"]) == (True, ["03", "04"])
    held.clear()
    assert events.since(events.epoch, state["count"])["removed"] == ["03", "04"]


def test_a_count_that_is_none_is_refused():
    with serving("x") as served:
        assert served.get("/blocks", params={"count": "-1"}).status_code == 400
