"""Logits of an output layer, one chunk of rows at a time in one reused buffer: products by torch, epilogues by the
log-softmax kernels.

Operations, with N the rows that are computed, H the hidden size and V the vocabulary: the logits take 2NHV, the
gradients of hidden and weight 2NHV each. Everything else is N * V.

Logits are float32, whatever the inputs are; `_products.py` says what is multiplied. Where the caller sets
`torch.backends.mkldnn.matmul.fp32_precision = "bf16"`, torch multiplies bfloat16 operands on the CPU and adds in
float32: then bfloat16 inputs lose nothing in the logits, and the gradient of the logits is rounded to bfloat16 as an
operand, as it always is on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastadv import native
from fastadv.ops import _logits
from fastadv.ops._policy_loss_kernel import SCALE_GRADIENT
from fastadv.ops._products import add_product, is_matrix, multiply, one_thread, operand_dtype

FIXED_ROWS = 64  # rows of every product in deterministic mode


@dataclass(frozen=True)
class Sizes:
    """How much is worked on at a time, by kind of device."""

    chunk_bytes: int  # of float32 logits, where the caller does not say how many rows are a chunk
    chunk_rows: tuple[int, int]  # at least and at most
    multiple: int  # of which a chunk's rows are
    tile_bytes: int  # of weights that are widened or gathered
    moved_bytes: int  # of logits that move at once where rows are dropped


SIZES = {
    "cpu": Sizes(2**27, (64, 2048), 1, 2**24, 1),
    # A GPU reads the weight and the sum of its gradient in every chunk: at 2048 rows the products still take longer.
    "cuda": Sizes(5 * 2**28, (256, 8192), 128, 2**28, 2**27),
}


def chunk_rows(vocab: int, rows: int, device: str = "cpu") -> int:
    """Rows of logits in a chunk: enough for products at their full rate, in little memory beside a weight gradient, and
    equal chunks."""
    sizes = SIZES[device]
    fewest, most = sizes.chunk_rows
    at_most = max(fewest, min(most, sizes.chunk_bytes // (4 * max(1, vocab))))
    chunks = -(-rows // at_most)
    return -(-rows // (chunks * sizes.multiple)) * sizes.multiple


@dataclass
class Gradients:
    """What is asked for, None where it is not, written whole: rows that no chunk brought are 0."""

    backend: str
    hidden: Tensor | None  # [N, H]
    weight: Tensor | None  # [V, H] float32
    bias: Tensor | None  # [V] float64
    begun: bool = False  # whether `weight` holds a sum yet

    @classmethod
    def of(
        cls, backend: str, hidden: Tensor, weight: Tensor, needs: Sequence[bool], dtype: torch.dtype | None = None
    ) -> Gradients:
        """Buffers for what is needed of (hidden, weight, bias); hidden's in its own dtype, or in `dtype`."""
        (vocab, size), device = weight.shape, weight.device
        rows = hidden.shape[:-1].numel()
        return cls(
            backend,
            torch.zeros((rows, size), dtype=dtype or hidden.dtype, device=device) if needs[0] else None,
            native.empty((vocab, size), torch.float32, device) if needs[1] else None,
            torch.zeros(vocab, dtype=torch.float64, device=device) if needs[2] else None,
        )

    def finished(
        self, hidden: Tensor, weight: Tensor, factor: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients times a factor (0-d, read on its device), shaped and typed like what they belong to. Uses the
        buffers up."""
        if self.weight is not None and not self.begun:
            self.weight.zero_()
        if factor is not None:
            for sum_ in (self.hidden, self.weight):
                if sum_ is not None:
                    SCALE_GRADIENT(self.backend, sum_, factor)
            if self.bias is not None:
                self.bias.mul_(factor)
        return (
            None if self.hidden is None else self.hidden.view(hidden.shape).to(hidden.dtype),
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None else self.bias.to(weight.dtype),
        )


class Head:
    """An output layer over some rows of hidden states.

    Args:
        backend: whose kernels make results and gradients of the logits.
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
        backend: str,
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
        self.backend, self.hidden, self.weight = backend, hidden.detach(), weight.detach()
        if self.hidden.is_contiguous():
            self.hidden = self.hidden.view(-1, weight.shape[1]) if weight.shape[1] else self.hidden.flatten(0, -2)
        self.bias = None if bias is None else bias.detach().to(torch.float32)
        self.rows, self.labels, self.softcap = rows, labels, softcap
        self.inverse_temperature = inverse_temperature
        self.deterministic = deterministic
        (vocab, size), device = weight.shape, weight.device
        self.sizes = SIZES[device.type]
        count = max(1, rows.shape[0])
        self.chunk = min(chunk or chunk_rows(vocab, count, device.type), count)
        if deterministic:
            self.chunk = -(-self.chunk // FIXED_ROWS) * FIXED_ROWS
        self.dtype = operand_dtype(weight.dtype, device)
        self.logits = native.empty((self.chunk, vocab), torch.float32, device)
        self.inputs = torch.empty((self.chunk, size), dtype=self.dtype, device=device)
        self._gradient: Tensor | None = None  # [chunk, V] in the operands' dtype; the logits themselves in float32
        self._hidden_gradient: Tensor | None = None  # [chunk, H]
        self.take, self.count = rows[:0], 0  # the rows that the buffers hold, as positions in `rows`
        self._height = max(1, self.sizes.tile_bytes // (4 * max(1, size)))  # rows of a tile of the weight
        self._copied = weight.dtype != self.dtype or not is_matrix(weight, rows_only=deterministic)
        self._tile = weight.new_empty((min(self._height, vocab), size) if self._copied else (0, size), dtype=self.dtype)

    def chunks(self, positions: Tensor | None = None) -> Iterator[Tensor]:
        """Positions in `rows`, all or those given, in pieces of at most a chunk."""
        if positions is None:
            positions = torch.arange(self.rows.shape[0], device=self.rows.device)
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
                        multiply(inputs, tile.t(), out)
                        continue
                    bias = self.bias[column : column + tile.shape[0]]
                    if self.dtype == torch.float32:
                        torch.addmm(bias, inputs, tile.t(), out=out)
                    else:
                        multiply(inputs, tile.t(), out)
                        out += bias

    def statistics(self) -> Tensor:
        """`[5, k]` float64 of the loaded rows; see `_logits.row_statistics`."""
        return _logits.row_statistics(self.backend, self.logits[: self.count], *self._row_arguments(), self.softcap)

    def keep(self, chosen: Tensor) -> None:
        """Drops loaded rows: `chosen [k]` bool says which stay. Kept rows from the end fill the places of dropped ones,
        which reads and writes a row of logits for each; a row that stayed would cost 2 * H as much in products. Waits
        for a GPU."""
        device, chosen = chosen.device, chosen.cpu()
        kept = int(chosen.sum())
        places = (~chosen[:kept]).nonzero().flatten()
        movers = kept + chosen[kept:].nonzero().flatten()
        order = torch.arange(kept)
        order[places] = movers
        self.take, self.count = self.take[order.to(device)], kept
        at_once = max(1, self.sizes.moved_bytes // (4 * max(1, self.logits.shape[1])))
        places, movers = places.to(device), movers.to(device)
        for first in range(0, places.shape[0], at_once):
            some = slice(first, first + at_once)
            for buffer in (self.logits, self.inputs):
                buffer.index_copy_(0, places[some], buffer.index_select(0, movers[some]))

    def silence(self, chosen: Tensor) -> None:
        """What `keep` does, without a wait: rows that are not chosen stay, as inputs of 0."""
        self.inputs[: self.count].masked_fill_(~chosen[:, None], 0)

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
        gradient = self._gradient_buffer()[: self.count]
        _logits.logits_gradient(
            self.backend, self.logits[: self.count], labels, lse, entropy, sum_p2, g_log_prob, g_entropy, g_sum_p2,
            inverse_temperature, self.softcap, out=gradient,
        )  # fmt: skip
        inputs = self.inputs[: self.count]
        with self._threads():
            if sums.hidden is not None:
                sums.hidden.index_copy_(0, self.rows[self.take], self._to_hidden().to(sums.hidden.dtype))
            if sums.weight is not None and sums.begun:
                add_product(sums.weight, gradient.t(), inputs)
            elif sums.weight is not None:
                multiply(gradient.t(), inputs, sums.weight)
                sums.begun = True
        if sums.bias is not None:
            sums.bias += gradient.sum(0, dtype=torch.float32)

    def _gradient_buffer(self) -> Tensor:
        """`[chunk, V]`: the logits, or what the operands of the products have to be."""
        if self.dtype == torch.float32:
            return self.logits
        if self._gradient is None:
            self._gradient = torch.empty_like(self.logits, dtype=self.dtype)
        return self._gradient

    def _to_hidden(self) -> Tensor:
        """`[k, H]`: gradient of the hidden states of the loaded rows."""
        if self._hidden_gradient is None:
            self._hidden_gradient = torch.empty_like(self.inputs, dtype=torch.float32)
        if self.weight.shape[0] == 0:  # a rank without a part of the vocabulary
            self._hidden_gradient.zero_()
        gradient = self._gradient_buffer()
        for first, last in self._row_tiles(gradient):
            out = self._hidden_gradient[first:last]
            for column, tile in self._weight_tiles():
                piece = gradient[first:last, column : column + tile.shape[0]]
                if column == 0:
                    multiply(piece, tile, out)
                else:
                    add_product(out, piece, tile)
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
        on_cpu = self.deterministic and self.logits.device.type == "cpu"
        return one_thread() if on_cpu else contextlib.nullcontext()

    def _row_arguments(self) -> tuple[Tensor, float | Tensor]:
        factor = self.inverse_temperature
        return self.labels[self.take], factor[self.take] if isinstance(factor, Tensor) else factor

    def _weight_tiles(self) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows of the weight as an operand): one tile where torch can multiply the weight as it lies and
        any order of additions is right."""
        if not self._copied and not self.deterministic:
            yield 0, self.weight
            return
        for first in range(0, self.weight.shape[0], self._height):
            rows = self.weight[first : first + self._height]
            yield first, self._tile[: rows.shape[0]].copy_(rows) if self._copied else rows
