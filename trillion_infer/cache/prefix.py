"""Prefix index of one cache group: block name to the page that holds it."""

from collections.abc import Sequence

from trillion_infer.cache.eviction import Block


class PrefixIndex:
    """Blocks by name and by page. One page per name: the first to publish it stays."""

    def __init__(self) -> None:
        self._by_name: dict[bytes, Block] = {}
        self._by_page: dict[int, Block] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: bytes) -> bool:
        return name in self._by_name

    def find(self, name: bytes) -> Block | None:
        return self._by_name.get(name)

    def block_at(self, page: int) -> Block | None:
        return self._by_page.get(page)

    def starting_with(self, prefix: bytes) -> list[Block]:
        """Blocks whose names begin with `prefix`."""
        return [block for name, block in self._by_name.items() if name.startswith(prefix)]

    def run_length(self, names: Sequence[bytes], limit: int) -> int:
        """Leading names, at most `limit`, that are all present."""
        for count in range(limit):
            if names[count] not in self._by_name:
                return count
        return limit

    def publish(self, name: bytes, page: int, depth: int, parent: bytes | None) -> Block | None:
        """Name the content of `page`, which follows block `parent`; None, without effect, if the name has a page."""
        if name in self._by_name:
            return None
        block = Block(name, page, depth, None if parent is None else self._by_name.get(parent))
        if block.parent is not None:
            block.parent.children.add(block)
        self._by_name[name] = block
        self._by_page[page] = block
        return block

    def drop(self, block: Block) -> None:
        if block.parent is not None:
            block.parent.children.discard(block)
        for child in block.children:
            child.parent = None
        del self._by_name[block.name]
        del self._by_page[block.page]

    def check_integrity(self) -> None:
        """Names and pages are in one-to-one correspondence. Raises AssertionError."""
        assert len(self._by_name) == len(self._by_page), "a name without a page, or a page without a name"
        for name, block in self._by_name.items():
            assert block.name == name, f"block {block.name.hex()} is filed under another name"
            assert self._by_page.get(block.page) is block, f"block {block.name.hex()} is filed under another page"
            assert block.parent is None or self._by_name.get(block.parent.name) is block.parent, "a parent is gone"
