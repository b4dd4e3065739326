"""A GGUF with the weights of another decoded to bfloat16 or float16, for engines that read no other format.

Run:    python benchmarks/float_gguf.py --model=SmolLM2-135M-Instruct.Q4_1.gguf --dtype=bf16 --output=smollm2.bf16.gguf
Expect: the same tensors and metadata; matrices in `dtype`, vectors in float32.
"""

import contextlib
import sys
from pathlib import Path

import gguf
import numpy as np
from absl import flags

from trillion_infer.cli.flags import run
from trillion_infer.core.errors import ConfigError

MODEL = flags.DEFINE_string("model", None, "GGUF file to decode.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "GGUF file to write.", required=True)
DTYPE = flags.DEFINE_enum("dtype", "bf16", ["bf16", "f16"], "Of the matrices.")
TYPES = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}
WRITTEN_ANEW = ("general.architecture", "general.file_type", "general.quantization_version")


def convert(model: Path, output: Path, dtype: str) -> None:
    """Writes `output`, a tensor at a time. Raises OSError, ValueError for what is no GGUF."""
    reader = gguf.GGUFReader(model)
    kind, file_type = TYPES[dtype]
    writer = gguf.GGUFWriter(output, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in WRITTEN_ANEW:
            continue
        inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        to = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(_: list[str]) -> None:
    model, output = Path(MODEL.value), Path(OUTPUT.value)
    if output.exists():
        raise ConfigError(f"output {OUTPUT.value!r} exists; name a file that does not.")
    try:
        convert(model, output, DTYPE.value)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            output.unlink()
        raise ConfigError(f"{model} was not converted: {error}") from error
    print(f"{output}: {output.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    run(main)
