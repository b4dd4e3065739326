"""Cutting a chain of layers into pipeline stages."""

from collections.abc import Sequence


def balanced_cuts(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Where each stage begins and the last one ends (`stages + 1` numbers): contiguous parts whose most costly one
    costs least; among those, parts as even as can be.

    Dynamic programming over (items, stages); the second criterion is the sum of squares. Raises ValueError where a
    stage would be empty.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} items cannot be cut into {stages} stages; at most {count}.")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (count + 1)
    best[0] = (0.0, 0.0, (0,))
    for _ in range(stages):
        found: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (count + 1)
        for stop in range(1, count + 1):
            for start in range(stop):
                before = best[start]
                if before is None:
                    continue
                part = total[stop] - total[start]
                option = (max(before[0], part), before[1] + part * part, (*before[2], stop))
                current = found[stop]
                if current is None or option < current:
                    found[stop] = option
        best = found
    last = best[count]
    assert last is not None
    return last[2]
