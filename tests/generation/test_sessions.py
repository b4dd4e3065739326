"""Sessions by name: exact ids, pins while alive, files that outlive the process, tenants apart."""

import pytest

from trillion_infer.core.errors import ConfigError, InvalidRequestError, SessionError, UnknownSessionError
from trillion_infer.core.request import Request
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.generation.session_files import SessionFolder
from trillion_infer.generation.sessions import MAX_NAME, Sessions
from trillion_infer.testing.byte_tokenizer import byte_tokenizer


class Keeper:
    """Remembers what it was asked."""

    def __init__(self):
        self.pins: dict[bytes, int] = {}
        self.done: list[tuple] = []

    def pin(self, names, count=1):
        for name in names:
            self.pins[name] = self.pins.get(name, 0) + count

    def __getattr__(self, what):
        return lambda *args: self.done.append((what, *args))

    def block_names(self, token_ids, salt):
        return [bytes([token]) for token in token_ids[::4]]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def keeper():
    return Keeper()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def sessions(keeper, clock, tmp_path):
    return Sessions(keeper, byte_tokenizer(), "model-a", tmp_path, 100.0, clock)


def turn(sessions, name, text, answer=b"yes", salt="", names=(b"1", b"2")):
    tokenizer = byte_tokenizer()
    ids = sessions.extend(name, salt, text, tokenizer.encode(text))
    request = Request("r", ids, SamplingParams(), 8, cache_salt=salt, session_id=name)
    sessions.begin(request)
    request.output_ids.extend(tokenizer.encode(answer.decode(), add_special_tokens=False))
    request.block_names.extend(names)
    sessions.end(request, text)
    return request


def test_the_next_turn_extends_the_exact_ids(sessions):
    first = turn(sessions, "s", "Hello")
    first_ids = first.known_ids()
    sessions._find("s", "").token_ids[3] = 7  # as if the model had cut the text otherwise than the tokenizer does
    ids = sessions.extend("s", "", "Helloyes and more", byte_tokenizer().encode("Helloyes and more"))
    assert ids[:4] == [*first_ids[:3], 7]
    assert ids[len(first_ids) :] == byte_tokenizer().encode(" and more", add_special_tokens=False)


def test_a_prompt_that_does_not_go_on_is_taken_as_it_is(sessions):
    turn(sessions, "s", "Hello")
    assert sessions.extend("s", "", "Other", [1, 2]) == [1, 2]
    assert sessions.extend("s", "", None, [1, 2]) == [1, 2]
    assert sessions.extend("new", "", "Hello", [1, 2]) == [1, 2]


def test_blocks_are_pinned_until_the_session_has_been_idle_and_then_demoted(sessions, keeper, clock):
    turn(sessions, "s", "a", names=(b"1", b"2"))
    turn(sessions, "s", "ab", names=(b"1", b"2", b"3"))
    assert keeper.pins == {b"1": 1, b"2": 1, b"3": 1}
    clock.now = 99
    sessions.tick()
    assert keeper.done == []
    clock.now = 100
    sessions.tick()
    assert keeper.done == [("demote", [b"1", b"2", b"3"])]
    assert set(keeper.pins.values()) == {0}
    (info,) = sessions.list()
    assert (info.is_pinned, info.is_live, info.idle_s) == (False, True, 100)
    turn(sessions, "s", "abc", names=(b"1",))
    assert keeper.pins[b"1"] == 1


def test_a_saved_session_outlives_the_process(sessions, keeper, tmp_path):
    turn(sessions, "a/b c", "Hello", names=(b"1",))
    before = sessions.history("a/b c")
    sessions.save("a/b c")
    assert keeper.done == [("persist", [b"1"])]
    again = Sessions(Keeper(), byte_tokenizer(), "model-a", tmp_path)
    assert [(info.name, info.is_live, info.is_saved) for info in again.list()] == [("a/b c", False, True)]
    assert again.load("a/b c").num_tokens == len(before)
    assert list(again.history("a/b c")) == list(before)
    assert again.extend("a/b c", "", "Helloyes!", [])[: len(before)] == list(before)


def test_what_cannot_be_loaded_says_why(sessions, keeper, tmp_path):
    with pytest.raises(UnknownSessionError, match="no saved session 'x'"):
        sessions.load("x")
    with pytest.raises(UnknownSessionError, match="no live session 'x'"):
        sessions.save("x")
    turn(sessions, "s", "Hello")
    sessions.save("s")
    with pytest.raises(SessionError, match=r"is of model model-a…, and this is model model-b…"):
        Sessions(keeper, byte_tokenizer(), "model-b", tmp_path).load("s")
    (path,) = tmp_path.glob("*.session")
    path.write_bytes(path.read_bytes().replace(b"Hello", b"Jello"))
    with pytest.raises(SessionError, match="is not what was saved"):
        sessions.load("s")
    assert [info.is_saved for info in sessions.list()] == [False]
    Sessions(keeper, byte_tokenizer(), "model-a", tmp_path).delete("s")
    assert not list(tmp_path.iterdir()), "a damaged file can be deleted"
    homeless = Sessions(keeper, byte_tokenizer(), "m")
    turn(homeless, "s", "Hello")
    with pytest.raises(ConfigError, match="give sessions=FOLDER or disk_kv"):
        homeless.save("s")


def test_a_session_is_resumed_from_its_text(sessions, tmp_path):
    assert sessions.resume("s") == ""
    turn(sessions, "s", "Hello")
    sessions.save("s")
    again = Sessions(Keeper(), byte_tokenizer(), "model-a", tmp_path)
    assert again.resume("s") == "Helloyes"
    request = Request("r", [1], SamplingParams(), 8, session_id="ids")
    sessions.begin(request)
    sessions.end(request, None)
    with pytest.raises(SessionError, match="has no text"):
        sessions.resume("ids")


def test_deleting_spares_blocks_that_other_sessions_have(sessions, keeper, tmp_path):
    turn(sessions, "one", "a", names=(b"shared", b"own"))
    turn(sessions, "two", "a", names=(b"shared",))
    sessions.save("one")
    sessions.delete("one")
    assert keeper.done[-1] == ("discard", [b"own"])
    assert list(tmp_path.iterdir()) == []
    assert keeper.pins == {b"shared": 1, b"own": 0}
    with pytest.raises(UnknownSessionError):
        sessions.delete("one")


def test_tenants_do_not_see_each_others_sessions_and_leave_nothing(sessions, keeper, tmp_path):
    for salt in ("a/", "a/x", "b/"):
        turn(sessions, "s", "Hello", salt=salt)
        sessions.save("s", salt)
    assert sessions.list() == []
    assert len(sessions.list("a/")) == 1
    with pytest.raises(UnknownSessionError):
        sessions.load("s", "c/")
    sessions.delete_tenant("a")
    assert keeper.done[-1] == ("delete_tenant", "a")
    assert sessions.list("a/") == sessions.list("a/x") == []
    assert len(sessions.list("b/")) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_session_has_one_turn_at_a_time(sessions):
    request = Request("r", [1], SamplingParams(), 8, session_id="s")
    sessions.begin(request)
    for refused in (
        lambda: sessions.extend("s", "", "more", [1]),
        lambda: sessions.save("s"),
        lambda: sessions.delete("s"),
    ):
        with pytest.raises(InvalidRequestError, match="computing a turn"):
            refused()


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME + 1), 5])
def test_bad_names_are_refused(sessions, name):
    with pytest.raises(InvalidRequestError, match="session_id is"):
        sessions.extend(name, "", "text", [1])


def test_a_folder_that_cannot_be_made_is_one_sentence(keeper, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/x' cannot be made \(Not a directory\)"):
        SessionFolder(tmp_path / "file" / "x").check()
    sessions = Sessions(keeper, byte_tokenizer(), "m", tmp_path / "file" / "x")
    turn(sessions, "s", "Hello")
    with pytest.raises(ConfigError, match="Session 's' cannot be written"):
        sessions.save("s")
