"""Which experts a token visits, and with what weight."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from trillion_infer.config.model import MoESpec
from trillion_infer.layers.context import Context
from trillion_infer.layers.parameters import hold, value
from trillion_infer.params.tree import Declared


class Router(nnx.Module):
    """float32 arithmetic throughout: a rounding here sends a token elsewhere. Rows of the weight are split over devices
    and the logits gathered."""

    weight: nnx.Param
    bias: nnx.Param | None
    selection_bias: nnx.Param | None

    def __init__(self, spec: MoESpec, declared: Declared):
        self.spec = spec
        hold(self, declared)

    def __call__(self, x: Float[Array, "T M"], ctx: Context) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        """The top_k experts of each token and their weights."""
        rule = self.spec.router
        logits = jnp.matmul(x.astype(jnp.float32), value(self.weight).T, precision=lax.Precision.HIGHEST)
        logits = ctx.gather(logits, "router_rows", axis=1)[:, : self.spec.experts]
        if self.bias is not None:
            logits = logits + value(self.bias)
        if rule.score == "topk_softmax":
            best, ids = lax.top_k(logits, self.spec.top_k)
            return ids, jax.nn.softmax(best, axis=-1)
        scores = jax.nn.sigmoid(logits) if rule.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        choice = scores if self.selection_bias is None else scores + value(self.selection_bias)
        if rule.groups > 1:
            choice = self._within_groups(choice)
        _, ids = lax.top_k(choice, self.spec.top_k)
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if rule.renormalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return ids, weights * rule.scale

    def _within_groups(self, choice: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Scores with -inf outside the best groups (DeepSeek-V3, section 2.1.2)."""
        rule = self.spec.router
        grouped = choice.reshape(choice.shape[0], rule.groups, -1)
        strength = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
        _, kept = lax.top_k(strength, rule.top_groups)
        open_groups = jax.nn.one_hot(kept, rule.groups, dtype=jnp.bool_).any(axis=1)
        return jnp.where(open_groups[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
