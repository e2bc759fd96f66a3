"""What verl's V1 trainer knows about the rows of a batch and an estimator is not told.

verl calls a registered estimator with rewards, a mask and prompt ids. Which rows are one session, which tokens
rejection took out of the mask, how a session ended and which weights sampled it lie in TransferQueue. The trainer of
fastadv.integrations.verl.trainer fetches them, and the estimator that runs inside of its call finds them here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

REFERENCE = "fastadv_reference_advantages"  # field of TransferQueue: see engine.py
PADDING_UID = "pad"  # verl's synthetic rows: verl/trainer/ppo/padding_utils.py


@dataclass(frozen=True, eq=False)
class SessionKeys:
    """The keys of a batch taken apart; a key is "{uid}_{session}_{output}".

    Attributes:
        sessions: `[B]` int64, number of the session of each row, from 0 in order of appearance.
        outputs: `[B]` int64, place of the row among the outputs of its session.
        last: `[B]` bool, the last output of its session.
        ids: `[S]` int64 per session, a hash of its key: what coins are tossed by.
        prompts: `[B]` int64, a hash of each row's uid: what coins of groups are tossed by.
        uids: `[B]`, prompt of each row.
    """

    sessions: Tensor  # [B]
    outputs: Tensor  # [B]
    last: Tensor  # [B]
    ids: Tensor  # [S]
    prompts: Tensor  # [B]
    uids: tuple[str, ...]

    @classmethod
    def of(cls, keys: Sequence[str]) -> SessionKeys:
        """Takes keys apart.

        Raises:
            ValueError: a key of another form, two rows with one key.
        """
        number: dict[str, int] = {}
        sessions, outputs, uids = [], [], []
        for key in keys:
            parts = key.rsplit("_", 2)
            if len(parts) != 3 or not parts[2].isdigit():
                raise ValueError(f"key {key!r} of the batch is not of the form uid_session_output")
            uids.append(parts[0])
            sessions.append(number.setdefault(f"{parts[0]}_{parts[1]}", len(number)))
            outputs.append(int(parts[2]))
        if len(set(zip(sessions, outputs, strict=True))) < len(keys):
            raise ValueError("two rows of the batch have the same key")
        session, output = torch.tensor(sessions, dtype=torch.int64), torch.tensor(outputs, dtype=torch.int64)
        top = torch.full((len(number),), -1, dtype=torch.int64).scatter_reduce_(0, session, output, "amax")
        return cls(session, output, output == top[session], _hashes(number), _hashes(uids), tuple(uids))


def _hashes(names: Iterable[str]) -> Tensor:
    """63 bits of each name, the same in every process."""
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return torch.tensor([int.from_bytes(d, "little") >> 1 for d in digests], dtype=torch.int64)


@dataclass(eq=False)
class TrainerRows:
    """What the trainer knows, in the order of the batch's rows.

    Attributes:
        keys: sessions and outputs of the rows.
        sampled: `[B, R]` bool, tokens that the model sampled, whatever rejection took out of the response mask.
        lengths: `[B]` int64, response tokens.
        padding: `[B]` bool, verl's synthetic rows.
        scores: `[B]` rewards before shaping and penalties, which say what is solved.
        endings: `[B]` int64, values of Ending; that of a session is its last output's. None: nothing tells.
        versions: `[B, 2]` int64, versions of the weights at the first and the last token; -1 is unknown. None: nothing
            tells.
        extra_fields: `[B]`, what the agent loop put beside each output; empty: nothing.
        step: the trainer's global step.
    """

    keys: SessionKeys
    sampled: Tensor  # [B, R]
    lengths: Tensor  # [B]
    padding: Tensor  # [B]
    scores: Tensor  # [B]
    endings: Tensor | None = None  # [B]
    versions: Tensor | None = None  # [B, 2]
    extra_fields: Sequence[Mapping[str, Any]] = ()
    step: int = 0

    @property
    def train_version(self) -> int | None:
        """Version of the weights that are about to be updated; None where nothing tells versions."""
        return None if self.versions is None else max(self.step - 1, 0)
