"""The arms that have a name: those of recipes and papers, with their owner and where their code is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

from fastadv import validation
from fastadv.arms.arm import CAPPED, Arm
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
from fastadv.outcomes import Ending

OVER_TURNS = (Ending.TURN_CAP, Ending.CONTEXT_CAP)
COMPACT = (Ending.CONTEXT_CAP, Ending.LENGTH_CAP, Ending.TURN_CAP, Ending.TIMEOUT, Ending.ERROR)


@dataclass(frozen=True)
class NamedArm:
    """An arm with a name, perhaps with parameters. Called with them, it makes the Arm.

    Attributes:
        name: in `fastadv.ARMS`.
        make: makes the arm from its parameters.
        equation: numbers of docs/theory.md.
        owner: whose it is.
        code_path: where the owner has it; "" where there is no code.
    """

    name: str
    make: Callable[..., Arm]
    equation: str
    owner: str
    code_path: str = ""

    @property
    def parameters(self) -> dict[str, int | float | str]:
        """Its parameters, with their defaults."""
        return {name: p.default for name, p in inspect.signature(self.make).parameters.items()}

    def __call__(self, *, seed: int = 0, **parameters: int | float | str) -> Arm:
        """The arm with these parameters.

        Args:
            seed: of its coins.
            parameters: others than the defaults.

        Raises:
            ValueError, TypeError: an unknown parameter, a value that the arm does not take.
        """
        known = self.parameters
        for name in parameters:
            if name not in known:
                has = f"has {', '.join(known)}" if known else "has none"
                raise ValueError(f"arm {self.name!r}: {name!r} is no parameter; it {has}")
        given = [f"{name}={value}" for name, value in parameters.items() if value != known[name]]
        name = f"{self.name}:{','.join(given)}" if given else self.name
        return replace(self.make(**parameters), name=name, seed=seed)


def _none() -> Arm:
    return Arm("none", description="no mask, every rollout with its reward")


def _mask() -> Arm:
    return Arm("mask", CAPPED, description="mask budget failures, all vote")


def _survivors() -> Arm:
    return Arm("survivors", CAPPED, population="survivors", description="mask budget failures, survivors vote")


def _random_mask(rho: float = 0.3) -> Arm:
    return Arm("random-mask", CAPPED, rho, description=f"mask a random {rho:.0%} of budget failures, all vote")


def _turn_reached(kappa: float = 2.0) -> Arm:
    text = f"no mask, turn-reached baseline, kappa {kappa:g}"
    return Arm("turn-reached", baseline="turn-reached", kappa=kappa, description=text)


def _microcoder(rho: float = 0.3, window: int = 128) -> Arm:
    return Arm(
        "microcoder", fraction=rho, baseline="mean", scale="std", singleton="raw", endings=(Ending.LENGTH_CAP,),
        condition=Condition(not_wrong=True, not_repeating=window),
        description=f"mask {rho:.0%} of what hit the length cap, is not wrong and does not repeat itself, all vote",
    )  # fmt: skip


def _skywork_before() -> Arm:
    return Arm(
        "skywork-before", baseline="mean", population="survivors", scale="std", singleton="raw",
        condition=Condition(capped=True), description="mask what was cut off, before the group's statistics",
    )  # fmt: skip


def _skywork_after() -> Arm:
    return Arm(
        "skywork-after", baseline="mean", scale="std", singleton="raw", condition=Condition(capped=True),
        description="mask what was cut off, after the group's statistics",
    )  # fmt: skip


def _mini_o3() -> Arm:
    return Arm(
        "mini-o3", baseline="mean", scale="std", singleton="raw", endings=OVER_TURNS,
        description="mask what ran out of turns or context, all vote",
    )  # fmt: skip


def _compact() -> Arm:
    return Arm("compact", endings=COMPACT, description="mask caps, timeouts and errors, all vote")


def _compact_survivors() -> Arm:
    return Arm(
        "compact-survivors", baseline="mean", population="survivors", endings=COMPACT,
        description="mask caps, timeouts and errors, survivors vote",
    )  # fmt: skip


def _truncated_zero_reward() -> Arm:
    return Arm(
        "truncated-zero-reward", baseline="mean", condition=Condition(capped=True, reward_at_most=0.0),
        description="mask what was cut off without a reward, all vote; cut off and passed stays",
    )  # fmt: skip


def _stale_tokens(after: int = 4) -> Arm:
    text = f"mask tokens that are more than {after} versions old, their rollouts vote"
    return Arm("stale-tokens", token_weights=StaleTokens(after), description=text)


def _dynamic_sampling() -> Arm:
    return Arm(
        "dynamic-sampling", baseline="mean", scale="std", singleton="raw", groups="mixed",
        description="remove groups that are all right or all wrong, from denominators too",
    )  # fmt: skip


def _inverse_probability(rho: float = 0.5) -> Arm:
    text = f"mask a random {rho:.0%} of budget failures, weight the others by 1/{1 - rho:g}"
    return Arm("inverse-probability", CAPPED, rho, row_weights=InverseProbability(), description=text)


def _nat_urs(r: float = 0.5) -> Arm:
    text = f"keep each token with probability {r:g}, weight it by its inverse"
    return Arm("nat-urs", token_weights=TokenCoins(r), description=text)


def _nat_rpc(least: int = 1) -> Arm:
    text = "cut each rollout at a random token, weight those before by 1 / P(kept)"
    return Arm("nat-rpc", token_weights=PrefixCut(least), description=text)


def _stopd(a: float = 0.5, turn: int = 1) -> Arm:
    text = f"go on after turn {turn} with probability {a:g}, weight what comes by its inverse"
    return Arm("stopd", token_weights=Continuation((turn,), a), description=text)


def _drop_stale(after: int = 0) -> Arm:
    text = f"drop groups with a token that is more than {after} versions old"
    return Arm("drop-stale", population="removed", condition=Condition(stale_after=after), description=text)


def _never_drop() -> Arm:
    return Arm("never-drop", description="stale groups count as fresh ones do")


def _rescue(a: float = 0.25, after: int = 0) -> Arm:
    text = f"keep stale groups with probability {a:g}, weight them by its inverse"
    return Arm("rescue", row_weights=Rescue(a, after), description=text)


def _oracle() -> Arm:
    return Arm("oracle", description="all groups of the same cohort, weight 1, sampled by the weights that are updated")


def _predictable(below: int = 1) -> Arm:
    text = f"mask turns after turn {below}, for every rollout"
    return Arm("predictable", token_weights=TurnMask(below), description=text)


def _position_buckets(edges: str = "128+512+2048", kappa: float = 2.0) -> Arm:
    try:
        positions = tuple(int(edge) for edge in str(edges).split("+"))
    except ValueError as error:
        raise ValueError(f"arm 'position-buckets': edges is {edges!r}; join integers with +") from error
    return Arm(
        "position-buckets", baseline="turn-reached", kappa=kappa, position_edges=positions,
        description=f"no mask, baseline of the rollouts that reached the same position ({edges})",
    )  # fmt: skip


def _matched_update() -> Arm:
    return Arm(
        "matched-update", CAPPED, matched_update=True,
        description="mask budget failures, all vote, updates as long as the reference's",
    )  # fmt: skip


_NAMED = (
    NamedArm("none", _none, "4", "Dr. GRPO and others: R = 0 at the cap"),
    NamedArm("mask", _mask, "1-4", "overlong filtering: DAPO, NeMo-RL, SkyRL, TRL, slime, Miles",
             "trl/trainer/grpo_trainer.py: mask_truncated_completions; nemo_rl/algorithms/grpo.py: overlong_filtering"),
    NamedArm("survivors", _survivors, "5-6", "NeMo-RL (SingleController), rLLM",
             "nemo_rl/algorithms/advantage_estimator.py: GRPOAdvantageEstimator"),
    NamedArm("random-mask", _random_mask, "10", "fastadv"),
    NamedArm("turn-reached", _turn_reached, "13", "fastadv"),
    NamedArm("microcoder", _microcoder, "1, 10", "MicroCoder-GRPO, arXiv 2603.07777"),
    NamedArm("skywork-before", _skywork_before, "5-6", "Skywork-OR1, arXiv 2505.22312, 3.2.3"),
    NamedArm("skywork-after", _skywork_after, "1-4, 8", "Skywork-OR1, arXiv 2505.22312, 3.2.3"),
    NamedArm("mini-o3", _mini_o3, "1-4, 8", "Mini-o3, arXiv 2509.07969",
             "verl/workers/actor/dp_actor.py: ignore_exceed"),
    NamedArm("compact", _compact, "1-4", "DeepSWE (rLLM v0.1)",
             "rllm/engine/agent_execution_engine.py: overlong_filter"),
    NamedArm("compact-survivors", _compact_survivors, "5-6", "rLLM",
             "rllm/trainer/algorithms/config.py: CompactFilteringConfig.should_mask"),
    NamedArm("truncated-zero-reward", _truncated_zero_reward, "1-4", "Miles; DeepScaleR, DeepCoder",
             "miles/rollout/filter_hub/sample_filters.py: mask_truncated_zero_reward"),
    NamedArm("stale-tokens", _stale_tokens, "1", "prime-rl #2957, xtuner #2003: max_token_staleness"),
    NamedArm("dynamic-sampling", _dynamic_sampling, "16", "DAPO, arXiv 2503.14476",
             "recipe/dapo/dapo_ray_trainer.py: filter_groups"),
    NamedArm("inverse-probability", _inverse_probability, "10-11", "Horvitz and Thompson 1952"),
    NamedArm("nat-urs", _nat_urs, "12", "NAT, arXiv 2603.06619: uniform token subsampling"),
    NamedArm("nat-rpc", _nat_rpc, "12", "NAT, arXiv 2603.06619: random prefix cut"),
    NamedArm("stopd", _stopd, "12", "STOPD, arXiv 2610.21337, from a description of one sentence"),
    NamedArm("drop-stale", _drop_stale, "15", "Miles",
             "miles/rollout/fully_async_data_buffer.py: DefaultDataBuffer.get"),
    NamedArm("never-drop", _never_drop, "12", "trainers that throttle instead: verl, SkyRL"),
    NamedArm("rescue", _rescue, "12", "fastadv"),
    NamedArm("oracle", _oracle, "12", "fastadv"),
    NamedArm("predictable", _predictable, "9", "fastadv"),
    NamedArm("position-buckets", _position_buckets, "13", "fastadv"),
    NamedArm("matched-update", _matched_update, "16", "fastadv"),
)  # fmt: skip

ARMS = MappingProxyType({arm.name: arm for arm in _NAMED})


def named_arm(text: str, *, seed: int = 0) -> Arm:
    """An arm by its name in `fastadv.ARMS`, with its parameters.

    Args:
        text: "NAME" or "NAME:parameter=value,...", such as "rescue:a=0.25,after=4".
        seed: of its coins, unless the text says `seed=...`.

    Returns:
        The arm.

    Raises:
        ValueError: an unknown name or parameter, with the valid ones, or a value that the arm does not take.
    """
    name, _, rest = (part.strip() for part in text.partition(":"))
    if name not in ARMS:
        raise ValueError(f"{name!r} is no arm{validation.did_you_mean(name, ARMS)}; they are {', '.join(ARMS)}")
    known = {**ARMS[name].parameters, "seed": seed}
    given: dict[str, int | float | str] = {"seed": seed}
    said: set[str] = set()
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known:
            raise ValueError(f"arm {text!r}: {part.strip()!r} is no parameter=value of {', '.join(known)}")
        if key in said:
            raise ValueError(f"arm {text!r}: {key} is there twice")
        said.add(key)
        try:
            given[key] = type(known[key])(value)
        except ValueError as error:
            raise ValueError(f"arm {text!r}: {key} is {value!r}, which is no {type(known[key]).__name__}") from error
    return ARMS[name](**given)  # type: ignore[arg-type]


def question_one_arms(*, baseline: str = "loo", kappa: float = 2.0, seed: int = 0) -> tuple[Arm, ...]:
    """The arms that ask whether masking capped rollouts changes the gradient (docs/theory.md, 1 to 7, 10 and 13).

    Args:
        baseline: of arms (a) to (d): "loo" (unbiased), or "mean" (GRPO's group mean, with the rollout in it).
        kappa: of the turn-reached arm.
        seed: of the coins of arm (d).

    Returns:
        Arms "a", "b", "c", "d0.3", "d0.6", "d1" and "e", in this order.

    Raises:
        ValueError: an unknown baseline, or a negative kappa.
    """
    partial = [
        Arm(
            f"d{rho:g}",
            CAPPED,
            rho,
            baseline,
            seed=seed,
            description=f"mask a random {rho:.0%} of capped rollouts, all vote",
        )
        for rho in (0.3, 0.6, 1.0)
    ]
    return (
        Arm("a", baseline=baseline, description="no mask, R = 0 at the cap"),
        Arm("b", CAPPED, baseline=baseline, description="mask capped rollouts, all vote"),
        Arm("c", CAPPED, baseline=baseline, population="survivors", description="mask capped rollouts, survivors vote"),
        *partial,
        Arm("e", baseline="turn-reached", kappa=kappa, description=f"no mask, turn-reached baseline, kappa {kappa:g}"),
    )
