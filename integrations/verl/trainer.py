"""verl's V1 trainers with what advantages of agents need: sessions, the sampled mask, endings, versions.

`trainer.v1.trainer_mode=fastadv_sync` (or fastadv_colocate_async, fastadv_separate_async) is verl's trainer of that
mode and one method more: before verl computes advantages, the rows' sessions are read from TransferQueue, and
estimators named `fastadv_*` find them. verl's own code runs around it unchanged, with KL in the reward and rollout
correction.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transfer_queue as tq
from fastadv.integrations.record_metrics import census_metrics, record_metrics
from fastadv.integrations.verl.agent import AgentTurns
from fastadv.integrations.verl.arms import arm_advantages, arm_of, arm_run
from fastadv.integrations.verl.endings import Caps, derived, reported
from fastadv.integrations.verl.export import write_rollouts
from fastadv.integrations.verl.metrics import (
    StepRecords,
    record_of,
    removed_rows,
)
from fastadv.integrations.verl.rows import telling
from fastadv.integrations.verl.sessions import SessionBatch, row_versions, session_order
from fastadv.integrations.verl.trainer_keys import TrainerOptions
from fastadv.integrations.verl.trainer_rows import PADDING_UID, REFERENCE, SessionKeys, TrainerRows
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.v1 import (
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    register_trainer,
)

from fastadv import named_arm, outcomes_of

FIELDS = ["loss_mask", "prompts", "responses", "num_turns", "extra_fields", "rm_scores", "rollout_log_probs"]
TOLD = ("values", "old_log_probs")  # of the tokens, where verl has them: for the estimators that need them


class FastadvTrainer:
    """Mixin over a V1 trainer of verl: tells estimators about sessions, shapes rewards, logs what the arm did."""

    config: Any
    tokenizer: Any
    global_steps: int
    local_trigger_step: int = 0
    _fastadv_records: StepRecords | None = None

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        options = TrainerOptions.of(self.config.algorithm)
        rows, data = self._fastadv_rows(batch, options)
        if options.rollouts is not None:
            sessions = SessionBatch.of(rows.scores, rows, options)
            log_probs = data.get("rollout_log_probs", None)
            write_rollouts(
                options.rollouts, self.global_steps, self.local_trigger_step, sessions, data["prompts"],
                data["responses"], log_probs,
            )  # fmt: skip
        if options.reward.active:
            self._fastadv_shape(batch, rows, options)
        with telling(turns=turn_fields(rows), **row_fields(rows), **self._fastadv_tokens(batch)):
            batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        arm = arm_of(self.config.algorithm.adv_estimator, options.own)
        if arm is None:
            metrics.update(census_metrics(SessionBatch.of(rows.scores, rows, options).batch))
            return batch
        rewards = self._fastadv_rewards(batch, rows)
        run = arm_run(arm, rewards, rows, options)
        if arm.matched_update:
            self._fastadv_match(batch, rows, arm_advantages(arm_run(named_arm("none"), rewards, rows, options)))
        removed = removed_rows(run, options.exclusion)
        if removed is not None:
            self._fastadv_remove(batch, removed)
        metrics.update(record_metrics(record_of(run, rows)))
        self.__dict__.setdefault("_fastadv_runs", []).append((run, rows))
        return batch

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], timing_raw: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._compute_metrics(batch, metrics, timing_raw, *args, **kwargs)  # type: ignore[misc]
        runs = self.__dict__.pop("_fastadv_runs", [])
        if self._fastadv_records is None:
            self._fastadv_records = StepRecords(TrainerOptions.of(self.config.algorithm))
        for update, (run, rows) in enumerate(runs):
            self._fastadv_records.write(run, rows, update, metrics, timing_raw)
        return result

    def _fastadv_rows(self, batch: Any, options: TrainerOptions) -> tuple[TrainerRows, Any]:
        """The rows of a batch, and what was fetched for them."""
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=FIELDS)
        keys = SessionKeys.of(batch.keys)
        lengths = data["responses"].offsets().diff()
        padding = torch.tensor(
            [
                bool(tag.get("is_padding")) or uid.startswith(PADDING_UID)
                for uid, tag in zip(keys.uids, batch.tags, strict=True)
            ]
        )
        sampled = data["loss_mask"].to_padded_tensor(0) != 0  # [B, R]
        num_turns = torch.tensor([int(n) for n in data["num_turns"]])  # a tensor, or a list of tensordict's
        endings = derived(
            Caps.of(self.config),
            lengths=lengths,
            prompt_lengths=data["prompts"].offsets().diff(),
            num_turns=num_turns,
            replies=num_turns // 2,
            last_ids=_last_sampled(data["responses"], sampled, lengths),
            end_ids=self._fastadv_end_ids(options),
        )
        extra = list(data["extra_fields"]) if "extra_fields" in data else []
        if options.ending_field is not None:
            endings = reported(extra, options.ending_field, options.ending_system, endings)
        rows = TrainerRows(
            keys=keys,
            sampled=sampled,
            lengths=lengths,
            padding=padding,
            scores=data["rm_scores"].to_padded_tensor(0.0).sum(-1),
            endings=endings,
            versions=_versions(batch.tags),
            extra_fields=extra,
            step=self.global_steps,
        )
        return rows, data

    def _fastadv_tokens(self, batch: Any) -> dict[str, Tensor]:
        """Numbers of tokens that verl tells no registered estimator, `[B, R]` each."""
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(TOLD))
        return {name: data[name].to_padded_tensor(0.0) for name in TOLD if name in data}

    def _fastadv_rewards(self, batch: Any, rows: TrainerRows) -> Tensor:
        """Rewards of rows as the estimator saw them, `[B]`: shaped, and with verl's KL penalty."""
        name = "token_level_rewards" if self.config.algorithm.use_kl_in_reward else "rm_scores"
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[name])
        rewards: Tensor = data[name].to_padded_tensor(0.0).sum(-1)
        return rewards

    def _fastadv_end_ids(self, options: TrainerOptions) -> tuple[int, ...]:
        if options.end_ids is not None:
            return options.end_ids
        end = getattr(self.tokenizer, "eos_token_id", None)
        return () if end is None else (int(end),)

    def _fastadv_shape(self, batch: Any, rows: TrainerRows, options: TrainerOptions) -> None:
        """Writes shaped rewards over verl's, at the last token of each row, as verl's reward managers put them."""
        last = rows.keys.last
        sessions = rows.keys.sessions
        per_session = torch.zeros(int(sessions.max()) + 1, dtype=torch.int64)
        per_session[sessions[last]] = last.nonzero()[:, 0]
        of_row = per_session[sessions]  # the session's last row
        before = rows.scores[of_row]
        assert rows.endings is not None
        solved_above = options.own.solved_above
        found = outcomes_of(rows.endings[of_row], before, solved_above=solved_above, timeout=options.timeout)
        longest = int(self.config.actor_rollout_ref.rollout.response_length)
        shaped = options.reward.apply(
            before, rows.lengths[of_row], found.capped, longest=longest, solved_above=solved_above
        )
        shaped = torch.where(rows.padding, rows.scores, shaped)
        parts = [torch.zeros(n) for n in rows.lengths.tolist()]
        for part, value in zip(parts, shaped.tolist(), strict=True):
            if len(part):
                part[-1] = value
        fields = TensorDict({"rm_scores": torch.nested.as_nested_tensor(parts, layout=torch.jagged)}, len(parts))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _fastadv_match(self, batch: Any, rows: TrainerRows, reference: Tensor) -> None:
        """Leaves the reference arm's advantages for the engine, which steps as far as they would.

        Raises:
            ValueError: an engine that would not look at them.
        """
        if os.environ.get("VERL_ENGINE_VENDOR") != "fastadv":
            raise ValueError(
                "algorithm.fastadv.arm has matched_update, which fastadv's engine does: set "
                "VERL_ENGINE_VENDOR=fastadv for "
                "the driver and the workers (FSDP), or take an arm without"
            )
        parts = [row[:n] for row, n in zip(reference, rows.lengths.tolist(), strict=True)]
        fields = {REFERENCE: torch.nested.as_nested_tensor(parts, layout=torch.jagged)}
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, len(parts)))

    def _fastadv_remove(self, batch: Any, removed: Tensor) -> None:
        """Takes rows out of the masks that losses and denominators read."""
        names = ["response_mask", "loss_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        fields = {}
        for name in names:
            parts = [part * (not gone) for part, gone in zip(data[name].unbind(), removed.tolist(), strict=True)]
            fields[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, len(removed)))


def row_fields(rows: TrainerRows) -> dict[str, Any]:
    """What estimators are told, as fields of `rows.Rows`."""
    keys = rows.keys
    return {
        "sampled": rows.sampled,
        "sessions": keys.sessions,
        "outputs": keys.outputs,
        "lengths": rows.lengths,
        "padding": rows.padding,
        "endings": rows.endings,
        "row_ids": keys.ids[keys.sessions],
        "group_ids": keys.prompts,
        "versions": row_versions(rows),
        "train_version": rows.train_version,
        "scores": rows.scores,
    }


def turn_fields(rows: TrainerRows) -> AgentTurns:
    """Outputs of sessions as turns of trajectories, for the estimators of verl-agent."""
    order = session_order(rows.keys.sessions, rows.keys.outputs)
    order = order[~rows.padding[order]]
    index = order.tolist()
    extra = [rows.extra_fields[row] if rows.extra_fields else {} for row in index]
    return AgentTurns(
        order, [rows.keys.uids[row] for row in index], rows.keys.sessions[order].tolist(),
        [fields.get("anchor_obs") for fields in extra], [fields.get("step_reward") for fields in extra],
    )  # fmt: skip


def _last_sampled(responses: Tensor, sampled: Tensor, lengths: Tensor) -> Tensor:
    """The last token of each row where the model sampled it, else -1; `[B]` int64."""
    ids = responses.values()
    ends = responses.offsets()[1:]  # type: ignore[attr-defined]
    there = lengths > 0
    last = torch.where(there, ids[(ends - 1).clamp(min=0)], -1)
    by_model = sampled.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0] if sampled.shape[1] else there
    return torch.where(there & by_model, last, -1)


def _versions(tags: list[dict[str, Any]]) -> Tensor | None:
    """Versions of the weights at the first and the last token of each row, `[B, 2]`; None where verl's tags lack
    them."""
    pairs = [(tag.get("min_global_steps"), tag.get("max_global_steps")) for tag in tags]
    if any(version is None for pair in pairs for version in pair):
        return None
    return torch.tensor(pairs, dtype=torch.int64).reshape(len(tags), 2)


@register_trainer("fastadv_sync")
class FastadvTrainerSync(FastadvTrainer, PPOTrainerSync):
    """verl's synchronous trainer with sessions."""


@register_trainer("fastadv_colocate_async")
class FastadvTrainerColocateAsync(FastadvTrainer, PPOTrainerColocateAsync):
    """verl's colocated asynchronous trainer with sessions."""


@register_trainer("fastadv_separate_async")
class FastadvTrainerSeparateAsync(FastadvTrainer, PPOTrainerSeparateAsync):
    """verl's asynchronous trainer on separate resources with sessions."""


TRAINERS = {
    "fastadv_sync": FastadvTrainerSync,
    "fastadv_colocate_async": FastadvTrainerColocateAsync,
    "fastadv_separate_async": FastadvTrainerSeparateAsync,
}
