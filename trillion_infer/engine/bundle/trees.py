"""Pytrees of tuples, lists, dicts and dataclasses as JSON: an output's structure without tracing and without pickle."""

import dataclasses
import importlib
import itertools
from typing import Any

import jax

PACKAGES = ("trillion_infer.", "pallas_kernels.")
"""Where the dataclasses of a tree may come from."""


class UnknownNode(Exception):
    """A tree holds what cannot be written down; the message names it."""


def encode(tree: jax.tree_util.PyTreeDef) -> Any:
    """The structure as JSON. Raises UnknownNode."""
    return _encode(jax.tree.unflatten(tree, [_Leaf() for _ in range(tree.num_leaves)]))


def decode(told: Any) -> jax.tree_util.PyTreeDef:
    """The structure that `encode` wrote. Raises UnknownNode for what it cannot have written."""
    return jax.tree.structure(_decode(told, itertools.count()))


class _Leaf:
    pass


def _encode(node: Any) -> Any:
    if isinstance(node, _Leaf):
        return "leaf"
    if node is None:
        return None
    if type(node) in (tuple, list):
        return {type(node).__name__: [_encode(child) for child in node]}
    if type(node) is dict and all(isinstance(key, str) for key in node):
        return {"dict": {key: _encode(child) for key, child in node.items()}}
    kind = type(node)
    if dataclasses.is_dataclass(kind) and kind.__module__.startswith(PACKAGES):
        fields = {f.name: _encode(getattr(node, f.name)) for f in dataclasses.fields(kind)}
        return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": fields}
    raise UnknownNode(f"a {kind.__module__}.{kind.__qualname__} in the outputs has no written form")


def _decode(told: Any, numbers: "itertools.count[int]") -> Any:
    if told == "leaf":
        return next(numbers)
    if told is None:
        return None
    if isinstance(told, dict):
        if "tuple" in told:
            return tuple(_decode(child, numbers) for child in told["tuple"])
        if "list" in told:
            return [_decode(child, numbers) for child in told["list"]]
        if "dict" in told:
            return {key: _decode(child, numbers) for key, child in told["dict"].items()}
        if "class" in told:
            kind = _class(told["class"])
            return kind(**{name: _decode(child, numbers) for name, child in told["fields"].items()})
    raise UnknownNode(f"{told!r} describes no tree")


def _class(name: str) -> Any:
    module, _, qualified = name.partition(":")
    if not module.startswith(PACKAGES):
        raise UnknownNode(f"{name} is no class of this library")
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise UnknownNode(f"{name} is no dataclass")
    return found
