"""Gram matrix of gradients that a trainer has anyway: K arms, each accumulated over micro-batches and sharded as the
trainer shards it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fastadv import validation
from fastadv.gradproj.sharding import Filter, gradient_of, local_part, reduced
from fastadv.ops.multi_dot_gram import multi_dot_gram

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BLOCK = 1 << 22  # elements of which differences are formed at a time
BASES = ("arms", "differences")


def _names(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    """Names, after a check that they are some: a text is a sequence too, of letters."""
    if isinstance(names, str):
        raise TypeError(f"GramAccumulator: {argument} is the text {names!r}; pass a list of names, such as [{names!r}]")
    strange = [name for name in names if not isinstance(name, str)]
    if strange:
        raise TypeError(f"GramAccumulator: {argument} hold {strange[0]!r}; names are texts")
    return tuple(names)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")


class GramAccumulator:
    """The Gram matrix of K gradients, parameter by parameter, none of them flattened or gathered.

    Either `capture` each arm's gradients after its backward passes, or `add` all of a parameter's at once. Then `gram`.

        accumulator = GramAccumulator(["no mask", "mask"], directions=["cap"], process_group=dist.group.WORLD)
        for arm in accumulator.names:
            optimizer.zero_grad()
            for micro_batch in micro_batches:
                loss(arm, micro_batch).backward()
            accumulator.capture(arm, model)
        gram = accumulator.gram()  # [3, 3] float64

    The first arm is the reference. Products are taken of the reference, of what the other arms differ by from it, and
    of the directions: an arm that lies close to the reference differs from it by less than a product of the two could
    show. Differences are formed in float32 (float64 of float64 gradients), products accumulated in float64.

    Memory: `capture` keeps a copy of this rank's shards, in the gradients' dtype, until the last arm is there: K - 1
    times the parameters over the number of shards, and the last arm's own. `add` keeps nothing. Copies that the trainer
    accumulates in bfloat16 are no better for it: have it reduce in float32.

    Sums, not means: gradients of all ranks and micro-batches have to be scaled alike. Under FSDP2 call `sum_gradients`
    first.

    Args:
        arms: names of the arms, the reference first, or their number.
        directions: names of gradients that are no arms, such as that of the probability of reaching the cap; they are
            not compared with the reference.
        process_group: ranks that hold the shards; one all-reduce of K * K + 1 numbers. Under HSDP one replica's ranks
            or all, it comes to the same. None: this rank has everything, as under DDP: plain tensors are taken for this
            rank's part, and a group whose ranks all hold the whole would count it once for each.
        filter: which parameters this rank counts, such as `megatron_filter(rank)`; None: all. What several ranks hold
            counts on one of them; DTensors that say so in their placements need no filter.
        device: where copies are kept and multiplied; None: where the gradients are.
    """

    def __init__(
        self,
        arms: int | Sequence[str],
        *,
        directions: Sequence[str] = (),
        process_group: ProcessGroup | None = None,
        filter: Filter | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(arms, int):
            validation.integer("GramAccumulator", "arms", arms, least=1)
            arms = [f"arm {k}" for k in range(arms)]
        arm_names = _names("arms", arms)
        self.names = (*arm_names, *_names("directions", directions))
        if not arm_names or len(set(self.names)) != len(self.names):
            raise ValueError(f"GramAccumulator: names are {list(self.names)}; pass at least one arm, each name once")
        self._arms = len(arm_names)
        self._group, self._filter = process_group, filter
        self._device = None if device is None else torch.device(device)
        self._held: dict[str, list[Tensor | None]] = {}
        self._captured: set[str] = set()
        self._shapes: dict[str, torch.Size] = {}  # of the parameters of the model that was captured
        self._counted: dict[str, Tensor] = {}  # parameter to [K] bool: whether its products are finite
        self._total = torch.zeros(len(self.names), len(self.names), dtype=torch.float64)
        self._rank_device = torch.device("cpu")  # where the group reduces

    @torch.no_grad()
    def capture(self, arm: int | str, model: nn.Module) -> None:
        """Takes an arm's gradients: of every parameter that requires one `.grad`, or `main_grad` where it is None.

        Gradients are left as they are. Set them to zero before the next arm's backward, or it holds both.

        Args:
            arm: its name, or its number in `names`.
            model: after the arm's last micro-batch. A parameter without a gradient counts as one of zeros.

        Raises:
            ValueError: an arm that is none or was captured before, a model without gradients or with other parameters
                than that of the arms before, shards outside of the process group, sparse or complex gradients.
            TypeError: an arm that is neither a name nor a number.
        """
        name = self._name(arm)
        self._check_model(model)
        parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}  # a tied one once
        gradients = {key: gradient_of(p) for key, p in parameters.items()}
        if all(g is None for g in gradients.values()):
            raise ValueError(
                f"capture: no parameter of the model has a gradient (arm {name!r}); call it after backward, and under "
                "FSDP2 after a backward that reduces (set_requires_gradient_sync)"
            )
        last = len(self._captured) == len(self.names) - 1
        for key, gradient in gradients.items():
            if self._filter is not None and not self._filter(key, parameters[key]):
                continue
            local = None if gradient is None else self._local(key, gradient)
            if local is not None and not last:
                local = local.to(self._device or local.device, copy=True)
            self._held.setdefault(key, [None] * len(self.names))[self.names.index(name)] = local
        self._captured.add(name)
        if last:
            for key in list(self._held):
                self._multiply(key, self._held.pop(key))

    @torch.no_grad()
    def add(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        """Adds one parameter's products.

        Args:
            name: of the parameter, for errors.
            gradients: K tensors of one shape, in the order of `names`, accumulated over all micro-batches; DTensors
                are read locally. None is a gradient of zeros.

        Raises:
            ValueError: another number of gradients, other shapes, sparse or complex ones, a parameter that was added
                before.
        """
        if len(gradients) != len(self.names):
            raise ValueError(f"add: {len(gradients)} gradients of {name}; pass {len(self.names)}, of {self.names}")
        strange = [type(g).__name__ for g in gradients if not (g is None or isinstance(g, Tensor))]
        if strange:
            raise TypeError(f"add: gradients of {name} hold a {strange[0]}; pass tensors, or None")
        if self._shapes and name not in self._shapes:
            raise ValueError(f"add: {name} is no parameter of the model that was captured; {_some(self._shapes)} are")
        if name in self._counted or name in self._held:
            raise ValueError(
                f"add: {name} was added before; add up its gradients over micro-batches first, the Gram matrix of a "
                "sum is not the sum of Gram matrices"
            )
        self._multiply(name, [None if g is None else self._local(name, g) for g in gradients])

    def gram(self, basis: str = "arms") -> Tensor:
        """The Gram matrix, `[K, K]` float64, the same on every rank of the process group, all of which have to call it.

        Args:
            basis: "arms", in the order of `names`, or "differences": the reference, arm - reference of the others, the
                directions.

        Raises:
            ValueError: an arm that is missing; a gradient that is not finite, on every rank of the group.
        """
        if basis not in BASES:
            raise ValueError(f"gram: basis is {basis!r}; it must be one of {', '.join(map(repr, BASES))}")
        missing = [name for name in self.names if name not in self._captured]
        if self._captured and missing:
            raise ValueError(f"gram: no gradients of {', '.join(missing)} were captured")
        if not self._captured and not self._counted:
            raise ValueError("gram: no gradients; call capture or add first")
        faults = [(key, self.names[row.index(False)]) for key, row in self._finite() if False in row]
        counts = self._total.new_tensor([float(len(faults))])
        # What ranks found goes along, so that all of them raise and none is left waiting.
        sums = reduced(torch.cat([self._total.flatten(), counts]).to(self._rank_device), self._group)
        if float(sums[-1]):
            where = f"{faults[0][0]} (arm {faults[0][1]!r})" if faults else "a parameter on another rank"
            raise ValueError(f"gram: the gradient of {where} is not finite, or above 1e19")
        total = sums[:-1].view_as(self._total)
        if basis == "differences":
            return total
        to_arms = torch.eye(len(self.names), dtype=torch.float64, device=total.device)
        to_arms[1 : self._arms, 0] = 1.0
        return to_arms @ total @ to_arms.T

    def _name(self, arm: int | str) -> str:
        """An arm's name, of its name or number."""
        if isinstance(arm, str):
            if arm not in self.names:
                raise ValueError(f"capture: {arm!r} is none of {list(self.names)}")
        else:
            validation.integer("capture", "arm", arm, most=len(self.names) - 1)
            arm = self.names[arm]
        if arm in self._captured:
            raise ValueError(f"capture: {arm!r} was captured before")
        return arm

    def _check_model(self, model: nn.Module) -> None:
        """Raises ValueError where arms come from models with other parameters: what one has not would count as 0."""
        validation.module("capture", "model", model)
        shapes = {key: p.shape for key, p in model.named_parameters()}
        known = self._shapes or shapes
        for key in {**known, **shapes}:
            if known.get(key) != shapes.get(key):
                has = "of another shape" if key in known and key in shapes else "missing" if key in known else "new"
                raise ValueError(
                    f"capture: {key} is {has} in this model, compared with that of the arms before; capture all arms "
                    "from one model, or copies of it"
                )
        self._shapes = shapes

    def _local(self, name: str, gradient: Tensor) -> Tensor | None:
        if gradient.layout is not torch.strided or not gradient.is_floating_point():
            raise ValueError(
                f"the gradient of {name} is {gradient.layout}, {gradient.dtype}; pass a dense one of real numbers"
            )
        local = local_part(name, gradient, self._group)
        self._rank_device = gradient.device
        return local

    def _finite(self) -> list[tuple[str, list[bool]]]:
        return [(key, finite.tolist()) for key, finite in self._counted.items()]

    def _multiply(self, name: str, gradients: list[Tensor | None]) -> None:
        present = [g for g in gradients if g is not None]
        if not present:
            self._counted[name] = torch.ones(len(self.names), dtype=torch.bool)
            return
        if len({g.shape for g in present}) > 1:
            shapes = [None if g is None else list(g.shape) for g in gradients]
            raise ValueError(f"the gradients of {name} have shapes {shapes}; they are of one parameter")
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in present) else torch.float32
        device = self._device or present[0].device
        flat = [None if g is None else g.reshape(-1) for g in gradients]
        products = self._total.new_zeros(self._total.shape, device=device)
        for start in range(0, present[0].numel(), BLOCK):
            parts = [None if v is None else v[start : start + BLOCK].to(device, dtype) for v in flat]
            zeros = torch.zeros_like(next(p for p in parts if p is not None))
            rows = [zeros if p is None else p for p in parts]
            products += multi_dot_gram([rows[0], *(r - rows[0] for r in rows[1 : self._arms]), *rows[self._arms :]])
        self._counted[name] = products.diagonal().isfinite()
        self._total = self._total.to(device) + products
