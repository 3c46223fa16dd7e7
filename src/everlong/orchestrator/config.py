"""Settings of the schedule: how many groups make a batch, how long to wait, when to evaluate."""

from typing import Literal

from pydantic import Field

from everlong.contracts.config import Config


class ScheduleConfig(Config):
    num_batches: int = Field(20, ge=0)
    """RL batches to train, after the warm-up."""
    groups_per_batch: int = Field(8, ge=1)
    """Groups (one task each) whose episodes make one batch."""
    group_size: int = Field(8, ge=1)
    """Episodes per group: the attempts at one task that share a baseline."""
    max_running: int = Field(64, ge=1)
    """Episodes alive at the same time; the rest wait, oldest first."""
    batch_deadline_s: float | None = Field(1800.0, gt=0)
    """Seconds after which a batch closes without the episodes that are still running; None waits for ever."""
    on_deadline: Literal["mask", "replace"] = "mask"
    """At the deadline: train each group on the members that ended (mask), or drop unfinished groups and open others (replace). A
    batch replaces at most groups_per_batch groups; at a deadline that would go beyond, it closes as with mask."""
    max_failures: int = Field(16, ge=1)
    """The run stops, with the last traceback, after this many episodes in a row failed through no doing of the agent."""
    checkpoint_every: int = Field(1, ge=1)
    """Batches between checkpoints. After a crash at most this many batches are trained again, from stored episodes."""
    eval_every: int = Field(0, ge=0)
    """RL batches between evaluations; 0 evaluates only before the first and after the last batch."""
    eval_attempts: int = Field(1, ge=1)
    """Episodes per held-out task and evaluation."""
    eval_deadline_s: float | None = Field(7200.0, gt=0)
    """Seconds after which an evaluation closes without the episodes that are still running or waiting: they have no verdict. None
    waits for ever."""


class WarmupConfig(Config):
    """Supervised batches on oracle traces before the first RL batch."""

    num_batches: int = Field(0, ge=0)
    """0 starts RL from the model as it is."""
    traces_per_batch: int = Field(32, ge=1)
    """Oracle traces per supervised batch, drawn from the training tasks in seeded epochs."""
    num_tasks: int | None = Field(None, ge=1)
    """Training tasks whose oracle trace is shown, drawn by the run's seed; None shows all. The others are left to RL."""
