"""XLA's persistent cache of compiled programs."""

from pathlib import Path

import jax


def enable_compile_cache(folder: str) -> None:
    """Compiled programs are kept in `folder` and found there by later processes. Unwritable folders are left alone."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
