"""The whole run's settings: one child per part, each beside the part it configures. Importing it loads no torch.

A run is described by one TOML file; dotted options override it (`--sampling.temperature 0.8`). Unknown keys fail with
the nearest name. The resolved file is written into the run's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from everlong.cli.ineffective import refuse_ineffective
from everlong.cli.model_fits import refuse_misfit
from everlong.contracts.config import Config
from everlong.contracts.records import SamplingParams
from everlong.engines.config import EmbeddedConfig, EngineConfig, VllmConfig, engines_of
from everlong.environments.grading.config import GradingConfig
from everlong.environments.sandboxes.config import SandboxConfig
from everlong.environments.tasks.config import TasksConfig
from everlong.models.adapter_config import AdapterConfig, NoAdapter
from everlong.models.config import ModelConfig, ToyModel
from everlong.models.source import shape_built_by_code
from everlong.orchestrator.config import RoundsConfig, ScheduleConfig, WarmupConfig, staleness_bound
from everlong.rollouts.config import HarnessConfig
from everlong.trainer.config import (
    AdamWConfig,
    CriticConfig,
    KlConfig,
    LossConfig,
    NoKl,
    OptimizerConfig,
    RatioConfig,
    ReplayConfig,
    SapoConfig,
    TrainerConfig,
    check_effective,
    check_projection,
    check_replay,
    ignores_staleness,
    level_of,
)
from everlong.trajectories.admission import AdmissionConfig
from everlong.trajectories.credit import CreditConfig, GaeConfig, GroupMeanConfig
from everlong.trajectories.packing import PackingConfig


class SamplingConfig(Config):
    """How every turn is sampled, in training and in evaluation."""

    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1 the kept set of every token is recorded and replayed in training."""
    top_k: int = Field(0, ge=0)
    """0 keeps all."""
    max_tokens: int = Field(256, ge=1)
    """Of one turn; less where the context has less room."""

    def params(self, stop_ids: tuple[int, ...]) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            stop_ids=stop_ids,
        )


class WeightsConfig(Config):
    store: str | None = None
    """URL of the object store that holds weights, checkpoints and episodes; None is the folder `store` of the run.
    Each run needs one of its own."""
    anchor_every: int = Field(10, ge=1)
    """Every so many versions one is published whole, so that a late engine needs few deltas."""
    keep: int | None = Field(None, ge=2)
    """So many of the newest policy versions stay in the store, with what they are read from and those of checkpoints; None
    keeps all."""

    @field_validator("store")
    @classmethod
    def _outlives_a_process(cls, store: str | None) -> str | None:
        if store is not None and store.startswith("memory:"):
            raise ValueError(
                "memory is shared by no two parts of a run and does not outlive it: give a folder or a URL"
            )
        return store


class ObserveConfig(Config):
    progress: Literal["live", "plain", "none"] = "live"
    """What the terminal shows while training: a live table, a line per batch, or nothing."""


class RunConfig(Config):
    seed: int = Field(0, ge=0)
    """Of task order and of every sampled token."""
    output: Path = Path("runs/run")
    """Folder of the run; it must not hold another run."""
    numerics: Literal["fast", "aligned"] = "fast"
    """aligned: engine and trainer agree to the bit and runs repeat bit for bit; refused where the machine cannot."""
    worker: Literal["process", "inline"] = "process"
    """Where engine and trainer live: in a process of their own, or in the control process (needs torch there, and with
    aligned numerics on an Intel CPU that nothing loaded torch before)."""
    threads: int | None = Field(None, ge=1)
    """Compute threads of the worker; None takes what the machine has. With schedule.type async engine and trainer have a worker
    each, with so many threads, or half of the machine's."""
    model: ModelConfig = ToyModel()
    adapter: AdapterConfig = NoAdapter()
    tasks: TasksConfig = TasksConfig()
    sandbox: SandboxConfig = SandboxConfig()
    harness: HarnessConfig = HarnessConfig()
    grading: GradingConfig = GradingConfig()
    engine: EngineConfig = EmbeddedConfig()
    sampling: SamplingConfig = SamplingConfig()
    warmup: WarmupConfig = WarmupConfig()
    schedule: ScheduleConfig = RoundsConfig()
    credit: CreditConfig = GroupMeanConfig()
    admission: AdmissionConfig = AdmissionConfig()
    packing: PackingConfig = PackingConfig()
    loss: LossConfig = SapoConfig()
    ratio: RatioConfig = RatioConfig()
    replay: ReplayConfig = ReplayConfig()
    kl: KlConfig = NoKl()
    optimizer: OptimizerConfig = AdamWConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="after")
    def _effective(self) -> RunConfig:
        if self.model.type != "scripted":
            check_effective(self.loss, self.ratio, self.trainer.updates_per_batch, self.kl)
            check_projection(self.trainer, self.ratio)
            check_replay(self.replay, self.trainer.updates_per_batch, self.kl)
            self._check_staleness()
        refuse_ineffective(self)
        self._check_engine()
        self._check_method()
        self._check_sizes()
        return self

    def _check_staleness(self) -> None:
        """Tokens of an older policy need something that weighs them. Raises ValueError."""
        why = ignores_staleness(self.loss, self.ratio)
        if why is not None and staleness_bound(self.schedule) != 0:
            raise ValueError(
                f"schedule.type={self.schedule.type} trains tokens of older policy versions, and {why}: set "
                "ratio.correction.type (token_truncation is common), or ratio.base to behaviour with a loss that has a "
                "ratio; or set schedule.type to rounds"
            )

    def _check_engine(self) -> None:
        """What a vLLM server, alone or in a pool, cannot give. Raises ValueError."""
        if self.model.type == "scripted" and not isinstance(self.engine, EmbeddedConfig):
            raise ValueError(
                f"engine.type={self.engine.type} has no effect with model.type=scripted, which samples by itself: leave it out"
            )
        servers = [engine for engine in engines_of(self.engine) if isinstance(engine, VllmConfig)]
        if servers and self.numerics == "aligned":
            raise ValueError(
                "numerics=aligned means that engine and trainer agree to the bit, which vLLM's kernels do not: take engines "
                "of type embedded only, or set numerics to fast"
            )
        if servers and self.adapter.type == "lora":
            raise ValueError(
                "an engine of type vllm loads whole weights, and with adapter.type=lora a version holds adapters alone: take "
                "engines of type embedded only, or set adapter.type to none"
            )
        without_mask = any(not server.returns_sampling_mask for server in servers)
        if without_mask and self.sampling.top_p < 1 and not self.sampling.top_k:
            raise ValueError(
                f"sampling.top_p={self.sampling.top_p} is replayed in training over the kept set of every token, which "
                "an engine of type vllm gives only where sampling.top_k bounds it: set sampling.top_k as well, or top_p to 1"
            )

    def _check_method(self) -> None:
        """Parts of a method that contradict each other. Raises ValueError."""
        if self.adapter.type == "lora" and self.optimizer.type == "muon":
            raise ValueError(
                "optimizer.type=muon makes the update of a whole matrix orthogonal, and with adapter.type=lora there are only its "
                "two factors: set optimizer.type to adamw, or adapter.type to none"
            )
        self._check_credit()
        self._check_centring()
        if self.loss.type == "dr_grpo" and isinstance(self.credit, GroupMeanConfig) and self.credit.scale != "none":
            raise ValueError(
                f"loss dr_grpo is defined on credit without deviation, got credit.scale={self.credit.scale}: set credit.scale to "
                "none, or loss.type to grpo"
            )

    def _check_credit(self) -> None:
        """What credit per token needs, and what needs it. Raises ValueError."""
        of_values = isinstance(self.credit, GaeConfig)
        if of_values and self.model.type == "scripted":
            raise ValueError(
                "credit.type=gae has no effect with model.type=scripted, which has no network and so no values: set credit.type "
                "to group_mean, or model.type to toy"
            )
        if self.loss.type == "ppo" and not of_values:
            raise ValueError(
                f"loss ppo is defined on credit per token from a critic, got credit.type={self.credit.type}: set credit.type to gae, "
                "or loss.type to grpo"
            )
        per_token = "credit.type=gae" if of_values else "credit.malformed_call" if self.credit.malformed_call else None
        if per_token and level_of(self.loss) == "sequence":
            raise ValueError(
                f"{per_token} gives the tokens of a branch different credits, and loss {self.loss.type} has one ratio and one "
                "credit per branch: take loss gspo_token or loss.level=sequence_token, or leave it out"
            )
        batches, pretrained = self.schedule.num_batches, self.critic.pretrain_batches
        if of_values and batches and pretrained >= batches:
            raise ValueError(
                f"critic.pretrain_batches={pretrained} leaves none of the schedule.num_batches={batches} to the policy, which would "
                "never train: lower one or raise the other"
            )

    def _check_centring(self) -> None:
        """What must be on record of every token. Raises ValueError."""
        if not self.ratio.score_centring:
            return
        if self.sampling.top_p == 1 and not self.sampling.top_k:
            raise ValueError(
                "ratio.score_centring sums over what could have been sampled, and with sampling.top_p=1 and sampling.top_k=0 that is "
                "the whole vocabulary, which is not recorded: set sampling.top_k or sampling.top_p"
            )
        if any(isinstance(engine, VllmConfig) for engine in engines_of(self.engine)):
            raise ValueError(
                "ratio.score_centring needs the sampler's logprob of every kept id, which an engine of type vllm does not give: set "
                "engine.type to embedded, or ratio.score_centring to false"
            )

    def _check_sizes(self) -> None:
        """What must fit together across parts. Raises ValueError."""
        if not self.schedule.num_batches and not self.warmup.num_batches:
            raise ValueError("there is nothing to train: schedule.num_batches and warmup.num_batches are both 0")
        shape = shape_built_by_code(self.model)  # a checkpoint's is known when it is opened
        if shape is not None:
            self.context(shape.max_positions)
            refuse_misfit(self, shape)
        needed = self.credit.min_verdicts if isinstance(self.credit, GroupMeanConfig) else 1
        if self.schedule.num_batches and needed > self.schedule.group_size:
            raise ValueError(
                f"a group of schedule.group_size={self.schedule.group_size} never has credit.min_verdicts={needed} verdicts, so "
                "that nothing would train: raise one or lower the other"
            )

    def context(self, max_positions: int) -> int:
        """Tokens of an episode, for a model of `max_positions`. Raises ValueError where the engine has not that many."""
        context = self.engine.context(max_positions)
        if (self.harness.max_context or 0) > context:
            raise ValueError(
                f"harness.max_context {self.harness.max_context} exceeds the {context} tokens of the engine: lower it, or "
                "raise engine.max_context"
            )
        return min(context, self.harness.max_context or context)
