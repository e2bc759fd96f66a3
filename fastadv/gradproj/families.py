"""Where the parts of a causal language model are, and how it is run so that a rollout does not see its batch mates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastadv.gradproj import attention, flash
from fastadv.gradproj.interceptors import Tape, check_gradient_hooks, is_plain
from fastadv.ops.segment_weight_gram import whole_float32


@dataclass(frozen=True)
class Paths:
    """Names of a family's parts, from the causal language model."""

    backbone: str
    tokens: str
    positions: str | None
    layers: str
    norm: str
    head: str = "lm_head"


_LLAMA = Paths("model", "model.embed_tokens", None, "model.layers", "model.norm")
_GPT2 = Paths("transformer", "transformer.wte", "transformer.wpe", "transformer.h", "transformer.ln_f")
FAMILIES = {"llama": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA, "gpt2": _GPT2}


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a model, by name."""

    model: nn.Module
    paths: Paths
    backbone: nn.Module
    tokens: nn.Embedding
    positions: nn.Embedding | None
    layers: dict[str, nn.Module]
    norm: nn.Module
    head: nn.Linear

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head.weight is self.tokens.weight

    def hidden(self, ids: Tensor) -> Any:
        """Runs everything below the head on `ids [b, T]`."""
        return self.backbone(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)

    def embedded(self, ids: Tensor) -> Tensor:
        """What the first layer should get, by the embeddings' weights alone."""
        hidden = functional.embedding(ids, self.tokens.weight)
        if self.positions is not None:
            hidden = hidden + self.positions.weight[: ids.shape[1]]
        return hidden


def parts_of(model: nn.Module) -> Parts:
    """Finds the parts of a transformers causal language model.

    Raises:
        ValueError: a model of another family, or one whose parts are not where its family has them.
    """
    family = getattr(getattr(model, "config", None), "model_type", None)
    paths = FAMILIES.get(family) if isinstance(family, str) else None
    if paths is None:
        raise ValueError(
            f"segment_gram: the model is a {type(model).__name__} (model_type {family!r}); supported are causal "
            f"language models of transformers with model_type {', '.join(FAMILIES)}"
        )
    found: dict[str, Any] = {}
    for part in ("backbone", "tokens", "layers", "norm", "head", *(["positions"] if paths.positions else [])):
        path = getattr(paths, part)
        try:
            found[part] = model.get_submodule(path)
        except AttributeError:
            raise ValueError(
                f"segment_gram: the model is a {type(model).__name__} of family {family} without {path}; pass the "
                "causal language model as transformers builds it"
            ) from None
    for part, kind in (("tokens", nn.Embedding), ("positions", nn.Embedding), ("head", nn.Linear)):
        module = found.get(part)
        if module is not None and not (is_plain(module, kind) and isinstance(module.weight, nn.Parameter)):
            raise ValueError(
                f"segment_gram: {getattr(paths, part)} is a {type(module).__name__}, which cannot be intercepted; a "
                f"plain torch.nn.{kind.__name__} can"
            )
    for part in ("tokens", "positions"):
        module = found.get(part)
        if module is not None and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
            raise ValueError(
                f"segment_gram: {getattr(paths, part)} has max_norm, scale_grad_by_freq or sparse set, with which a "
                "row's gradient is no sum over its tokens"
            )
    layers = {f"{paths.layers}.{i}": layer for i, layer in enumerate(found["layers"])}
    return Parts(
        model, paths, found["backbone"], found["tokens"], found.get("positions"), layers, found["norm"], found["head"]
    )


def check_parameters(model: nn.Module) -> None:
    """Raises ValueError where parameters are not whole, or not together with all that the model computes with."""
    devices = set()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if hasattr(value, "placements"):
            raise ValueError(
                f"segment_gram: {name} is sharded over processes; pass the whole model, or use GramAccumulator on the "
                "gradients of a training step"
            )
        devices.add(value.device)
    if len(devices) > 1:
        raise ValueError(
            f"segment_gram: the model is on {', '.join(sorted(map(str, devices)))}; a segment Gram is computed on one "
            "device: move the model to one (without device_map), or take SketchCollector in a training step"
        )
    if any(device.type == "meta" for device in devices):
        raise ValueError("segment_gram: the model is on the meta device and has no values; load its weights first")


def check_hooks(parts: Parts) -> None:
    """Raises ValueError for hooks that do not run here. (Those of layers, and of modules in them, do.)"""
    model, paths = parts.model, parts.paths
    check_gradient_hooks("segment_gram", dict(model.named_parameters()), dict(model.named_modules()))
    if parts.head._forward_hooks or parts.head._forward_pre_hooks:
        raise ValueError(f"segment_gram: {paths.head} has forward hooks, which do not run here; remove them")
    for name in ("", paths.backbone, paths.tokens, paths.head, *([paths.positions] if paths.positions else [])):
        module = model.get_submodule(name)
        if module._backward_hooks or module._backward_pre_hooks:
            raise ValueError(
                f"segment_gram: {name or 'the model'} has backward hooks, which do not run here; remove them"
            )


def check_sharing(parts: Parts) -> None:
    """Raises ValueError where a parameter has two names, other than a head tied to the embedding."""
    tied = {f"{parts.paths.tokens}.weight", f"{parts.paths.head}.weight"}
    names: dict[int, str] = {}
    for name, parameter in parts.model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name and {first, name} != tied:
            raise ValueError(
                f"segment_gram: {first} and {name} are one parameter; only the output layer may share its weight, with "
                "the token embedding"
            )


def check_dropout(model: nn.Module) -> None:
    """Raises ValueError where dropout would change the model from one run to the next."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        p = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "attention_dropout", 0.0)
        if isinstance(p, float) and p > 0:
            raise ValueError(
                f"segment_gram: {name or type(model).__name__} drops out with p = {p}; gradients of one fixed policy "
                "need model.eval(), or a dropout of 0"
            )


_CLAIM = threading.Lock()
_ATTENTIONS = {"blocks": (attention.NAME, attention.attention), "flash": (flash.NAME, flash.attend)}


@contextmanager
def fixed_policy(model: nn.Module, tape: Tape, attends: str) -> Iterator[None]:
    """The model in evaluation mode and its own precision, with attention whose results do not depend on batch mates,
    as those of fused kernels do: "blocks" or "flash". Everything is set back at the end.

    Raises:
        ValueError: another pass runs on the model, or on one that shares its config.
    """
    config: Any = model.config
    device = next(model.parameters()).device.type
    name, function = _ATTENTIONS[attends]
    attention.register(name, function)
    with _CLAIM:
        own = config._attn_implementation
        if own in (attention.NAME, flash.NAME):
            raise ValueError("segment_gram: another pass runs on this model, or on one that shares its config")
        config._attn_implementation = name
    training = [module for module in model.modules() if module.training]
    token = attention.TAPE.set(tape)
    try:
        model.eval()
        with torch.inference_mode(False), torch.autocast(device, enabled=False), whole_float32():
            yield
    finally:
        attention.TAPE.reset(token)
        config._attn_implementation = own
        for module in training:
            module.training = True
