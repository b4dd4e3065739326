"""Reading `quantization_config`: which format a checkpoint's weights are in, or why it cannot be used."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trillion_infer.core.errors import UnsupportedModelError
from trillion_infer.weights.quant_formats import Fp8, Int4, Mxfp4, StoredFormat

SUPPORTED = "compressed-tensors pack-quantized int4 (symmetric, by group), fp8 with weight_block_size, mxfp4"


def read_quantisation(config: Mapping[str, Any]) -> tuple[StoredFormat | None, tuple[str, ...]]:
    """The format, None for plain weights, and the modules that compressed-tensors says are plain (see `ignored`).

    Activations stay in the engine's dtype whatever the config says of them. Raises UnsupportedModelError by name.
    """
    quant = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not quant:
        return None, ()
    method = quant.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(quant), tuple(quant.get("ignore") or ())
    if method == "fp8":
        block = quant.get("weight_block_size")
        if not block or block[0] != block[1] or quant.get("fmt", "e4m3") != "e4m3":
            raise _unsupported(f"fp8 with weight_block_size {block} and fmt {quant.get('fmt')!r}")
        return Fp8(block[0]), ()
    if method == "mxfp4":
        return Mxfp4(32), ()
    raise _unsupported(f"quant_method {method!r}")


def ignored(module: str, patterns: Sequence[str]) -> bool:
    """True when an entry of a compressed-tensors ignore list names `module`: literally (also without the names of the
    modules around it), or by a regular expression after "re:" that matches from its beginning."""
    return any(
        re.match(p[3:], module) is not None if p.startswith("re:") else module == p or module.endswith(f".{p}")
        for p in patterns
    )


def _compressed_tensors(quant: Mapping[str, Any]) -> StoredFormat:
    groups = list((quant.get("config_groups") or {}).values())
    if quant.get("format") != "pack-quantized" or len(groups) != 1:
        raise _unsupported(f"compressed-tensors format {quant.get('format')!r} with {len(groups)} config groups")
    weights = groups[0].get("weights") or {}
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    wrong = [f"{k}={weights.get(k)!r}" for k, v in wanted.items() if weights.get(k) != v]
    if weights.get("actorder"):
        wrong.append(f"actorder={weights['actorder']!r}")
    size = weights.get("group_size")
    if not isinstance(size, int) or size < 8 or size % 8:
        raise _unsupported(f"compressed-tensors pack-quantized with group_size={size!r}")
    if wrong:
        raise _unsupported(f"compressed-tensors pack-quantized with {', '.join(wrong)}")
    return Int4(size)


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the checkpoint's weights are quantised by {what}; supported: {SUPPORTED}")
