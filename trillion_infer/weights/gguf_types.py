"""GGML's tensor types: numbers, and how many values a block holds in how many bytes. The gguf package says the same,
but importing it takes as long as reading a file's header."""

from enum import IntEnum


class GGMLType(IntEnum):
    """By the number that a GGUF file stores."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41

    @property
    def block(self) -> tuple[int, int]:
        """Values of a block, and its bytes."""
        return _BLOCKS[self.name]


_BLOCKS = {
    **{name: (1, size) for name, size in {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}.items()},
    **{"I16": (1, 2), "I8": (1, 1), "MXFP4": (32, 17), "NVFP4": (64, 36), "Q1_0": (128, 18), "IQ4_NL": (32, 18)},
    **{name: (32, size) for name, size in {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}.items()},
    **{"Q8_1": (32, 40), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176)},
    **{"Q6_K": (256, 210), "Q8_K": (256, 292), "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66)},
    **{"IQ2_XS": (256, 74), "IQ2_S": (256, 82), "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_XS": (256, 136)},
    **{"TQ1_0": (256, 54), "TQ2_0": (256, 66)},
}
