"""Settings that do nothing beside others: they are refused, so that nobody compares two runs that are the same.

Only what an option on the command line switched off is taken back instead: a file stays as it is, and the run's resolved
file holds the defaults of what had no effect.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from everlong.contracts.config import Config
from everlong.orchestrator.config import RoundsConfig
from everlong.trajectories.credit import FixedDecay, GaeConfig

if TYPE_CHECKING:
    from everlong.cli.config import RunConfig

C = TypeVar("C", bound=Config)

UNUSED_BY_SCRIPTED = (
    "numerics",
    "threads",
    "adapter",
    "engine.max_running",
    "engine.prefill_chunk_tokens",
    "engine.block_tokens",
    "engine.cache_tokens",
    "engine.prefix_cache",
    "loss",
    "ratio",
    "replay",
    "kl",
    "optimizer",
    "critic",
    "trainer",
)
"""By the scripted model: it has no network, no cache and no gradient."""


_options: ContextVar[Set[str]] = ContextVar("options", default=frozenset())


class Ineffective(NamedTuple):
    """A setting, or a group of them, that another one switches off."""

    path: str
    switch: str
    why: str


@contextmanager
def options_given(options: Set[str]) -> Generator[None]:
    """While it lasts, configs are validated as if these settings (dotted, or a whole group) came from a command line."""
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


def refuse_ineffective(config: RunConfig) -> None:
    """Raises ValueError that names every setting which differs from its default and which nothing would read."""
    found = [f"{rule.path} has no effect {rule.why}" for rule in _found(config) if not _taken_back(rule)]
    if found:
        raise ValueError("; ".join(found))


def take_back_ineffective(config: RunConfig) -> RunConfig:
    """The config with the default of every setting that has no effect."""
    for rule in _found(config):
        config = _with_default(config, rule.path)
    return config


def _found(config: RunConfig) -> Iterator[Ineffective]:
    return (rule for rule in _rules(config) if _is_set(config, rule.path))


def _taken_back(rule: Ineffective) -> bool:
    """Whether an option switched it off that some file, or the quickstart, had set."""
    return _is_option(rule.switch) and not _is_option(rule.path)


def _is_option(path: str) -> bool:
    """Whether the setting, the group that holds it, or a part of it stands on the command line."""
    return any(f"{path}.".startswith(f"{given}.") or given.startswith(f"{path}.") for given in _options.get())


def _rules(config: RunConfig) -> Iterator[Ineffective]:
    if config.model.type == "scripted":
        known = {f"engine.{name}" for name in type(config.engine).model_fields}
        for path in UNUSED_BY_SCRIPTED:
            if path.startswith("engine.") and path not in known:
                continue
            yield Ineffective(path, "model.type", "with model.type=scripted: leave it out, or set model.type to toy")
    if config.sandbox.type == "scripted":
        for path in ("sandbox.isolation", "sandbox.root"):
            yield Ineffective(
                path, "sandbox.type", "with sandbox.type=scripted: leave it out, or set sandbox.type to local"
            )
    if config.sandbox.type == "gvisor":
        why = "with sandbox.type=gvisor, whose sandboxes have a kernel of their own: leave it out, or set sandbox.type to local"
        yield Ineffective("sandbox.isolation", "sandbox.type", why)
    else:
        why = f"with sandbox.type={config.sandbox.type}: leave it out, or set sandbox.type to gvisor"
        yield Ineffective("sandbox.runsc", "sandbox.type", why)
        why += "; the others hold no process between two commands, so there is nothing to pause"
        for path in ("sandbox.pause_after_s", "sandbox.max_resident"):
            yield Ineffective(path, "sandbox.type", why)
    if not config.tasks.eval:
        for path in ("schedule.eval_every", "schedule.eval_attempts", "schedule.eval_deadline_s"):
            yield Ineffective(path, "tasks.eval", "without held-out tasks: leave it out, or name some in tasks.eval")
    if config.kl.type != "none" and config.sampling.top_p == 1 and not config.sampling.top_k:
        why = "with sampling.top_p=1 and sampling.top_k=0, which truncate nothing: leave it out, or set one"
        yield Ineffective("kl.support", "sampling.top_p", why)
    if isinstance(config.schedule, RoundsConfig) and config.schedule.batch_deadline_s is None:
        why = "with schedule.batch_deadline_s=None: leave it out, or set a deadline"
        yield Ineffective("schedule.on_deadline", "schedule.batch_deadline_s", why)
    if config.replay.routes == "none" and config.model.type != "scripted":
        why = "with replay.routes=none: leave it out, or set replay.routes"
        yield Ineffective("replay.weights", "replay.routes", why)
    yield from _credit_rules(config)
    if config.admission.max_branches == 1:
        why = "with admission.max_branches=1, where no two branches share a token: leave it out, or admit more"
        yield Ineffective("trainer.shared_prefix", "admission.max_branches", why)
    if not config.warmup.num_batches:
        for path in ("warmup.traces_per_batch", "warmup.num_tasks", "optimizer.supervised_learning_rate"):
            why = "with warmup.num_batches=0: leave it out, or set warmup.num_batches"
            yield Ineffective(path, "warmup.num_batches", why)


def _credit_rules(config: RunConfig) -> Iterator[Ineffective]:
    credit = config.credit
    if not isinstance(credit, GaeConfig):
        if config.model.type != "scripted":
            why = f"with credit.type={credit.type}, which asks no critic: leave it out, or set credit.type to gae"
            yield Ineffective("critic", "credit.type", why)
        return
    why = "with credit.type=gae, which compares no rewards: leave it out, or set credit.type to group_mean"
    yield Ineffective("admission.zero_signal", "credit.type", why)
    if config.admission.overlong == "mask":
        why = "with admission.overlong=mask, where nothing that was cut off trains: leave it out, or set admission.overlong to train"
        yield Ineffective("credit.truncated", "admission.overlong", why)
    whole = isinstance(credit.decay, FixedDecay) and credit.decay.value == 1
    if credit.discount == 1 and whole and credit.value_decay == 1:
        why = "with credit.discount, decay.value and value_decay of 1, where both ways give the same: leave it out, or lower one"
        yield Ineffective("credit.boundary", "credit.decay", why)


def _is_set(config: RunConfig, path: str) -> bool:
    """Whether a setting, or a group of them, differs from its default. A resolved file sets everything, so that being
    set says nothing."""
    *groups, name = path.split(".")
    holder: Config = config
    for group in groups:
        holder = getattr(holder, group)
    return getattr(holder, name) != type(holder).model_fields[name].default


def _with_default(config: C, path: str) -> C:
    name, _, rest = path.partition(".")
    value = _with_default(getattr(config, name), rest) if rest else type(config).model_fields[name].default
    return config.model_copy(update={name: value})
