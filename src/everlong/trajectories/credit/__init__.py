"""Credit: the advantage of each episode of a group, or of each token. One file per estimator, each pure."""

from everlong.trajectories.credit.from_values import credit_from_values
from everlong.trajectories.credit.gae import FixedDecay, GaeConfig, LengthDecay
from everlong.trajectories.credit.group_mean import GroupMeanConfig
from everlong.trajectories.credit.scoring import AnyCredit, CreditConfig, score_group

__all__ = [
    "AnyCredit",
    "CreditConfig",
    "FixedDecay",
    "GaeConfig",
    "GroupMeanConfig",
    "LengthDecay",
    "credit_from_values",
    "score_group",
]
