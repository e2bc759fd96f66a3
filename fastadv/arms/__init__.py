"""Arms: what training recipes do with rollouts, as data: declared, named, compared, written down and audited."""

from fastadv.arms.arm import ARM_BASELINES, CAPPED, Arm, ArmResult, freeze
from fastadv.arms.audit import Audit, audit
from fastadv.arms.comparison import ArmComparison, compare_arms
from fastadv.arms.known import Known
from fastadv.arms.named import ARMS, NamedArm, named_arm, question_one_arms
from fastadv.arms.rules import (
    Condition,
    Continuation,
    InverseProbability,
    PrefixCut,
    Rescue,
    StaleTokens,
    TokenCoins,
    TurnMask,
)
from fastadv.arms.text import arm_from_dict, arm_to_dict, arms_from_yaml, arms_to_yaml

__all__ = [
    "ARMS",
    "ARM_BASELINES",
    "CAPPED",
    "Arm",
    "ArmComparison",
    "ArmResult",
    "Audit",
    "Condition",
    "Continuation",
    "InverseProbability",
    "Known",
    "NamedArm",
    "PrefixCut",
    "Rescue",
    "StaleTokens",
    "TokenCoins",
    "TurnMask",
    "arm_from_dict",
    "arm_to_dict",
    "arms_from_yaml",
    "arms_to_yaml",
    "audit",
    "compare_arms",
    "freeze",
    "named_arm",
    "question_one_arms",
]
