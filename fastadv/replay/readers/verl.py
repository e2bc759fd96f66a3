"""verl's rollout JSON lines (`trainer.rollout_data_dir`): one object a rollout with input, output, score and step.

There are no tokens, masks or log-probs in them, and no word on truncation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fastadv.groups import group_index
from fastadv.outcomes import Ending, outcomes_of
from fastadv.replay.errors import ReplayError, counted
from fastadv.replay.readers.rollouts import ReadOptions, Rollouts, label_text, reward_of, short

REFUSED = (
    "verl's rollout log carries text and scores only: no tokens, masks or turns, and no word on truncation, so a "
    "capped rollout cannot be told from a wrong answer. Arms and gradients need the portable format or a Miles dump"
)


def _line(path: Path, number: int, text: str) -> dict[str, Any]:
    where = f"{path}, line {number}"
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReplayError(f"{where} is no JSON ({error}); a log has one object a line") from error
    if not isinstance(fields, dict):
        raise ReplayError(f"{where} is a {type(fields).__name__}, not an object")
    for name in ("input", "output", "score"):
        if name not in fields:
            raise ReplayError(f"{where} has no {name!r}; verl writes input, output, score and step")
    if isinstance(fields["score"], (bool, str, list, dict)):
        raise ReplayError(f"{where}: 'score' is {short(fields['score'])}, not a number")
    if not isinstance(fields["input"], str):
        raise ReplayError(f"{where}: 'input' is a {type(fields['input']).__name__}, not the prompt's text")
    if not isinstance(fields.get("step"), (int, float, str, type(None))):
        raise ReplayError(f"{where}: 'step' is a {type(fields['step']).__name__}, not a number")
    return fields


def read(path: Path, options: ReadOptions) -> Rollouts:
    """Reads a rollout log of verl: rewards by group; a group is the rollouts of one step with the same input.

    Raises:
        ReplayError: a line that is no JSON or lacks a field, naming it.
    """
    rewards: list[float] = []
    groups: list[str] = []
    labels: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                fields = _line(path, number, text)
                rewards.append(reward_of(f"{path}, line {number}: 'score'", fields["score"]))
                group = f"{fields.get('step')}\n{fields['input']}"
                groups.append(group)
                labels.setdefault(group, label_text(fields["input"]))
                options.progress(number, 0)
    except UnicodeDecodeError as error:
        raise ReplayError(f"{path} is no text ({error})") from error
    except OSError as error:
        raise ReplayError(f"{path} cannot be read: {error.strerror}") from error
    if not rewards:
        raise ReplayError(f"{path} holds no rollouts")
    missing = sum(r != r for r in rewards)
    notes = ["verl's log does not say which rollouts were truncated: BUDGET cannot be counted"]
    if missing:
        notes.append(f"{counted(missing, 'rollout')} without a score (null or NaN): counted as INFRA")
    if options.reward_key is not None:
        notes.append("--reward-key does not apply: verl's score is no dictionary")
    scores = torch.tensor(rewards, dtype=torch.float64)
    endings = torch.full(scores.shape, Ending.UNKNOWN, dtype=torch.int64)
    return Rollouts(
        source="verl",
        outcomes=outcomes_of(endings, scores, solved_above=options.solved_above).outcomes,
        rewards=scores,
        groups=group_index(groups),
        labels=list(labels.values()),
        batch=None,
        notes=notes,
        refused=REFUSED,
    )
