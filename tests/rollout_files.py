"""Small rollout files and a small policy for the replay tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from fastadv.testing import miles_sample

VOCABULARY = 23


def sample(rng: random.Random, group: int, index: int, **changes: Any) -> dict[str, Any]:
    """A rollout of one to four turns; four turns are the cap."""
    turns = rng.randint(1, 4)
    mask, log_probs = [], []
    for turn in range(turns):
        mask += [1] * rng.randint(1, 3) + [0] * (rng.randint(1, 2) if turn < turns - 1 else 0)
    for on in mask:
        log_probs.append(-2 * rng.random() if on else 0.0)
    capped = turns == 4
    given: dict[str, Any] = {
        "group_index": group,
        "index": index,
        "prompt": f"task {group}",
        "response": "...",
        "prompt_ids": [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))],
        "response_ids": [rng.randrange(VOCABULARY) for _ in mask],
        "loss_mask": mask,
        "rollout_log_probs": log_probs,
        "reward": 0.0 if capped else float(rng.random() < 0.6),
        "status": "truncated" if capped else "completed",
        **changes,
    }
    return miles_sample(**given)


def samples(prompts: int = 12, size: int = 6, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [sample(rng, group, group * size + i) for group in range(prompts) for i in range(size)]


def write_dump(path: Path, entries: list[Any], **extra: Any) -> Path:
    torch.save({"rollout_id": 0, "samples": entries, "metadata": {}, **extra}, path)
    return path


def write_verl(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_policy(folder: Path, *, vocabulary: int = VOCABULARY, context: int = 64) -> Path:
    """A random GPT-2 of about 4,000 parameters, with weights large enough to have opinions. Unlike Llama's norms, which
    are float32 inside, it is float64 throughout when it is asked to be."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary, n_embd=16, n_layer=1, n_head=2, n_positions=context, initializer_range=0.4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder
