"""From the episodes of some groups to a batch: credit, admission, packing. A pure function of the episodes and the seed, and of
the critic's values where credit is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everlong.contracts.records import Episode, ScoredColumns, ScoredGroup, ScoreRequest, TrainBatch
from everlong.trajectories.admission import AdmissionConfig
from everlong.trajectories.credit import AnyCredit, GaeConfig, credit_from_values, score_group
from everlong.trajectories.packing import PackedBatch, PackingConfig, pack_batch


@dataclass(frozen=True, slots=True)
class BatchMaker:
    credit: AnyCredit
    admission: AdmissionConfig
    packing: PackingConfig
    seed: int
    max_staleness: int | None = None
    """Policy versions by which a token may be old when it trains; None sets no bound."""

    def make(self, batch: int, groups: Mapping[int, Sequence[Episode]]) -> tuple[list[ScoredGroup], PackedBatch]:
        """Packs the groups in the order of their numbers, episodes in the order of their attempts."""
        scored = [
            score_group(group, episodes[0].order.task, sorted(episodes, key=lambda e: e.order.attempt), self.credit)
            for group, episodes in sorted(groups.items())
            if episodes
        ]
        return scored, pack_batch(batch, scored, self.packing, self.admission, self.seed, self.max_staleness)

    def question(self, batch: TrainBatch) -> ScoreRequest | None:
        """What must be known before the batch has its credit; None where it has it already."""
        if not isinstance(self.credit, GaeConfig) or not batch.micro_batches:
            return None
        return ScoreRequest(micro_batches=batch.micro_batches, wanted=("values",))

    def credited(self, batch: TrainBatch, scores: ScoredColumns) -> TrainBatch:
        """The batch with the credit that follows from the answer."""
        assert isinstance(self.credit, GaeConfig), "nothing was asked"
        return credit_from_values(batch, scores, self.credit)
