"""A policy at a fixed checkpoint, and log-probs of logged tokens under it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastadv.batch import Batch
from fastadv.replay.errors import ReplayError, counted, finite
from fastadv.responses import Responses, without_prompt


@dataclass(frozen=True, eq=False)
class Policy:
    """A causal language model."""

    model: nn.Module
    vocabulary: int
    context: int | None  # longest sequence, if the configuration says
    temperature: float = 1.0
    notes: tuple[str, ...] = ()  # what the report says about the checkpoint

    def __post_init__(self) -> None:
        finite("--temperature", self.temperature, above=0)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> Policy:
        """Loads a transformers checkpoint: config.json and safetensors, nothing from the network, no remote code.

        Raises:
            ReplayError: transformers is not installed, the folder is no such checkpoint, the device is not there or
                too small.
        """
        device = device_named(str(device))
        try:
            import transformers
        except ImportError as error:
            raise ReplayError(
                f"--policy needs transformers ({error}): pip install 'transformers>=4.56', or '.[replay]' where "
                "fastadv's source is"
            ) from error
        if folder.is_file():
            raise ReplayError(f"{folder} is a file; --policy takes the folder that it is in ({folder.parent})")
        if not (folder / "config.json").is_file():
            raise ReplayError(f"{folder} is no policy: it has no config.json (a folder as save_pretrained writes it)")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=dtype,
                    output_loading_info=True, ignore_mismatched_sizes=True,  # reported below, by name
                )  # fmt: skip
        except Exception as error:  # transformers has many ways to say that a checkpoint is broken
            raise ReplayError(f"{folder} cannot be loaded as a policy ({type(error).__name__}: {error})") from error
        absent = [f"{key} is missing" for key in sorted(loading.get("missing_keys", ()))]
        absent += [_mismatch(key) for key in sorted(loading.get("mismatched_keys", ()), key=str)]
        if absent:  # transformers would draw them at random
            raise ReplayError(
                f"{folder} cannot be used as a policy: {counted(len(absent), 'weight')} missing or of another shape "
                f"({_first(absent)}); pass a complete checkpoint that fits its config.json"
            )
        unused = sorted(map(str, loading.get("unexpected_keys", ())))
        notes = [f"the model has no place for {counted(len(unused), 'weight')} of the checkpoint: {_first(unused)}"]
        try:
            model.to(device).eval()
        except torch.OutOfMemoryError as error:
            raise ReplayError(f"{folder} does not fit on {device}: {error}") from error
        config = model.config.get_text_config()
        vocabulary, context = (getattr(config, name, None) for name in ("vocab_size", "max_position_embeddings"))
        if not isinstance(vocabulary, int):
            raise ReplayError(f"{folder} cannot be used as a policy: its configuration has no vocab_size")
        context = context if isinstance(context, int) else None
        return cls(model, vocabulary, context, temperature, tuple(notes if unused else ()))

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return next(self.model.parameters()).device

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that gradients are taken by; a tied one is there once."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.parameters)

    def check(self, batch: Batch) -> None:
        """Raises ReplayError unless the model can score every response token of the batch."""
        ids = batch.token_ids
        if ids is None:
            raise ReplayError("the rollouts carry no token ids: gradients need the prompt and response tokens")
        if ids.ids.numel() and int(ids.ids.max()) >= self.vocabulary:
            raise ReplayError(
                f"the rollouts hold token id {int(ids.ids.max())}, the policy's vocabulary ends at "
                f"{self.vocabulary - 1}: they come from another tokenizer"
            )
        lengths = ids.cu_seqlens.diff()
        if self.context is not None and lengths.numel() and int(lengths.max()) > self.context:
            raise ReplayError(f"a rollout has {int(lengths.max())} tokens, the policy's context ends at {self.context}")
        rollout = without_prompt(batch)
        if rollout is not None:
            raise ReplayError(f"rollout {rollout} has no prompt: nothing predicts its first response token")

    def log_probs(self, batch: Batch, first: int, last: int) -> Tensor:
        """Log-probs of the response tokens of rollouts `first .. last - 1`, packed `[n]` float32 (float64 if the model
        is), on the CPU as the batch is, with a graph."""
        responses = Responses.of(batch, first, last, self.device)
        return responses.log_probs(self.model(**responses.arguments()).logits, self.temperature).cpu()


def device_named(name: str) -> torch.device:
    """The device "cpu", "cuda" or "cuda:i".

    Raises:
        ReplayError: another name, or a device that is not there.
    """
    kind, colon, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (colon and not (index.isascii() and index.isdigit()))):
        raise ReplayError(f"--device is {name!r}; it must be cpu, cuda, or cuda:0 and on")
    if name != "cpu":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            build = "" if torch.version.cuda or torch.version.hip else ", and this torch is built for the CPU alone"
            raise ReplayError(f"--device {name}: torch sees no CUDA device{build}; take cpu, or run where there is one")
        if index and int(index) >= count:
            raise ReplayError(f"--device {name}: the last CUDA device is cuda:{count - 1}")
    return torch.device(name)


def _mismatch(key: Any) -> str:
    """A weight of another shape; transformers gives its name, or its name and two shapes."""
    if not isinstance(key, tuple):
        return str(key)
    name, *shapes = key
    return f"{name} has shape {' instead of '.join(str(list(shape)) for shape in shapes)}"


def _first(names: list[str]) -> str:
    """The first three names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def token_range(batch: Batch, first: int, last: int) -> slice:
    """Where the response tokens of rollouts `first .. last - 1` are."""
    assert batch.cu_seqlens is not None
    return slice(int(batch.cu_seqlens[first]), int(batch.cu_seqlens[last]))


def score(policy: Policy, batch: Batch, max_tokens: int) -> Iterator[tuple[slice, Tensor]]:
    """Log-probs of all response tokens, a micro-batch at a time, without a graph: (where, `[n]`)."""
    with torch.no_grad():
        for first, last in batch.micro_batches(max_tokens):
            yield token_range(batch, first, last), policy.log_probs(batch, first, last)
