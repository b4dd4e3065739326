"""What an operation does not run it does not import."""

import subprocess
import sys


def test_operations_traced_for_a_cpu_import_no_pallas():
    """It takes some tenths of a second of a cold start."""
    code = (
        "import sys, jax\n"
        "from pallas_kernels import quantised_matmul, ragged_paged_attention\n"
        "from pallas_kernels.quantised_matmul.arg_specs import SPECS as PRODUCTS\n"
        "from pallas_kernels.ragged_paged_attention.arg_specs import SPECS\n"
        "x, weight, layer = PRODUCTS[0].abstract(2, 8)\n"
        "jax.eval_shape(lambda x, w, i: quantised_matmul.quantised_matmul(x, w, layer=i), x, weight, layer)\n"
        "args = SPECS[0].abstract('cpu', 2, 8, 4)\n"
        "jax.eval_shape(lambda *a: ragged_paged_attention.ragged_paged_attention(*a, scale=1.0), *args)\n"
        "print([name for name in sys.modules if name.startswith('jax.experimental.pallas')])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert told.stdout.strip() == "[]", told.stderr
