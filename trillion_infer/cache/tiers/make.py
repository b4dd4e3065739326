"""The tiers that a user's budgets ask for."""

import hashlib
from collections.abc import Sequence

from trillion_infer.cache.tiers.base import Tier
from trillion_infer.cache.tiers.disk import DiskTier
from trillion_infer.cache.tiers.host import HostTier
from trillion_infer.cache.tiers.mooncake import MooncakeTier
from trillion_infer.cache.tiers.objects import ObjectTier
from trillion_infer.cache.tiers.segment import file_bytes
from trillion_infer.config.tiers import MooncakeStore, parse_disk, parse_store
from trillion_infer.core.errors import ConfigError


def make_tiers(
    host_kv: float,
    disk_kv: str | None,
    store: str | None,
    model: bytes,
    layout: str,
    unit_bytes: Sequence[Sequence[int]],
) -> list[Tier]:
    """Fastest first; none if none is asked for.

    model, layout: what the bytes of a block depend on. unit_bytes: of each part of a block, by cache group.
    Raises ConfigError for a budget that does not hold one block of every group, for an unusable folder and for a store
    that cannot be reached.
    """
    fingerprint = hashlib.sha256(
        b"trillion_infer/kv/tier/3" + hashlib.sha256(model).digest() + layout.encode()
    ).digest()
    tiers: list[Tier] = []
    whole = sum(map(sum, unit_bytes))
    if host_kv:
        _check("host_kv", host_kv, whole)
        tiers.append(HostTier(fingerprint, int(host_kv)))
    if disk_kv:
        disk = parse_disk(disk_kv)
        _check("disk_kv", disk.num_bytes, sum(file_bytes(sizes) for sizes in unit_bytes))
        tiers.append(DiskTier(disk.folder, fingerprint, disk.num_bytes))
    if store:
        place = parse_store(store)
        if isinstance(place, MooncakeStore):
            if place.segment:
                _check("the segment of store", place.segment, whole)
            tiers.append(MooncakeTier(place, fingerprint, max(map(max, unit_bytes))))
        else:
            if place.num_bytes:
                _check("the budget of store", place.num_bytes, whole)
            tiers.append(ObjectTier(place, fingerprint))
    return tiers


def _check(option: str, budget: float, needed: int) -> None:
    if budget < needed:
        raise ConfigError(
            f"{option} is {budget:,.0f} bytes and one block of this model takes {needed:,}; give it at least that."
        )
