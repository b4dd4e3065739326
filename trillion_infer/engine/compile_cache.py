"""XLA's persistent cache of compiled programs."""

import threading
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

COMPILER = "compile-program"
"""How the names of the threads begin that compile an engine's programs."""


def enable_compile_cache(folder: str) -> None:
    """Compiled programs are kept in `folder` and found there by later processes. Unwritable folders are left alone."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if jax.config.jax_compilation_cache_dir != folder:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()  # which has settled on a folder at its first use
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class FreshCompiles:
    """While entered, XLA compiles anew. `cached`: programs of an engine that came from the cache all the same.

    What XLA's CPU runtime loaded from its cache it serialises without the functions in it ("Function … not found" when
    that is loaded, in jaxlib 0.12), so only fresh programs may go into a bundle. The setting is the whole process's,
    so who is inside is counted for the whole process: several engines may compile at a time, each until its own end.
    Small programs that other threads had begun to compile, such as those that make weights, may still be found and do
    not count.
    """

    _lock, _inside, _enabled = threading.Lock(), 0, True

    def __init__(self) -> None:
        self.cached = 0

    def __enter__(self) -> "FreshCompiles":
        kind = FreshCompiles
        with kind._lock:
            if not kind._inside:
                kind._enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
                self._switch(False)
            kind._inside += 1
        jax.monitoring.register_event_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._listen)
        kind = FreshCompiles
        with kind._lock:
            kind._inside -= 1
            if not kind._inside:
                self._switch(kind._enabled)

    def _switch(self, enabled: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()

    def _listen(self, event: str, **_: object) -> None:
        ours = threading.current_thread().name.startswith(COMPILER)
        self.cached += ours and event == "/jax/compilation_cache/cache_hits"
