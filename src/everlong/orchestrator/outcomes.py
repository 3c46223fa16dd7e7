"""In which terminal state an episode ends, and where each of its sampled tokens goes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everlong.contracts.errors import Reason
from everlong.contracts.records import Episode
from everlong.ledger.facts import EpisodeEnded, EpisodeState
from everlong.trajectories.admission import TokenOutcome


def train_outcomes(episodes: Sequence[Episode], outcomes: Mapping[str, TokenOutcome]) -> list[EpisodeEnded]:
    """The end of every episode of a trained batch."""
    return [_train_outcome(episode, outcomes[episode.id]) for episode in episodes]


def _train_outcome(episode: Episode, tokens: TokenOutcome) -> EpisodeEnded:
    if tokens.trained:
        state, reason = EpisodeState.TRAINED, str(episode.reason)
    elif episode.reason in (Reason.CANCELLED, Reason.DEADLINE):
        state, reason = EpisodeState.CANCELLED, str(episode.reason)
    elif episode.reward is None:
        state, reason = EpisodeState.FAILED, str(episode.verdict.reason or episode.reason)
    else:
        state = EpisodeState.DISCARDED
        reason = max(tokens.discarded, key=lambda name: tokens.discarded[name], default="no_tokens")
    return EpisodeEnded(
        episode=episode.id, state=state, reason=reason, trained=tokens.trained, discarded=dict(tokens.discarded)
    )


def eval_outcome(episode: Episode) -> EpisodeEnded:
    """An evaluation teaches nobody: its tokens are discarded as evaluated."""
    failed = episode.reward is None
    reason = str(episode.verdict.reason or episode.reason) if failed else str(episode.reason)
    discarded = {"evaluated": episode.num_sampled} if episode.num_sampled else {}
    state = EpisodeState.FAILED if failed else EpisodeState.EVALUATED
    return EpisodeEnded(episode=episode.id, state=state, reason=reason, trained=0, discarded=discarded)
