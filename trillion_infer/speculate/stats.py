"""Honest figures of speculation: what each drafter proposed and what stood."""

from dataclasses import dataclass, field

from trillion_infer.core.outputs import DraftFigures
from trillion_infer.speculate.base import Draft


@dataclass
class SpeculationStats:
    """Figures by drafter."""

    by_drafter: dict[str, DraftFigures] = field(default_factory=dict)

    def record(self, draft: Draft, accepted: int) -> None:
        """One verified draft, of which `accepted` tokens stood. An empty draft counts for nothing."""
        if draft.tokens:
            self.by_drafter.setdefault(draft.drafter, DraftFigures()).record(len(draft.tokens), accepted)
