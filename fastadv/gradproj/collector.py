"""Sketches of every rollout's gradient inside a training step that runs anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from fastadv import validation
from fastadv.gradproj.interceptors import check_gradient_hooks, described
from fastadv.gradproj.pieces import Pieces, Watch, way_of
from fastadv.gradproj.sharding import Filter, is_dtensor
from fastadv.gradproj.sketch import RolloutSketches
from fastadv.ops.count_sketch import check_sketch, count_sketch, sketch_values
from fastadv.rows import Rows


class _Keep(torch.autograd.Function):
    """Holds a tensor as autograd holds what a backward needs, so that checkpointing drops it and brings it back."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def _kept(value: Tensor) -> Any:
    """What holds the tensor, as `saved_tensors`."""
    apply: Any = _Keep.apply
    return apply(torch.empty(0, requires_grad=True), value).grad_fn


def _on_gradient(output: Tensor, take: Callable[[Tensor], None]) -> None:
    """Calls with the gradient of a forward's output, as the module's backward gets it: after the hooks of the output,
    and before what is written into it later."""
    if output.grad_fn is None:
        output.register_hook(take)  # type: ignore[no-untyped-call]
        return
    base, shape = output._base, output.shape
    # A linear layer's output is a view: writing into it cuts the view out of the graph, and not what it is of.
    whole = base is not None and base.grad_fn is not None and base.numel() == output.numel() and output.is_contiguous()
    source: Any = base if whole else output
    number = source.output_nr

    def before(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[number]
        if gradient is not None:
            take(gradient.reshape(shape))

    source.grad_fn.register_prehook(before)


def _after_accumulation(parameter: Any, hook: Callable[[Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(hook)


@dataclass(frozen=True, eq=False)
class _Layout:
    """Where a micro-batch's rollouts are in what passes through the model."""

    rollouts: list[int]
    ends: list[int] | None  # of packed tokens, from 0; None: padded

    def parts(self, name: str, value: Tensor) -> list[Tensor]:
        """The rollouts' parts of a tensor of all tokens: [1, N, ...] or [N, ...] packed, [b, T, ...] padded."""
        shape = list(value.shape)
        if self.ends is None:
            if value.shape[:1] != (len(self.rollouts),):
                raise ValueError(
                    f"SketchCollector: {name} works on {shape}, the micro-batch has {len(self.rollouts)} rollouts; "
                    "what all rollouts share, such as position ids [1, T], has to be given for each, [b, T]"
                )
            return list(value.unbind())
        tokens = self.ends[-1]
        if value.shape[:2] == (1, tokens):
            value = value[0]
        elif value.shape[:1] != (tokens,):
            raise ValueError(
                f"SketchCollector: {name} works on {shape}, cu_seqlens ends at {tokens} tokens; expected "
                f"[1, {tokens}, ...] or [{tokens}, ...]"
            )
        return [value[a:b] for a, b in zip(self.ends[:-1], self.ends[1:], strict=True)]


class SketchCollector:
    """Collects a count sketch of each rollout's own gradient while a training step runs.

        with SketchCollector(model) as collector:
            for rows, batch in micro_batches:
                with collector.micro_batch(rows, cu_seqlens):
                    loss(model, batch).backward()
        sketches = collector.sketches()
        sketches.cosines(coefficients)  # of arms [K, B], with errors

    What is sketched is the gradient of the rollout's part of the loss that is run. With the unit loss, the sum of its
    tokens' log-probs, arms that weight rollouts are rows of coefficients, arms thought of later too. The training loss
    itself gives its own arm's parts, which coefficients re-weight. Losses are to be sums: a mean over a micro-batch
    scales its rollouts by what else is in it.

    Modules are watched, not replaced: the step's `.grad` is what it is without the collector, bit for bit. Hooks of
    modules may change what they get, give and get back; hooks on the gradients of parameters are refused. Inputs are
    held as autograd holds its own, so activation checkpointing frees them as before. In the slot where a weight's
    gradient is formed, each rollout's `dY^T X` is formed in float32 a tile at a time, added to the rollout's sketch and
    dropped. That costs one more product of the size of the weight gradient's, and `copies` hashes an element.

    Memory: `copies * size * 8` bytes a rollout, 8 MiB as set.

    Rollouts only: the turns of a rollout share its activations, and tokens' positions in the backward do not tell whose
    loss a gradient comes from.

    Args:
        model: its Linear, Embedding, LayerNorm, RMSNorm layers and GPT-2's Conv1D are known. Must not be compiled.
        size: slots of one sketch, a multiple of 32.
        copies: independent sketches; errors come from them.
        seed: of the hash.
        level: "rollout".
        quantum: power of two; sketches are sums of whole multiples of it, which makes them independent of any order.
            Elements far below it are lost (scale a loss that is a mean over thousands of tokens), elements of 2^50 and
            more of it refused; on a GPU, where nothing waits to look, their sketch is NaN.
        keep_gradients: False spares the products that `.grad` takes, and forms none: for a pass that is no training
            step. Not for parameters that FSDP shards.
        shards: (row, column) of the whole parameter at which this rank's part begins, by parameter name, for tensor
            parallelism. A parameter with one dimension is a row: (0, first).
        filter: which parameters this rank sketches, such as `megatron_filter(rank)`; None: all.
        strict: False leaves out parameters of modules that are not known; `covered` of the result says so.
        scratch: elements of a tile.
        device: where finished sketches are kept; None: where they were made.

    Raises:
        ValueError: a module that is not known, or another argument that cannot be. Within a backward: a gradient that
            is not finite, by its parameter's name; a tensor that the micro-batch's rollouts do not divide.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        size: int = 2**17,
        copies: int = 8,
        seed: int = 0,
        level: str = "rollout",
        quantum: float = 2.0**-40,
        keep_gradients: bool = True,
        shards: Mapping[str, tuple[int, int]] | None = None,
        filter: Filter | None = None,
        strict: bool = True,
        scratch: int = 1 << 22,
        device: torch.device | str | None = None,
    ) -> None:
        op = "SketchCollector"
        validation.module(op, "model", model)
        validation.choice(op, "level", level, ("rollout",))
        validation.integer(op, "scratch", scratch, least=1)
        check_sketch(op, size, copies, quantum, seed)
        if size % 32:
            raise ValueError(f"{op}: size is {size}; it must be a positive multiple of 32")
        self._size, self._copies, self._seed, self._quantum = size, copies, seed, quantum
        self._keep, self._shards, self._scratch = keep_gradients, dict(shards or {}), scratch
        self._device = None if device is None else torch.device(device)
        names = {p: name for name, p in model.named_parameters() if p.requires_grad}  # a tied one by its first name
        unknown = [name for name in self._shards if name not in names.values()]
        if unknown:
            raise ValueError(f"{op}: shards names {unknown[0]!r}, which is no parameter that requires a gradient")
        for name, place in self._shards.items():
            if not isinstance(place, (tuple, list)) or len(place) != 2:
                raise TypeError(f"{op}: shards[{name!r}] is {place!r}; pass (row, column), where this part begins")
            for what, value in zip(("row", "column"), place, strict=True):
                validation.integer(op, f"the {what} of shards[{name!r}]", value)
        if not keep_gradients and any(is_dtensor(p) for p in names):
            raise ValueError(f"{op}: keep_gradients=False needs parameters that are not sharded")
        self._watched: dict[str, tuple[nn.Module, Pieces, dict[str, str]]] = {}  # by name: own parameters' full names
        self._owners: dict[str, list[str]] = {}  # modules of each parameter
        self._parameters: dict[str, nn.Parameter] = {}
        strange = []
        for name, module in model.named_modules():
            own = {key: p for key, p in module.named_parameters(recurse=False) if p.requires_grad}
            wanted = {key: names[p] for key, p in own.items() if filter is None or filter(names[p], p)}
            if not wanted:
                continue
            way = way_of(module)
            if way is None:
                strange.append(f"{name or 'the model itself'} ({described(module)})")
                continue
            self._watched[name] = (module, way, wanted)
            for key, full in wanted.items():
                self._owners.setdefault(full, []).append(name)
                self._parameters[full] = own[key]
        if strange and strict:
            raise ValueError(
                f"{op}: no way to sketch the parameters of {', '.join(strange[:5])}"
                f"{', ...' if len(strange) > 5 else ''}; freeze them, or leave them out with strict=False"
            )
        if not self._watched:
            raise ValueError(f"{op}: no parameter to sketch: none requires a gradient, is known and passes the filter")
        self._total = sum(p.numel() for p in names)
        self._handles: list[Any] = []
        self._layout: _Layout | None = None
        self._rows: Tensor | None = None
        self._fired: set[str] = set()
        self._accumulated: set[str] = set()
        self._done: list[tuple[list[int], Tensor]] = []

    @property
    def covered(self) -> int:
        """Parameters that are sketched."""
        return sum(p.numel() for p in self._parameters.values())

    def __enter__(self) -> SketchCollector:
        if self._handles:
            raise RuntimeError("SketchCollector: it watches the model already")
        for name, (module, way, wanted) in self._watched.items():
            self._handles.append(Watch(module, self._look(name, module, way, wanted)))
        for name, parameter in self._parameters.items():
            if self._keep:
                self._handles.append(_after_accumulation(parameter, self._noting(name)))
            else:
                parameter.requires_grad_(False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if not self._keep:
            for parameter in self._parameters.values():
                parameter.requires_grad_(True)

    @contextmanager
    def micro_batch(self, rollouts: Sequence[int] | Tensor, cu_seqlens: Tensor | None = None) -> Iterator[None]:
        """Forward and backward of some rollouts; both within, recomputation included. A rollout that comes again, say
        its other part, is added up. Nothing is kept of a micro-batch that raises.

        Args:
            rollouts: `[b]` numbers of the rollouts, in the order that they lie in.
            cu_seqlens: `[b + 1]` ends of packed tokens, the last the number of them; None: the model is given
                `[b, T]`.

        Raises:
            ValueError: numbers that do not fit; a parameter whose gradient came about outside of its module's forward.
        """
        op = "SketchCollector.micro_batch"
        numbers = rollouts.tolist() if isinstance(rollouts, Tensor) else list(rollouts)
        strange = [row for row in numbers if isinstance(row, bool) or not isinstance(row, int)]
        if strange:
            raise ValueError(f"{op}: rollouts holds {strange[0]!r}; they are integers")
        ends = None
        if cu_seqlens is not None:
            tokens = torch.empty(int(cu_seqlens[-1]) if cu_seqlens.numel() else 0, device=cu_seqlens.device)
            Rows.of(op, "cu_seqlens' tokens", tokens, cu_seqlens)
            ends = cu_seqlens.tolist()
            if len(ends) != len(numbers) + 1:
                raise ValueError(f"{op}: cu_seqlens is of {len(ends) - 1} rollouts, {len(numbers)} are named")
        if not self._handles or self._layout is not None:
            raise RuntimeError(f"{op}: {'one runs already' if self._handles else 'use the collector with `with`'}")
        modules = {name: module for name, (module, _, _) in self._watched.items()}
        check_gradient_hooks("SketchCollector", self._parameters, modules)
        self._layout, self._rows = _Layout(numbers, ends), None
        self._fired.clear()
        self._accumulated.clear()
        try:
            yield
            self._check()
            if self._rows is None:
                raise ValueError(f"{op}: no gradient reached the model; run forward and backward within")
            self._done.append((numbers, self._rows.to(self._device or self._rows.device)))
        finally:
            self._layout, self._rows = None, None

    def sketches(self) -> RolloutSketches:
        """What was collected, rollouts in the order in which they came first.

        Raises:
            ValueError: no micro-batch was run.
        """
        if not self._done:
            raise ValueError("SketchCollector: no micro-batch was run")
        rollouts = list(dict.fromkeys(row for numbers, _ in self._done for row in numbers))
        place = {row: i for i, row in enumerate(rollouts)}
        values = self._done[0][1].new_zeros(len(rollouts), self._copies, self._size)
        for numbers, rows in self._done:
            values.index_add_(0, values.new_tensor([place[row] for row in numbers]), rows)
        return RolloutSketches(
            values, torch.tensor(rollouts), self._quantum, self._seed, covered=self.covered, total=self._total
        )

    def gradient_error(self) -> float:
        """How far the sum of the rollouts' sketches is from the sketch of `.grad`, relative to it: about the rounding
        of the model's dtype if all was seen, and the cheapest proof of it. `.grad` has to hold what ran since the
        collector was made and nothing else, not clipped, not averaged over ranks.

        Raises:
            ValueError: gradients that are sharded, or that there are none of.
        """
        whole = torch.zeros_like(self.sketches().values[0])
        for name, parameter in self._parameters.items():
            if is_dtensor(parameter):
                raise ValueError(f"gradient_error: {name} is sharded; run it on a model that is not")
            if parameter.grad is not None:
                self._sketch(name, 0, parameter.grad.to(whole.device), whole)
        if not bool(whole.any()):
            raise ValueError("gradient_error: the model has no gradients (keep_gradients=False, or zero_grad)")
        found, quantum = self.sketches(), self._quantum
        # As numbers: what stands for a bad value in both would cancel as integers.
        rollouts, expected = sketch_values(found.values, quantum).sum(0), sketch_values(whole, quantum)
        return float((rollouts - expected).norm() / expected.norm())

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _noting(self, name: str) -> Callable[[Tensor], None]:
        return lambda parameter: self._accumulated.add(name)

    def _look(self, name: str, module: nn.Module, way: Pieces, wanted: dict[str, str]) -> Callable[[Any, Any], None]:
        def look(x: Any, output: Any) -> None:
            if self._layout is None:
                raise RuntimeError(f"SketchCollector: {name} ran outside of micro_batch; or run it under no_grad")
            layout = self._layout
            if is_dtensor(x) or is_dtensor(output):
                raise ValueError(f"SketchCollector: {name} works on DTensors; give it local tensors, and shards=")
            if not output.requires_grad:  # the first of a model whose parameters were told not to
                output.requires_grad_()
            # Detached: what is captured must not hold the graph that it came from.
            held = [_kept(x.detach())]

            def on_gradient(dy: Tensor) -> None:
                if not held:
                    raise RuntimeError(f"SketchCollector: a second backward through one forward of {name}")
                (kept,) = held.pop().saved_tensors
                with torch.no_grad():
                    self._add(name, module, way, wanted, layout, kept, dy.detach())

            _on_gradient(output, on_gradient)

        return look

    def _add(
        self,
        name: str,
        module: nn.Module,
        way: Pieces,
        wanted: dict[str, str],
        layout: _Layout,
        x: Tensor,
        dy: Tensor,
    ) -> None:
        if layout is not self._layout:
            raise RuntimeError(f"SketchCollector: backward of {name} in another micro_batch than its forward")
        if self._rows is None:
            shape = (len(layout.rollouts), self._copies, self._size)
            self._rows = torch.zeros(shape, dtype=torch.int64, device=dy.device)
        self._fired.add(name)
        dy = dy if dy.dtype == torch.float64 else dy.to(torch.float32)
        for row, (x_part, dy_part) in enumerate(zip(layout.parts(name, x), layout.parts(name, dy), strict=True)):
            for key, first, values in way(module, x_part, dy_part, self._scratch):
                if key in wanted:
                    self._sketch(wanted[key], first, values, self._rows[row])

    def _sketch(self, parameter: str, first: int, values: Tensor, out: Tensor) -> None:
        """Adds rows of a parameter's gradient, from the first of this rank's on."""
        row, column = self._shards.get(parameter, (0, 0))
        try:
            count_sketch(
                values, self._size, seed=self._seed, parameter=parameter, copies=self._copies, quantum=self._quantum,
                row_offset=row + first, column_offset=column, out=out,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"SketchCollector: the gradient of {parameter}: {error}") from error

    def _check(self) -> None:
        """Raises where a gradient was formed that no hook saw, or part of it: of a tied weight, say, that a fused loss
        takes without calling the module that it belongs to."""
        for name in sorted(self._accumulated):
            silent = [owner for owner in self._owners[name] if owner not in self._fired]
            if silent:
                raise ValueError(
                    f"SketchCollector: {name} got a gradient, but {silent[0]} did not run, or its output was cut out "
                    "of the graph by a write in place: call the module, not a function of its weight"
                )
