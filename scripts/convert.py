"""Writes a checkpoint in final layout, which loads without transformation on any mesh with as many tensor shards.

Run:    python scripts/convert.py --model=SmolLM2-135M-Instruct.Q4_1.gguf --output=smollm2.orbax --dtype=bfloat16
        python scripts/convert.py --model=Kimi-K2.5 --output=kimi.orbax --mesh=tensor=8 --keep_quantised
        The last with --coordinator=HOST:PORT --num_processes=N --process_id=I on each of N hosts: each reads and writes
        its own shards. The directory must be one that all of them see.
Expect: one line with the bytes and the speed; `--model=smollm2.orbax` then works with every other script.
"""

import sys
from pathlib import Path

from absl import flags

from sharding.mesh import make_mesh
from trillion_infer.cli.flags import run
from trillion_infer.cli.hosts import define_host_flags
from trillion_infer.config.engine import EngineConfig
from trillion_infer.core.errors import TrillionInferError
from trillion_infer.engine.build import plan_engine
from trillion_infer.models import read_family
from trillion_infer.weights import load_params, open_checkpoint
from trillion_infer.weights.orbax import save_final_layout
from trillion_infer.weights.quant_load import routed_experts
from trillion_infer.weights.rounding import RECIPES

MODEL = flags.DEFINE_string("model", None, "Hugging Face directory, .gguf file or hub id.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "Directory to write.", required=True)
DTYPE = flags.DEFINE_string("dtype", "auto", "float32, bfloat16, or auto (as the model says).")
MESH = flags.DEFINE_string("mesh", None, "Devices to hold the weights meanwhile, e.g. tensor=4.")
QUANTIZE = flags.DEFINE_enum("quantize", None, list(RECIPES), "Round the weights of products to this format.")
KEEP = flags.DEFINE_bool("keep_quantised", False, "Keep routed experts quantised that the checkpoint holds quantised.")
join_hosts = define_host_flags()


def main(_: list[str]) -> None:
    join_hosts()
    try:
        checkpoint = open_checkpoint(MODEL.value)
        family = read_family(checkpoint.config, checkpoint.generation_config)
        blueprint = plan_engine(family, make_mesh(MESH.value), EngineConfig(dtype=DTYPE.value, quantize=QUANTIZE.value))
        params, report = load_params(
            blueprint.specs,
            checkpoint,
            blueprint.shardings,
            dtype=blueprint.dtype,
            ignore=family.ignore,
            tied={family.names.head: family.names.embed},
            keep_quantised=routed_experts if KEEP.value else False,
            quantize=QUANTIZE.value,
        )
        save_final_layout(Path(OUTPUT.value), params, checkpoint, blueprint.dtype)
    except (TrillionInferError, ValueError) as error:
        sys.exit(f"convert.py: {error}")
    print(f"{OUTPUT.value}: {len(params)} parameters from {report.bytes / 1e9:.2f} GB, read at {report.gb_s:.2f} GB/s")


if __name__ == "__main__":
    run(main)
