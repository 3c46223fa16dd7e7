"""Credit: the advantage of each episode of a group. One file per estimator, each pure."""

from everlong.trajectories.credit.group_mean import GroupMeanConfig
from everlong.trajectories.credit.scoring import CreditConfig, score_group

__all__ = ["CreditConfig", "GroupMeanConfig", "score_group"]
