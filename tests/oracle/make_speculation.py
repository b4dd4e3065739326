"""Tiny EAGLE-3 heads and an MTP checkpoint, with the drafts of a plain reference.

    python tests/oracle/make_speculation.py        # after make_tiny.py: the targets are its models

- eagle3_llama: head for `llama_deep`; `midlayer.*` names, an embedding of its own, auxiliary layers 2, N/2, N-3
- eagle3_mla: head for `deepseek_v3`; `layers.0.*` names, latent attention and dense MLP, the target's embedding
- deepseek_v3_mtp: a whole checkpoint whose layer N is an MTP layer
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from common import Trace, first_good_seed, save_npz
from eagle3_reference import draft_chain, rms_norm
from tiny_configs import DEEPSEEK_MTP, EAGLE3_LLAMA, EAGLE3_MLA
from tiny_model import (
    MIN_GAP,
    disk_tensors,
    generator,
    prompts,
    random_model,
    text_config,
    tiny_folder,
    trace_all,
    write_checkpoint,
    write_golden,
)
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.utils.logging import disable_progress_bar

DRAFTS = 3
AFTER = (0, 5, 17)


def load(name: str) -> PreTrainedModel:
    """A tiny target, float32 and eager."""
    return AutoModelForCausalLM.from_pretrained(
        tiny_folder(name), dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def prefixes(name: str) -> dict[str, torch.Tensor]:
    """Prompt i followed by 1 + a greedy tokens of the target, for a in AFTER; named `i_a`."""
    golden = np.load(tiny_folder(name) / "golden.npz")
    out = {}
    for i in range(3):
        for after in AFTER:
            row = np.concatenate([golden[f"prompt_{i}"], golden[f"tokens_{i}"][: after + 1]])
            out[f"{i}_{after}"] = torch.from_numpy(row.astype(np.int64))
    return out


def head_tensors(name: str, config: dict, layer: str, embed: bool) -> dict[str, torch.Tensor]:
    """Random head weights, exact in bfloat16, with a random increasing vocabulary map."""
    m, draft, vocab = config["hidden_size"], config["draft_vocab_size"], config["vocab_size"]
    rng = generator(name, 0)
    shapes = {f"{layer}mlp.{p}_proj.weight": (config["intermediate_size"], m) for p in ("gate", "up")}
    shapes |= {f"{layer}mlp.down_proj.weight": (m, config["intermediate_size"])}
    shapes |= {"fc.weight": (m, 3 * m), "lm_head.weight": (draft, m)}
    heads = config["num_attention_heads"]
    if "kv_lora_rank" in config:
        nope, turned, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        attention = {
            "q_a_proj": (config["q_lora_rank"], 2 * m),
            "q_b_proj": (heads * (nope + turned), config["q_lora_rank"]),
            "kv_a_proj_with_mqa": (config["kv_lora_rank"] + turned, 2 * m),
            "kv_b_proj": (heads * (nope + v), config["kv_lora_rank"]),
            "o_proj": (m, heads * v),
        }
        norms = {"self_attn.q_a_layernorm": config["q_lora_rank"], "self_attn.kv_a_layernorm": config["kv_lora_rank"]}
    else:
        wide, narrow = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
        attention = {"q_proj": (wide, 2 * m), "k_proj": (narrow, 2 * m), "v_proj": (narrow, 2 * m), "o_proj": (m, wide)}
        norms = {}
    shapes |= {f"{layer}self_attn.{key}.weight": shape for key, shape in attention.items()}
    if embed:
        shapes["embed_tokens.weight"] = (vocab, m)
    norms |= {"input_layernorm": m, "hidden_norm": m, "post_attention_layernorm": m}
    gains = {"embed_tokens.weight": m**0.5, "fc.weight": 0.3}
    tensors = {}
    for key, shape in sorted(shapes.items()):
        std = gains.get(key, 1.5) / shape[1] ** 0.5
        tensors[key] = (torch.randn(shape, generator=rng) * std).bfloat16()
    for key, width in [(f"{layer}{k}.weight", w) for k, w in sorted(norms.items())] + [("norm.weight", m)]:
        tensors[key] = (1 + 0.2 * torch.randn(width, generator=rng)).bfloat16()
    kept = torch.randperm(vocab, generator=rng)[:draft].sort().values
    tensors["d2t"] = kept - torch.arange(draft)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    return tensors


@torch.no_grad()
def make_eagle3(name: str, target_name: str, config: dict, layer: str, aux_layers: list[int], embed: bool) -> None:
    """Writes the head's checkpoint and its chains on the target's greedy runs."""
    tensors = head_tensors(name, config, layer, embed)
    write_checkpoint(tiny_folder(name), config, tensors)
    wide = {k: v.float() if v.dtype == torch.bfloat16 else v for k, v in tensors.items()}
    target = load(target_name)
    embedding = wide["embed_tokens.weight"] if embed else target.get_input_embeddings().weight
    arrays: dict[str, np.ndarray] = {"aux_layers": np.array(aux_layers)}
    for key, tokens in prefixes(target_name).items():
        states = target(input_ids=tokens[None, :-1], output_hidden_states=True).hidden_states
        aux = torch.cat([states[i][0] for i in aux_layers], -1)
        chain = draft_chain(wide, layer, text_config(config), embedding, aux, tokens, DRAFTS)
        arrays |= {
            f"prefix_{key}": tokens.int().numpy(),
            f"aux_last_{key}": aux[-1].numpy(),
            f"draft_tokens_{key}": chain.tokens.int().numpy(),
            f"draft_logits_{key}": chain.logits.numpy(),
            f"draft_hidden_{key}": chain.hidden.numpy(),
        }
    save_npz(tiny_folder(name) / "golden.npz", arrays)
    print(name, [arrays[key].tolist() for key in arrays if key.startswith("draft_tokens")])


def mtp_names(config: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames the last layer of a model one layer too deep to the MTP layer, and adds what an MTP layer has more."""
    m, index = config["hidden_size"], config["num_hidden_layers"]
    rng = generator("mtp extras", 0)
    out = dict(tensors)
    prefix = f"model.layers.{index}."
    out[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    out[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"]
    out[f"{prefix}eh_proj.weight"] = (torch.randn(m, 2 * m, generator=rng) / (2 * m) ** 0.5).bfloat16()
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        out[f"{prefix}{norm}.weight"] = (1 + 0.2 * torch.randn(m, generator=rng)).bfloat16()
    return out


@torch.no_grad()
def make_mtp() -> None:
    """Writes the checkpoint, its ordinary golden arrays, and MTP chains."""
    name, folder, config = "deepseek_v3_mtp", tiny_folder("deepseek_v3_mtp"), DEEPSEEK_MTP
    deeper = text_config(config | {"num_hidden_layers": config["num_hidden_layers"] + 1})

    def attempt(seed: int) -> tuple[PreTrainedModel, list[Trace]]:
        with tempfile.TemporaryDirectory() as scratch:
            tensors = disk_tensors(random_model(deeper, generator(name, seed)), Path(scratch))
        write_checkpoint(folder, config, mtp_names(config, tensors))
        loaded = load(name)
        return loaded, trace_all(loaded, prompts(name, config["vocab_size"]))

    _, model, traces = first_good_seed(attempt, MIN_GAP)
    write_golden(folder, model, traces)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config['num_hidden_layers']}\."]
    model.config.name_or_path = str(folder)
    mtp = MtpModel.from_pretrained(model).eval()
    arrays: dict[str, np.ndarray] = {}
    for key, tokens in prefixes(name).items():
        hidden = model(input_ids=tokens[None, :-1], output_hidden_states=True).hidden_states[-1]
        drafts, logits = mtp_chain(mtp, model, hidden, tokens)
        first, first_logits, _ = mtp(
            tokens[None, 1:], hidden, None, torch.arange(1, len(tokens))[None], MtpCache(config=mtp.config)
        )
        if int(first) != int(drafts[0]) or float((first_logits[0, 0] - logits[0]).abs().max()) > 1e-5:
            raise RuntimeError("the reference's first draft is not transformers'")
        arrays |= {
            f"prefix_{key}": tokens.int().numpy(),
            f"draft_tokens_{key}": drafts.int().numpy(),
            f"draft_logits_{key}": logits.numpy(),
        }
    save_npz(folder / "mtp.npz", arrays)
    print(name, [arrays[key].tolist() for key in arrays if key.startswith("draft_tokens")])


def mtp_chain(
    mtp: MtpModel, model: PreTrainedModel, hidden: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The one MTP layer applied DRAFTS times; `hidden [1, n, M]` is the target's output after its last norm.

    Position i takes hidden state i and the embedding of token i + 1. A drafted position takes the layer's own output
    after `shared_head.norm`, as the target's states come after the target's last norm.
    """
    layer, following = mtp.layers[0], tokens[1:]
    found = []
    for _ in range(DRAFTS):
        embedded = mtp.embed_tokens(following)
        eps = model.config.rms_norm_eps
        joined = torch.cat(
            [rms_norm(embedded, layer.enorm.weight, eps), rms_norm(hidden[0], layer.hnorm.weight, eps)], -1
        )
        x = (joined @ layer.eh_proj.weight.T)[None]
        positions = torch.arange(1, len(following) + 1)[None]
        mask = torch.full((len(following),) * 2, float("-inf")).triu(1)[None, None]
        rope = model.model.rotary_emb(x, positions)
        out = layer.mtp_block(x, attention_mask=mask, position_embeddings=rope, position_ids=positions)
        out = rms_norm(out, layer.post_norm.weight, eps)
        logits = model.lm_head(out[0, -1])
        found.append((logits.argmax(), logits))
        following = torch.cat([following, logits.argmax()[None]])
        hidden = torch.cat([hidden, out[:, -1:]], 1)
    return torch.stack([token for token, _ in found]), torch.stack([row for _, row in found])


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bar()
    depth = load("llama_deep").config.num_hidden_layers
    make_eagle3("eagle3_llama", "llama_deep", EAGLE3_LLAMA, "midlayer.", [2, depth // 2, depth - 3], embed=True)
    make_eagle3("eagle3_mla", "deepseek_v3", EAGLE3_MLA, "layers.0.", [1, 2, 3], embed=False)
    make_mtp()
