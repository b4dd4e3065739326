"""Memory is accounted for by holder; what does not fit is one error that says what would."""

import re
from types import SimpleNamespace

import jax
import pytest

from sharding.mesh import make_mesh
from trillion_infer import OutOfMemoryError
from trillion_infer.cache.layout import pool_layouts
from trillion_infer.engine import budget
from trillion_infer.engine.memory import holders_text, told_as_ours, with_unaccounted
from trillion_infer.models import read_family
from trillion_infer.testing.tiny_models import tiny_config

MIB = 2**20


def divide(family: str, size: int, **options):
    """Pages of a tiny family's pools within `size` bytes on one device."""
    mesh = make_mesh(None)
    layouts = pool_layouts(read_family(tiny_config(family)).config, 16, "float32", dict(mesh.shape), "cpu")
    wanted = {"max_running": 4, "max_model_len": 512, "extend_len": 64, **options}
    return budget.divide(layouts, mesh, size, **wanted), sum(budget.local_page_bytes(lay, mesh) for lay in layouts)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek"])
def test_the_settings_an_error_names_do_fit(family):
    """kv_memory as named is enough; so is max_model_len as named, which one page more is not."""
    with pytest.raises(OutOfMemoryError) as caught:
        divide(family, 1000)
    least = int(re.search(r"Raise kv_memory to ([\d,]+) or more", str(caught.value))[1].replace(",", ""))
    groups, _ = divide(family, least)
    assert all(group.num_pages >= 1 for group in groups)
    with pytest.raises(OutOfMemoryError):
        divide(family, least - 64)


def test_the_largest_length_that_fits_is_named():
    """A window of 16 beside full layers: a long request's share leaves the window no page, a shorter one's does."""
    _, page = divide("gemma3", 10 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        divide("gemma3", 3 * page, extend_len=1)
    named = re.search(r"The largest max_model_len of which one request fits is (\d+)\.", str(caught.value))
    if named is None:
        assert "Not even one request of 16 tokens fits." in str(caught.value)
        return
    groups, _ = divide("gemma3", 3 * page, extend_len=1, max_model_len=int(named[1]))
    assert all(group.num_pages >= 1 for group in groups)


def test_what_took_the_memory_is_said():
    with pytest.raises(OutOfMemoryError, match=r"-5 bytes a device \(weights take 7, program temporaries 9\)"):
        divide("llama", -5, taken="weights take 7, program temporaries 9")


def test_a_refused_allocation_names_holders_and_flags():
    holders = {"weights": 3 * MIB, "kv_attention_full": 9 * MIB, "sampler": 0, "program_temporaries": MIB}
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore")
    with pytest.raises(OutOfMemoryError) as caught, told_as_ours("the KV pools", holders):
        raise error
    assert str(caught.value) == (
        "there is no memory for the KV pools (RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.). "
        "Held or wanted: kv_attention_full 9.0 MiB, weights 3.0 MiB, program_temporaries 1.0 MiB. Lower, the largest "
        "first: kv_memory; dtype, a quantised checkpoint, or a mesh that splits them over more devices; prefill_chunk "
        "and max_running."
    )


def test_other_errors_of_the_devices_stay_what_they_are():
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"), told_as_ours("the KV pools", {}):
        raise error


def test_unaccounted_is_what_is_in_use_beside_the_holders():
    used = 10**15
    device = SimpleNamespace(
        platform="tpu", process_index=0, memory_stats=lambda: {"bytes_limit": 2 * used, "bytes_in_use": used}
    )
    import numpy as np

    mesh = SimpleNamespace(devices=np.array([device, device], dtype=object))
    held = with_unaccounted({"weights": 10**14, "program_temporaries": 10**15, "disk_kv": 10**15}, mesh, {})
    assert held["unaccounted"] == 2 * used - 10**14


def test_every_holder_of_an_engine_is_named(make_llm):
    llm = make_llm("smollm2", page_size=8, host_kv=MIB)
    held = llm.memory()
    assert {"weights", "kv_attention_full", "page_tables", "sampler", "program_temporaries", "host_kv"} <= set(held)
    assert held["weights"] == sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine._params))
    assert held["unaccounted"] > 0
    assert holders_text(held).startswith("Held or wanted: unaccounted ")


def test_a_model_that_host_memory_cannot_hold_is_refused_before_loading():
    from trillion_infer import LLM

    config = {**tiny_config("llama"), "hidden_size": 1 << 20, "vocab_size": 1 << 20}
    with pytest.raises(OutOfMemoryError, match=r"the weights of llama are [\d.]+ GiB on each device of this mesh"):
        LLM(config)
