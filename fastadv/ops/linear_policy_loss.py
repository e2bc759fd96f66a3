"""Policy loss from hidden states and an output layer, without the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastadv import validation
from fastadv.losses import LossConfig, loss_config
from fastadv.ops import _logits
from fastadv.ops._linear import Gradients
from fastadv.ops._register import first_order
from fastadv.ops.linear_log_probs import Arguments, arguments, counted_rows, head_of, log_probs_of, may_wait
from fastadv.ops.policy_loss import LossOutput, policy_loss, without_kernel
from fastadv.ops.token_counts import Denominators
from fastadv.rows import Rows
from fastadv.segment_table import Segments, SegmentTable
from fastadv.token_index import TokenIndex, weighted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Losses of which the derivative by a token's log-prob depends on nothing but that token's numbers.
TOKEN_LOSSES = frozenset({"reinforce", "ppo", "cispo", "sapo"})

LossOf = Callable[[Tensor, Tensor | None], LossOutput]  # of log-probs and, where the loss takes them, entropies


def by_token(config: LossConfig, old_log_probs: Tensor | None) -> bool:
    """Whether gradients can be made as soon as a chunk's log-probs are there."""
    # Without old log-probs a correction is to the policy itself, and of a rollout needs all of its log-probs.
    of_policy = old_log_probs is None and any(c.level != "token" or c.veto is not None for c in config.corrections)
    return config.loss in TOKEN_LOSSES and not of_policy and config.sequence_mask is None


@dataclass
class OnePass:
    """Loss and gradients chunk by chunk: the logits of a chunk are there once, become their own gradient, and leave two
    products. 6NHV operations, N the tokens that have a gradient; 2NHV for the others that count.

    `loss_of` is asked after every chunk, for all tokens: of a loss by token, the gradient at the tokens that are there
    is right whatever lies at the others, and the last answer is the loss. It reads some bytes a token, nothing beside
    the products of a chunk.
    """

    given: Arguments
    loss_of: LossOf
    with_entropy: bool
    unread: Tensor | None  # tokens that the loss counts and an index does not: their log-probs are NaN

    @torch.no_grad()
    def run(self, needs: tuple[bool, ...]) -> tuple[Gradients, LossOutput]:
        """Unscaled gradients of hidden, weight and bias, hidden's in float32, and the loss."""
        hidden, weight, _ = self.given.layer
        backend, inputs = self.given.backend, self.given.inputs
        rows, device = counted_rows(inputs), inputs.codes.device  # [L]
        head = head_of(backend, self.given.layer, inputs, self.given.numbers, rows)
        sums = Gradients.of(backend, hidden, weight, needs, dtype=torch.float32)
        log_probs = torch.zeros(inputs.codes.shape, dtype=torch.float32, device=device)
        if self.unread is not None:
            log_probs.masked_fill_(self.unread, torch.nan)
        entropy = torch.zeros_like(log_probs) if self.with_entropy else None
        state = torch.empty((3, rows.shape[0]), dtype=torch.float64, device=device)
        kept = [torch.empty_like(rows, dtype=torch.float32) for _ in range(1 + self.with_entropy)]
        upstream = [*kept, None, None][:3]
        waits, output = may_wait(backend, inputs), None
        for take in head.chunks():
            here = rows[take]
            head.load(take)
            found = _logits.finish(backend, head.statistics())
            state[:, take] = torch.stack([found.lse, found.entropy, found.sum_p2])
            log_probs.view(-1)[here] = found.log_prob.to(torch.float32)
            if entropy is not None:
                entropy.view(-1)[here] = found.entropy.to(torch.float32)
            output, *gradients = self._loss_and_gradients(log_probs, entropy)
            flows = torch.zeros_like(take, dtype=torch.bool)
            for gradient, of_rows in zip(gradients, kept, strict=True):
                of_rows[take] = gradient.view(-1)[here]
                flows |= of_rows[take] != 0
            if waits:
                head.keep(flows)
            else:
                head.silence(flows)
            if head.count:
                head.backward(state, upstream, sums)
        return sums, self.loss_of(log_probs, entropy) if output is None else output

    def _loss_and_gradients(self, log_probs: Tensor, entropy: Tensor | None) -> tuple[Any, ...]:
        leaves = [t.detach().requires_grad_() for t in (log_probs, entropy) if t is not None]
        with torch.enable_grad():
            output = self.loss_of(leaves[0], leaves[1] if len(leaves) == 2 else None)
        return (output._replace(loss=output.loss.detach()), *torch.autograd.grad(output.loss, leaves))


class _OnePass(torch.autograd.Function):
    """The forward leaves the gradients in buffers; the first backward hands them over, a second one computes them
    again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        work: OnePass,
        others: list[Any],
        found: list[Any],
    ) -> Tensor:
        ctx.gradients, output = work.run(ctx.needs_input_grad[:3])
        ctx.work = work
        ctx.save_for_backward(hidden, weight, bias, *validation.saveable(*(t for t in others if isinstance(t, Tensor))))
        found.append(output)
        return output.loss

    @staticmethod
    @first_order("linear_policy_loss")
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *_ = ctx.saved_tensors  # raises where the graph was freed
        sums, ctx.gradients = ctx.gradients, None
        if sums is None:
            sums, _ = ctx.work.run(ctx.needs_input_grad[:3])
        return (*sums.finished(hidden, weight, grad_loss), None, None, None)


# ---- the public op ---------------------------------------------------------------------------------------------------


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor | SegmentTable,
    mask: Tensor | TokenIndex,
    *,
    config: str | LossConfig = "ppo",
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    cu_seqlens: Tensor | None = None,
    turn_ids: Tensor | Segments | None = None,
    rollout_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    weights: Tensor | None = None,
    is_weights: Tensor | None = None,
    selected: Tensor | None = None,
    row_tokens: Tensor | None = None,
    denominator: float | Tensor | Denominators | None = None,
    reduction: str = "loss",
    vocab_start: int = 0,
    vocab_group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> LossOutput:
    """`policy_loss` of `linear_log_probs`, with the gradients made while a chunk's logits are there.

    For losses by token ("ppo", "reinforce", "cispo", "sapo") with reduction "loss", the logits are multiplied out once:
    three products in place of four. Tokens that do not count are passed over, and those without a gradient (clipped,
    advantage 0) after the first product. For every other loss, under torch.compile, with vocab_group and on the
    reference it is the plain composition; the result is the same up to rounding. Without gradients it computes none.
    The entropy that `config.entropy_coef` asks for comes from the same logits. Rollouts are whole in a call: parts of
    them, whose log-ratios would have to be reduced over ranks, take `linear_log_probs` and `policy_loss`.

    Args:
        hidden, weight, labels: as in `linear_log_probs`.
        old_log_probs, advantages, mask, config: as in `policy_loss`. The mask may be a `fastadv.token_index` of it and
            of `weights`, as in `linear_log_probs`; without one the host waits for a GPU once a chunk.
        bias, temperature, softcap, vocab_start, vocab_group, chunk_tokens, deterministic: as in `linear_log_probs`.
        cu_seqlens, turn_ids, rollout_log_probs, ref_log_probs: as in `policy_loss`.
        weights, is_weights, selected, row_tokens, denominator, reduction: as in `policy_loss`; a token with weight 0 is
            not read.
        backend: "auto" or the name of one of `fastadv.backends()`.

    Returns:
        LossOutput(loss, metrics). A backward hands over the gradients that the forward made, without a copy where the
        upstream gradient is 1; a second backward (retain_graph) computes them again.

    Raises:
        ValueError, TypeError: as `linear_log_probs` and `policy_loss` raise them, before anything is multiplied.

    Source: docs/ops/linear_policy_loss.md.
    """
    op = "linear_policy_loss"
    config = loss_config(config)
    wants_entropy = config.entropy_coef != 0
    # A loss without a kernel runs on the reference, of log-probs that a kernel made.
    loss_backend = backend if without_kernel(config, reduction) is None else "auto"

    def loss_of(log_probs: Tensor, entropy: Tensor | None) -> LossOutput:
        return policy_loss(
            log_probs, old_log_probs, advantages, counted, config=config, cu_seqlens=cu_seqlens, turn_ids=turn_ids,
            rollout_log_probs=rollout_log_probs, ref_log_probs=ref_log_probs, entropy=entropy, weights=weights,
            is_weights=is_weights, selected=selected, row_tokens=row_tokens, denominator=denominator,
            reduction=reduction, backend=loss_backend,
        )  # fmt: skip

    validation.tensor(op, "labels", labels)
    read: Tensor | TokenIndex
    if isinstance(mask, TokenIndex):
        mask.check_layout(op, tuple(labels.shape), labels.device)
        counted, read, unread = mask.mask, mask, _unread(op, mask, labels, weights, cu_seqlens)
    else:
        validation.tensor(op, "mask", mask, shape=tuple(labels.shape))
        validation.mask_values(op, "mask", mask)
        counted, read, unread = mask, _weighted(op, mask, labels, weights, cu_seqlens), None
    given = arguments(
        op, hidden, weight, labels, bias=bias, mask=read, temperature=temperature, softcap=softcap, ignore_index=None,
        vocab_start=vocab_start, vocab_group=vocab_group, chunk_tokens=chunk_tokens, deterministic=deterministic,
        backend=backend,
    )  # fmt: skip
    one_pass = (
        given.backend != "reference" and reduction == "loss" and by_token(config, old_log_probs) and vocab_group is None
        and given.needs_gradient and not given.registered
    )  # fmt: skip
    if not one_pass:
        log_probs, entropy, _ = log_probs_of(given)
        if unread is not None:
            log_probs = log_probs.masked_fill(unread, torch.nan)
        return loss_of(log_probs, entropy if wants_entropy else None)
    with torch.no_grad():  # whatever policy_loss refuses, it refuses before the products
        nothing = torch.zeros(labels.shape, device=labels.device)
        loss_of(nothing, nothing if wants_entropy else None)
    found: list[LossOutput] = []
    table = [advantages.values, advantages.segments.offsets] if isinstance(advantages, SegmentTable) else [advantages]
    others = [*given.inputs, old_log_probs, *table, counted, weights, is_weights, rollout_log_probs, ref_log_probs]
    loss = _OnePass.apply(*given.layer, OnePass(given, loss_of, wants_entropy, unread), others, found)  # type: ignore[no-untyped-call]
    return found[0]._replace(loss=loss)


def _weighted(op: str, mask: Tensor, labels: Tensor, weights: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Tokens that count and have a weight other than 0. Weights of a wrong shape are for `policy_loss` to refuse."""
    on = mask != 0
    return weighted(on, weights, Rows.of(op, "labels", labels, cu_seqlens)) if isinstance(weights, Tensor) else on


def _unread(
    op: str, index: TokenIndex, labels: Tensor, weights: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor | None:
    """Tokens that the loss counts and the index does not. Raises ValueError if there are any, where values are read."""
    if index.reads is index.mask:
        return None
    unread = _weighted(op, index.mask, labels, weights, cu_seqlens) & ~index.reads
    if validation.reads_values(unread):
        if bool(unread.any()):
            raise ValueError(
                f"{op}: weights is not 0 at {int(unread.sum())} tokens that the TokenIndex leaves out; build it with "
                "fastadv.token_index(mask, weights=weights) of the same weights"
            )
        return None
    return unread
