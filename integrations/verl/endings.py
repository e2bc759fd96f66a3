"""How a session ended, from what verl keeps: lengths, turns, and the last token.

verl marks nothing: its vLLM server writes "completed" for a reply that stopped and for one that was cut, and agent
loops end at response_length, max_assistant_turns or max_user_turns without a word. An agent loop of the user's own may
leave its reason in `extra_fields`, which then counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastadv import Ending
from fastadv.statuses import endings

ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Caps:
    """What ends a session of verl, from its yaml.

    Attributes:
        response_length: most response tokens (model and tools) of a row.
        assistant_turns: most replies of the model; None: no limit.
        user_turns: most replies of tools; None: no limit.
        model_length: most tokens of prompt and response; None: no limit besides.
    """

    response_length: int
    assistant_turns: int | None = None
    user_turns: int | None = None
    model_length: int | None = None

    @classmethod
    def of(cls, config: Any) -> Caps:
        """Reads `actor_rollout_ref.rollout` of verl's configuration."""
        rollout = config.actor_rollout_ref.rollout
        turns = rollout.get("multi_turn") or {}
        # Without the tool agent loop there is one reply, whatever the limits say.
        limits = {name: turns.get(f"max_{name}_turns") for name in ("assistant", "user")} if turns.get("enable") else {}
        return cls(
            int(rollout.response_length), limits.get("assistant"), limits.get("user"), rollout.get("max_model_len")
        )


def derived(
    caps: Caps,
    *,
    lengths: Tensor,
    prompt_lengths: Tensor,
    num_turns: Tensor,
    replies: Tensor,
    last_ids: Tensor | None = None,
    end_ids: Sequence[int] = (),
) -> Tensor:
    """Endings of rows by the caps that they ran into.

    LENGTH_CAP: the response fills `response_length`, or its last token, which the model sampled, does not end a reply.
    CONTEXT_CAP: of the others, prompt and response fill the model's window. TURN_CAP: then as many replies as
    max_assistant_turns, or as many tool replies as max_user_turns. SUBMITTED: the rest.

    What cannot be told: an agent that submits with its last turn or its last token counts as capped, and one whose tool
    reply would not have fit counts as submitted.

    Args:
        caps: the limits.
        lengths: `[B]` response tokens.
        prompt_lengths: `[B]` prompt tokens.
        num_turns: `[B]`, verl's: replies of the model, replies of tools, and 1 for the prompt.
        replies: `[B]` replies of the model.
        last_ids: `[B]`, the last token where the model sampled it, -1 where a tool wrote it; None: not looked at.
        end_ids: tokens that end a reply; empty: not looked at.

    Returns:
        `[B]` int64, values of Ending.
    """
    result = torch.full_like(lengths, int(Ending.SUBMITTED))
    tool_replies = num_turns - 1 - replies
    for count, most in ((replies, caps.assistant_turns), (tool_replies, caps.user_turns)):
        if most:
            result[count >= most] = int(Ending.TURN_CAP)
    if caps.model_length:
        result[prompt_lengths + lengths >= caps.model_length] = int(Ending.CONTEXT_CAP)
    cut = lengths >= caps.response_length
    if last_ids is not None and len(end_ids):
        cut |= (last_ids >= 0) & ~torch.isin(last_ids, torch.tensor(list(end_ids)))
    result[cut] = int(Ending.LENGTH_CAP)
    return result


def reported(extra_fields: Sequence[Mapping[str, Any]], field: str, system: str, known: Tensor) -> Tensor:
    """Endings where the agent loop left a reason in its `extra_fields`; the others stay.

    Args:
        extra_fields: `[B]`, of each row.
        field: key of the reason.
        system: whose words it is, as `fastadv.statuses.ending` takes it.
        known: `[B]`, what was derived.

    Raises:
        ValueError: no row has the field; a reason that the system does not know.
    """
    reasons = [fields.get(field) if isinstance(fields, Mapping) else None for fields in extra_fields]
    rows = [row for row, reason in enumerate(reasons) if reason is not None]
    if not rows:
        raise ValueError(
            f"algorithm.fastadv.trainer.ending_field is {field!r}, but no row of the batch has it in its "
            "extra_fields; the agent "
            "loop has to set AgentLoopOutput.extra_fields"
        )
    told = endings(system, [reasons[row] for row in rows])
    result = known.clone()
    result[torch.tensor(rows)] = told
    return result
