"""Rollouts of a training step as a file of the portable format (docs/portable_format.md), for `fastadv replay`.

verl's own log of rollouts has texts and a score: enough for a census, and not for gradients.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from fastadv.integrations.verl.sessions import SessionBatch
from torch import Tensor

from fastadv import TokenIds
from fastadv.replay.readers import portable


def write_rollouts(
    folder: str | Path,
    step: int,
    update: int,
    sessions: SessionBatch,
    prompts: Tensor,
    responses: Tensor,
    rollout_log_probs: Tensor | None = None,
) -> Path:
    """Writes one file.

    Args:
        folder: made if it is not there.
        step, update: the trainer's step, and the local update in it; they name the file.
        sessions: the step's sessions.
        prompts, responses: ids of the rows, nested as TransferQueue has them. A session of several outputs is no one
            sequence, so that a batch with such sessions is written without ids: census and arms, no gradients.
        rollout_log_probs: of the sampler, nested like the responses.

    Returns:
        The file, "step_00000012_0.safetensors"; one that a run before a restart wrote is replaced.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    batch, order = sessions.batch, sessions.order.tolist()
    if rollout_log_probs is not None:
        batch = replace(batch, rollout_log_probs=_packed(rollout_log_probs, order).to(torch.float32))
    if len(order) == batch.num_rollouts:
        batch = replace(batch, token_ids=_token_ids(prompts, responses, order))
    path = folder / f"step_{step:08d}_{update}.safetensors"
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    portable.write(part, batch)
    return part.replace(path)


def _packed(nested: Tensor, order: list[int]) -> Tensor:
    rows = nested.unbind()
    return torch.cat([rows[row] for row in order]) if order else nested.values()[:0]


def _token_ids(prompts: Tensor, responses: Tensor, order: list[int]) -> TokenIds:
    asked, given = prompts.unbind(), responses.unbind()
    rows = [torch.cat([asked[row], given[row]]) for row in order]
    ends = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    ids = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
    return TokenIds(ids.to(torch.int32), ends)
