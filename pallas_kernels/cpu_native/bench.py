"""Times native products beside XLA's own: `python -m pallas_kernels.cpu_native.bench`.

Prints a JSON object a line for each shape and row count: microseconds a layer inside a scan over a stack of weights,
the best of several interleaved runs: bf16 natively and by XLA, int4 with offsets with x as it is and with x in int8;
and what the first is in GB/s of weights and GFLOP/s. Expected: native reads bf16 weights at the machine's memory speed
up to 4 rows and is several times as fast as XLA up to 16; int8 is the fastest everywhere.
"""

import json
import time

import jax
import jax.numpy as jnp

from pallas_kernels.cpu_native.matmul import matmul, quantised_matmul
from pallas_kernels.quantised_matmul import quantise

SHAPES = ((960, 576, 30), (576, 576, 30), (3072, 576, 30), (576, 1536, 30), (49152, 576, 1))
ROWS = (1, 2, 4, 8, 16, 64, 512)
RUNS = 5


def scan(product):
    """A program that takes every layer's product of the same x, and returns something of each."""

    def through(x, w):
        def step(total, layer):
            return total + product(x, w, layer)[0, 0].astype(jnp.float32), None

        return jax.lax.scan(step, jnp.float32(0), jnp.arange(jax.tree.leaves(w)[0].shape[0], dtype=jnp.int32))[0]

    return jax.jit(through)


def xla(x, w, layer):
    """The product as XLA does it: a slice of the stack, then a dot."""
    return jnp.einsum("tm,nm->tn", x, w[layer], preferred_element_type=jnp.float32)


def packed(x, w, layer):
    """The product with packed weights and x as it is."""
    return quantised_matmul(x, w.packed, w.scale, layer)


def rounded(x, w, layer):
    """The same with x rounded to int8."""
    return quantised_matmul(x, w.packed, w.scale, layer, int8_activations=True)


def main() -> None:
    programs = {"native": scan(matmul), "xla": scan(xla), "int4": scan(packed), "int4_int8": scan(rounded)}
    for columns, depth, layers in SHAPES:
        w = jax.random.normal(jax.random.key(0), (layers, columns, depth), jnp.bfloat16)
        int4 = quantise(w, "int4_affine")
        for rows in ROWS if layers > 1 else ROWS[:-1]:
            x = jax.random.normal(jax.random.key(1), (rows, depth), jnp.bfloat16)
            best = dict.fromkeys(programs, float("inf"))
            for _ in range(RUNS + 1):
                for name, program in programs.items():
                    start = time.perf_counter()
                    program(x, int4 if name.startswith("int4") else w).block_until_ready()
                    best[name] = min(best[name], time.perf_counter() - start)
            line: dict[str, float] = {"N": columns, "M": depth, "T": rows}
            for name, seconds in best.items():
                line[f"{name}_us"] = round(seconds / layers * 1e6, 1)
            line["native_gb_s"] = round(w.nbytes / best["native"] / 1e9, 2)
            line["native_gflop_s"] = round(2 * rows * w.size / best["native"] / 1e9, 1)
            line["times_xla"] = round(best["xla"] / best["native"], 2)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
