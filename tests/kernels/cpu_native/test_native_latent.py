import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_modules import load_module

from pallas_kernels.cpu_native import native
from pallas_kernels.cpu_native.attention import latent_paged_attention

pytestmark = pytest.mark.skipif(not native().isas, reason=native().reason)

latent_cases = load_module("latent_paged_attention/latent_cases.py")
MIXED = ((0, 1), (15, 1), (300, 1), (0, 40), (17, 5), (100, 30))
CASES = {
    "mixed": latent_cases.Case(MIXED),
    "padded_width": latent_cases.Case(MIXED, width=64),
    "many_heads": latent_cases.Case(MIXED, heads=70),
    "deepseek_widths": latent_cases.Case(((5, 1), (30, 6)), heads=8, rank=512, rope=64, width=576),
    "bfloat16": latent_cases.Case(MIXED, dtype="bfloat16"),
    "nothing": latent_cases.Case((), padded_tokens=8, padded_seqs=4),
}


def run(case, isa="auto"):
    batch = latent_cases.build(case)
    args = [jnp.asarray(x) for x in batch.args]
    out, pool = jax.jit(lambda *args: latent_paged_attention(*args, scale=case.scale, isa=isa))(*args)
    return batch, np.asarray(out), np.asarray(pool)


@pytest.mark.parametrize("isa", native().isas)
@pytest.mark.parametrize("name", CASES)
def test_output_and_pool_match_dense_attention(name, isa):
    case = CASES[name]
    batch, out, pool = run(case, isa)
    tolerance = latent_cases.TOLERANCE[case.dtype]
    expected = latent_cases.attend(case, batch)
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=tolerance, rtol=tolerance)
    expected = latent_cases.written(case, batch)
    np.testing.assert_array_equal(pool.astype(np.float32), expected.astype(np.float32))


def test_a_page_out_of_range_is_an_error_not_a_crash():
    case = dataclasses.replace(CASES["mixed"], lens=((20, 5),))
    args = [jnp.asarray(x) for x in latent_cases.build(case).args]
    args[7] = jnp.full_like(args[7], 99)
    with pytest.raises(Exception, match="page 99 of block 0 of sequence 0 is outside"):
        jax.block_until_ready(latent_paged_attention(*args, scale=1.0))
