"""Honest figures of speculation: what each drafter proposed and what stood."""

from dataclasses import dataclass, field

from trillion_infer.speculate.base import Draft


@dataclass
class DrafterStats:
    """Counts of one drafter. drafts: verified drafts of at least one token."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted tokens that stood; 0 before any."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that one verification gave, the verifier's own included; 1 before any."""
        return 1.0 + (self.accepted / self.drafts if self.drafts else 0.0)


@dataclass
class SpeculationStats:
    """Figures by drafter."""

    by_drafter: dict[str, DrafterStats] = field(default_factory=dict)

    def record(self, draft: Draft, accepted: int) -> None:
        """One verified draft, of which `accepted` tokens stood. An empty draft counts for nothing."""
        if not draft.tokens:
            return
        stats = self.by_drafter.setdefault(draft.drafter, DrafterStats())
        stats.drafts += 1
        stats.drafted += len(draft.tokens)
        stats.accepted += accepted
