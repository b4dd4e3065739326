"""Attention over a paged pool of latents (multi-head latent attention in its absorbed form)."""

from pallas_kernels.latent_paged_attention.api import latent_paged_attention

__all__ = ["latent_paged_attention"]
