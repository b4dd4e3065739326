"""Block identity."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.cache.naming import BlockNamer

tokens = st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4)
short = st.text(max_size=4)


def chain(namer, root, blocks):
    for block in blocks:
        root = namer.next(root, block)
    return root


def test_names_are_the_same_in_another_process_with_another_hash_seed():
    """K02: the name is written down here, too, so that it never changes unnoticed."""
    code = (
        "from trillion_infer.cache.naming import BlockNamer as B;"
        "n = B(b'm', b'l', 2); print(n.next(n.root('s', 'a'), [1, 2]).hex())"
    )
    names = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    namer = BlockNamer(b"m", b"l", 2)
    assert names == {namer.next(namer.root("s", "a"), [1, 2]).hex().encode()}


@given(st.tuples(short, short, st.binary(max_size=4)), st.tuples(short, short, st.binary(max_size=4)))
def test_salt_adapter_and_multimodal_inputs_are_kept_apart(one, other):
    """K01: moving a character from one field to its neighbour gives another name."""
    namer = BlockNamer(b"m", b"l", 4)
    assert (namer.root(*one) == namer.root(*other)) == (one == other)


@given(st.tuples(st.binary(max_size=3), st.binary(max_size=3)), st.tuples(st.binary(max_size=3), st.binary(max_size=3)))
def test_model_and_layout_are_kept_apart(one, other):
    assert (BlockNamer(*one, 4).root() == BlockNamer(*other, 4).root()) == (one == other)


def test_page_size_is_part_of_the_name():
    assert BlockNamer(b"m", b"l", 4).root() != BlockNamer(b"m", b"l", 8).root()


@given(st.lists(tokens, max_size=4), st.lists(tokens, max_size=4))
def test_names_agree_exactly_when_all_tokens_up_to_there_agree(one, other):
    namer = BlockNamer(b"m", b"l", 4)
    root = namer.root()
    assert (chain(namer, root, one) == chain(namer, root, other)) == (one == other)
