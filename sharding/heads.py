"""How attention heads are laid out over tensor-parallel devices, whatever their numbers."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HeadPlan:
    """Physical heads that divide evenly over `tensor` devices and give the same answer as the logical ones.

    With fewer devices than KV heads, KV heads are padded with zeros up to a multiple of the devices. With more
    devices than KV heads, each KV head is replicated `replicas` times and its query heads are split among the
    replicas, padded with zeros where they do not divide. A padded head adds nothing: its value and output weights
    are zero.

    heads, kv_heads: the model's own numbers. physical_kv_heads is a multiple of tensor; physical query heads are
    physical_kv_heads * group, and query head h reads KV head h // group.
    """

    heads: int
    kv_heads: int
    tensor: int

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads are not a multiple of {self.kv_heads} KV heads.")

    @property
    def replicas(self) -> int:
        """Copies of each KV head: the largest divisor of tensor that leaves room for every KV head."""
        fitting = [r for r in range(1, self.tensor + 1) if self.tensor % r == 0 and self.tensor // r >= self.kv_heads]
        return max(fitting, default=1)

    @property
    def padded_kv_heads(self) -> int:
        distinct = self.tensor // self.replicas
        return -(-self.kv_heads // distinct) * distinct

    @property
    def physical_kv_heads(self) -> int:
        return self.padded_kv_heads * self.replicas

    @property
    def padded_group(self) -> int:
        return self.group * self.replicas

    @property
    def group(self) -> int:
        """Query heads of one physical KV head."""
        return -(-(self.heads // self.kv_heads) // self.replicas)

    @property
    def physical_heads(self) -> int:
        return self.physical_kv_heads * self.group

    def place_queries(self, x: np.ndarray) -> np.ndarray:
        """[heads, …] -> [physical_kv_heads, group, …], zeros in padded heads."""
        group = self.heads // self.kv_heads
        x = x.reshape(self.kv_heads, group, *x.shape[1:])
        if (self.padded_kv_heads, self.padded_group) != (self.kv_heads, group):
            pad = [(0, self.padded_kv_heads - self.kv_heads), (0, self.padded_group - group)]
            x = np.pad(x, pad + [(0, 0)] * (x.ndim - 2))
        return x.reshape(self.physical_kv_heads, self.group, *x.shape[2:])

    def place_keys(self, x: np.ndarray) -> np.ndarray:
        """[kv_heads, …] -> [physical_kv_heads, …]: zeros in padded heads, replicas side by side."""
        if self.padded_kv_heads != self.kv_heads:
            x = np.pad(x, [(0, self.padded_kv_heads - self.kv_heads)] + [(0, 0)] * (x.ndim - 1))
        return x if self.replicas == 1 else np.repeat(x, self.replicas, axis=0)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
