"""Small quantised matrices whose packing the compressed-tensors package confirms.

    python tests/oracle/make_formats.py

Writes golden/formats/NAME.safetensors: the stored tensors under their checkpoint names and `value`, the float32 matrix
`[out, in]` they stand for. Each is decoded by compressed-tensors (gpt-oss's form of mxfp4 by transformers) and must be
equal, bit for bit.
"""

import torch
from common import GOLDEN
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from quantize import E2M1, fp8_block, int4_group, mxfp4
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ROWS, COLS = 24, 96
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def draw(seed: int, *shape: int) -> Tensor:
    """A bfloat16-exact matrix whose groups differ in size by some powers of two."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.randint(-4, 4, (*shape[:-1], shape[-1] // 32), generator=rng).float().exp2()
    return (torch.randn(shape, generator=rng) * size.repeat_interleave(32, -1)).bfloat16().float()


def scheme(**weights: object) -> QuantizationScheme:
    """A compressed-tensors scheme for weights only."""
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def write(name: str, tensors: dict[str, Tensor], value: Tensor, decoded: Tensor) -> None:
    """Writes one file after comparing `value` with the package's `decoded`."""
    if not torch.equal(value.float(), decoded.float()):
        worst = (value.float() - decoded.float()).abs().max()
        raise RuntimeError(f"{name}: compressed-tensors decodes other values, by {worst:.2e}")
    (GOLDEN / "formats").mkdir(parents=True, exist_ok=True)
    stored = {k: v.clone().contiguous() for k, v in tensors.items()}
    save_file(stored | {"value": value.float().contiguous()}, GOLDEN / "formats" / f"{name}.safetensors")
    print(name, {k: (str(v.dtype), list(v.shape)) for k, v in stored.items()})


def make_int4() -> None:
    """Kimi's routed experts."""
    form = int4_group(draw(1, ROWS, COLS))
    wide = form.tensors | {"weight_scale": form.tensors["weight_scale"].float()}
    args = scheme(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
    write("int4_g32", form.tensors, form.value, PackedQuantizationCompressor.decompress(wide, args)["weight"])
    packed = PackedQuantizationCompressor.compress({"weight": form.value, "weight_scale": wide["weight_scale"]}, args)
    if not torch.equal(packed["weight_packed"], form.tensors["weight_packed"]):
        raise RuntimeError("int4_g32: compressed-tensors packs other words")


def make_fp8() -> None:
    """DeepSeek's fp8, with blocks cut short on both sides."""
    form = fp8_block(draw(2, 200, 160))
    tensors = {f"m.{key}": value for key, value in form.tensors.items()}
    converter = FP8BlockDequantizer(targets=["m"], dtype=torch.float32)
    write("fp8_block", form.tensors, form.value, converter.process(tensors)["m.weight"])


def make_mxfp4() -> None:
    """One matrix in compressed-tensors' naming, and two experts in gpt-oss's `[E, out, in / 32, 16]`."""
    form = mxfp4(draw(3, ROWS, COLS))
    named = {"weight_packed": form.tensors["blocks"].flatten(-2), "weight_scale": form.tensors["scales"]}
    args = scheme(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True)
    write("mxfp4", named, form.value, MXFP4PackedCompressor.decompress(named, args)["weight"])
    pair = mxfp4(draw(4, 2, ROWS, COLS))
    decoded = convert_moe_packed_tensors(pair.tensors["blocks"], pair.tensors["scales"], dtype=torch.float32)
    write("mxfp4_gpt_oss", pair.tensors, pair.value, decoded.transpose(1, 2))


def make_nvfp4() -> None:
    """e2m1 in groups of 16, e4m3 scales, one float32 divisor: value = e2m1 * scale / weight_global_scale.

    The package decodes in bfloat16, so the divisor is a power of two here and nothing is rounded.
    """
    weight = draw(5, ROWS, COLS)
    groups = weight.reshape(ROWS, COLS // 16, 16)
    divisor = (448 * 6 / weight.abs().max()).log2().floor().exp2().reshape(1)
    scale = (groups.abs().amax(-1, keepdim=True) / 6 * divisor).to(torch.float8_e4m3fn)
    unit = scale.float() / divisor
    code = ((groups / unit).abs()[..., None] - E2M1).abs().argmin(-1)
    value = (torch.where(groups < 0, -E2M1[code], E2M1[code]) * unit).reshape(ROWS, COLS)
    nibble = (code + 8 * (groups < 0)).reshape(ROWS, COLS // 2, 2)
    tensors = {
        "weight_packed": (nibble[..., 0] | (nibble[..., 1] << 4)).to(torch.uint8),
        "weight_scale": scale[..., 0],
        "weight_global_scale": divisor,
    }
    args = scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    wide = tensors | {"weight_scale": tensors["weight_scale"].float()}
    write("nvfp4", tensors, value, NVFP4PackedCompressor.decompress(wide, args)["weight"])


def make_awq() -> None:
    """AutoAWQ GEMM: `qweight [in, out/8]`, `qzeros [in/g, out/8]`, `scales [in/g, out]`; value = (q - z) * s."""
    group, inputs, outputs = 32, COLS, ROWS
    rng = torch.Generator().manual_seed(6)
    q = torch.randint(0, 16, (inputs, outputs), generator=rng)
    z = torch.randint(0, 16, (inputs // group, outputs), generator=rng)
    s = torch.rand(inputs // group, outputs, generator=rng).half()

    def pack(x: Tensor) -> Tensor:
        lanes = x.reshape(len(x), -1, 8)[..., AWQ_ORDER].to(torch.int64)
        words = (lanes << (4 * torch.arange(8))).sum(-1)
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)

    tensors = {"qweight": pack(q), "qzeros": pack(z), "scales": s}
    value = ((q - z.repeat_interleave(group, 0)) * s.float().repeat_interleave(group, 0)).T
    converter = AutoAWQConverter(group_size=group)
    weight, scale, zero = converter._convert_gemm_module(tensors["qweight"], s, tensors["qzeros"])
    decoded = (weight - zero.repeat_interleave(group, 1)) * scale.float().repeat_interleave(group, 1)
    write("awq_g32", tensors, value, decoded)


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_int4()
    make_fp8()
    make_mxfp4()
    make_nvfp4()
    make_awq()
