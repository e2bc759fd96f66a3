"""The segment Gram: inner products of all segments' log-prob gradients, and the rollouts that arms are made of."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastadv import validation
from fastadv.batch import Batch
from fastadv.outcomes import Outcome

FORMAT, VERSION = "fastadv segment gram", "1"  # docs/gram_file.md describes it
TENSORS = {
    "gram": torch.float64, "rows": torch.int64, "turns": torch.int64, "offsets": torch.int64, "tokens": torch.int64,
    "rewards": torch.float64, "group_ids": torch.int64, "outcomes": torch.uint8, "capped": torch.bool,
    "row_ids": torch.int64,
}  # fmt: skip
LARGEST_NOTES = 2**20  # characters of metadata that are looked into
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
        rollouts: the rollouts with one token a (rollout, turn), which is all that an arm reads; None: not known.
        tokens: sampled tokens of each (rollout, turn) of `rollouts`, int64; None: not known.
        notes: what was done to the rollouts, for people. Untrusted text where the Gram was loaded.

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
        rollouts, tokens = outline(batches)
        return replace(
            self, rollouts=rollouts, tokens=tokens, batch=batch_fingerprint(batches), notes=(*self.notes, *notes)
        )

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file, whole or not at all; an existing one is replaced. docs/gram_file.md describes it.

        Raises:
            ValueError: a Gram without rollouts.
            OSError: the file cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = Path(path)
        if self.rollouts is None or self.tokens is None:
            raise ValueError("SegmentGram.save: no arm can be computed without the rollouts; take with_rollouts first")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"SegmentGram.save: {path} cannot be written: {path.parent} is no folder")
        if path.is_dir():
            raise IsADirectoryError(f"SegmentGram.save: {path} is a folder; name a file in it")
        batch = self.rollouts
        about = {
            "covered": self.covered, "total": self.total, "temperature": self.temperature, "dtype": self.dtype,
            "checkpoint": self.checkpoint, "batch": self.batch, "notes": list(self.notes),
        }  # fmt: skip
        tensors = {
            "gram": self.gram, "rows": self.rows, "turns": self.turns, "offsets": batch.segments.offsets,
            "tokens": self.tokens, "rewards": batch.rewards, "group_ids": batch.groups.index,
            "outcomes": batch.outcomes.to(torch.uint8), "capped": batch.capped, "row_ids": batch.row_ids,
        }  # fmt: skip
        metadata = {"format": FORMAT, "version": VERSION, "about": json.dumps(about)}
        handle, name = tempfile.mkstemp(dir=path.parent)
        os.close(handle)
        try:
            save_file({key: t.cpu().contiguous() for key, t in tensors.items()}, name, metadata)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException as error:
            os.unlink(name)
            if isinstance(error, SafetensorError):
                raise OSError(f"safetensors: {error}") from error
            raise

    @classmethod
    def load(cls, path: str | Path) -> SegmentGram:
        """Reads a file that `save` wrote. Nothing in it is trusted: sizes, dtypes, symmetry and counts are checked.

        Raises:
            ValueError: a file that is no segment Gram, with what is wrong with it.
            OSError: a file that cannot be read.
        """
        tensors, about = _read(path)
        if bool((tensors["outcomes"] > Outcome.BUDGET).any()):
            raise ValueError(f"{path}: outcomes holds {int(tensors['outcomes'].max())}; a result is 0, 1 or 2")
        groups = tensors["group_ids"]
        try:
            with validation.checks("on"):  # a file's offsets are not trusted, whatever FASTADV_CHECKS says
                turns = _turns(tensors["offsets"], tensors["tokens"])
                rollouts = Batch.of(
                    mask=torch.ones_like(turns, dtype=torch.bool), turn_ids=turns, cu_seqlens=tensors["offsets"],
                    rewards=tensors["rewards"], group_ids=groups, outcomes=tensors["outcomes"],
                    capped=tensors["capped"], row_ids=tensors["row_ids"],
                )  # fmt: skip
                return cls(
                    tensors["gram"], tensors["rows"], tensors["turns"], rollouts=rollouts, tokens=tensors["tokens"],
                    **about,
                )  # fmt: skip
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"{path}: {error}") from error


def batches_of(op: str, batches: Batch | Sequence[Batch]) -> list[Batch]:
    """One batch or several, as a list."""
    if isinstance(batches, Batch):
        return [batches]
    if not isinstance(batches, Sequence) or not all(isinstance(batch, Batch) for batch in batches):
        raise TypeError(f"{op}: batch is a {type(batches).__name__}; pass a Batch (see Batch.of), or a list of them")
    return list(batches)


def outline(batches: Sequence[Batch]) -> tuple[Batch, Tensor]:
    """The rollouts of all batches with one token a (rollout, turn), and how many sampled tokens each stands for.

    Returns:
        The batch, on the CPU, which every arm treats as the batches it stands for, and `[S]` int64 counts.
    """
    if not batches:
        raise ValueError("outline: no batch was given")
    groups, segments = 0, 0
    offsets: list[Tensor] = []
    group_ids: list[Tensor] = []
    tokens: list[Tensor] = []
    for batch in batches:
        index = batch.segments
        offsets.append(index.offsets[bool(offsets) :].cpu() + segments)
        group_ids.append(batch.groups.index.cpu() + groups)
        tokens.append(segment_tokens_count(batch).cpu())
        segments, groups = segments + index.count, groups + batch.groups.num_groups
    ends, counts = torch.cat(offsets), torch.cat(tokens)

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(batch, name).cpu() for batch in batches])

    turns = _turns(ends, counts)
    rollouts = Batch.of(
        mask=torch.ones_like(turns, dtype=torch.bool), turn_ids=turns, cu_seqlens=ends, rewards=joined("rewards"),
        group_ids=torch.cat(group_ids), outcomes=joined("outcomes"), capped=joined("capped"),
        row_ids=joined("row_ids"),
    )  # fmt: skip
    return rollouts, counts


def segment_tokens_count(batch: Batch) -> Tensor:
    """Sampled tokens in each segment, `[S]` int64."""
    index = batch.segments
    on = batch.mask & (batch.turn_ids >= 0)
    segment = batch.rows.spread(index.offsets[:-1])[on] + batch.turn_ids[on]
    return torch.bincount(segment, minlength=index.count)


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
        for name, value in parts.items():
            _update(digest, name, value)
    return digest.hexdigest()


def _update(digest: Any, name: str, value: Tensor) -> None:
    digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
    digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())


def _turns(offsets: Tensor, like: Tensor) -> Tensor:
    """Turn of each segment, `[S]` int64, from the segments' offsets by rollout."""
    if int(offsets[-1]) != like.shape[0]:
        raise ValueError(f"offsets end at {int(offsets[-1])}, but tokens has {like.shape[0]} segments")
    lengths = offsets.diff()
    if int(offsets[0]) != 0 or bool((lengths < 0).any()):
        raise ValueError("offsets must start at 0 and not decrease")
    return torch.arange(like.shape[0]) - torch.repeat_interleave(offsets[:-1], lengths, output_size=like.shape[0])


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
    validation.tensor(op, "tokens", tokens, shape=(index.count,), dtypes=(torch.int64,))
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


# ---- files -----------------------------------------------------------------------------------------------------------


def _read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name the Gram in it, such as {path / 'gram.safetensors'}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} is no segment Gram: its metadata has no format {FORMAT!r}")
            if metadata.get("version") != VERSION:
                raise ValueError(
                    f"{path} has version {metadata.get('version')!r} of the format; this is fastadv for {VERSION!r}"
                )
            names = set(file.keys())
            if names != set(TENSORS):
                odd = ", ".join(sorted(name[:80] for name in names ^ set(TENSORS))[:10])
                raise ValueError(f"{path}: {odd} is missing, or not of the format")
            tensors = {name: file.get_tensor(name) for name in TENSORS}
    except OSError as error:  # which does not always say of which file
        raise type(error)(f"{path} cannot be read: {error}") from error
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error})") from error
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:  # a dtype that torch has not
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    for name, dtype in TENSORS.items():
        if tensors[name].dtype != dtype or tensors[name].dim() != 1 + (name == "gram"):
            raise ValueError(
                f"{path}: {name} is {tensors[name].dtype} of shape {list(tensors[name].shape)}; the format has "
                f"{dtype} of {1 + (name == 'gram')} dimensions"
            )
    if tensors["offsets"].shape[0] < 1:
        raise ValueError(f"{path}: offsets is empty; it has one number more than there are rollouts")
    return tensors, _about(path, metadata.get("about", ""))


def _about(path: Path, text: str) -> dict[str, Any]:
    kinds: dict[str, type | tuple[type, ...]] = {
        "covered": int, "total": int, "temperature": (int, float), "dtype": str, "checkpoint": str, "batch": str,
        "notes": list,
    }  # fmt: skip
    if len(text) > LARGEST_NOTES:
        raise ValueError(f"{path}: its metadata has {len(text):,} characters; at most {LARGEST_NOTES:,} are read")
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its metadata is no JSON ({error})") from error
    if not isinstance(about, dict) or set(about) != set(kinds):
        raise ValueError(f"{path}: its metadata must have the keys {', '.join(kinds)}, and no others")
    for name, kind in kinds.items():
        if not isinstance(about[name], kind) or isinstance(about[name], bool):
            raise ValueError(f"{path}: {name} in its metadata is a {type(about[name]).__name__}")
    if not all(isinstance(note, str) for note in about["notes"]):
        raise ValueError(f"{path}: notes in its metadata must be texts")
    if abs(about["temperature"]) > 1e300:  # an integer may be too large for a float
        raise ValueError(f"{path}: temperature in its metadata is not finite")
    return {**about, "notes": tuple(about["notes"]), "temperature": float(about["temperature"])}
