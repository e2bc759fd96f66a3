"""Flags of the trainer that an arm or an estimator of ours cannot be combined with. Every error names both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastadv.integrations.miles.options import Options

import fastadv as fa

# Estimators of the trainer for which a sample's number is the advantage of its tokens.
TAKES_ADVANTAGES = ("grpo", "gspo", "cispo")


def check_run(args: Any, options: Options) -> None:
    """Raises ValueError where the trainer's flags destroy what the options ask for."""
    if options.arm is None and options.estimator is None:
        raise ValueError("one of fastadv.arm and fastadv.estimator says what advantages are; neither is given")
    for problem in _problems(args, options):
        raise ValueError(problem)


def _problems(args: Any, options: Options) -> Iterator[str]:
    yield from _of_estimators(args, options)
    yield from _of_levels(options)
    yield from _of_turns(args, options)


def _flag(args: Any, name: str) -> Any:
    return getattr(args, name, None)


def _of_estimators(args: Any, options: Options) -> Iterator[str]:
    arm, trainer = options.arm, _flag(args, "advantage_estimator")
    excludes = arm is not None and arm.excludes_any
    removes = (excludes and options.exclusion == "mask") or (arm is not None and arm.groups == "mixed")
    filtered = options.filter is not None or _flag(args, "rollout_sample_filter_path")
    if str(trainer).startswith("reinforce_plus_plus") and (removes or filtered):
        yield (
            f"--advantage-estimator {trainer} fails on a sample whose mask is 0 everywhere, and samples are removed "
            "here (fastadv.exclusion, fastadv.filter or --rollout-sample-filter-path); use --advantage-estimator grpo, "
            "or fastadv.exclusion: weight"
        )
    if trainer is not None and trainer not in TAKES_ADVANTAGES:
        yield (
            f"--advantage-estimator {trainer} makes something else of what the reward hook returns; with fastadv it is "
            f"one of {', '.join(TAKES_ADVANTAGES)}, which take it as the advantage of every token"
        )
    weighted = arm is not None and (arm.row_weights is not None or excludes or arm.level == "turn")
    if _flag(args, "normalize_advantages") and weighted:
        yield (
            "--normalize-advantages whitens advantages after the hook, which moves what was excluded away from 0 and "
            "divides weights such as 1/a out again; leave it out"
        )
    if arm is not None and arm.matched_update:
        yield (
            "fastadv.arm matched-update scales the learning rate, which no reward hook can do; name the arm itself, "
            "and the reference run's norms in fastadv.updates.match (docs/miles.md)"
        )


def _of_levels(options: Options) -> Iterator[str]:
    if options.arm is not None:
        if options.arm.level == "token":
            yield (
                f"fastadv.arm {options.arm.name} has a weight or an advantage for every token, and the reward hook "
                "hands on one number a sample or a turn"
            )
        return
    assert options.estimator is not None
    found = fa.ESTIMATORS[options.estimator]
    if found.level != "rollout":
        more = "; as an arm turn-reached baselines are fastadv.arm: turn-reached" if found.level == "turn" else ""
        yield (
            f"fastadv.estimator {options.estimator} gives an advantage a {found.level}, and the reward hook hands on "
            f"one number a sample{more}"
        )


def _of_turns(args: Any, options: Options) -> Iterator[str]:
    by_turn = options.arm is not None and options.arm.level == "turn"
    if by_turn and options.turns == "none":
        yield (
            "fastadv.arm has advantages of turns, and fastadv.turns does not say how they get to the trainer; it is "
            "init (with --custom-megatron-init-path fastadv.integrations.miles.megatron_init, in slime with "
            "--custom-advantage-function-path fastadv.integrations.slime.advantage), flags, or samples"
        )
    if options.turns != "none" and not by_turn:
        yield f"fastadv.turns is {options.turns}, but no advantages of turns come out of the other options"
    if by_turn and _flag(args, "use_opsm"):
        yield (
            "--use-opsm masks tokens by the sign of their own advantage, which differs by turn here, so that it would "
            "cut rollouts apart; leave it out"
        )
    if options.turns == "flags":
        told = _flag(args, "use_opd") and _flag(args, "opd_kl_coef") == -1 and _flag(args, "opd_type") == "sglang"
        if not told:
            yield (
                "fastadv.turns is flags, which adds to advantages through opd_reverse_kl: --use-opd --opd-type sglang "
                "--opd-kl-coef -1 have to be set"
            )
        if _flag(args, "loss_type") == "score_centering":
            yield (
                "--loss-type score_centering does not read opd_reverse_kl, so fastadv.turns: flags would do nothing; "
                "use init"
            )
    if options.turns == "init" and _flag(args, "log_multi_turn"):
        yield (
            "--log-multi-turn reads round_number, in which fastadv.turns: init hands advantages of turns on; leave it "
            "out"
        )
