"""The output layer: the gradient of log-probs by hidden states, and the head's own gradient in vocabulary slices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastadv.gradproj.embedding import SortedRows
from fastadv.gradproj.streams import MicroBatch
from fastadv.ops.segment_weight_gram import GramSum, Part, Run, tile_dtype, weight_gradient_tiles

LEAST_SLICE = 64  # words: thinner products are slow
LEAST_ROWS = 64  # of logits, for the same reason


def slice_width(vocabulary: int, tokens: int, gradients: int, numbers: int) -> int:
    """Words of a vocabulary slice, of which there are `tokens` logits and `gradients` weights of all segments a word:
    as many as fit in `numbers`, and LEAST_SLICE at least where their logits do."""
    fewest = min(LEAST_SLICE, max(1, numbers // tokens))
    return min(vocabulary, max(fewest, numbers // max(tokens, gradients)))


class Head:
    """A linear output layer over the hidden states that loss tokens are predicted from.

    Of every loss token it keeps the hidden state, the log-sum-exp of its logits and its weight; logits exist for a
    chunk of tokens, then again for a slice of the vocabulary.
    """

    def __init__(self, linear: nn.Linear, temperature: float, scratch_bytes: int) -> None:
        self.linear, self.scale, self.scratch_bytes = linear, 1 / temperature, scratch_bytes
        self._hidden: list[Tensor] = []
        self._log_sums: list[Tensor] = []
        self._micro_batches: list[MicroBatch] = []

    def logits(self, hidden: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Logits `[n, last - first]` of a slice of the vocabulary, divided by the temperature, float32 at least."""
        dtype = tile_dtype(hidden.dtype)
        logits = hidden.to(dtype) @ self.linear.weight[first:last].to(dtype).t()
        if self.linear.bias is not None:
            logits += self.linear.bias[first:last].to(dtype)
        return logits.mul_(self.scale)

    def cotangents(self, micro_batch: MicroBatch, hidden: Tensor) -> Tensor:
        """Gradient of the weighted log-probs by the hidden states of the loss tokens, `[l, d]`, and keeps these.

        Args:
            micro_batch: whose loss tokens they are.
            hidden: `[b * T, d]`, all rows.
        """
        hidden = hidden.index_select(0, micro_batch.loss_rows)  # [l, d]
        dtype = tile_dtype(hidden.dtype)
        weight = self.linear.weight.detach()
        chunk = max(LEAST_ROWS, self.scratch_bytes // (dtype.itemsize * weight.shape[0]))
        # A weight of another precision is widened a slice at a time.
        width = max(1, self.scratch_bytes // (dtype.itemsize * weight.shape[1]))
        width = weight.shape[0] if weight.dtype == dtype else width
        log_sums, gradients = [], []
        for rows, labels in zip(torch.split(hidden, chunk), torch.split(micro_batch.labels, chunk), strict=True):
            parts = [self.logits(rows, a, a + width) for a in range(0, weight.shape[0], width)]
            logits = parts[0] if len(parts) == 1 else torch.cat(parts, 1)  # [c, V]
            log_sum = logits.logsumexp(-1)
            if not bool(log_sum.isfinite().all()):
                raise ValueError(
                    "segment_gram: the model's log-probs are not finite: it holds NaN or infinity, or the temperature "
                    "is too small"
                )
            p = logits.sub_(log_sum[:, None]).exp_()
            gradient = weight[labels].to(dtype)  # [c, d]
            for a in range(0, weight.shape[0], width):
                gradient -= p[:, a : a + width] @ weight[a : a + width].to(dtype)
            gradients.append(gradient)
            log_sums.append(log_sum)
            del parts, logits, p
        if any(p.requires_grad for p in self.linear.parameters()):
            self._hidden.append(hidden)
            self._log_sums.append(torch.cat(log_sums))
            self._micro_batches.append(micro_batch)
        factor = micro_batch.weights.to(dtype) * self.scale  # [l]
        return (torch.cat(gradients) * factor[:, None]).to(hidden.dtype)

    def add_to(self, gram: GramSum, embedding: SortedRows | None) -> None:
        """Adds the Gram of the head's per-segment gradients, plus those of a tied embedding, and forgets them."""
        if not self._hidden:
            return
        batches = self._micro_batches
        segments = torch.cat([m.segments for m in batches])  # [l]
        order = segments.argsort(stable=True)
        hidden = torch.cat(self._hidden)[order]  # [l, d]
        log_sums = torch.cat(self._log_sums)[order]
        labels = torch.cat([m.labels for m in batches])[order]
        factor = torch.cat([m.weights for m in batches])[order].to(log_sums.dtype) * self.scale
        self._hidden, self._log_sums, self._micro_batches = [], [], []
        there, counts = torch.unique_consecutive(segments[order], return_counts=True)
        starts = [0, *counts.cumsum(0).tolist()]
        runs = [Run(s, starts[i], starts[i], starts[i + 1] - starts[i]) for i, s in enumerate(there.tolist())]

        (vocabulary, size), tokens = self.linear.weight.shape, hidden.shape[0]
        width = slice_width(vocabulary, tokens, gram.segments * size, self.scratch_bytes // log_sums.itemsize)
        train_weight = self.linear.weight.requires_grad
        train_bias = self.linear.bias is not None and self.linear.bias.requires_grad
        for first in range(0, vocabulary, width):
            last = min(vocabulary, first + width)
            p = self.logits(hidden, first, last).sub_(log_sums[:, None]).exp_()  # [l, v]
            gradient = p.neg_()
            inside = ((labels >= first) & (labels < last)).nonzero().squeeze(1)
            gradient[inside, labels[inside] - first] += 1
            gradient *= factor[:, None]
            if train_weight:
                for tile in weight_gradient_tiles([Part(hidden, gradient, runs)], gram.segments, self.scratch_bytes):
                    if embedding is not None:
                        embedding.scatter_ids(tile.values, first + tile.row, tile.column)
                    gram.add(tile.flat())
            if train_bias:
                whole = gradient.new_zeros(gram.segments, last - first)
                gram.add(whole.index_add_(0, segments[order], gradient))
