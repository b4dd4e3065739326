"""transformers on CPU torch, on the same token ids as the engine's benchmark.

    oracle-env/bin/python tests/oracle/torch_baseline.py --model=FILE.gguf --work=WORK.json --dtype=bf16

`WORK.json`: {"decode": {"prompt_ids": [...], "out": 128}, "prefill": {"prompt_ids": [...], "out": 1},
"offline": {"prompts": [[...]], "out": 64, "running": 16}, "startup": {"prompt_ids": [...]}}; workloads not named are
not run. Without `--work` the standard sizes are drawn with a fixed seed.

Prints one JSON object a line: {"engine","metric","value","unit","dtype","model"}. Best of `--repeats` after a warm-up.
A GGUF is dequantised once into a safetensors folder under `--cache`, and everything, start-up too, runs from there:
reading the GGUF itself costs transformers half a minute more, which would say nothing of its speed. Decoding is a bare
loop over the model with SDPA attention, faster than `generate`.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DTYPES = {"bf16": "bfloat16", "f32": "float32"}
Work = dict[str, Any]


def standard_work(vocab: int = 49152, seed: int = 0) -> Work:
    """The sizes of the benchmark: 32 in and 128 out; 1,024 in; 32 requests of 16 to 512 in, 64 out, 16 running."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(100, vocab) for _ in range(count)]

    return {
        "decode": {"prompt_ids": ids(32), "out": 128},
        "prefill": {"prompt_ids": ids(1024), "out": 1},
        "offline": {"prompts": [ids(rng.randint(16, 512)) for _ in range(32)], "out": 64, "running": 16},
        "startup": {"prompt_ids": ids(32)},
    }


def converted(model: Path, dtype: str, cache: Path) -> Path:
    """A safetensors folder of `model`: itself, or the GGUF dequantised into `cache` once a dtype."""
    if model.is_dir():
        return model
    stat = model.stat()
    key = hashlib.sha256(f"{model.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{dtype}".encode()).hexdigest()[:16]
    folder = cache / f"{model.stem}-{dtype}-{key}"
    if not (folder / "model.safetensors").exists():
        import torch
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(
            str(model.parent), gguf_file=model.name, dtype=getattr(torch, DTYPES[dtype])
        )
        for attribute in ("quantization_config", "_pre_quantization_dtype"):
            loaded.config.__dict__.pop(attribute, None)
        loaded.hf_quantizer = None
        loaded.is_quantized = False
        loaded.save_pretrained(folder)
    return folder


class Baseline:
    """A loaded model and the bare generation loop."""

    def __init__(self, folder: Path, dtype: str, threads: int | None):
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        if threads:
            torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPES[dtype])).eval()

    def run(self, prompts: list[list[int]], out: int) -> list[float]:
        """Greedy tokens of a left-padded batch; returns the time at the start and after each token."""
        torch = self.torch
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        padded = any(len(p) != longest for p in prompts)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * (len(p) + out) for p in prompts]) if padded else None
        times = [time.perf_counter()]
        cache = None
        with torch.inference_mode():
            for step in range(out):
                extra: dict[str, Any] = {}
                if mask is not None:
                    seen = mask[:, : longest + step]
                    positions = (seen.cumsum(-1) - 1).clamp(min=0)
                    extra = {"attention_mask": seen, "position_ids": positions[:, -ids.shape[1] :]}
                result = self.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1, **extra)
                cache = result.cache
                ids = result.logits[:, -1].argmax(-1, keepdim=True)
                ids.sum().item()
                times.append(time.perf_counter())
        return times


def decode_tok_s(base: Baseline, work: Work) -> float:
    """Tokens a second after the first one, batch 1."""
    times = base.run([work["prompt_ids"]], work["out"])
    return (work["out"] - 1) / (times[-1] - times[1])


def prefill_tok_s(base: Baseline, work: Work) -> float:
    """Prompt tokens a second until the first token."""
    times = base.run([work["prompt_ids"]], 1)
    return len(work["prompt_ids"]) / (times[1] - times[0])


def offline_seconds(base: Baseline, work: Work) -> float:
    """Seconds for all requests in padded batches of at most `running`, in the order given."""
    start = time.perf_counter()
    for first in range(0, len(work["prompts"]), work["running"]):
        base.run(work["prompts"][first : first + work["running"]], work["out"])
    return time.perf_counter() - start


def startup_s(args: argparse.Namespace, folder: Path, prompt: list[int]) -> float:
    """Seconds from starting a process to its first token."""
    child = [
        sys.executable,
        __file__,
        f"--model={folder}",
        f"--dtype={args.dtype}",
        f"--first_token={json.dumps(prompt)}",
    ]
    if args.threads:
        child.append(f"--threads={args.threads}")
    start = time.perf_counter()
    with subprocess.Popen(child, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        line = process.stdout.readline() if process.stdout else ""
        took = time.perf_counter() - start
    if not line.strip().isdigit():
        raise RuntimeError("the start-up process ended without a token; run it by hand to see why")
    return took


def measure(args: argparse.Namespace) -> None:
    """Runs the workloads and prints their lines."""
    work = json.loads(Path(args.work).read_text()) if args.work else standard_work()
    folder = converted(Path(args.model), args.dtype, Path(args.cache))

    def emit(metric: str, value: float, unit: str) -> None:
        line = {
            "engine": "transformers",
            "metric": metric,
            "value": round(value, 3),
            "unit": unit,
            "dtype": args.dtype,
            "model": Path(args.model).name,
        }
        print(json.dumps(line), flush=True)

    if "startup" in work:
        prompt = work["startup"]["prompt_ids"]
        emit("startup_s", min(startup_s(args, folder, prompt) for _ in range(args.repeats)), "s")
    base = Baseline(folder, args.dtype, args.threads)
    base.run([list(range(100, 132))], 4)
    if "decode" in work:
        emit("decode_tok_s", max(decode_tok_s(base, work["decode"]) for _ in range(args.repeats)), "tokens/s")
    if "prefill" in work:
        emit("prefill_tok_s", max(prefill_tok_s(base, work["prefill"]) for _ in range(args.repeats)), "tokens/s")
    if "offline" in work:
        seconds = min(offline_seconds(base, work["offline"]) for _ in range(args.repeats))
        out = len(work["offline"]["prompts"]) * work["offline"]["out"]
        emit("offline_out_tok_s", out / seconds, "tokens/s")
        emit("offline_total_tok_s", (out + sum(map(len, work["offline"]["prompts"]))) / seconds, "tokens/s")
    emit("peak_rss_mb", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "MB")


def main() -> None:
    """Parses the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a GGUF file or a transformers folder")
    parser.add_argument("--work", help="JSON file of token ids; default: standard sizes, fixed seed")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's own choice")
    parser.add_argument("--repeats", type=int, default=3)
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    parser.add_argument("--cache", default=f"{cache}/trillion_infer_oracle", help="where a GGUF is converted to")
    parser.add_argument("--first_token", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first_token:
        base = Baseline(Path(args.model), args.dtype, args.threads)
        base.run([json.loads(args.first_token)], 1)
        print(0, flush=True)
        return
    measure(args)


if __name__ == "__main__":
    main()
