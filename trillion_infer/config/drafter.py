"""What a drafting head is: one decoder layer between a target's hidden states and a vocabulary of its own."""

from dataclasses import dataclass

from trillion_infer.config.model import ModelConfig


@dataclass(frozen=True)
class Eagle3Spec:
    """An EAGLE-3 head (arXiv 2503.01840) as its checkpoint describes it.

    config: its layer, width and (drafting) vocabulary. target_vocab, target_width: of the model it was trained for.
    aux_layers: after how many target layers each of its three inputs is taken; None: (2, N/2, N-3) of N.
    prefix: what the layer's tensors are called. own_embed: it brings an embedding. pruned: `d2t` maps its ids.
    """

    config: ModelConfig
    target_vocab: int
    target_width: int
    aux_layers: tuple[int, int, int] | None = None
    prefix: str = "midlayer."
    own_embed: bool = False
    pruned: bool = True

    def aux_of(self, layers: int) -> tuple[int, int, int]:
        """The target layers after which its inputs are taken, for a target of so many."""
        return self.aux_layers or (2, layers // 2, layers - 3)
