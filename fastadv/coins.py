"""Coins that do not depend on the order, the process or the number of times they are tossed, and the weights that they
give."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastadv import validation
from fastadv._graphs import constant_in_graphs
from fastadv.groups import GroupIndex, Labels, group_index

Ids = Tensor | Sequence[int | str]
EXCLUSION, RESCUE = "arm exclusion", "rescue"  # streams

STEP = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, as int64: splitmix64's increment
_WORD = 2**64 - 1


def shifted(x: Tensor, bits: int) -> Tensor:
    """int64 as uint64, shifted to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: Tensor) -> Tensor:
    """splitmix64's finaliser; int64 arithmetic wraps as uint64's does."""
    x = (x ^ shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ shifted(x, 31)


@constant_in_graphs
def number(text: str) -> int:
    """A string's 64 bits."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def check_seed(op: str, seed: int) -> None:
    """Raises TypeError unless a seed is an integer: a fraction would be cut off, and two seeds give the same coins."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{op}: seed is {seed!r}; pass an integer")


def uniforms(seed: int, ids: Ids, stream: str = "") -> Tensor:
    """A number in [0, 1) for each id, `[n]` float64: a hash of (seed, stream, id) and of nothing else.

    The id's element of the splitmix64 sequence that starts at a mix of the seed and the stream's name; strings are
    first hashed to 64 bits by BLAKE2b. Numbers of different streams are independent.

    Raises:
        TypeError: a seed that is no integer, ids that are not integers or strings.
        ValueError: an integer id beyond 64 bits.
    """
    check_seed("uniforms", seed)
    if isinstance(ids, Tensor):
        validation.tensor("uniforms", "ids", ids, dtypes=validation.INTEGERS)
        numbers = ids.to(torch.int64)
    else:
        if not isinstance(ids, (Sequence, np.ndarray)):  # an iterator would be empty after the checks
            raise TypeError(f"uniforms: ids is a {type(ids).__name__}; pass a tensor or a list of integers or strings")
        listed = ids.tolist() if isinstance(ids, np.ndarray) else ids
        for i, x in enumerate(listed):
            if isinstance(x, bool) or not isinstance(x, (int, str)):
                raise TypeError(f"uniforms: ids[{i}] is {x!r}; ids are integers or strings")
            if isinstance(x, int) and not -(2**63) <= x < 2**63:
                raise ValueError(f"uniforms: ids[{i}] is {x}, which has more than 64 bits; pass it as a string")
        numbers = torch.tensor([number(x) if isinstance(x, str) else x for x in listed], dtype=torch.int64)
    origin = torch.tensor((seed + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=numbers.device)
    if stream:
        origin = mixed(origin + STEP) ^ number(stream)
    bits = mixed(mixed(origin + STEP) + (numbers + 1) * STEP)
    return shifted(bits, 11).to(torch.float64) * 2.0**-53


def keep(seed: int, ids: Ids, probability: float | Tensor, *, stream: str = "") -> Tensor:
    """Tosses one coin per id.

    The same seed and id give the same coin in every pass, process and restart, so a rollout that is looked at twice is
    not tossed for twice. Raising the probability only adds ids.

    Args:
        seed: any integer.
        ids: `[n]` integers or strings; say rollout ids, or group ids to keep groups whole.
        probability: chance of True, in [0, 1]; one number or `[n]`.
        stream: name of the use, where one id needs several independent coins.

    Returns:
        `[n]` bool.

    Raises:
        ValueError: a probability outside of [0, 1], or another number of them than of ids.
        TypeError: a seed that is no integer, ids that are not integers or strings.
    """
    chance = torch.as_tensor(probability, dtype=torch.float64)
    if bool(((chance < 0) | (chance > 1) | chance.isnan()).any()):
        raise ValueError(f"keep: probability is {probability}; it must be in [0, 1]")
    u = uniforms(seed, ids, stream)
    if chance.dim() and chance.shape != u.shape:
        raise ValueError(f"keep: probability has shape {list(chance.shape)}; pass one number or {list(u.shape)}")
    return u < chance.to(u.device)


def keeps(seed: int, label: int | str, probability: float, *, stream: str = "") -> bool:
    """One coin of `keep`, tossed in a few microseconds: for code that decides about one group at a time.

    Args:
        seed: any integer.
        label: the id, an integer of 64 bits or a string.
        probability: chance of True, in [0, 1].
        stream: name of the use.

    Raises:
        ValueError: a probability outside of [0, 1], an integer id beyond 64 bits.
        TypeError: a seed that is no integer, an id that is no integer or string.
    """
    check_seed("keeps", seed)
    if not 0 <= probability <= 1:
        raise ValueError(f"keeps: probability is {probability}; it must be in [0, 1]")
    if isinstance(label, bool) or not isinstance(label, (int, str)):
        raise TypeError(f"keeps: label is {label!r}; ids are integers or strings")
    if isinstance(label, int) and not -(2**63) <= label < 2**63:
        raise ValueError(f"keeps: label is {label}, which has more than 64 bits; pass it as a string")
    bits = number(label) if isinstance(label, str) else label
    return (_mixed(_origin(seed, stream) + (bits + 1) * STEP) >> 11) * 2.0**-53 < probability


def _mixed(x: int) -> int:
    """`mixed` of an integer, as an unsigned one."""
    x &= _WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return x ^ (x >> 31)


@lru_cache(maxsize=64)
def _origin(seed: int, stream: str) -> int:
    """Where the sequence of a seed and a stream starts."""
    origin = (seed + 2**63) % 2**64 - 2**63
    if stream:
        origin = _mixed(origin + STEP) ^ number(stream)
    return _mixed(origin + STEP)


def in_any_row(group_ids: Labels, flags: Tensor) -> Tensor:
    """Spreads what is true of one rollout over its group: a group is stale if its oldest rollout is.

    Args:
        group_ids: `[B]` labels or a GroupIndex.
        flags: `[B]` bool, say whether a rollout was sampled too long ago.

    Returns:
        `[B]` bool, the same in all rows of a group.

    Raises:
        ValueError, TypeError: shapes that differ, flags that are not boolean.
    """
    groups = group_index(group_ids, op="in_any_row").to(flags.device)
    validation.tensor("in_any_row", "flags", flags, shape=(groups.num_rows,), dtypes=(torch.bool,))
    hits = torch.zeros(groups.num_groups, dtype=torch.int64, device=flags.device)  # [G]
    return hits.index_add(0, groups.index, flags.to(torch.int64))[groups.index] > 0


def exclusion_weights(seed: int, row_ids: Ids, hit: Tensor, fraction: float, *, reweigh: bool = False) -> Tensor:
    """Excludes a random share of some rollouts, by one coin per rollout id.

    Without `reweigh` a share rho of the capped rollouts pays rho b for ending so (docs/theory.md, 10). With it the ones
    that stay count for those that do not, and the expectation is that of no exclusion at all.

    Args:
        seed: of the coins; those of `fastadv.Arm` with this seed.
        row_ids: `[B]` integers or strings.
        hit: `[B]` bool, rollouts that the coin decides about; the others keep weight 1.
        fraction: chance of exclusion, in [0, 1].
        reweigh: whether rollouts that the coin spared weigh 1 / (1 - fraction) instead of 1.

    Returns:
        `[B]` float32: 1, 0, or 1 / (1 - fraction).

    Raises:
        ValueError: a fraction outside of [0, 1]; `reweigh` with fraction 1, for which no weight exists.
        TypeError: ids that are not integers or strings, `hit` that is not boolean.
    """
    if reweigh and fraction == 1:
        raise ValueError(
            "exclusion_weights: fraction is 1 and reweigh is set: nothing is left that could weigh for what is excluded"
        )
    excluded = keep(seed, row_ids, fraction, stream=EXCLUSION)
    validation.tensor("exclusion_weights", "hit", hit, shape=tuple(excluded.shape), dtypes=(torch.bool,))
    spared = 1 / (1 - fraction) if reweigh else 1.0
    return weights_of(hit, ~excluded, spared).to(torch.float32)


def rescue_weights(seed: int, group_ids: Ids, stale: Tensor, keep_probability: float) -> Tensor:
    """Weights that keep a stale group with a known chance a and let it count 1/a: E[w] = 1, whatever made it stale.

    One coin per group id, a function of (seed, id): a group that is looked at again, in another pass, process or after
    a restart, meets the same coin. (A coin drawn anew at each of m looks would leave E[w] = a^(m - 1).) Ids have to
    name one sampled group each: with prompt ids alone a prompt would meet the same coin in every epoch. Raising a only
    adds groups.

    The weights go where `policy_loss` takes them (`weights=`), after advantages are normalised: as a multiplier of
    rewards 1/a cancels in the standard deviation. The divisor stays that of all candidates (`divisors.divisor`).

    Args:
        seed: any integer.
        group_ids: `[B]` integers or strings, one a rollout or one a group.
        stale: `[B]` bool, the same in all rows of a group (`in_any_row`).
        keep_probability: a, in (0, 1]; 1 never drops. To drop all stale groups is another arm, and has no weight.

    Returns:
        `[B]` float32: 1 fresh, 1/a stale and kept, 0 stale and dropped.

    Raises:
        ValueError: a outside of (0, 1], a group that is stale in part.
        TypeError: ids that are not integers or strings, `stale` that is not boolean.
    """
    _check_keep_probability("rescue_weights", keep_probability)
    if isinstance(group_ids, GroupIndex):
        raise TypeError(
            "rescue_weights: group_ids is a GroupIndex, which numbers groups by their order in the batch; pass the ids"
        )
    kept = keep(seed, group_ids, keep_probability, stream=RESCUE)
    validation.tensor("rescue_weights", "stale", stale, shape=tuple(kept.shape), dtypes=(torch.bool,))
    if validation.reads_values(stale):
        mixed_rows = in_any_row(group_ids, stale) & ~stale
        if bool(mixed_rows.any()):
            row = int(mixed_rows.nonzero()[0])
            raise ValueError(
                f"rescue_weights: group {_label(group_ids, row)!r} is stale in some rows and fresh in row {row}; a "
                "group is kept or dropped whole: stale=fa.coins.in_any_row(group_ids, stale)"
            )
    return weights_of(stale, kept, 1 / keep_probability).to(torch.float32)


def weights_of(hit: Tensor, kept: Tensor, weight: float) -> Tensor:
    """1 where not hit, `weight` where hit and kept, else 0: `[B]` float64."""
    return torch.where(hit, kept.to(device=hit.device, dtype=torch.float64) * weight, 1.0)


def _label(ids: Ids, row: int) -> int | str:
    return int(ids[row]) if isinstance(ids, Tensor) else ids[row]


def _check_keep_probability(owner: str, a: float) -> None:
    if isinstance(a, bool) or not isinstance(a, (int, float)):
        raise TypeError(f"{owner}: keep_probability is a {type(a).__name__}; pass a number")
    if not 0 < a <= 1:
        raise ValueError(
            f"{owner}: keep_probability is {a}; it must be in (0, 1]: what is never kept has no weight that could "
            "make up for it (to drop all stale groups is an arm of its own)"
        )
    if a * torch.finfo(torch.float32).max < 1:
        raise ValueError(f"{owner}: keep_probability is {a}; the weight 1/a of what is kept is no float32")


@dataclass(frozen=True)
class RescueStatistics:
    """What a RescueSampler did. A group counts once, however often it was looked at, as it was at the last look.

    Attributes:
        seen: groups.
        stale: of them.
        kept: stale ones that were kept.
        dropped: stale ones that were not.
        mean_weight: over all groups seen, 1 in expectation; 0 for none.
        looks: groups looked at, each pass counted: `looks - seen` came again.
        passes: calls of `weights`.
    """

    seen: int
    stale: int
    kept: int
    dropped: int
    mean_weight: float
    looks: int
    passes: int


class RescueSampler:
    """`rescue_weights` with a tally, and a state for checkpoints.

    The coins need no memory. The tally remembers which groups it has counted, so that one that waits through several
    passes counts once; `reset_statistics` at the end of each step keeps it small and gives the step's own numbers.

    Attributes:
        keep_probability: a.
        seed: of the coins.
        stream: name of the coins' use, "rescue".
    """

    stream = RESCUE

    def __init__(self, keep_probability: float, seed: int = 0) -> None:
        _check_keep_probability("RescueSampler", keep_probability)
        check_seed("RescueSampler", seed)
        self.keep_probability = keep_probability
        self.seed = seed
        self.reset_statistics()

    def weights(self, group_ids: Ids, stale: Tensor) -> Tensor:
        """Weights of a pass over groups, `[B]` float32; see `rescue_weights`, also for what it raises."""
        weights = rescue_weights(self.seed, group_ids, stale, self.keep_probability)
        ids = group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids
        looks = dict(zip(ids, zip(stale.tolist(), weights.tolist(), strict=True), strict=True))
        self._groups |= looks
        self._looks += len(looks)
        self._passes += 1
        return weights

    def statistics(self) -> RescueStatistics:
        """The tally since the last reset."""
        seen = len(self._groups)
        stale = [weight for is_stale, weight in self._groups.values() if is_stale]
        kept = sum(weight > 0 for weight in stale)
        return RescueStatistics(
            seen=seen,
            stale=len(stale),
            kept=kept,
            dropped=len(stale) - kept,
            mean_weight=sum(weight for _, weight in self._groups.values()) / seen if seen else 0.0,
            looks=self._looks,
            passes=self._passes,
        )

    def reset_statistics(self) -> None:
        """Starts the tally anew. Coins stay what they are."""
        self._groups: dict[int | str, tuple[bool, float]] = {}  # staleness and weight at the last look
        self._looks = 0
        self._passes = 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: lists, numbers and strings, so that JSON carries it."""
        return {
            "version": 1,
            "keep_probability": self.keep_probability,
            "seed": self.seed,
            "groups": [[group, *look] for group, look in self._groups.items()],
            "looks": self._looks,
            "passes": self._passes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a state up again.

        Raises:
            ValueError: the state of a sampler with other coins: groups that were decided about would be decided anew.
        """
        own = {"version": 1, "keep_probability": self.keep_probability, "seed": self.seed}
        other = {name: state.get(name) for name in own}
        if other != own:
            raise ValueError(
                f"load_state_dict: the state is of {other}, this sampler is {own}; make one like the state's"
            )
        try:
            groups = {group: (bool(stale), float(weight)) for group, stale, weight in state["groups"]}
            looks, passes = int(state["looks"]), int(state["passes"])
        except (KeyError, TypeError, ValueError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else f"is broken: {error}"
            raise ValueError(f"load_state_dict: the state {what}; pass what state_dict gave") from error
        self._groups, self._looks, self._passes = groups, looks, passes
