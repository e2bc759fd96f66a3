"""One step of verl on committed rollouts, on a CPU: python -m examples.verl.smoke [verl's overrides]

verl's configuration, TransferQueue, trainer, advantages and actor loss are verl's own; what needs GPUs is left out: the
rollouts are those of examples/frozen_lake instead of a server's, and one process holds the policy instead of workers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fastadv import Batch

ROOT = Path(__file__).parents[2]
LAKE = ROOT / "examples" / "frozen_lake"
DEFAULTS = (ROOT / "examples" / "verl" / "fastadv.yaml").read_text()
# Of the committed rollouts, which verl's configuration has to know.
MAX_TURNS, PROMPT_TOKENS, RESPONSE_TOKENS, ROLLOUTS = 12, 16, 96, 8
STEP = 1


def configuration(overrides: list[str]) -> Any:
    """verl's own, with what fastadv.yaml and the command line change."""
    import yaml
    from hydra import compose, initialize_config_module

    changes = [
        f"actor_rollout_ref.rollout.response_length={RESPONSE_TOKENS}",
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        f"actor_rollout_ref.rollout.multi_turn.max_assistant_turns={MAX_TURNS}",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"actor_rollout_ref.model.path={LAKE / 'policy'}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.actor.optim.lr=1e-3",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*changes, *yaml.safe_load(DEFAULTS), *overrides])


@contextmanager
def transfer_queue() -> Iterator[None]:
    """verl's store of rows, on a Ray of this process's own."""
    import ray
    import transfer_queue as tq

    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    tq.init()
    try:
        yield
    finally:
        tq.close()
        ray.shutdown()


def rollouts() -> Batch:
    """The committed rollouts."""
    from fastadv.replay import readers
    from fastadv.replay.readers.rollouts import ReadOptions

    batch = readers.read(LAKE / "rollouts.pt", ReadOptions()).batch
    assert batch is not None
    return batch


def rows_of_rollouts() -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]]]:
    """The committed rollouts as verl's agent loops leave them in TransferQueue: keys, fields, tags."""
    batch = rollouts()
    assert batch.cu_seqlens is not None
    assert batch.token_ids is not None
    assert batch.rollout_log_probs is not None
    keys, fields, tags = [], [], []
    seen: dict[int, int] = {}
    for row in range(batch.num_rollouts):
        begin, end = batch.cu_seqlens[row : row + 2].tolist()
        first, last = batch.token_ids.cu_seqlens[row : row + 2].tolist()
        ids = batch.token_ids.ids[first:last].long()
        prompt, response = ids[: len(ids) - (end - begin)], ids[len(ids) - (end - begin) :]
        scores = torch.zeros(end - begin)
        scores[-1] = float(batch.rewards[row])
        group = int(batch.groups.index[row])
        session = seen[group] = seen.get(group, -1) + 1
        turns = int(batch.segments.turns()[row])
        keys.append(f"prompt{group}_{session}_0")
        fields.append({
            "uid": f"prompt{group}", "prompts": prompt, "responses": response, "rm_scores": scores,
            "response_mask": batch.mask[begin:end].long(), "loss_mask": batch.mask[begin:end].long(),
            "num_turns": 2 * turns, "extra_fields": {}, "rollout_log_probs": batch.rollout_log_probs[begin:end],
        })  # fmt: skip
        tags.append({"is_padding": False, "min_global_steps": 0, "max_global_steps": 0})
    return keys, fields, tags


def log_probs(model: Any, rows: list[dict[str, Any]]) -> list[Tensor]:
    """Log-probs of each row's response under the policy, through fastadv's kernels: no logits."""
    import fastadv as fa

    found = []
    for row in rows:
        ids = torch.cat([row["prompts"], row["responses"]])
        hidden = model.model(input_ids=ids[None, :-1]).last_hidden_state[0]
        first = len(row["prompts"]) - 1
        found.append(fa.linear_log_probs(hidden[first:], model.lm_head.weight, ids[first + 1 :]).log_probs)
    return found


def nested(parts: list[Tensor]) -> Tensor:
    """Rows of different lengths as verl's engines have them."""
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def update_actor(config: Any, model: Any, rows: list[dict[str, Any]], advantages: list[Tensor]) -> dict[str, float]:
    """A step of the actor with verl's `ppo_loss`, in micro-batches, and its metrics."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=actor.optim.lr)
    optimizer.zero_grad()
    tokens = int(sum(row["loss_mask"].sum() for row in rows))
    size = actor.ppo_micro_batch_size_per_gpu
    totals: dict[str, list[float]] = {}
    for begin in range(0, len(rows), size):
        part, own = rows[begin : begin + size], advantages[begin : begin + size]
        fields = {
            "prompts": nested([row["prompts"] for row in part]),
            "responses": nested([row["responses"] for row in part]),
            "input_ids": nested([torch.cat([row["prompts"], row["responses"]]) for row in part]),
            "response_mask": nested([row["response_mask"] for row in part]),
            "old_log_probs": nested([row["old_log_probs"] for row in part]), "advantages": nested(own),
        }  # fmt: skip
        data = TensorDict(fields, batch_size=len(part))
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(rows))
        # verl's engines give a log-prob for every token of the sequence; those of prompts are not read.
        whole = [
            torch.cat([new.new_zeros(len(row["prompts"]) - 1), new, new.new_zeros(1)])
            for row, new in zip(part, log_probs(model, part), strict=True)
        ]
        loss, metrics = ppo_loss(actor, {"log_probs": nested(whole)}, data)
        loss.backward()
        for name, metric in metrics.items():
            totals.setdefault(name, []).append(float(metric.aggregate() if hasattr(metric, "aggregate") else metric))
    totals["actor/grad_norm"] = [float(torch.nn.utils.clip_grad_norm_(model.parameters(), actor.optim.clip_grad))]
    optimizer.step()
    return {
        name: sum(values) if name == "actor/pg_loss" else sum(values) / len(values) for name, values in totals.items()
    }


def run(overrides: list[str]) -> dict[str, float]:
    """The step; returns its metrics."""
    import transfer_queue as tq
    from transformers import AutoModelForCausalLM
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    config = configuration(overrides)
    model = AutoModelForCausalLM.from_pretrained(config.actor_rollout_ref.model.path)
    keys, rows, tags = rows_of_rollouts()
    with torch.no_grad():
        for row, old in zip(rows, log_probs(model, rows), strict=True):
            row["old_log_probs"] = old
    metrics: dict[str, Any] = {}
    trainer = object.__new__(get_trainer_cls(config.trainer.v1.trainer_mode))
    trainer.config, trainer.tokenizer, trainer.global_steps = config, None, STEP
    batch = tq.KVBatchMeta(partition_id="train", keys=keys, tags=tags)
    tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags)
    # What verl's metrics ask of a cluster.
    trainer.use_critic, trainer._rollout_moe_lb_metrics_accumulator = False, None
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    begin = time.perf_counter()
    trainer._compute_advantage(batch, metrics)
    data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["advantages", "response_mask", "loss_mask"])
    for row, mask, counted in zip(rows, data["response_mask"].unbind(), data["loss_mask"].unbind(), strict=True):
        row["response_mask"], row["loss_mask"] = mask, counted
    metrics |= update_actor(config, model, rows, list(data["advantages"].unbind()))
    trainer._compute_metrics(batch, metrics, {"step": time.perf_counter() - begin}, global_steps=STEP, epoch=0)
    return {name: float(value) for name, value in metrics.items()}


def main() -> None:
    """Prints what verl would log."""
    with transfer_queue():
        metrics = run(sys.argv[1:])
    for name in sorted(metrics):
        print(f"{name:44} {metrics[name]:.6g}")


if __name__ == "__main__":
    main()
