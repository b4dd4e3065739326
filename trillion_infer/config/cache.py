"""What the KV cache is made of: one group of pages for all layers that see the same positions."""

from dataclasses import dataclass

from trillion_infer.core.errors import ConfigError


@dataclass(frozen=True)
class CacheGroup:
    """Pages of the layers that share one rule of visibility.

    window: the token at position i sees (i - window, i]; None sees everything before it.
    num_pages: pages of the pool; a page holds `page_size` positions of every layer of the group.
    chunk: the token at position i sees [i // chunk * chunk, i] (chunked attention); excludes `window`.
    reusable: False for state that cannot be continued from the pages of a prefix (recurrent layers); a cache with
        such a group never reports a prefix hit.
    """

    name: str
    window: int | None
    num_pages: int
    chunk: int | None = None
    reusable: bool = True

    def __post_init__(self) -> None:
        if self.num_pages < 1:
            raise ConfigError(f"Cache group {self.name!r} has {self.num_pages} pages; give it at least 1.")
        if self.window is not None and self.chunk is not None:
            raise ConfigError(
                f"Cache group {self.name!r} has window {self.window} and chunk {self.chunk}; set at most one."
            )
        for field in ("window", "chunk"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"Cache group {self.name!r} has {field} {value}; it must be None or at least 1.")

    @property
    def is_full(self) -> bool:
        """Every earlier position is visible."""
        return self.window is None and self.chunk is None

    def first_visible(self, position: int) -> int:
        """The earliest position that the token at `position` sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0

    def pages_for(self, num_tokens: int, extend_len: int, page_size: int) -> int:
        """Most pages held at once while a sequence grows to `num_tokens` by steps of at most `extend_len` tokens."""
        whole = -(-num_tokens // page_size)
        reach = self.window or self.chunk
        if reach is None:
            return whole
        span = reach + extend_len - 1
        return min(whole, (span - 2) // page_size + 2 if span > 1 else 1)
