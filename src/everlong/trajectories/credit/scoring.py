"""What is known of the credit of a group's episodes before any network is asked, by the estimator that the settings name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from everlong.contracts.records import MAX_REWARD, Episode, ScoredGroup
from everlong.trajectories.credit.gae import GaeConfig
from everlong.trajectories.credit.group_mean import GroupMeanConfig, all_equal, group_mean, mean
from everlong.trajectories.credit.overlong import punished

AnyCredit = GroupMeanConfig | GaeConfig
CreditConfig = Annotated[AnyCredit, Field(discriminator="type")]


def score_group(group: int, task: str, episodes: Sequence[Episode], config: AnyCredit) -> ScoredGroup:
    """Compare the episodes that have a verdict; one without has credit None and no part in the baseline. What is compared is
    the reward less what a length near the limit costs. Where credit comes from values, nothing is compared: until they are
    known an episode with a verdict has credit 0.

    Raises ValueError where an episode is of another group or task, is there twice, or has a reward that is not finite or
    beyond `MAX_REWARD`.
    """
    _check_members(group, task, episodes)
    rewards = [_shaped(episode, config) for episode in episodes]
    verdicts = [reward for reward in rewards if reward is not None]
    if isinstance(config, GaeConfig):
        credits = tuple(None if reward is None else 0.0 for reward in rewards)
        return ScoredGroup(
            group=group,
            task=task,
            episodes=tuple(episodes),
            credits=credits,
            rewards=tuple(rewards),
            malformed_call=config.malformed_call,
        )
    if len(verdicts) < config.min_verdicts:
        nobody = (None,) * len(episodes)
        return ScoredGroup(
            group=group, task=task, episodes=tuple(episodes), credits=nobody, discarded="too_few_verdicts"
        )
    credits = group_mean(verdicts, config)
    advantages = iter(_dealt(credits, group) if config.shuffled else credits)
    return ScoredGroup(
        group=group,
        task=task,
        episodes=tuple(episodes),
        credits=tuple(None if reward is None else next(advantages) for reward in rewards),
        rewards=tuple(rewards),
        malformed_call=config.malformed_call,
        baseline=mean(verdicts),
        discarded="zero_signal" if all_equal(verdicts) else None,
    )


def _shaped(episode: Episode, config: AnyCredit) -> float | None:
    """The reward that is compared."""
    return None if episode.reward is None else punished(episode.reward, episode.num_sampled, config.overlong)


def _dealt(credits: list[float], group: int) -> list[float]:
    """The credits in an order that depends on the group's number only, so that a resumed run deals the same."""
    order = np.random.default_rng(group).permutation(len(credits))
    return [credits[place] for place in order]


def _check_members(group: int, task: str, episodes: Sequence[Episode]) -> None:
    """A group is a number, never a name: names can collide once they are joined, numbers cannot."""
    for episode in episodes:
        order = episode.order
        if (order.group, order.task) != (group, task):
            raise ValueError(
                f"expected episodes of group {group} at task {task!r}, got {order.group} at {order.task!r}"
            )
        if episode.reward is not None and not abs(episode.reward) <= MAX_REWARD:
            raise ValueError(
                f"{episode.id} has reward {episode.reward}: a verdict is a finite number of at most {MAX_REWARD:.3g}, or "
                "None; a larger one would make its credit infinite"
            )
    if len({episode.id for episode in episodes}) != len(episodes):
        raise ValueError(f"group {group} holds an episode twice: {sorted(episode.id for episode in episodes)}")
