"""What an earlier process of the same run already did, as the ledger tells it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Progress:
    num_batches: int = 0
    """Trained batches, warm-up included; equals the policy version."""
    consumed: frozenset[int] = frozenset()
    """Training groups that a trained batch holds or that were replaced. Every other group is still to be served."""
    closed_groups: tuple[int, ...] | None = None
    """Groups of a batch that was closed but not trained: it closes over the same groups again."""
    open_groups: dict[int, int] = field(default_factory=dict)
    """Training groups that were opened and are in no closed batch, each with the version that the engine held then: none of its
    tokens is older."""
    ended: frozenset[str] = frozenset()
    """Episodes that ended and whose content is stored: they are not sampled again."""
    incarnations: dict[str, int] = field(default_factory=dict)
    """Next incarnation of every episode that was interrupted."""
    evals: frozenset[int] = frozenset()
    """Evaluations already recorded."""
    num_replaced: int = 0
    """Groups that the batch under way has replaced already."""
