"""What engines do with KV blocks by name, for sessions and tenants."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Array

from trillion_infer.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from trillion_infer.engine.tiering import KVTiering


class KeepsBlocks:
    """The part of an engine that pins, copies out and deletes blocks. The engine owns the fields."""

    schedulers: list[Scheduler]
    tiering: "KVTiering | None"

    @property
    def all_pools(self) -> tuple[Array, ...]:
        """The KV pools, those of models that draft among them, as the steps sent so far leave them."""
        raise NotImplementedError

    def pin(self, names: Sequence[bytes], count: int = 1) -> None:
        """Evict these blocks after all others; `count` -1 takes it back."""
        for scheduler in self.schedulers:
            scheduler.cache.pin(names, count)

    def demote(self, names: Sequence[bytes]) -> None:
        """Copy these blocks to the tiers beyond the device and give up their pages first; without tiers, nothing."""
        if self.tiering is not None:
            self.tiering.save_cached(self.all_pools, names, waits=False)
            for scheduler in self.schedulers:
                scheduler.cache.supersede(names)

    def persist(self, names: Sequence[bytes]) -> None:
        """Copy these blocks to a tier that outlives the process, if there is one."""
        if self.tiering is not None:
            self.tiering.persist(self.all_pools, names)

    def discard(self, names: Sequence[bytes]) -> None:
        """Delete these blocks in every tier; what requests hold is not shared any more."""
        for scheduler in self.schedulers:
            scheduler.cache.forget_each(names)
        if self.tiering is not None:
            self.tiering.discard(names)

    def delete_tenant(self, salt: str) -> None:
        """Delete the blocks of a tenant in every tier; what its requests hold is not shared any more."""
        tag = self.schedulers[0].cache.tag(salt)
        for scheduler in self.schedulers:
            scheduler.cache.forget(tag)
        if self.tiering is not None:
            self.tiering.delete_tenant(tag)

    @property
    def page_size(self) -> int:
        """Tokens of a block."""
        return self.schedulers[0].cache.page_size

    def holds(self, name: bytes) -> bool:
        """Whether a block is on the device, or in the tier next to it."""
        for scheduler in self.schedulers:
            for number, group in enumerate(scheduler.cache.groups):
                if name in group.index or (self.tiering is not None and self.tiering.is_at_hand(number, name)):
                    return True
        return False

    def block_names(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Names of the whole blocks of a sequence."""
        return self.schedulers[0].cache.names_of(token_ids, salt)


class KeepsBlocksOf:
    """The same for an engine made of others."""

    @property
    def parts(self) -> Sequence[Any]:
        """The engines it is made of, at least one."""
        raise NotImplementedError

    def pin(self, names: Sequence[bytes], count: int = 1) -> None:
        for engine in self.parts:
            engine.pin(names, count)

    def demote(self, names: Sequence[bytes]) -> None:
        for engine in self.parts:
            engine.demote(names)

    def persist(self, names: Sequence[bytes]) -> None:
        for engine in self.parts:
            engine.persist(names)

    def discard(self, names: Sequence[bytes]) -> None:
        for engine in self.parts:
            engine.discard(names)

    def delete_tenant(self, salt: str) -> None:
        for engine in self.parts:
            engine.delete_tenant(salt)

    @property
    def page_size(self) -> int:
        return self.parts[0].page_size

    def holds(self, name: bytes) -> bool:
        return any(engine.holds(name) for engine in self.parts)

    def block_names(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        return self.parts[0].block_names(token_ids, salt)
