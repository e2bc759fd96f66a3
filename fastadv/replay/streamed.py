"""Where the replay asks for the segment Gram of its rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fastadv import gradproj
from fastadv.batch import Batch
from fastadv.dispatch import BackendUnavailableError
from fastadv.gradproj import flash
from fastadv.gradproj.families import parts_of
from fastadv.gradproj.gram import SegmentGram, checkpoint_fingerprint
from fastadv.replay.errors import ReplayError
from fastadv.replay.policy import Policy


def segment_gram(
    policy: Policy,
    batches: Sequence[Batch],
    *,
    max_tokens: int,
    attention: str = "auto",
    notes: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SegmentGram:
    """The Gram of every (rollout, turn) of all batches, with everything that is needed to ask it about arms later.

    Raises:
        ValueError: a model that cannot be intercepted, or gradients that are not finite.
    """
    gram = gradproj.segment_gram(
        policy.model, list(batches), level="turn", temperature=policy.temperature, max_tokens=max_tokens,
        attention=attention, progress=progress,
    )  # fmt: skip
    gram = replace(
        gram,
        temperature=policy.temperature,
        dtype=str(policy.parameters[0].dtype).removeprefix("torch."),
        checkpoint=checkpoint_fingerprint(policy.model),
    )
    return gram.with_rollouts(batches, notes=notes)


def check_attention(policy: Policy, attention: str) -> None:
    """Raises ReplayError unless the pass can run the attention that was asked for."""
    try:
        parts_of(policy.model)
        flash.choose(attention, policy.model)
    except (BackendUnavailableError, ValueError) as error:
        raise ReplayError(f"--attention {attention}: {error}") from error


def plan(policy: Policy, batches: Sequence[Batch], *, attention: str = "auto") -> str:
    """What the pass will take, for people: operations, streams, memory, and which attention it runs.

    Raises:
        ValueError: a model of a family that the planner, and so the pass, does not know.
    """
    return gradproj.plan(
        policy.model,
        batch=batches,
        level="turn",
        value_bytes=policy.parameters[0].element_size(),
        attention=attention,
    ).explain()
