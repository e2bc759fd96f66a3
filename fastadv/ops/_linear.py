"""Logits of an output layer, one chunk of rows at a time in one reused buffer: products by torch, epilogues by the
log-softmax kernels.

Operations, with N the rows that are computed, H the hidden size and V the vocabulary: the logits take 2NHV, the
gradients of hidden and weight 2NHV each. Everything else is N * V.

Hidden states and weights in bfloat16 or float16 are widened to float32, the weight one tile of rows at a time, and
multiplied in float32: torch has no product on the CPU that takes them and leaves float32. So logits are never rounded
to the inputs' type. Where the caller sets `torch.backends.mkldnn.matmul.fp32_precision = "bf16"`, torch multiplies
bfloat16 operands and adds in float32: then bfloat16 inputs lose nothing in the logits, and the gradient of the logits
is rounded to bfloat16 as an operand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv import native
from fastadv.ops import _logits

CHUNK_BYTES = 2**27  # of float32 logits, where the caller does not say how many rows are a chunk
CHUNK_ROWS = (64, 2048)
TILE_BYTES = 2**24  # of weights that are widened or gathered at a time
FIXED_ROWS = 64  # rows of every product in deterministic mode


def chunk_rows(vocab: int, rows: int) -> int:
    """Rows of logits in a chunk: enough for products at their full rate, in little memory beside a weight gradient, and
    equal chunks."""
    fewest, most = CHUNK_ROWS
    at_most = max(fewest, min(most, CHUNK_BYTES // (4 * max(1, vocab))))
    chunks = -(-rows // at_most)
    return -(-rows // chunks)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch's products on one thread: how many there are decides in which order they add."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class Gradients:
    """What is asked for, None where it is not, written whole: rows that no chunk brought are 0."""

    hidden: Tensor | None  # [N, H]
    weight: Tensor | None  # [V, H] float32
    bias: Tensor | None  # [V] float64
    begun: bool = False  # whether `weight` holds a sum yet

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, needs: Sequence[bool], dtype: torch.dtype | None = None) -> Gradients:
        """Buffers for what is needed of (hidden, weight, bias); hidden's in its own dtype, or in `dtype`."""
        vocab, size = weight.shape
        rows = hidden.shape[:-1].numel()
        return cls(
            torch.zeros((rows, size), dtype=dtype or hidden.dtype) if needs[0] else None,
            native.empty((vocab, size), torch.float32) if needs[1] else None,
            torch.zeros(vocab, dtype=torch.float64) if needs[2] else None,
        )

    def finished(
        self, hidden: Tensor, weight: Tensor, factor: float = 1.0
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients times a factor, shaped and typed like what they belong to. Uses the buffers up."""
        if self.weight is not None and not self.begun:
            self.weight.zero_()
        if factor != 1.0:
            for sum_ in (self.hidden, self.weight, self.bias):
                if sum_ is not None:
                    sum_.mul_(factor)
        return (
            None if self.hidden is None else self.hidden.view(hidden.shape).to(hidden.dtype),
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None else self.bias.to(weight.dtype),
        )


class Head:
    """An output layer over some rows of hidden states.

    Args:
        hidden: `[N, H]` or `[B, T, H]`, any strides; read where `rows` says, and only there.
        weight: `[V, H]`, any strides.
        bias: `[V]` or None.
        rows: `[L]` int64: the tokens that are computed, counted through all leading dimensions of hidden.
        labels: `[L]` int64: column of the weight's rows, or as fastadv.ops._logits says.
        inverse_temperature: one number, or `[L]` float64.
        softcap: 0: none.
        chunk: rows of logits that exist at a time; 0: as many as pay.
        deterministic: every product that a row's result comes from has FIXED_ROWS rows (the rest is 0) and a fixed tile
            of the weight, and runs on one thread: so the result depends neither on the other rows nor on the number of
            threads.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        labels: Tensor,
        inverse_temperature: float | Tensor,
        softcap: float,
        chunk: int,
        deterministic: bool,
    ) -> None:
        self.hidden, self.weight = hidden.detach(), weight.detach()
        if self.hidden.is_contiguous():
            self.hidden = self.hidden.view(-1, weight.shape[1]) if weight.shape[1] else self.hidden.flatten(0, -2)
        self.bias = None if bias is None else bias.detach().to(torch.float32)
        self.rows, self.labels, self.softcap = rows, labels, softcap
        self.inverse_temperature = inverse_temperature
        self.deterministic = deterministic
        vocab, size = weight.shape
        count = max(1, rows.shape[0])
        self.chunk = min(chunk or chunk_rows(vocab, count), count)
        if deterministic:
            self.chunk = -(-self.chunk // FIXED_ROWS) * FIXED_ROWS
        self.logits = native.empty((self.chunk, vocab), torch.float32)
        self.inputs = torch.empty((self.chunk, size))
        self._hidden_gradient: Tensor | None = None  # [chunk, H]
        self.take, self.count = rows[:0], 0  # the rows that the buffers hold, as positions in `rows`
        self._height = max(1, TILE_BYTES // (4 * max(1, size)))  # rows of a tile of the weight
        self._copied = weight.dtype != torch.float32 or not _is_matrix(weight, rows_only=deterministic)
        self._tile = torch.empty((min(self._height, vocab), size) if self._copied else (0, size))

    def chunks(self, positions: Tensor | None = None) -> Iterator[Tensor]:
        """Positions in `rows`, all or those given, in pieces of at most a chunk."""
        if positions is None:
            positions = torch.arange(self.rows.shape[0])
        for first in range(0, positions.shape[0], self.chunk):
            yield positions[first : first + self.chunk]

    def load(self, take: Tensor) -> None:
        """Computes the logits of these positions of `rows`."""
        self.take, self.count = take, take.shape[0]
        rows = self.rows[take]
        if self.hidden.dim() == 2:
            chosen = self.hidden.index_select(0, rows)
        else:
            width = self.hidden.shape[1]
            chosen = self.hidden[rows // width, rows % width]
        self.inputs[: self.count].copy_(chosen)
        with self._threads():
            for first, last in self._row_tiles(self.inputs):
                inputs = self.inputs[first:last]
                for column, tile in self._weight_tiles():
                    out = self.logits[first:last, column : column + tile.shape[0]]
                    if self.bias is None:
                        torch.mm(inputs, tile.t(), out=out)
                    else:
                        torch.addmm(self.bias[column : column + tile.shape[0]], inputs, tile.t(), out=out)

    def statistics(self) -> Tensor:
        """`[5, k]` float64 of the loaded rows; see `_logits.row_statistics`."""
        return _logits.row_statistics("cpu", self.logits[: self.count], *self._row_arguments(), self.softcap)

    def keep(self, chosen: Tensor) -> None:
        """Drops loaded rows: `chosen [k]` bool says which stay. Kept rows from the end fill the places of dropped ones,
        which reads and writes a row of logits for each; a row that stayed would cost 2 * H as much in products."""
        kept = int(chosen.sum())
        places = (~chosen[:kept]).nonzero().flatten()
        movers = kept + chosen[kept:].nonzero().flatten()
        order = torch.arange(kept)
        order[places] = movers
        for place, mover in zip(places.tolist(), movers.tolist(), strict=True):
            self.logits[place].copy_(self.logits[mover])
            self.inputs[place].copy_(self.inputs[mover])
        self.take, self.count = self.take[order], kept

    def backward(self, state: Tensor, upstream: list[Tensor | None], sums: Gradients) -> None:
        """Adds the gradients of the loaded rows, whose logits become their own gradient.

        Args:
            state: `[3, L]` float64: lse, entropy and sum of squares of each of `rows`.
            upstream: of log-prob, entropy and sum of squares, each `[L]` float32 or None.
            sums: what to add to.
        """
        lse, entropy, sum_p2 = state[:, self.take]
        labels, inverse_temperature = self._row_arguments()
        g_log_prob, g_entropy, g_sum_p2 = (None if g is None else g[self.take] for g in upstream)
        gradient = self.logits[: self.count]
        _logits.logits_gradient(
            "cpu", gradient, labels, lse, entropy, sum_p2, g_log_prob, g_entropy, g_sum_p2, inverse_temperature,
            self.softcap, out=gradient,
        )  # fmt: skip
        inputs = self.inputs[: self.count]
        with self._threads():
            if sums.hidden is not None:
                sums.hidden.index_copy_(0, self.rows[self.take], self._to_hidden().to(sums.hidden.dtype))
            if sums.weight is not None and sums.begun:
                sums.weight.addmm_(gradient.t(), inputs)
            elif sums.weight is not None:
                torch.mm(gradient.t(), inputs, out=sums.weight)
                sums.begun = True
        if sums.bias is not None:
            sums.bias += gradient.sum(0)

    def _to_hidden(self) -> Tensor:
        """`[k, H]`: gradient of the hidden states of the loaded rows."""
        if self._hidden_gradient is None:
            self._hidden_gradient = torch.empty_like(self.inputs)
        if self.weight.shape[0] == 0:  # a rank without a part of the vocabulary
            self._hidden_gradient.zero_()
        for first, last in self._row_tiles(self.logits):
            out = self._hidden_gradient[first:last]
            for column, tile in self._weight_tiles():
                piece = self.logits[first:last, column : column + tile.shape[0]]
                if column == 0:
                    torch.mm(piece, tile, out=out)
                else:
                    out.addmm_(piece, tile)
        return self._hidden_gradient[: self.count]

    def _row_tiles(self, operand: Tensor) -> Iterator[tuple[int, int]]:
        """Rows that are multiplied at a time: all that are loaded, or FIXED_ROWS, the last filled up with 0."""
        if not self.deterministic:
            yield 0, self.count
            return
        end = -(-self.count // FIXED_ROWS) * FIXED_ROWS
        operand[self.count : end].zero_()
        for first in range(0, end, FIXED_ROWS):
            yield first, first + FIXED_ROWS

    def _threads(self) -> contextlib.AbstractContextManager[None]:
        return one_thread() if self.deterministic else contextlib.nullcontext()

    def _row_arguments(self) -> tuple[Tensor, float | Tensor]:
        factor = self.inverse_temperature
        return self.labels[self.take], factor[self.take] if isinstance(factor, Tensor) else factor

    def _weight_tiles(self) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows of the weight in float32): one tile where torch can multiply the weight as it lies and any
        order of additions is right."""
        if not self._copied and not self.deterministic:
            yield 0, self.weight
            return
        for first in range(0, self.weight.shape[0], self._height):
            rows = self.weight[first : first + self._height]
            yield first, self._tile[: rows.shape[0]].copy_(rows) if self._copied else rows


def _is_matrix(t: Tensor, rows_only: bool) -> bool:
    """Whether a product takes these strides without a copy."""
    (rows, columns), (down, across) = t.shape, t.stride()
    return (across == 1 and down >= max(1, columns)) or (not rows_only and down == 1 and across >= max(1, rows))
