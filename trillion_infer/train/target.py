"""The target while a head is trained: hidden states of whole sequences, computed when a batch needs them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from trillion_infer.engine.batch import BatchLayout
from trillion_infer.engine.buckets import Bucket
from trillion_infer.engine.build import Blueprint
from trillion_infer.engine.ops import choose_ops
from trillion_infer.engine.programs import compile_program
from trillion_infer.engine.state import StateShape
from trillion_infer.engine.step import make_forward


class TargetStates:
    """Runs a target over `rows` sequences of `length` tokens a data shard, in pools of its own."""

    def __init__(self, blueprint: Blueprint, params, aux_layers: tuple[int, ...], rows: int, length: int):
        mesh, config = blueprint.mesh, blueprint.config
        self._params, self._shards, taken = params, mesh.shape["data"], tuple(sorted(set(aux_layers)))
        self.aux_layers, self._places = aux_layers, [taken.index(layers) for layers in aux_layers]
        self.dtype, self.width = jnp.dtype(blueprint.dtype), 4 * blueprint.family.config.width
        self._layout = BatchLayout(Bucket(rows * length, rows))
        self.rows, self.length = rows * self._shards, length
        size = blueprint.layouts[0].page_size
        blocks = -(-length // size)
        pages = (rows * blocks,) * len(blueprint.layouts)
        vocab = blueprint.state_shape(pages).vocab
        shape = StateShape(blueprint.layouts, pages, rows, blocks, vocab, False)
        state = shape.allocate(mesh)
        self._pools = state.pools
        table = np.tile(np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks), (self._shards, 1))
        by_data = NamedSharding(mesh, P("data"))
        self._tables = tuple(jax.device_put(table, by_data) for _ in state.tables)
        self._last = state.sampler.last_token
        self._put = partial(jax.device_put, device=by_data)
        ops = choose_ops(mesh, blueprint.dtype, config.attention, config.interpret, config.int8_activations)
        abstract = shape.abstract(mesh)
        forward = make_forward(
            blueprint.model, mesh, self._layout.bucket, abstract, ops, blueprint.abstract_params, taken
        )
        packed = jax.ShapeDtypeStruct((self._shards, self._layout.size), jnp.int32, sharding=by_data)
        args = (blueprint.abstract_params, abstract.pools, abstract.tables, abstract.sampler.last_token, packed)
        self._program = compile_program("target_states", forward, args, (1,))

    def __call__(self, tokens: Int[np.ndarray, "B T"]) -> tuple[Float[Array, "B T 3M"], Float[Array, "B T M"]]:
        """The auxiliary states side by side and the final hidden states, in the target's type."""
        bucket = self._layout.bucket
        packed = np.zeros((self._shards, self._layout.size), np.int32)
        for out, rows in zip(packed, tokens.reshape(self._shards, bucket.sequences, self.length), strict=True):
            views = self._layout.views(out)
            views["tokens"][:] = rows.ravel()
            views["slots"][:] = np.arange(bucket.sequences)
            views["kv_lens"][:] = views["prompt_lens"][:] = self.length
            views["cu_q_lens"][:] = np.arange(bucket.sequences + 1) * self.length
            views["num_seqs"][:] = (0, bucket.sequences)
        packed = self._put(packed)
        self._pools, _, _, hidden, (_, aux) = self._program.run(
            self._params, self._pools, self._tables, self._last, packed
        )
        shape = (self.rows, self.length, -1)
        joined = jnp.concatenate([aux[place] for place in self._places], axis=1)
        return joined.reshape(shape).astype(self.dtype), hidden.reshape(shape).astype(self.dtype)
