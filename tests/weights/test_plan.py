"""Names, shapes and dtypes are checked as a whole before anything is read."""

import ml_dtypes
import numpy as np
import pytest

from trillion_infer.core.errors import ModelLoadError
from trillion_infer.testing.checkpoints import write_hf_directory
from trillion_infer.weights import ParamSpec, Source, open_checkpoint
from trillion_infer.weights.plan import plan_load

pytestmark = pytest.mark.smoke

TIED = {"lm_head.weight": "embed.weight"}
EMBED = np.arange(32, dtype=np.float32).reshape(8, 4)


def spec(name: str, shape: tuple[int, ...], dtype=None, transform=None) -> ParamSpec:
    return ParamSpec(shape, dtype, (None,) * len(shape), (Source(name, (), transform),))


def checkpoint(path, config=None, **tensors):
    named = {n.replace("__", "."): t for n, t in tensors.items()}
    return open_checkpoint(write_hf_directory(path, named, config or {}))


def test_every_fault_is_in_one_message(tmp_path):
    stored = checkpoint(tmp_path, a=EMBED, b=EMBED, c=np.zeros(3, np.int32), extra=EMBED)
    specs = {
        "p": spec("a", (4, 8)),
        "q": spec("b", (8, 4), transform=np.transpose),
        "r": spec("c", (3,)),
        "s": spec("gone.1", (2,)),
        "t": spec("gone.2", (2,)),
    }
    with pytest.raises(ModelLoadError) as caught:
        plan_load(specs, stored, dtype="float32")
    message = str(caught.value)
    for part in (
        "2 tensors are missing: gone.1, gone.2",
        "1 tensors are unexpected: extra",
        "a has shape (8, 4); p needs (4, 8)",
        "b has shape (8, 4), which becomes (4, 8); q needs (8, 4)",
        "c has dtype int32, r needs float32",
    ):
        assert part in message


def test_a_transform_that_cannot_take_the_shape_is_reported(tmp_path):
    stored = checkpoint(tmp_path, a=EMBED)
    with pytest.raises(ModelLoadError, match=r"a has shape \(8, 4\), which p cannot use"):
        plan_load({"p": spec("a", (3, 5), transform=lambda x: x.reshape(3, 5))}, stored, dtype="float32")


def test_unscaled_fp8_is_not_taken_for_bfloat16(tmp_path):
    stored = checkpoint(tmp_path, a=EMBED.astype(ml_dtypes.float8_e4m3fn))
    with pytest.raises(ModelLoadError, match="a has dtype float8_e4m3fn, p needs bfloat16"):
        plan_load({"p": spec("a", (8, 4))}, stored, dtype="bfloat16")


def test_ignored_tensors_are_skipped_and_reported(tmp_path):
    stored = checkpoint(tmp_path, a=EMBED, vision__x=EMBED, layers__0__rotary_emb__inv_freq=EMBED)
    plan = plan_load({"p": spec("a", (8, 4))}, stored, dtype="float32", ignore=[r"vision\..*"])
    assert set(plan.skipped) == {"vision.x", "layers.0.rotary_emb.inv_freq"}


def test_ignore_patterns_match_whole_names(tmp_path):
    stored = checkpoint(tmp_path, a=EMBED, my__vision__x=EMBED)
    with pytest.raises(ModelLoadError, match=r"unexpected: my\.vision\.x"):
        plan_load({"p": spec("a", (8, 4))}, stored, dtype="float32", ignore=[r"vision\..*"])


HEADED = {"embed": spec("embed.weight", (8, 4)), "head": spec("lm_head.weight", (4, 8), transform=np.transpose)}


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}, {}])
def test_u56_absent_head_is_read_from_the_embedding(tmp_path, config):
    plan = plan_load(HEADED, checkpoint(tmp_path, config, embed__weight=EMBED), dtype="float32", tied=TIED)
    assert plan.tied == ("lm_head.weight",)
    assert [r.name for r in plan.regions["head"]] == ["embed.weight"]


def test_u56_absent_head_with_tie_flag_false_names_both_facts(tmp_path):
    stored = checkpoint(tmp_path, {"tie_word_embeddings": False}, embed__weight=EMBED)
    with pytest.raises(ModelLoadError, match=r"tie_word_embeddings is false, but .* holds no lm_head\.weight"):
        plan_load(HEADED, stored, dtype="float32", tied=TIED)


def test_u56_differing_head_with_tie_flag_true_names_both_facts(tmp_path):
    stored = checkpoint(tmp_path, {"tie_word_embeddings": True}, embed__weight=EMBED, lm_head__weight=EMBED + 1)
    with pytest.raises(ModelLoadError, match=r"tie_word_embeddings is true, but .* lm_head\.weight that differs"):
        plan_load(HEADED, stored, dtype="float32", tied=TIED)


def test_u56_equal_head_with_tie_flag_true_is_accepted_unused(tmp_path):
    stored = checkpoint(tmp_path, {"tie_word_embeddings": True}, embed__weight=EMBED, lm_head__weight=EMBED)
    plan = plan_load({"embed": HEADED["embed"]}, stored, dtype="float32", tied=TIED)
    assert plan.tied == ("lm_head.weight",)


def test_stored_head_with_tie_flag_false_is_used(tmp_path):
    stored = checkpoint(tmp_path, {"tie_word_embeddings": False}, embed__weight=EMBED, lm_head__weight=EMBED + 1)
    plan = plan_load(HEADED, stored, dtype="float32", tied=TIED)
    assert [r.name for r in plan.regions["head"]] == ["lm_head.weight"]
