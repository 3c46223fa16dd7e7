"""Settings that do nothing beside others: they are refused, so that nobody compares two runs that are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from everlong.contracts.config import Config

if TYPE_CHECKING:
    from everlong.cli.config import RunConfig

UNUSED_BY_SCRIPTED = (
    "numerics",
    "threads",
    "engine.max_running",
    "engine.prefill_chunk_tokens",
    "engine.block_tokens",
    "engine.cache_tokens",
    "engine.prefix_cache",
    "loss",
    "ratio",
    "optimizer",
    "trainer",
)
"""By the scripted model: it has no network, no cache and no gradient."""


def refuse_ineffective(config: RunConfig) -> None:
    """Raises ValueError that names every setting which differs from its default and which nothing would read."""
    found = [f"{path} has no effect {why}" for path, why in _rules(config) if _is_set(config, path)]
    if found:
        raise ValueError("; ".join(found))


def _rules(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.model.type == "scripted":
        known = {f"engine.{name}" for name in type(config.engine).model_fields}
        for path in UNUSED_BY_SCRIPTED:
            if path.startswith("engine.") and path not in known:
                continue
            yield path, "with model.type=scripted: leave it out, or set model.type to toy"
    if not config.tasks.eval:
        for path in ("schedule.eval_every", "schedule.eval_attempts"):
            yield path, "without held-out tasks: leave it out, or name some in tasks.eval"
    if config.schedule.batch_deadline_s is None:
        yield "schedule.on_deadline", "with schedule.batch_deadline_s=None: leave it out, or set a deadline"
    if not config.warmup.num_batches:
        for path in ("warmup.traces_per_batch", "optimizer.supervised_learning_rate"):
            yield path, "with warmup.num_batches=0: leave it out, or set warmup.num_batches"


def _is_set(config: RunConfig, path: str) -> bool:
    """Whether a setting, or a group of them, differs from its default. A resolved file sets everything, so that being
    set says nothing."""
    *groups, name = path.split(".")
    holder: Config = config
    for group in groups:
        holder = getattr(holder, group)
    return getattr(holder, name) != type(holder).model_fields[name].default
