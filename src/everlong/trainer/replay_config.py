"""Which decisions of the network training takes from elsewhere instead of making them anew. Importing it loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from everlong.contracts.config import Config
from everlong.contracts.decisions import DecisionShape
from everlong.trainer.kl_config import AnyKl, NoKl


class ReplayConfig(Config):
    """Of a model with experts. Kept sets are replayed always."""

    routes: Literal["none", "rollout", "recompute"] = "none"
    """Which experts a token goes to in training: those of the router's present choice, those that the engine chose at sampling
    (R3, arXiv:2510.11370), or those that the trainer's weights choose before the first update of the batch (R2, arXiv:2507.18071)."""
    weights: Literal["recomputed", "recorded"] = "recomputed"
    """With what weight an expert enters: by the present router's scores, or as recorded with the choice, while the router has
    the gradient of its own."""

    def names(self, decisions: Mapping[str, DecisionShape]) -> tuple[str, ...]:
        """What of a network's decisions is replayed."""
        if self.routes == "none":
            return ()
        all_too = self.weights == "recorded"
        return tuple(name for name, shape in decisions.items() if all_too or shape.num_choices is not None)

    def recorded(self, decisions: Mapping[str, DecisionShape]) -> tuple[str, ...]:
        """What an engine must record at sampling for that."""
        return self.names(decisions) if self.routes == "rollout" else ()


WITHOUT_REPLAY = ReplayConfig()


def check_replay(replay: ReplayConfig, updates_per_batch: int, kl: AnyKl) -> None:
    """Raises ValueError for a replay without effect."""
    if replay.routes == "recompute" and updates_per_batch == 1 and isinstance(kl, NoKl):
        raise ValueError(
            "replay.routes=recompute has no effect with trainer.updates_per_batch=1 and kl.type=none: the one update computes by "
            "the routes of its own weights. Set trainer.updates_per_batch to 2 or more, or replay.routes to rollout or none"
        )


def check_routers(replay: ReplayConfig, decisions: Mapping[str, DecisionShape], model: str) -> None:
    """Raises ValueError for a replay of routes where the network has no router; `model` is what the user called it."""
    if replay.routes != "none" and not decisions:
        raise ValueError(
            f"replay.routes={replay.routes} needs a model with routers, and {model} has none: set replay.routes to none, or "
            "model.type to toy-moe"
        )
