"""The Gram matrix of all segments' policy gradients, layer by layer over all micro-batches.

Parameters are fixed, so a layer can run on every micro-batch before the next one does. Forward, each layer's inputs
are kept. Backward, a layer is recomputed on one micro-batch after the other; then all segments' gradients of its
weights are formed in tiles, multiplied with each other, and dropped. No gradient of a segment ever exists as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastadv import validation
from fastadv.batch import Batch
from fastadv.gradproj import flash
from fastadv.gradproj.embedding import EmbeddingRows
from fastadv.gradproj.families import (
    Parts,
    check_dropout,
    check_hooks,
    check_parameters,
    check_sharing,
    fixed_policy,
    parts_of,
)
from fastadv.gradproj.gram import SegmentGram, batches_of
from fastadv.gradproj.head import Head
from fastadv.gradproj.interceptors import Interceptor, Tape, described, interceptor
from fastadv.gradproj.streams import LEVELS, Layout, MicroBatch, Packed, layout, segments_of, sequences
from fastadv.ops.segment_weight_gram import GramSum, checked_scratch
from fastadv.responses import without_prompt

OP = "segment_gram"
# Largest difference of a log-prob, in nats, between a rollout alone and the same beside others.
BATCH_MATE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
# Of a logit between the model's own and those that gradients are taken of, relative to the largest.
MODEL_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.03, torch.float16: 0.01}
SAMPLE_TOKENS = 32


def segment_gram(
    model: nn.Module,
    batch: Batch | Sequence[Batch],
    *,
    level: str = "rollout",
    temperature: float = 1.0,
    token_weights: Tensor | None = None,
    max_tokens: int = 4096,
    scratch_bytes: int | None = None,
    strict: bool = True,
    attention: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> SegmentGram:
    """Inner products of the policy gradients of all segments: `H[s, r] = <u_s, u_r>`, with `u_s` the sum over the
    segment's sampled tokens of the gradient of their log-prob by all trainable parameters.

    Runs on one device, the model's, wherever the batch is. A model on several devices, or sharded over processes, is
    refused.

    Costs about what one forward and backward pass with checkpointing does at level "rollout", and a few times that at
    level "turn", whatever is asked of it afterwards: the Gram of any arms `A [K, S]` over segments is `A H A^T`.

    Args:
        model: a causal language model of transformers: llama, qwen2, qwen3 or gpt2.
        batch: rollouts with token ids, or several batches, whose segments follow each other.
        level: "rollout", or "turn" for segments (rollout, turn) in the order of `batch.segments`. Tokens outside of
            turns count in neither.
        temperature: of the policy; logits are divided by it.
        token_weights: `[N]`, a factor of each response token's gradient, packed, over all batches. None: 1.
        max_tokens: padded tokens of a micro-batch.
        scratch_bytes: most that a tile of gradients takes, or one of logits if it has more than 64 rows. None: 16 MiB
            on a CPU, 1 GiB on a GPU.
        strict: whether a module with parameters that cannot be intercepted is an error; if not, its parameters are
            left out, as those that are frozen are, and `covered` says so.
        attention: "blocks", the library's own in float32 at least; "flash", flash-attn's in the model's precision, for
            bfloat16 and float16 models on a CUDA device; "auto": flash where it can run. A plan of the model says
            which.
        progress: called with (done, of how many) after each layer.

    Raises:
        BackendUnavailableError: attention "flash" where it cannot run, with the reason.
        ValueError: a model of another family or on several devices, a module that cannot be intercepted, hooks that do
            not run here, dropout that is on, parameters shared other than by a tied head, rollouts without token ids or
            prompt, from another tokenizer or longer than the model's context, gradients that are not finite, a model
            whose log-probs of a rollout depend on the rollouts beside it (by more than BATCH_MATE_TOLERANCE, looked at
            on a few tokens), or whose logits are not those of its last norm and output layer. The model is always left
            as it was.
        TypeError: what is no model or no batch, a number of another type.
    """
    validation.choice(OP, "level", level, LEVELS)
    validation.count(OP, "temperature", temperature, positive=True)
    validation.integer(OP, "max_tokens", max_tokens, least=1)
    validation.module(OP, "model", model)
    if progress is not None and not callable(progress):
        raise TypeError(f"{OP}: progress is a {type(progress).__name__}; pass a function of (done, total)")
    temperature = float(temperature)
    whole = [one.packed() for one in batches_of(OP, batch)]
    parts = parts_of(model)
    device = parts.tokens.weight.device
    scratch_bytes = checked_scratch(OP, scratch_bytes, device)
    check_parameters(model)
    check_dropout(model)
    check_sharing(parts)
    check_hooks(parts)
    attends = flash.choose(attention, model).name
    for one in whole:
        if one.mask.device.type == "meta":
            raise ValueError(f"{OP}: the batch is on the meta device and has no values; pass the rollouts themselves")
        _check_batch(one, parts)
    divided = [sequences(one) for one in whole]  # what a rollout's sequences add up to is added up at the end
    batches = [one.batch for one in divided]
    if token_weights is not None:
        tokens = sum(one.mask.shape[0] for one in batches)
        validation.tensor(OP, "token_weights", token_weights, shape=(tokens,), dtypes=validation.FLOATS)
        if not bool(token_weights.isfinite().all()):
            raise ValueError(f"{OP}: token_weights[{int((~token_weights.isfinite()).nonzero()[0])}] is not finite")
    plan = layout(batches, level, max_tokens, token_weights, device)
    tape = Tape(plan.segments)
    with fixed_policy(model, tape, attends):
        run = _Run(parts, plan, tape, temperature, scratch_bytes, strict, attends)
        gram = run.gram(progress or (lambda done, total: None))
        rows, turns, place = segments_of(whole, divided, level)
        return SegmentGram(
            gram=_folded(gram.cpu(), place, len(rows)),
            rows=rows,
            turns=turns,
            covered=sum(p.numel() for p in run.covered.values()),
            total=sum(p.numel() for p in model.parameters()),
            temperature=temperature,
            dtype=str(parts.tokens.weight.dtype).removeprefix("torch."),
        )


def _folded(gram: Tensor, place: Tensor | None, size: int) -> Tensor:
    """The Gram of segments from that of their parts: gradients add up, so products do."""
    if place is None:
        return gram
    rows = gram.new_zeros(size, gram.shape[1]).index_add(0, place, gram)
    return rows.new_zeros(size, size).index_add(1, place, rows)


def _check_batch(batch: Batch, parts: Parts) -> None:
    """Raises ValueError unless the model can score every response token."""
    ids = batch.token_ids
    if ids is None:
        raise ValueError(f"{OP}: the batch has no token_ids; gradients need the prompt and response tokens")
    vocabulary = parts.tokens.weight.shape[0]
    for extreme in ids.ids.aminmax() if ids.ids.numel() else ():
        if not 0 <= int(extreme) < vocabulary:
            raise ValueError(
                f"{OP}: the batch holds token id {int(extreme)}, the model's vocabulary is 0 .. {vocabulary - 1}: the "
                "rollouts come from another tokenizer, or are padded"
            )
    lengths = ids.cu_seqlens.diff()
    context = getattr(parts.model.config, "max_position_embeddings", None)
    if isinstance(context, int) and lengths.numel() and int(lengths.max()) > context:
        raise ValueError(
            f"{OP}: rollout {ids.rollout_of(int(lengths.argmax()))} has {int(lengths.max())} tokens, the model's "
            f"context ends at {context}"
        )
    rollout = without_prompt(batch)
    if rollout is not None:
        raise ValueError(f"{OP}: rollout {rollout} has no prompt: nothing predicts its first response token")


@dataclass
class _Call:
    """What a layer was called with on a micro-batch."""

    hidden: Tensor  # [b, T, d]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def _sample(micro_batch: MicroBatch) -> tuple[int, MicroBatch]:
    """The last rollout that has rows, and the first of these alone, without padding."""
    live = micro_batch.whole.live
    row = micro_batch.ids.shape[0] - 1 if live is None else int(live[-1]) // micro_batch.ids.shape[1]
    length = min(SAMPLE_TOKENS, micro_batch.whole.lengths[-1])
    whole = Packed.of(torch.tensor([length]), length, micro_batch.ids.device)
    return row, replace(micro_batch, ids=micro_batch.ids[row : row + 1, :length], whole=whole)


class _Run:
    """One pass over one model and all micro-batches."""

    def __init__(
        self,
        parts: Parts,
        plan: Layout,
        tape: Tape,
        temperature: float,
        scratch_bytes: int,
        strict: bool,
        attends: str,
    ) -> None:
        self.parts, self.plan, self.tape, self.scratch_bytes, self.attends = parts, plan, tape, scratch_bytes, attends
        self.total = GramSum(plan.segments, parts.tokens.weight.device)
        self.head = Head(parts.head, temperature, scratch_bytes)
        self.covered: dict[int, Tensor] = {}
        self.interceptors: dict[str, list[Interceptor]] = {}
        stages = {**parts.layers, parts.paths.norm: parts.norm}
        for name, stage in stages.items():
            found = [
                interceptor(f"{name}.{inner}" if inner else name, module, self.tape)
                for inner, module in stage.named_modules()
                if any(True for _ in module.parameters(recurse=False))
            ]
            self.interceptors[name] = [one for one in found if one is not None]
            self._cover(p for one in self.interceptors[name] for p in one.covers())
        self._cover(p for p in (parts.tokens.weight, *parts.head.parameters()) if p.requires_grad)
        if parts.positions is not None and parts.positions.weight.requires_grad:
            self._cover([parts.positions.weight])
        if strict:
            self._check_covered()
        if not self.covered:
            raise ValueError(f"{OP}: no parameter of the model requires a gradient; call requires_grad_(True) on some")

    def _cover(self, parameters: Iterable[Tensor]) -> None:
        self.covered.update((id(p), p) for p in parameters)

    def _check_covered(self) -> None:
        for name, module in self.parts.model.named_modules():
            for inner, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in self.covered:
                    raise ValueError(
                        f"{OP}: {name or 'the model'} ({described(module)}) owns {inner}, and no interceptor is "
                        "registered for it: register one (fastadv.gradproj.register_interceptor), freeze it, or pass "
                        "strict=False to leave it out"
                    )

    def gram(self, progress: Callable[[int, int], None]) -> Tensor:
        """`[S, S]` float64."""
        batches, names = self.plan.micro_batches, list(self.parts.layers)
        with self._intercepted():
            with torch.no_grad():
                calls = [self._forward(one) for one in batches]
                self._check_batch_mates(calls)
                self._check_model(calls)
            total, norm = len(names) + 2, self.parts.paths.norm
            cotangents = [self._through_norm(one, call.pop()) for one, call in zip(batches, calls, strict=True)]
            self._multiply(norm)
            progress(1, total)
            for done, name in enumerate(reversed(names)):
                layer = self.parts.layers[name]
                for i, one in enumerate(batches):
                    cotangents[i] = self._back(name, layer, one, calls[i].pop(), cotangents[i])
                self._multiply(name)
                progress(done + 2, total)
            with torch.no_grad():
                self._embeddings(cotangents)
            progress(total, total)
        return self.total.whole()

    @contextmanager
    def _intercepted(self) -> Iterator[None]:
        """Puts the interceptors in place of their modules' forwards, and takes them away again."""
        ours = [one for found in self.interceptors.values() for one in found]
        before = [one.module.__dict__.get("forward") for one in ours]
        try:
            for one in ours:
                one.module.forward = one
            yield
        finally:
            for one, forward in zip(ours, before, strict=True):
                if forward is None:
                    one.module.__dict__.pop("forward", None)
                else:
                    one.module.forward = forward

    def _forward(self, micro_batch: MicroBatch) -> list[_Call]:
        """Runs the model below the head and keeps what every layer and the last norm get."""
        self.tape.micro_batch, ids = micro_batch, micro_batch.ids
        calls: list[_Call] = []
        passed, intact = [self.parts.embedded(ids)], True  # what the next of them should get

        def check(hidden: Tensor) -> None:
            nonlocal intact
            expected = passed.pop()
            same = hidden.shape == expected.shape and hidden.allclose(expected, rtol=0, atol=0, equal_nan=True)
            intact = intact and same

        def keep(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            keywords = dict(keywords)
            hidden = keywords.pop("hidden_states") if not arguments else arguments[0]
            check(hidden)
            calls.append(_Call(hidden, arguments[1:], keywords))

        def left(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            passed.append(output[0] if isinstance(output, tuple) else output)

        stages = [*self.parts.layers.values(), self.parts.norm]
        # Inputs before other hooks, which run again when the layer is recomputed; outputs after them.
        hooks = [stage.register_forward_pre_hook(keep, with_kwargs=True, prepend=True) for stage in stages]
        hooks += [stage.register_forward_hook(left) for stage in stages]
        try:
            output = self.parts.hidden(ids)
        finally:
            for hook in hooks:
                hook.remove()
        check(output.last_hidden_state)
        if len(calls) != len(stages) or not intact:
            raise ValueError(
                f"{OP}: the model does not run its {len(stages) - 1} layers on its embeddings one after the other, and "
                "its norm at the end, with nothing (a hook, a scale) between or around them"
            )
        return calls

    def _log_probs(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Log-probs `[n - 1]` of `ids [n]` from the last norm's input `[1, n, d]`."""
        hidden = self.parts.norm(hidden)[0, :-1]
        return self.head.logits(hidden).log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)

    def _check_batch_mates(self, calls: list[list[_Call]]) -> None:
        """Raises ValueError unless a rollout's log-probs beside others are what they are alone, on a few tokens, and
        with flash-attn, whose backward is not ours, its gradients too."""
        crowded = [i for i, one in enumerate(self.plan.micro_batches) if one.ids.shape[0] > 1]
        if not crowded:
            return
        i = min(crowded, key=lambda i: self.plan.micro_batches[i].rows)
        one = self.plan.micro_batches[i]
        if self.attends == "flash":
            flash.check_batch_mates(self.parts.model, one.whole)
        row, sample = _sample(one)
        ids = sample.ids[0]
        if len(ids) < 2:
            return
        beside = self._log_probs(calls[i][-1].hidden[row : row + 1, : len(ids)], ids)
        alone = self._log_probs(self._forward(sample)[-1].hidden, ids)
        difference, tolerance = float((alone - beside).abs().max()), BATCH_MATE_TOLERANCE[calls[i][-1].hidden.dtype]
        if difference > tolerance:
            raise ValueError(
                f"{OP}: a rollout's log-probs beside others differ by {difference:.1e} nats from those alone (more "
                f"than {tolerance:.0e}): the model's attention or norms look at other rollouts"
            )

    def _check_model(self, calls: list[list[_Call]]) -> None:
        """Raises ValueError unless the model's own logits are those that gradients are taken of, on a few tokens."""
        if not calls:
            return
        row, self.tape.micro_batch = _sample(self.plan.micro_batches[0])
        ids = self.tape.micro_batch.ids
        ours = self.head.logits(self.parts.norm(calls[0][-1].hidden[row : row + 1, : ids.shape[1]])) / self.head.scale
        theirs = self.parts.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        difference = float((theirs - ours).abs().max() / ours.abs().max())
        if difference > MODEL_TOLERANCE[calls[0][-1].hidden.dtype]:
            raise ValueError(
                f"{OP}: the model's logits are not its output layer's of its last norm: they differ by "
                f"{difference:.1e} of the largest (a hook on the model, a scale or a soft cap of logits)"
            )

    def _through_norm(self, micro_batch: MicroBatch, call: _Call) -> list[Tensor]:
        """The head's cotangents, taken back through the last norm."""

        def cotangents(hidden: Tensor) -> list[Tensor]:
            by_loss = self.head.cotangents(micro_batch, hidden)  # [l, d]
            return [
                by_loss.new_zeros(stream.rows, by_loss.shape[1]).index_copy_(
                    0, stream.loss_rows, by_loss[stream.losses]
                )
                for stream in micro_batch.streams
            ]

        return self._back(self.parts.paths.norm, self.parts.norm, micro_batch, call, cotangents)

    def _back(
        self,
        name: str,
        module: nn.Module,
        micro_batch: MicroBatch,
        call: _Call,
        cotangents: list[Tensor] | Callable[[Tensor], list[Tensor]],
    ) -> list[Tensor]:
        """Recomputes a layer on a micro-batch and takes each stream's cotangent `[n, d]` of its output to its input."""
        self.tape.micro_batch = micro_batch
        for one in self.interceptors[name]:
            one.called = False
        x = call.hidden.detach().requires_grad_()
        with torch.enable_grad():
            y = module(x, *call.arguments, **call.keywords)
        y = y[0] if isinstance(y, tuple) else y
        d = x.shape[-1]
        with torch.no_grad():
            if callable(cotangents):
                cotangents = cotangents(y.detach().view(-1, d))
        found = []
        for stream in micro_batch.streams:
            self.tape.stream = stream
            whole = stream.spread(cotangents.pop(0), micro_batch.rows).view(y.shape)
            (gradient,) = torch.autograd.grad(y, x, whole, retain_graph=bool(cotangents))
            found.append(stream.gather(gradient.reshape(-1, d)))
        return found

    @torch.no_grad()
    def _multiply(self, name: str) -> None:
        """Adds the Gram of one layer's gradients."""
        for one in self.interceptors[name]:
            one.add_to(self.total, self.scratch_bytes)
        self._check_finite(name)

    def _check_finite(self, name: str) -> None:
        if not self.total.finite():
            raise ValueError(
                f"{OP}: gradients of {name} are not finite: they overflow {self.parts.tokens.weight.dtype}, or a "
                "backward divides by 0"
            )

    def _embeddings(self, cotangents: list[list[Tensor]]) -> None:
        """The token embedding, then the head, which may be the same parameter, then positions."""
        parts = self.parts
        rows, positions = EmbeddingRows(parts.tokens.padding_idx), EmbeddingRows(None)
        for one, found in zip(self.plan.micro_batches, cotangents, strict=True):
            place = torch.arange(one.ids.shape[1], device=one.ids.device).expand(one.ids.shape)
            for stream, cotangent in zip(one.streams, found, strict=True):
                if parts.tokens.weight.requires_grad:
                    rows.keep(stream.gather(one.ids.flatten()), stream, cotangent)
                if parts.positions is not None and parts.positions.weight.requires_grad:
                    positions.keep(stream.gather(place.flatten()), stream, cotangent)
        positions.add_to(self.total, self.scratch_bytes)
        self._check_finite(str(parts.paths.positions))
        if parts.tied and rows.any():
            self.head.add_to(self.total, rows.sorted())
        else:
            rows.add_to(self.total, self.scratch_bytes)
            self.head.add_to(self.total, None)
        self._check_finite(f"{parts.paths.tokens} or {parts.paths.head}")
