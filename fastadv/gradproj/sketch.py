"""Sketches of every rollout's gradient, and what they say about arms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastadv import validation
from fastadv.gradproj.sharding import reduced
from fastadv.ops.count_sketch import check_sketch, sketch_values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FORMAT = "fastadv rollout sketches 1"


class SketchEstimate(NamedTuple):
    """Numbers between arms with their standard errors over sketches (not over rollouts)."""

    value: Tensor  # [K, K] float64
    error: Tensor  # [K, K] float64, NaN from one copy


@dataclass(frozen=True, eq=False)
class RolloutSketches:
    """A count sketch of the gradient of each rollout's part of the loss, from `SketchCollector`.

    Sketches are linear: an arm that weights the rollouts by `a` has the sketch `a @ values`. Inner products of sketches
    estimate those of gradients without bias, with a standard error of about `|x| |y| sqrt((1 + cos^2) / m)` from m =
    copies * size slots; that of a cosine is `(1 - cos^2) / sqrt(m)`.

    Attributes:
        values: `[B, copies, size]` int64, multiples of the quantum; the same bits for any split into micro-batches and
            for any sharding of parameters that leaves the gradients' elements the same.
        rollouts: `[B]` int64, their numbers.
        quantum: what an integer 1 stands for.
        seed: of the hash; sketches of other seeds do not go together.
        covered: parameters that were sketched.
        total: parameters that require a gradient.
    """

    values: Tensor  # [B, copies, size]
    rollouts: Tensor  # [B]
    quantum: float
    seed: int
    covered: int
    total: int

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for parts that do not fit: sketches are also read from files."""
        op = "RolloutSketches"
        validation.tensor(op, "values", self.values, dtypes=(torch.int64,))
        if self.values.dim() != 3:
            raise ValueError(f"{op}: values has shape {list(self.values.shape)}; expected [B, copies, size]")
        validation.tensor(op, "rollouts", self.rollouts, shape=self.values.shape[:1], dtypes=(torch.int64,))
        check_sketch(op, self.values.shape[2], self.values.shape[1], self.quantum, self.seed)
        if len(set(self.rollouts.tolist())) < self.rollouts.numel():
            raise ValueError(f"{op}: rollouts holds a number twice; add up the sketches of one rollout")
        validation.integer(op, "total", self.total)
        validation.integer(op, "covered", self.covered, most=self.total)

    def __repr__(self) -> str:
        rows, copies, size = self.values.shape
        return (
            f"RolloutSketches({rows} rollouts, {copies} copies of {size:,} slots on {self.values.device}, "
            f"{self.covered:,} of {self.total:,} parameters, quantum {self.quantum:g}, seed {self.seed})"
        )

    def arms(self, coefficients: Tensor, *, process_group: ProcessGroup | None = None) -> Tensor:
        """Sketches of arms, `[K, copies, size]` float64.

        Args:
            coefficients: `[K, B]`, weights of these rollouts in each arm. A rollout that all arms weight by 0 is not
                read.
            process_group: ranks with other rollouts (data parallel), other parameters (tensor or pipeline parallel) or
                other tokens of the same rollouts (context parallel): sketches are summed over it, K rows of them.

        Raises:
            ValueError: coefficients of another shape.
            TypeError: coefficients that are no tensor, or of another dtype.
        """
        op = "RolloutSketches"
        rows, copies, size = self.values.shape
        validation.tensor(op, "coefficients", coefficients, dtypes=validation.MASKS)
        if coefficients.dim() != 2 or coefficients.shape[1] != rows:
            raise ValueError(f"{op}: coefficients has shape {list(coefficients.shape)}; expected [K, {rows}]")
        weights = coefficients.to(self.values.device, torch.float64)
        used = (weights != 0).any(0)
        weights = weights[:, used]
        sums = weights.new_empty(weights.shape[0], copies, size)
        for copy in range(copies):
            sums[:, copy] = weights @ sketch_values(self.values[used, copy], self.quantum)
        return reduced(sums, process_group)

    def inner_products(self, coefficients: Tensor, *, process_group: ProcessGroup | None = None) -> SketchEstimate:
        """Inner products between arms; arguments and errors raised as of `arms`. Standard errors come from the copies,
        which are independent sketches."""
        grams = _grams(self.arms(coefficients, process_group=process_group))
        return _jackknife(grams, lambda gram: gram)

    def cosines(self, coefficients: Tensor, *, process_group: ProcessGroup | None = None) -> SketchEstimate:
        """Cosines between arms; arguments and errors raised as of `arms`.

        They are normalised by the sketches' own norms: near 1 the error is far below that of an inner product over
        exact norms. NaN along an arm of zeros. Standard errors are the jackknife's over the copies."""
        grams = _grams(self.arms(coefficients, process_group=process_group))
        return _jackknife(grams, _cosines)

    def all_reduce(self, process_group: ProcessGroup) -> RolloutSketches:
        """The rollouts of all ranks, in ascending order: sketches of one rollout add up, whether ranks had other
        parameters of it, other tokens, or had it not at all.

        Every rank then holds all rollouts. Where arms are all that is wanted, `process_group=` of `cosines` sums those
        instead.

        Raises:
            ValueError: ranks that sketched in another way, on every rank.
        """
        import torch.distributed as dist

        way = (self.seed, self.quantum, *self.values.shape[1:])
        ranks: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(ranks, (way, self.rollouts.tolist()), group=process_group)
        if len({other for other, _ in ranks}) > 1:
            raise ValueError(
                f"all_reduce: ranks have other sketches, (seed, quantum, copies, size) are {[w for w, _ in ranks]}"
            )
        rollouts = sorted({row for _, rows in ranks for row in rows})
        place = {row: i for i, row in enumerate(rollouts)}
        values = self.values.new_zeros(len(rollouts), *self.values.shape[1:])
        values[[place[row] for row in self.rollouts.tolist()]] = self.values
        return replace(self, values=reduced(values, process_group), rollouts=self.rollouts.new_tensor(rollouts))

    def save(self, path: str | Path) -> None:
        """Writes them to a file."""
        fields = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in vars(self).items()}
        torch.save({"format": FORMAT, **fields}, path)

    @classmethod
    def load(cls, path: str | Path) -> RolloutSketches:
        """Reads what `save` wrote, onto the CPU.

        Raises:
            ValueError: another kind of file, or parts that do not fit.
            OSError: the file cannot be read.
        """
        try:
            fields = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # a pickle may be broken in any way
            raise ValueError(f"{path} holds no {FORMAT} ({type(error).__name__})") from error
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise ValueError(f"{path} holds no {FORMAT}")
        try:
            return cls(**fields)
        except (TypeError, ValueError) as error:  # missing fields, others, or of another kind
            raise ValueError(f"{path} is no sound {FORMAT}: {error}") from error


def _grams(arms: Tensor) -> Tensor:
    """[copies, K, K] of arms [K, copies, size]."""
    by_copy = arms.transpose(0, 1)
    return by_copy @ by_copy.transpose(1, 2)


def _cosines(gram: Tensor) -> Tensor:
    norms = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    return gram / (norms[..., :, None] * norms[..., None, :])


def _jackknife(grams: Tensor, statistic: Any) -> SketchEstimate:
    """A statistic of the mean over copies, its error from leaving out one copy at a time."""
    copies = grams.shape[0]
    value = statistic(grams.mean(0))
    if copies == 1:
        return SketchEstimate(value, torch.full_like(value, torch.nan))
    others = statistic((grams.sum(0) - grams) / (copies - 1))
    spread = (others - others.mean(0)).square().sum(0) * (copies - 1) / copies
    return SketchEstimate(value, spread.sqrt())
