"""What to watch while a policy trains: counts, turns, costs, staleness, masks and penalties, by outcome and difficulty.

Every function takes the tensors of one batch and returns a dataclass of plain numbers; none changes anything. A share
of nothing is NaN. Intervals are 95 % and take rollouts as independent: rollouts of one prompt are not quite that, so
that they are too narrow where prompts differ much. docs/outcomes.md lists the functions.
"""

from fastadv.monitoring.behaviour import Behaviour, Costs, behaviour, costs
from fastadv.monitoring.counts import (
    RolloutCounts,
    TurnSeparation,
    TurnSummary,
    rollout_counts,
    turn_separation,
    turns_by_outcome,
)
from fastadv.monitoring.difficulty import DIFFICULTIES, DifficultyRow, by_difficulty, difficulty
from fastadv.monitoring.penalties import LengthBudget, PenaltyAndClip, length_budget, penalty_and_clip
from fastadv.monitoring.staleness import Staleness, staleness

__all__ = [
    "DIFFICULTIES",
    "Behaviour",
    "Costs",
    "DifficultyRow",
    "LengthBudget",
    "PenaltyAndClip",
    "RolloutCounts",
    "Staleness",
    "TurnSeparation",
    "TurnSummary",
    "behaviour",
    "by_difficulty",
    "costs",
    "difficulty",
    "length_budget",
    "penalty_and_clip",
    "rollout_counts",
    "staleness",
    "turn_separation",
    "turns_by_outcome",
]
