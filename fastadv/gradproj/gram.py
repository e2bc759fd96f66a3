"""The segment Gram: inner products of all segments' log-prob gradients, and the rollouts that arms are made of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastadv import validation
from fastadv.batch import Batch
from fastadv.gradproj.outline import Repeats, outline

LARGEST_TOKENS = 2.0**53  # whose sums are exact
ROUNDING = 1e-6  # of products of gradients in float32


@dataclass(frozen=True, eq=False)
class SegmentGram:
    """H = U Uᵀ: row s of U is the gradient of the log-prob of segment s's sampled tokens, by all parameters.

    A policy gradient that weights segments by `a [S]` is `a U`, and the inner product of two is `a H bᵀ`: whatever
    arms are asked about, the model is not needed again. Tensors are kept as they are: do not write into them.

    Attributes:
        gram: `[S, S]` float64, symmetric.
        rows: `[S]` int64, rollout of each segment, in the order of the batch.
        turns: `[S]` int64, turn of each segment from 0; -1 everywhere if a segment is a whole rollout.
        covered: parameters whose gradients are in it.
        total: parameters of the model.
        temperature: that the log-probs were taken at.
        dtype: of the model, "float32" for example.
        checkpoint: fingerprint of the parameters; "" if nobody took it.
        batch: fingerprint of the rollouts' tokens; "" if nobody took it.
        rollouts: the rollouts with one token a run, which is all that an arm reads: the sampled tokens of a turn that
            weights of one version sampled, or of a turn if versions are not known; None: not known.
        tokens: `[R]` int64, sampled tokens of each run; None: not known.
        notes: what was done to the rollouts, for people. Untrusted text where the Gram was loaded.
        repeats: which repetitions the rollouts end in; None: not known.
        file_version: of the file that it was loaded from; 1 has neither endings nor versions nor repeats.

    Raises:
        ValueError, TypeError: parts that do not fit, a Gram that cannot be one.
    """

    gram: Tensor  # [S, S]
    rows: Tensor  # [S]
    turns: Tensor  # [S]
    covered: int
    total: int
    temperature: float = 1.0
    dtype: str = "float32"
    checkpoint: str = ""
    batch: str = ""
    rollouts: Batch | None = None
    tokens: Tensor | None = None
    notes: tuple[str, ...] = ()
    repeats: Repeats | None = None
    file_version: int = 2

    def __post_init__(self) -> None:
        op = "SegmentGram"
        validation.tensor(op, "rows", self.rows, dtypes=(torch.int64,))
        size = self.rows.shape[0] if self.rows.dim() == 1 else -1
        validation.tensor(op, "gram", self.gram, dtypes=(torch.float64,))
        validation.tensor(op, "turns", self.turns, dtypes=(torch.int64,), device=self.rows.device)
        if self.turns.shape != (size,) or self.gram.shape != (size, size):
            raise ValueError(
                f"{op}: gram has shape {list(self.gram.shape)}, rows {list(self.rows.shape)} and turns "
                f"{list(self.turns.shape)}; expected [S, S], [S] and [S]"
            )
        texts = {"dtype": self.dtype, "checkpoint": self.checkpoint, "batch": self.batch}
        notes = self.notes if isinstance(self.notes, tuple) else (None,)
        for name, text in (*texts.items(), *(("notes", note) for note in notes)):
            if not isinstance(text, str):
                raise TypeError(f"{op}: {name} is {getattr(self, name)!r}; pass a text, or as notes a tuple of texts")
        validation.integer(op, "total", self.total)
        validation.integer(op, "covered", self.covered, most=self.total)
        validation.count(op, "temperature", self.temperature, positive=True)
        _check_order(op, self.rows, self.turns)
        _check_gram(op, self.gram)
        if (self.rollouts is None) != (self.tokens is None):
            raise ValueError(f"{op}: rollouts and tokens come together")
        if self.rollouts is not None and self.tokens is not None:
            _check_rollouts(op, self, self.rollouts, self.tokens)
        if self.rollouts is not None and self.repeats is not None:
            _check_repeats(op, self.repeats, self.rollouts)

    def __repr__(self) -> str:
        rollouts = "without rollouts" if self.rollouts is None else f"with {self.rollouts.num_rollouts} rollouts"
        return (
            f"SegmentGram({self.size} segments, level {self.level}, gram [{self.size}, {self.size}] on "
            f"{self.gram.device}, {rollouts}, {self.covered:,} of {self.total:,} parameters, {self.dtype}, temperature "
            f"{self.temperature:g})"
        )

    @property
    def size(self) -> int:
        """Number of segments, S."""
        return self.rows.shape[0]

    @property
    def level(self) -> str:
        """What a segment is: "rollout" or "turn"."""
        return "rollout" if bool((self.turns < 0).any()) else "turn"

    def with_rollouts(self, batches: Batch | Sequence[Batch], *, notes: Sequence[str] = ()) -> SegmentGram:
        """The Gram with what arms are computed from.

        Args:
            batches: those that it was computed from, in their order.
            notes: what was done to the rollouts, for people.

        Raises:
            ValueError: rollouts that are not the Gram's.
        """
        batches = batches_of("with_rollouts", batches)
        rollouts, tokens, repeats = outline(batches)
        return replace(
            self, rollouts=rollouts, tokens=tokens, repeats=repeats, batch=batch_fingerprint(batches),
            notes=(*self.notes, *notes), file_version=2,
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file, whole or not at all; an existing one is replaced. docs/gram_file.md describes it.

        Raises:
            ValueError: a Gram without rollouts.
            OSError: the file cannot be written.
        """
        from fastadv.gradproj.gram_file import write

        write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> SegmentGram:
        """Reads a file that `save` wrote. Nothing in it is trusted: sizes, dtypes, symmetry and counts are checked.

        Raises:
            ValueError: a file that is no segment Gram, with what is wrong with it.
            OSError: a file that cannot be read.
        """
        from fastadv.gradproj.gram_file import read

        return read(Path(path))


def batches_of(op: str, batches: Batch | Sequence[Batch]) -> list[Batch]:
    """One batch or several, as a list."""
    if isinstance(batches, Batch):
        return [batches]
    if not isinstance(batches, Sequence) or not all(isinstance(batch, Batch) for batch in batches):
        raise TypeError(f"{op}: batch is a {type(batches).__name__}; pass a Batch (see Batch.of), or a list of them")
    return list(batches)


def checkpoint_fingerprint(model: nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and values of a model's parameters, a tied one once."""
    digest = hashlib.sha256(b"fastadv checkpoint 1")
    for name, parameter in model.named_parameters():
        _update(digest, name, parameter.detach())
    return digest.hexdigest()


def batch_fingerprint(batches: Sequence[Batch]) -> str:
    """SHA-256 over what a gradient reads of packed batches: ids, offsets, masks and turns."""
    digest = hashlib.sha256(b"fastadv batch 1")
    for batch in batches:
        parts = {"mask": batch.mask, "turn_ids": batch.turn_ids, "lengths": batch.lengths}
        if batch.token_ids is not None:
            parts |= {"ids": batch.token_ids.ids, "cu_seqlens": batch.token_ids.cu_seqlens}
            if batch.token_ids.rollouts is not None and batch.token_ids.responses is not None:
                parts |= {"rollouts": batch.token_ids.rollouts, "responses": batch.token_ids.responses}
        for name, value in parts.items():
            _update(digest, name, value)
    return digest.hexdigest()


def _update(digest: Any, name: str, value: Tensor) -> None:
    digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
    digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_order(op: str, rows: Tensor, turns: Tensor) -> None:
    """Raises unless segments are numbered as those of a batch are."""
    if rows.numel() == 0:
        return
    steps = rows.diff()
    if bool((turns < 0).any()):
        if not bool((turns == -1).all()) or not torch.equal(rows, torch.arange(rows.shape[0], device=rows.device)):
            raise ValueError(f"{op}: turns below 0 mean one segment a rollout: turns all -1, and rows 0 .. B - 1")
        return
    expected = torch.where(steps == 0, turns[:-1] + 1, 0)
    if int(rows[0]) < 0 or bool((steps < 0).any()) or int(turns[0]) != 0 or not torch.equal(turns[1:], expected):
        raise ValueError(f"{op}: rows must not decrease, and turns count from 0 within each")


def _check_gram(op: str, gram: Tensor) -> None:
    """Raises unless every number can be an inner product of gradients. A few rows at a time: it may be large."""
    diagonal = gram.diagonal()
    if not bool(diagonal.isfinite().all()) or bool((diagonal < 0).any()):
        at = int((~(diagonal >= 0) | diagonal.isinf()).nonzero()[0])
        raise ValueError(f"{op}: gram[{at}, {at}] is {float(diagonal[at])}; a squared norm is finite and at least 0")
    norms = diagonal.sqrt()
    for first in range(0, gram.shape[0], 256):
        part, bound = gram[first : first + 256], norms[first : first + 256, None] * norms
        limits = {
            "an inner product is at most the product of the norms": (part.abs(), bound * (1 + ROUNDING)),
            "it must be symmetric": ((part - gram[:, first : first + 256].mT).abs(), bound * ROUNDING),
        }
        for rule, (value, largest) in limits.items():
            bad = ~(value <= largest)
            if bool(bad.any()):
                row, column = (int(i) for i in bad.nonzero()[0])
                raise ValueError(f"{op}: gram[{first + row}, {column}] is {float(part[row, column])}; {rule}")


def _check_rollouts(op: str, gram: SegmentGram, rollouts: Batch, tokens: Tensor) -> None:
    index = rollouts.segments
    validation.tensor(op, "tokens", tokens, shape=rollouts.mask.shape, dtypes=(torch.int64,))
    if bool((tokens < 0).any()):
        raise ValueError(f"{op}: tokens holds {int(tokens.min())}; counts are from 0")
    if float(tokens.double().sum()) > LARGEST_TOKENS:
        raise ValueError(f"{op}: tokens holds {int(tokens.max())}; all together there are at most 2^53")
    if gram.level == "rollout" and gram.size:
        same = gram.size == rollouts.num_rollouts
    else:
        rows = rollouts.segments.row_of_segment()
        turns = torch.arange(index.count) - index.offsets[rows]
        same = torch.equal(gram.rows.cpu(), rows) and torch.equal(gram.turns.cpu(), turns)
    if not same:
        raise ValueError(
            f"{op}: the Gram's {gram.size} segments are not those of the {rollouts.num_rollouts} rollouts, which have "
            f"{index.count}"
        )


def _check_repeats(op: str, repeats: Repeats, rollouts: Batch) -> None:
    if repeats.offsets.shape[0] != rollouts.num_rollouts + 1:
        raise ValueError(
            f"{op}: repeats are of {repeats.offsets.shape[0] - 1} rollouts, but there are {rollouts.num_rollouts}"
        )
