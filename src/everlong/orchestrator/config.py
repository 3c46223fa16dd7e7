"""Settings of the schedule: how sampling and training share the time, how many groups make a batch, when to evaluate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from everlong.contracts.config import Config


class _Schedule(Config):
    """What every schedule settles."""

    num_batches: int = Field(20, ge=0)
    """RL batches to train, after the warm-up."""
    groups_per_batch: int = Field(8, ge=1)
    """Groups (one task each) whose episodes make one batch; of `partial` the groups that are kept alive, of which those that
    are complete when sampling pauses make the batch."""
    group_size: int = Field(8, ge=1)
    """Episodes per group: the attempts at one task that share a baseline."""
    max_running: int = Field(64, ge=1)
    """Episodes alive at the same time; the rest wait, oldest first."""
    max_failures: int = Field(16, ge=1)
    """The run stops, with the last traceback, after this many episodes in a row failed through no doing of the agent."""
    checkpoint_every: int = Field(1, ge=1)
    """Batches between checkpoints. After a crash at most this many batches are trained again, from stored episodes."""
    eval_every: int = Field(0, ge=0)
    """RL batches between evaluations; 0 evaluates only before the first and after the last batch."""
    eval_attempts: int = Field(1, ge=1)
    """Episodes per held-out task and evaluation."""
    eval_deadline_s: float | None = Field(7200.0, gt=0)
    """Seconds after which an evaluation closes without the episodes that are still running or waiting: they have no verdict. They
    count from its first episode, and not while it waits for slots that training holds. None waits for ever."""


class RoundsConfig(_Schedule):
    """Sample a whole batch by one policy version, train it, publish: nothing is stale and nothing overlaps."""

    type: Literal["rounds"] = "rounds"
    batch_deadline_s: float | None = Field(1800.0, gt=0)
    """Seconds from the first episode of a batch to when it closes without those that are still running; groups of which nobody had
    begun are left to the next batch. None waits for ever."""
    on_deadline: Literal["mask", "replace"] = "mask"
    """At the deadline: train each group on the members that ended (mask), or drop unfinished groups and open others (replace). A
    batch replaces at most groups_per_batch groups; at a deadline that would go beyond, it closes as with mask."""


class PartialConfig(_Schedule):
    """Sampling pauses when a share of the episodes has ended; the others go on after the update (Kimi K3's partial rollout)."""

    type: Literal["partial"] = "partial"
    completion: float = Field(0.75, gt=0, le=1)
    """Share of groups_per_batch x group_size episodes that must end before sampling pauses and whole groups train."""
    max_staleness: int | None = Field(None, ge=0)
    """Policy versions by which a token may be old when it trains; older ones are masked as `over_age`. None trains all."""
    group_deadline_s: float | None = Field(1800.0, gt=0)
    """Seconds after which a group closes without its episodes that are still running or waiting. They count while one of them runs,
    and not while an evaluation holds the others back. None waits for ever."""


class AsyncConfig(_Schedule):
    """Sampling and training overlap, and no token trains that is older than a bound."""

    type: Literal["async"] = "async"
    max_staleness: int = Field(1, ge=0)
    """Policy versions by which a token may be old when it trains; 0 overlaps nothing."""
    on_over_age: Literal["wait", "mask"] = "wait"
    """wait: training waits for a group before it would be too old, so that nothing is lost. mask: training goes on with the
    groups that are complete, and tokens that have become too old train nowhere; they are those of the longest episodes."""
    publish_every: int = Field(1, ge=1)
    """Batches between publications; evaluations and the end of the run publish as well."""
    group_deadline_s: float | None = Field(1800.0, gt=0)
    """Seconds after which a group closes without its episodes that are still running or waiting. They count while one of them runs,
    and not while an evaluation holds the others back. None waits for ever."""

    @model_validator(mode="after")
    def _reaches_every_batch(self) -> AsyncConfig:
        if self.publish_every > self.max_staleness + 1:
            raise ValueError(
                f"schedule.publish_every={self.publish_every} leaves the engine {self.publish_every - 1} versions behind, and "
                f"schedule.max_staleness={self.max_staleness} lets no such token train: publish at least every "
                f"{self.max_staleness + 1} batches, or raise max_staleness to {self.publish_every - 1}"
            )
        return self


AnySchedule = RoundsConfig | PartialConfig | AsyncConfig
ScheduleConfig = Annotated[AnySchedule, Field(discriminator="type")]


def staleness_bound(schedule: AnySchedule) -> int | None:
    """The age in versions beyond which a token must not train; None where the schedule sets no bound."""
    return 0 if isinstance(schedule, RoundsConfig) else schedule.max_staleness


class WarmupConfig(Config):
    """Supervised batches on oracle traces before the first RL batch."""

    num_batches: int = Field(0, ge=0)
    """0 starts RL from the model as it is."""
    traces_per_batch: int = Field(32, ge=1)
    """Oracle traces per supervised batch, drawn from the training tasks in seeded epochs."""
    num_tasks: int | None = Field(None, ge=1)
    """Training tasks whose oracle trace is shown, drawn by the run's seed; None shows all. The others are left to RL."""
