"""fastadv: the advantage-and-loss step of RL post-training for LLM agents, as exact fused kernels with PyTorch
references."""

from fastadv import arms, coins, divisors, estimators, gradproj, monitoring, statuses
from fastadv.arms import (
    ARMS,
    Arm,
    ArmComparison,
    ArmResult,
    Audit,
    Known,
    arm_from_dict,
    arm_to_dict,
    arms_from_yaml,
    arms_to_yaml,
    audit,
    compare_arms,
    freeze,
    named_arm,
)
from fastadv.batch import Batch, pad, unpad
from fastadv.coins import RescueSampler, keep
from fastadv.dispatch import BackendUnavailableError, backends, last_backend
from fastadv.estimators import ESTIMATORS, estimate
from fastadv.groups import GroupIndex, group_index
from fastadv.losses import KL, PRESETS, Correction, LossConfig, SequenceMask
from fastadv.matched_update import MatchedUpdate, UpdateNorm, matched_update, update_norms
from fastadv.norms import global_norm
from fastadv.ops.covariance_selection import covariance_selection
from fastadv.ops.group_advantages import group_advantages, singleton_rows
from fastadv.ops.linear_log_probs import linear_log_probs
from fastadv.ops.linear_policy_loss import linear_policy_loss
from fastadv.ops.multi_dot_gram import multi_dot_gram
from fastadv.ops.optimal_token_baseline import optimal_token_baseline
from fastadv.ops.policy_loss import LossOutput, policy_loss
from fastadv.ops.score_centering import Sampler, score_centering_loss
from fastadv.ops.segments import segment_tokens
from fastadv.ops.sequence_log_ratios import sequence_log_ratios
from fastadv.ops.token_counts import Denominators, denominators, token_counts
from fastadv.ops.token_log_probs import TokenLogProbs, token_log_probs
from fastadv.ops.token_returns import TokenReturns, token_returns
from fastadv.ops.turn_advantages import turn_advantages
from fastadv.ops.turn_ids import segments, turn_ids_from_mask, turn_ids_from_positions
from fastadv.ops.whiten import whiten
from fastadv.outcomes import Census, Ending, Outcome, Outcomes, Regime, census, outcomes_of, regime
from fastadv.record import StepRecord
from fastadv.record_file import RecordError, RecordWriter, read_records
from fastadv.reference.sequence_log_ratios import SequenceLogRatios
from fastadv.rewards import soft_overlong_penalty, stop_properly_penalty, truncation_mask, zero_on_cap
from fastadv.segment_table import Segments, SegmentTable
from fastadv.statistics import FrozenStatistics, freeze_statistics
from fastadv.token_ids import TokenIds
from fastadv.token_index import TokenIndex, token_index
from fastadv.validation import checks

__version__ = "0.1.0"

__all__ = [
    "ARMS",
    "ESTIMATORS",
    "KL",
    "PRESETS",
    "Arm",
    "ArmComparison",
    "ArmResult",
    "Audit",
    "BackendUnavailableError",
    "Batch",
    "Census",
    "Correction",
    "Denominators",
    "Ending",
    "FrozenStatistics",
    "GroupIndex",
    "Known",
    "LossConfig",
    "LossOutput",
    "MatchedUpdate",
    "Outcome",
    "Outcomes",
    "RecordError",
    "RecordWriter",
    "Regime",
    "RescueSampler",
    "Sampler",
    "SegmentTable",
    "Segments",
    "SequenceLogRatios",
    "SequenceMask",
    "StepRecord",
    "TokenIds",
    "TokenIndex",
    "TokenLogProbs",
    "TokenReturns",
    "UpdateNorm",
    "arm_from_dict",
    "arm_to_dict",
    "arms",
    "arms_from_yaml",
    "arms_to_yaml",
    "audit",
    "backends",
    "census",
    "checks",
    "coins",
    "compare_arms",
    "covariance_selection",
    "denominators",
    "divisors",
    "estimate",
    "estimators",
    "freeze",
    "freeze_statistics",
    "global_norm",
    "gradproj",
    "group_advantages",
    "group_index",
    "keep",
    "last_backend",
    "linear_log_probs",
    "linear_policy_loss",
    "matched_update",
    "monitoring",
    "multi_dot_gram",
    "named_arm",
    "optimal_token_baseline",
    "outcomes_of",
    "pad",
    "policy_loss",
    "read_records",
    "regime",
    "score_centering_loss",
    "segment_tokens",
    "segments",
    "sequence_log_ratios",
    "singleton_rows",
    "soft_overlong_penalty",
    "statuses",
    "stop_properly_penalty",
    "token_counts",
    "token_index",
    "token_log_probs",
    "token_returns",
    "truncation_mask",
    "turn_advantages",
    "turn_ids_from_mask",
    "turn_ids_from_positions",
    "unpad",
    "update_norms",
    "whiten",
    "zero_on_cap",
]
