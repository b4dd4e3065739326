"""Structures of outputs survive being written down; what is not ours does not come back."""

import jax
import numpy as np
import pytest

from trillion_infer.engine.bundle import trees
from trillion_infer.sample import Sampled, SamplerState, Verified

SAMPLED = Sampled(*range(6))
VERIFIED = Verified(*range(7))
STATE = SamplerState(*range(4))


@pytest.mark.parametrize(
    "tree",
    [1, (1, 2), ((1,), [2, (3, None)], {"a": 4, "b": (5,)}), (STATE, SAMPLED), (STATE, VERIFIED), ()],
    ids=["leaf", "tuple", "nested", "sampled", "verified", "empty"],
)
def test_round_trip(tree):
    structure = jax.tree.structure(tree)
    assert trees.decode(trees.encode(structure)) == structure


def test_a_foreign_class_is_not_written():
    with pytest.raises(trees.UnknownNode, match="Box in the outputs has no written form"):
        trees.encode(jax.tree.structure((Box(1),)))


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, held: object):
        self.held = held

    def tree_flatten(self):
        return (self.held,), None

    @classmethod
    def tree_unflatten(cls, _, held):
        return cls(*held)


@pytest.mark.parametrize(
    "told",
    [
        {"class": "os:system", "fields": {}},
        {"class": "trillion_infer.llm:LLM", "fields": {}},
        {"class": "trillion_infer.llm:nothing", "fields": {}},
        {"set": []},
        7,
        "other",
    ],
)
def test_what_encode_cannot_have_written_is_refused(told):
    with pytest.raises(trees.UnknownNode):
        trees.decode(told)


def test_leaves_keep_their_order():
    structure = trees.decode(trees.encode(jax.tree.structure((SAMPLED, [1, 2]))))
    values = [np.int32(i) for i in range(structure.num_leaves)]
    assert jax.tree.leaves(jax.tree.unflatten(structure, values)) == values
