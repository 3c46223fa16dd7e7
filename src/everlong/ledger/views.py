"""Sums over episodes, counted anew each time: no counter is kept that could drift from the facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from everlong.contracts.records import Record
from everlong.ledger.facts import EpisodeState

if TYPE_CHECKING:
    from everlong.ledger.lifecycle import EpisodeView

LOST = (EpisodeState.FAILED, EpisodeState.CANCELLED)
"""Ends that nobody chose for the episode's own sake."""


class Balance(Record, frozen=True, kw_only=True):
    """Where every episode and every sampled token went.

    offered = ended + open, and sampled = trained + discarded + open, always.
    """

    offered: int
    """Episodes that were started, each counted once over all incarnations."""
    ended: dict[str, dict[str, int]]
    """Episodes by terminal state and reason."""
    open: dict[str, int]
    """Episodes by state that have not ended."""
    tokens_sampled: int
    tokens_trained: int
    tokens_discarded: dict[str, int]
    """By reason."""
    tokens_open: int
    """Sampled by incarnations whose episode has not ended."""
    calls_uncounted: int = 0
    """Model calls of which nobody knows how many tokens they sampled: these stand in none of the counts above."""
    flags: dict[str, int] = {}
    """Episodes with a sign of cheating or tampering, by its name."""

    @property
    def holds(self) -> bool:
        ended = sum(sum(reasons.values()) for reasons in self.ended.values())
        tokens = self.tokens_trained + sum(self.tokens_discarded.values()) + self.tokens_open
        return self.offered == ended + sum(self.open.values()) and self.tokens_sampled == tokens

    def tables(self) -> dict[str, dict[str, int]]:
        """The same for people: title, then row, then count."""
        ended = {f"{state}: {why}": n for state, reasons in self.ended.items() for why, n in reasons.items()}
        discarded = {f"discarded: {why}": n for why, n in self.tokens_discarded.items()}
        tables = {
            "episodes": {"offered": self.offered, **ended, **{f"open: {state}": n for state, n in self.open.items()}},
            "tokens": {
                "sampled": self.tokens_sampled,
                "trained": self.tokens_trained,
                **discarded,
                "open": self.tokens_open,
            },
        }
        if self.calls_uncounted:
            tables["tokens"]["not counted: model calls"] = self.calls_uncounted
        return {**tables, "flags": self.flags} if self.flags else tables


class Decile(Record, frozen=True, kw_only=True):
    """A tenth of the ended episodes, by how many tokens they sampled. Losses concentrate in the longest."""

    min_tokens: int
    max_tokens: int
    episodes: int
    lost: int
    """Failed or cancelled."""
    tokens: int = 0
    """Sampled by the last incarnations."""
    over_age: int = 0
    """Of these, too old to train when their batch came."""

    @property
    def loss_rate(self) -> float:
        return self.lost / self.episodes

    @property
    def over_age_rate(self) -> float:
        return self.over_age / self.tokens if self.tokens else 0.0

    @property
    def name(self) -> str:
        """Example: "190 to 200 tokens"."""
        return f"{self.min_tokens:,} to {self.max_tokens:,} tokens"


def balance_of(episodes: Iterable[EpisodeView]) -> Balance:
    ended: dict[str, Counter[str]] = {}
    open_, discarded, flags = Counter[str](), Counter[str](), Counter[str]()
    offered = sampled = trained = tokens_open = uncounted = 0
    for view in episodes:
        offered += 1
        sampled += view.num_sampled + sum(view.lost_tokens.values())
        discarded.update(view.lost_tokens)
        flags.update(set(view.flags))
        uncounted += view.uncounted_calls
        if view.state.terminal:
            ended.setdefault(view.state.value, Counter())[view.reason] += 1
            trained += view.trained
            discarded.update(view.discarded)
        else:
            open_[view.state.value] += 1
            tokens_open += view.turn_tokens
            discarded.update(view.stray_tokens)
    return Balance(
        offered=offered,
        ended={state: dict(sorted(reasons.items())) for state, reasons in sorted(ended.items())},
        open=dict(sorted(open_.items())),
        tokens_sampled=sampled,
        tokens_trained=trained,
        tokens_discarded={why: n for why, n in sorted(discarded.items()) if n},
        tokens_open=tokens_open,
        calls_uncounted=uncounted,
        flags=dict(sorted(flags.items())),
    )


def deciles_of(episodes: Iterable[EpisodeView]) -> list[Decile]:
    """At most ten, each with at least one episode, as equal in number as they can be."""
    ended = sorted((view for view in episodes if view.state.terminal), key=lambda view: view.num_sampled)
    cuts = [round(tenth * len(ended) / 10) for tenth in range(11)]
    tenths = [ended[start:stop] for start, stop in pairwise(cuts) if stop > start]
    return [
        Decile(
            min_tokens=tenth[0].num_sampled,
            max_tokens=tenth[-1].num_sampled,
            episodes=len(tenth),
            lost=sum(view.state in LOST for view in tenth),
            tokens=sum(view.num_sampled for view in tenth),
            over_age=sum(view.discarded.get("over_age", 0) for view in tenth),
        )
        for tenth in tenths
    ]
