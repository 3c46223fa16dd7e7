"""The critic: values of states for the credit, and steps of its own towards the returns.

L = sum over the batch's sampled tokens of (V_t - R_t)^2 / 2, divided by their number. V_t is read from the hidden state of the
token before t, which has not seen t. Every sampled token counts, also one whose kept set left it no choice and one that a
correction rejects. Sums are taken as the policy's: by micro-batch index in a fixed tree, divided once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everlong.contracts.records import MicroBatch
from everlong.models.llama.model import Llama
from everlong.models.numerics import widened
from everlong.models.value_network import ValueNetwork
from everlong.trainer.critic_config import BoundedHead, CriticConfig, critic_optimizer
from everlong.trainer.gradient_sum import GradientSum
from everlong.trainer.optimizer import MasterOptimizer, learning_rate
from everlong.trainer.optimizer_config import AnyOptimizer
from everlong.trainer.preparation import PreparedBatch
from everlong.trainer.ranks.ranks import ALONE, OwnedGradient, Ranks
from everlong.trainer.replay import predecessors
from everlong.trainer.tally import Tally

PREFIX = "critic/"
"""Of the critic's tensors in a checkpoint."""
ROUNDING = 1e-6
"""A return is a sum of values and rewards: one on the bound may come out just beyond it."""


@dataclass(frozen=True, slots=True)
class ValueGradient:
    loss: float
    gradient: OwnedGradient
    values: Tensor
    """float32 [P] over the whole batch, detached, at the weights that the gradient was taken at."""


@dataclass(frozen=True, slots=True)
class StateValues:
    """Per token of a micro-batch float32[T]; NaN where the token is neither sampled nor trainable."""

    before: np.ndarray
    after: np.ndarray


class Critic:
    """Its first question or batch makes the policy's weights of that moment its trunk's, so that a warm-up comes before it."""

    def __init__(self, policy: Llama, config: CriticConfig, optimizer: AnyOptimizer, ranks: Ranks = ALONE) -> None:
        self._policy, self._config, self._ranks, head = policy, config, ranks, config.head
        if isinstance(head, BoundedHead):
            self.network = ValueNetwork(policy, bounds=(head.low, head.high))
        else:
            self.network = ValueNetwork(policy, initial=head.initial)
        self._optimizer_config = critic_optimizer(config, optimizer)
        self._optimizer = MasterOptimizer(self.network, self._optimizer_config, "the critic's gradient", ranks)
        self._started, self._num_batches = torch.zeros(()), torch.zeros(())

    @property
    def pretrains(self) -> bool:
        """Whether the policy stays as it is in the critic's next batch."""
        return int(self._num_batches) < self._config.pretrain_batches

    @torch.no_grad()
    def score(self, micro_batch: MicroBatch) -> StateValues:
        self.begin()
        columns = micro_batch.columns
        own = self.network.read(micro_batch, np.arange(len(columns))).numpy()
        previous = predecessors(micro_batch.segments, len(columns))
        asked = (columns.sampled | columns.trainable) & (previous >= 0)
        nothing = np.float32(np.nan)
        return StateValues(np.where(asked, own[previous], nothing), np.where(asked, own, nothing))

    def check(self, batch: PreparedBatch) -> None:
        """Raises ValueError where a sampled token has no return, or one that the head cannot reach."""
        returns = batch.returns
        if not returns.isfinite().all():
            raise ValueError(
                f"{int((~returns.isfinite()).sum())} sampled tokens have no return for the critic: make credit of values "
                "before the batch is trained"
            )
        head = self._config.head
        if not isinstance(head, BoundedHead):
            return
        if ((returns < head.low - ROUNDING) | (returns > head.high + ROUNDING)).any():
            raise ValueError(
                f"returns reach from {float(returns.min()):.4g} to {float(returns.max()):.4g}, the critic's head from "
                f"{head.low} to {head.high}: set critic.head.low and critic.head.high to the range of the rewards"
            )

    def train(self, batch: PreparedBatch, num_batches: int, tally: Tally) -> None:
        """The steps of a batch that was checked."""
        self.begin()
        rate = 0.0
        for update in range(self._config.updates_per_batch):
            rate = learning_rate(self._optimizer_config, self._optimizer.num_steps)
            with tally.seconds("critic"):
                step = value_gradient(self.network, batch, self._ranks, self._optimizer.owners)
                norm = self._optimizer.step(step.gradient, num_batches, rate)
            if not update:  # nothing has been learnt of this batch yet
                _tally_values(step.values, batch.returns, tally)
            tally.mean("critic/loss", step.loss)
            tally.mean("critic/grad_norm", norm)
        tally.total("critic/learning_rate", rate)
        tally.total("critic/updates", self._config.updates_per_batch)
        self._num_batches += 1

    def state(self) -> dict[str, Tensor]:
        """Everything that its next step depends on; over several ranks what is held here."""
        state = {"started": self._started, "num_batches": self._num_batches, **self._optimizer.state()}
        return {f"{PREFIX}{name}": value for name, value in state.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError, and changes nothing, unless the state is of this critic."""
        own = {name.removeprefix(PREFIX): value for name, value in state.items()}
        started, num_batches = own.pop("started", None), own.pop("num_batches", None)
        if started is None or num_batches is None:
            raise ValueError(
                "the checkpoint holds no critic, and credit.type=gae needs one: resume with the settings of the run"
            )
        self._optimizer.load_state(own)
        self._started, self._num_batches = started, num_batches

    def reset(self) -> None:
        """As if it had never been asked."""
        self._started, self._num_batches = torch.zeros(()), torch.zeros(())

    def begin(self) -> None:
        """Make the policy's present weights the trunk's, the first time."""
        if not self._started:
            self.network.start_from(self._policy)
            self._optimizer.reset()
            self._started = torch.ones(())


def value_gradient(
    network: ValueNetwork, batch: PreparedBatch, ranks: Ranks = ALONE, owners: Sequence[int] = ()
) -> ValueGradient:
    """Loss and gradient of the batch at the network's weights; it must hold a token that the policy sampled."""
    gradients, own = GradientSum(), list[tuple[float, Tensor]]()
    weights = network.trained_weights()
    for index in ranks.share(len(batch.micro_batches)):
        prepared = batch.micro_batches[index]
        if not len(prepared.policy_P):
            gradients.push(index, None)
            continue
        values_P = network.read(prepared.micro_batch, prepared.rows.predecessors_R[prepared.policy_P].numpy())
        terms_P = (values_P - prepared.returns_P).square() / 2
        parts = torch.autograd.grad(terms_P.sum(), list(weights.values()), allow_unused=True)
        pairs = zip(weights.values(), parts, strict=True)
        gradients.push(index, [widened(torch.zeros_like(w) if part is None else part) for w, part in pairs])
        own.append((float(terms_P.detach().double().sum()), values_P.detach()))
    present = [len(prepared.policy_P) > 0 for prepared in batch.micro_batches]
    gradient = ranks.sum(gradients, present, owners, [weight.shape for weight in weights.values()])
    assert gradient is not None, "a batch without a sampled token teaches no critic"
    for part in gradient:
        if part is not None:
            part.div_(batch.num_policy)
    computed = [each for found in ranks.gather(own) for each in found]
    loss = 0.0
    for part, _ in computed:
        loss += part
    return ValueGradient(loss / batch.num_policy, gradient, torch.cat([values for _, values in computed]))


def _tally_values(values: Tensor, returns: Tensor, tally: Tally) -> None:
    """Of tokens that the critic has not yet learnt from: 1 - Var(R - V) / Var(R), absent where all returns are one."""
    values, returns = values.double(), returns.double()
    tally.mean("critic/value", values)
    tally.total("critic/value_variance", float(values.var(correction=0)))
    spread = float(returns.var(correction=0))
    if spread > 0:
        tally.total("critic/explained_variance", 1 - float((returns - values).var(correction=0)) / spread)
