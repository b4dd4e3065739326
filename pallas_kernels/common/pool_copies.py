"""Whether a compiled program copies an array as large as a pool."""

import math
import re
from collections.abc import Sequence

ALIASING = re.compile(r"output_to_operand_aliasing=.*calls=%?([\w.-]+)")
HEAD = re.compile(r"^%?([\w.-]+) \(.*\{$")


def pool_copies(hlo: str, shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """Lines of the compiled program's text that copy an array of one of the shapes, whole or with all but its last
    axis merged.

    A fusion that writes into its own operand may hold a `copy` of it that is no array: on TPU an update of a page in
    place is written as a change of the pool's layout, of which only the page's window is ever computed.
    """
    wanted = [f"[{','.join(map(str, shape))}]" for shape in shapes]
    wanted += [f"[{math.prod(shape[:-1])},{shape[-1]}]" for shape in shapes]
    in_place = set(ALIASING.findall(hlo))
    found, computation = [], ""
    for line in hlo.splitlines():
        if head := HEAD.match(line):
            computation = head[1]
        copies = " copy(" in line or "copy-start(" in line
        if copies and computation not in in_place and any(shape in line for shape in wanted):
            found.append(line)
    return found
