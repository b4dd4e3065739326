"""Checks the values of every batch before it is sent: with them a bad page table is an error, not a crash."""

from collections.abc import Sequence

import numpy as np

from pallas_kernels.common.batch_values import BatchValueError, check_values
from trillion_infer.cache.layout import PoolLayout
from trillion_infer.core.errors import KernelInputError
from trillion_infer.engine.batch import BatchLayout
from trillion_infer.engine.state import DeviceState


class BatchGuard:
    """What `debug_kernels` turns on. It reads the page tables back from the devices, which makes every step wait."""

    def __init__(self, layouts: Sequence[PoolLayout]):
        self._layouts = layouts

    def check(self, layout: BatchLayout, packed: np.ndarray, state: DeviceState) -> None:
        """Raises KernelInputError where a kernel would touch a wrong page, naming op, sequence, block and value.

        Args:
          packed: the step's array, `[data, layout.size]`. state: what the step will run on.
        """
        tables = [np.asarray(table).reshape(len(packed), -1, table.shape[1]) for table in state.tables]
        for shard, row in enumerate(packed):
            views = layout.views(row)
            for pool, table, of in zip(state.kv_pools, tables, self._layouts, strict=True):
                try:
                    check_values(
                        views["kv_lens"],
                        table[shard][views["slots"]],
                        views["cu_q_lens"],
                        views["num_seqs"],
                        op="latent_paged_attention" if of.key.kind == "latent" else "ragged_paged_attention",
                        pages=pool.shape[1] // len(packed),
                        page_size=of.page_size,
                        tokens=layout.bucket.tokens,
                        window=of.key.window,
                        chunk=of.key.chunk,
                    )
                except BatchValueError as error:
                    raise KernelInputError(f"{error} (cache group {of.key.name}, data shard {shard})") from error
