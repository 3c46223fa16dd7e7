"""In which terminal state an episode ends, and where each of its sampled tokens goes. Pure.

What the session discarded while the episode ran (aborted, refused, client gone) keeps the reason the ledger has for it;
only the rest is named here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everlong.contracts.records import Episode
from everlong.ledger.facts import EpisodeEnded, EpisodeState
from everlong.ledger.lifecycle import EpisodeView
from everlong.trajectories.admission import NOT_IN_TREE, TokenOutcome


def train_outcomes(
    episodes: Sequence[Episode], outcomes: Mapping[str, TokenOutcome], views: Mapping[str, EpisodeView]
) -> list[EpisodeEnded]:
    """The end of every episode of a trained batch."""
    return [_train_outcome(episode, outcomes[episode.id], views[episode.id].stray_tokens) for episode in episodes]


def _train_outcome(episode: Episode, tokens: TokenOutcome, stray: Mapping[str, int]) -> EpisodeEnded:
    if tokens.trained:
        state, reason = EpisodeState.TRAINED, str(episode.reason)
    elif episode.reason.ordered:
        state, reason = EpisodeState.CANCELLED, str(episode.reason)
    elif episode.reward is None:
        state, reason = EpisodeState.FAILED, str(episode.verdict.reason or episode.reason)
    else:
        state = EpisodeState.DISCARDED
        reason = max(tokens.discarded, key=lambda name: tokens.discarded[name], default="no_tokens")
    rest = dict(tokens.discarded)
    rest[NOT_IN_TREE] = rest.get(NOT_IN_TREE, 0) - sum(stray.values())
    return EpisodeEnded(
        episode=episode.id, state=state, reason=reason, trained=tokens.trained, discarded=_joined(stray, rest)
    )


def eval_outcome(episode: Episode, view: EpisodeView) -> EpisodeEnded:
    """An evaluation teaches nobody: its tokens are discarded as evaluated."""
    failed = episode.reward is None
    reason = str(episode.verdict.reason or episode.reason) if failed else str(episode.reason)
    state = EpisodeState.FAILED if failed else EpisodeState.EVALUATED
    if episode.reason.ordered:
        state = EpisodeState.CANCELLED
    return EpisodeEnded(
        episode=episode.id, state=state, reason=reason, trained=0, discarded=_all_discarded(view, "evaluated")
    )


def replaced_outcome(view: EpisodeView) -> EpisodeEnded:
    """The end of a member of a group that another took the place of."""
    return EpisodeEnded(
        episode=view.episode,
        state=EpisodeState.CANCELLED,
        reason="group_replaced",
        trained=0,
        discarded=_all_discarded(view, "group_replaced"),
    )


def _all_discarded(view: EpisodeView, reason: str) -> dict[str, int]:
    return _joined(view.stray_tokens, {reason: view.turn_tokens})


def _joined(stray: Mapping[str, int], rest: Mapping[str, int]) -> dict[str, int]:
    reasons = sorted(stray.keys() | rest.keys())
    counts = {reason: stray.get(reason, 0) + rest.get(reason, 0) for reason in reasons}
    return {reason: count for reason, count in counts.items() if count}
