"""Models that draft: what an EAGLE-3 head, an MTP layer and a small decoder have in common, and each of them."""

from trillion_infer.layers.draft.base import DraftInputs, DraftModel
from trillion_infer.layers.draft.decoder import SmallDecoder
from trillion_infer.layers.draft.eagle3 import Eagle3
from trillion_infer.layers.draft.mtp import MTP

__all__ = ["MTP", "DraftInputs", "DraftModel", "Eagle3", "SmallDecoder"]
