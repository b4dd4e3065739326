"""Which blocks to bring back for a request that waits: as many leading ones as the tiers hold and the pools take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trillion_infer.cache.group import GroupPages, has_room
from trillion_infer.cache.kv_cache import KVCache
from trillion_infer.core.request import Request


@dataclass(frozen=True)
class Promotion:
    """The first `count` blocks of `names` can be continued from once those of `lacking[group]` are back."""

    names: list[bytes]
    count: int
    lacking: tuple[list[int], ...]

    def lacking_names(self, group: int) -> list[bytes]:
        return [self.names[block] for block in self.lacking[group]]


def plan_promotion(cache: KVCache, request: Request, is_stored: Callable[[int, bytes], bool]) -> Promotion | None:
    """None if the tiers have nothing to add to what `cache.match` finds. Changes no state.

    is_stored: whether a tier has the whole block of a cache group.
    """
    names = cache.matchable_names(request)
    computing = next((i for i, name in enumerate(names) if cache.is_computing(name)), len(names))
    names = names[:computing]
    usable = [_usable(group, number, names, is_stored) for number, group in enumerate(cache.groups)]
    found = cache.match(request) // cache.page_size
    for count in range(len(names), found, -1):
        if all(flags[count] for flags in usable):
            lacking = tuple(group.lacking(names, count) for group in cache.groups)
            if all(has_room(g, names, count, blocks) for g, blocks in zip(cache.groups, lacking, strict=True)):
                return Promotion(names, count, lacking)
    return None


def _usable(
    group: GroupPages, number: int, names: Sequence[bytes], is_stored: Callable[[int, bytes], bool]
) -> list[bool]:
    """usable[n]: all that a query right after n leading blocks reads of this group is present or stored."""
    usable, run = [True], 0
    for count, name in enumerate(names, start=1):
        run = run + 1 if name in group.index or is_stored(number, name) else 0
        usable.append(run >= count - group.first_needed(count * group.page_size))
    return usable
