"""Who a worker is, and whether two workers can hand pages to each other."""

import dataclasses
from dataclasses import dataclass

import msgpack

from trillion_infer.core.errors import ConfigError
from trillion_infer.transfer.handoff.wire import WireError, pack


@dataclass(frozen=True)
class PoolSpec:
    """One pool as it travels. shape: of a page over all layers, `[L, p, K, 2, D]` or `[L, p, R]`; K logical heads."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def quantised(self) -> bool:
        """Its numbers have scales, which travel with them."""
        return self.dtype in ("int8", "float8_e4m3fn")


@dataclass(frozen=True)
class Identity:
    """What a handshake tells.

    model: fingerprint of configuration and weights, in hex. epoch: names this life of the worker. data: address of
    its transport. transport: which.
    """

    name: str
    model: str
    pools: tuple[PoolSpec, ...]
    epoch: str
    transport: str
    data: str

    def pack(self) -> bytes:
        return pack(dataclasses.asdict(self))

    @staticmethod
    def unpack(data: bytes) -> "Identity":
        """Raises WireError for what `pack` could not have made."""
        try:
            found = msgpack.unpackb(data, raw=False)
            pools = tuple(PoolSpec(p["name"], tuple(map(int, p["shape"])), p["dtype"]) for p in found.pop("pools"))
            texts = {name: str(found.pop(name)) for name in ("name", "model", "epoch", "transport", "data")}
            if found:
                raise KeyError(*found)
        except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
            raise WireError(f"the peer's first frame is no identity ({error!r}).") from error
        return Identity(pools=pools, **texts)

    def check(self, other: "Identity") -> None:
        """Raises ConfigError, with both sides named, unless pages of one can become pages of the other.

        The dtypes of the pools may differ: pages are converted where they arrive.
        """
        both = f"{self.name} and {other.name}"
        if self.model != other.model:
            raise ConfigError(
                f"{both} serve different models or weights (fingerprints {self.model[:12]} and {other.model[:12]}); "
                "start both with the same --model."
            )
        if self.transport != other.transport:
            raise ConfigError(
                f"{both} move pages by {self.transport} and {other.transport}; give both the same --handoff_transport."
            )
        for ours, theirs in zip(self.pools, other.pools, strict=False):
            if (ours.name, ours.shape) != (theirs.name, theirs.shape):
                raise ConfigError(
                    f"{both} have KV that cannot be moved into each other: pool {ours.name} with pages of "
                    f"{list(ours.shape)} and pool {theirs.name} with pages of {list(theirs.shape)}; give both the same "
                    "--page_size and --speculate."
                )
        if len(self.pools) != len(other.pools):
            raise ConfigError(
                f"{both} have {len(self.pools)} and {len(other.pools)} pools of KV, those of models that draft among "
                "them; give both the same --speculate."
            )
