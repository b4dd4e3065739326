"""Times native products beside XLA's own: `python -m pallas_kernels.cpu_native.bench`.

Prints a JSON object a line for each shape and row count: microseconds a layer inside a scan over a stack of bf16
weights, the best of several interleaved runs, and what that is in GB/s of weights and GFLOP/s. Expected: native reads
weights at the machine's memory speed up to 4 rows and is several times as fast as XLA up to 16.
"""

import json
import time

import jax
import jax.numpy as jnp

from pallas_kernels.cpu_native.matmul import matmul

SHAPES = ((960, 576, 30), (576, 576, 30), (3072, 576, 30), (576, 1536, 30), (49152, 576, 1))
ROWS = (1, 2, 4, 8, 16, 64, 512)
RUNS = 5


def scan(product):
    """A program that takes every layer's product of the same x, and returns something of each."""

    def through(x, w):
        def step(total, layer):
            return total + product(x, w, layer)[0, 0].astype(jnp.float32), None

        return jax.lax.scan(step, jnp.float32(0), jnp.arange(w.shape[0], dtype=jnp.int32))[0]

    return jax.jit(through)


def xla(x, w, layer):
    """The product as XLA does it: a slice of the stack, then a dot."""
    return jnp.einsum("tm,nm->tn", x, w[layer], preferred_element_type=jnp.float32)


def main() -> None:
    programs = {"native": scan(matmul), "xla": scan(xla)}
    for columns, depth, layers in SHAPES:
        w = jax.random.normal(jax.random.key(0), (layers, columns, depth), jnp.bfloat16)
        for rows in ROWS if layers > 1 else ROWS[:-1]:
            x = jax.random.normal(jax.random.key(1), (rows, depth), jnp.bfloat16)
            best = dict.fromkeys(programs, float("inf"))
            for _ in range(RUNS + 1):
                for name, program in programs.items():
                    start = time.perf_counter()
                    program(x, w).block_until_ready()
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
