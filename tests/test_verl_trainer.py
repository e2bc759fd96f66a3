"""verl's V1 trainer with sessions: its own code around, and the real TransferQueue beneath."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from command import DOCS
from torch import Tensor
from verl_import import verl_module
from verl_queue import VerlRows, agents

import fastadv as fa
from fastadv.replay.readers import portable
from fastadv.replay.readers.rollouts import ReadOptions

tq = verl_module("transfer_queue")
OmegaConf = verl_module("omegaconf").OmegaConf
trainer = verl_module("fastadv.integrations.verl.trainer")
NAMED = verl_module("fastadv.integrations.verl.registration").ESTIMATORS
POLICY_LOSSES = verl_module("fastadv.integrations.verl.policy_losses").POLICY_LOSSES
arms = verl_module("fastadv.integrations.verl.arms")
smoke = verl_module("examples.verl.smoke")
PARTITIONS = iter(range(10**6))
MODES = ("fastadv_sync", "fastadv_colocate_async", "fastadv_separate_async")


@pytest.fixture(scope="module")
def queue() -> Iterator[None]:
    """One TransferQueue for all tests, on one Ray."""
    ray = verl_module("ray")
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    tq.init()
    yield
    tq.close()
    ray.shutdown()


class Run:
    """A trainer of verl that has come to its advantages, with nothing else of it made."""

    def __init__(
        self, rows: VerlRows, name: str = "fastadv_turn", *, mode: str = MODES[0], own: Any = None, **algorithm: Any
    ):
        self.rows, self.metrics = rows, {}
        self.batch = tq.KVBatchMeta(partition_id=f"train{next(PARTITIONS)}", keys=list(rows.keys), tags=rows.tags)
        tq.kv_batch_put(
            keys=rows.keys, partition_id=self.batch.partition_id, tags=rows.tags,
            fields=verl_module("verl.utils.tensordict_utils").list_of_dict_to_tensordict(rows.fields),
        )  # fmt: skip
        self.trainer = object.__new__(verl_module("verl.trainer.ppo.v1").get_trainer_cls(mode))
        self.trainer.tokenizer, self.trainer.global_steps = None, 3
        self.trainer.config = OmegaConf.create({
            "algorithm": {
                "adv_estimator": name, "use_kl_in_reward": False, "gamma": 1.0, "lam": 1.0, "fastadv": own or {},
                **algorithm,
            },
            "actor_rollout_ref": {"rollout": {"response_length": 8, "n": 3, "multi_turn": {"enable": False}}},
        })  # fmt: skip
        self.batch = self.trainer._compute_advantage(self.batch, self.metrics)

    def field(self, name: str) -> Tensor:
        data = tq.kv_batch_get(keys=self.rows.keys, partition_id=self.batch.partition_id, select_fields=[name])
        return data[name].to_padded_tensor(0)


def by_hand(rows: VerlRows, kappa: float = 2.0) -> Tensor:
    """The turn-reached baseline (docs/theory.md, 13) by loops over sessions, their outputs and their turns."""
    sessions: dict[tuple[str, str], list[int]] = {}
    for row, key in enumerate(rows.keys):
        uid, session, _ = key.rsplit("_", 2)
        if not uid.startswith("pad"):
            sessions.setdefault((uid, session), []).append(row)
    reward, turns, of_token = {}, {}, {}
    for session, members in sessions.items():
        members.sort(key=lambda row: int(rows.keys[row].rsplit("_", 1)[1]))
        reward[session], turn = float(rows.fields[members[-1]]["rm_scores"].sum()), -1
        for row in members:
            inside = 0
            for t, on in enumerate(rows.fields[row]["loss_mask"].tolist()):
                turn += on and not inside
                inside = on
                if on:
                    of_token[row, t] = session, turn
        turns[session] = turn + 1
    result = torch.zeros(len(rows.keys), max(len(row["loss_mask"]) for row in rows.fields))
    for (row, t), (session, turn) in of_token.items():
        others = [s for s in sessions if s[0] == session[0] and s != session]
        reached = [reward[s] for s in others if turns[s] > turn]
        if not others:
            continue
        target = sum(reward[s] for s in others) / len(others)
        bucket = sum(reached) / len(reached) if reached else target
        shrink = len(reached) / (len(reached) + kappa)
        result[row, t] = reward[session] - target - shrink * (bucket - target)
    return result


@pytest.mark.parametrize("mode", MODES)
def test_the_turn_reached_baseline_of_sessions(queue: None, mode: str) -> None:
    run = Run(agents(), mode=mode)
    torch.testing.assert_close(run.field("advantages"), by_hand(run.rows), rtol=1e-6, atol=1e-6)
    assert torch.equal(run.field("returns"), run.field("advantages"))
    kappa = Run(agents(), mode=mode, own={"kappa": 0.5})
    torch.testing.assert_close(kappa.field("advantages"), by_hand(run.rows, 0.5), rtol=1e-6, atol=1e-6)


def test_a_session_counts_once(queue: None) -> None:
    """b's first session has two outputs: verl's own trainer would let its reward vote twice for any name but grpo."""
    run = Run(agents(), "fastadv_rloo")
    found = run.field("advantages")
    assert found[1].tolist() == [0.875, 0, 0.875, 0, 0, 0, 0, 0]  # 1 - (0 + 0.25) / 2
    assert found[5].tolist() == [0.875, 0.875, 0, 0, 0, 0, 0, 0]
    assert found[3].tolist() == [-0.625, 0, 0, 0, 0, 0, 0, 0]
    assert not found[4].any(), "a row of padding"


@pytest.mark.parametrize("std", [True, False])
def test_grpo_is_verls_own(queue: None, std: bool) -> None:
    """verl's estimator runs through as it is, and equals ours by sessions."""
    theirs, ours = (Run(agents(), name, norm_adv_by_std_in_grpo=std) for name in ("grpo", "fastadv_grpo"))
    torch.testing.assert_close(theirs.field("advantages"), ours.field("advantages"), rtol=1e-5, atol=1e-5)
    assert ours.metrics["fastadv/b"] == pytest.approx(3.25 / 7)
    assert theirs.metrics["fastadv/census/solved"] == 5.0
    assert "fastadv/b" not in theirs.metrics
    assert "fastadv/b" in Run(agents()).metrics


def test_the_critics_values_come_along(queue: None) -> None:
    """verl passes them to its own name only; with a trainer of ours to the other too, over rows as verl has them."""
    rows = agents()
    for row in rows.fields:
        row["values"] = torch.rand(len(row["responses"]))
    given = {"gamma": 0.97, "lam": 0.9}
    theirs, ours = (Run(rows, name, **given) for name in ("gae", "fastadv_gae"))
    on = rows.padded("loss_mask") != 0
    for name in ("advantages", "returns"):
        torch.testing.assert_close(ours.field(name), torch.where(on, theirs.field(name), 0.0), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="fastadv_gae needs the critic's values"):
        Run(agents(), "fastadv_gae")


def test_rejected_tokens_end_no_turn(queue: None) -> None:
    """Rollout correction takes tokens out of the response mask, in the middle of turns: turns stay what was sampled."""
    rows = agents()
    for row in rows.fields:
        row["rollout_log_probs"] = row["old_log_probs"].clone()
        row["rollout_log_probs"][1::3] += 3.0
    run = Run(rows, rollout_correction={
        "bypass_mode": False, "rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0",
        "rollout_is_batch_normalize": False, "rollout_is_threshold": 2.0,
    })  # fmt: skip
    kept = run.field("response_mask")
    assert bool((kept != rows.padded("loss_mask")).any()), "something was rejected"
    torch.testing.assert_close(run.field("advantages"), by_hand(rows) * kept, rtol=1e-6, atol=1e-6)


# ---- arms ------------------------------------------------------------------------------------------------------------


def test_an_arm_sees_how_sessions_ended(queue: None) -> None:
    """a/1 fills the response of 8 tokens: the mask takes it out, by its advantage or by the masks."""
    weight = Run(agents(), "fastadv_arm", own={"arm": "mask"})
    assert not weight.field("advantages")[2].any()
    assert weight.field("response_mask")[2].any()
    assert weight.metrics["fastadv/cap_hit_rate"] == pytest.approx(1 / 7)
    assert weight.metrics["fastadv/excluded_rate"] == pytest.approx(1 / 7)
    gone = Run(agents(), "fastadv_arm", own={"arm": "mask", "trainer": {"exclusion": "mask"}})
    assert torch.equal(gone.field("advantages"), weight.field("advantages"))
    for name in ("response_mask", "loss_mask"):
        assert not gone.field(name)[2].any()
        assert torch.equal(gone.field(name)[[0, 1, 3, 5]], weight.field(name)[[0, 1, 3, 5]])


def test_an_arm_in_the_yaml(queue: None) -> None:
    arm = {"name": "mine", "excludes": ["budget"], "baseline": "mean", "scale": "std"}
    run = Run(agents(), "fastadv_arm", own={"arm": arm})
    a = run.field("advantages")
    assert a[0, 0] == a[6, 1] > 0
    with pytest.raises(ValueError, match=r"algorithm\.fastadv\.arm: .*baselin"):
        Run(agents(), "fastadv_arm", own={"arm": {"name": "mine", "baselin": "mean"}})
    with pytest.raises(ValueError, match=r"algorithm\.fastadv\.arm: 'masc' is no arm"):
        Run(agents(), "fastadv_arm", own={"arm": "masc"})


def test_the_record_is_of_what_the_estimator_did(queue: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every named arm: the estimator that verl calls, and the trainer that measures the arm, make the same of it."""
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "fastadv")
    refused: dict[str, str] = {}
    for name in fa.ARMS:
        rows = agents()
        for i, tag in enumerate(rows.tags):
            tag |= {"min_global_steps": i % 3, "max_global_steps": 2}
        try:
            run = Run(rows, "fastadv_arm", own={"arm": name})
        except ValueError as error:
            refused[name] = str(error)
            continue
        ((made, _),) = run.trainer.__dict__["_fastadv_runs"]
        torch.testing.assert_close(run.field("advantages"), arms.arm_advantages(made), rtol=1e-6, atol=1e-6, msg=name)
    assert list(refused) == ["microcoder"], "which looks for repetitions in token ids"
    assert "algorithm.fastadv.arm: Arm 'microcoder'" in refused["microcoder"]


def test_stale_tokens_are_told_by_versions(queue: None) -> None:
    """Weights 0 to 2 sampled the second session; verl tells the first and the last of them, and trains version 2."""
    rows = VerlRows().add("a", 0, 0, [1, 1], 1.0, versions=(2, 2)).add("a", 1, 0, [1, 1], 0.0, versions=(0, 2))
    arm = {"name": "s", "token_weights": {"rule": "stale-tokens", "after": 1}}
    run = Run(rows, "fastadv_arm", own={"arm": arm})
    assert run.field("advantages").tolist() == [[1.0, 1.0], [0.0, -1.0]]
    assert run.metrics["fastadv/staleness/most"] == 2.0
    assert run.metrics["fastadv/staleness/mean"] == 0.5


def test_a_matched_update_leaves_the_references_advantages(queue: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="set VERL_ENGINE_VENDOR=fastadv"):
        Run(agents(), "fastadv_arm", own={"arm": "matched-update"})
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "fastadv")
    run = Run(agents(), "fastadv_arm", own={"arm": "matched-update"})
    plain = Run(agents(), "fastadv_arm", own={"arm": "none"})
    assert torch.equal(run.field("fastadv_reference_advantages"), plain.field("advantages"))
    assert not torch.equal(run.field("advantages"), plain.field("advantages"))


# ---- rewards ---------------------------------------------------------------------------------------------------------


def test_the_soft_overlong_penalty_is_in_the_rewards(queue: None) -> None:
    own = {"trainer": {"reward": {"overlong": {"cache_length": 4}}, "end_ids": []}}
    run = Run(agents(), "fastadv_dr_grpo", own=own)
    scores = run.field("rm_scores").sum(1)
    assert scores.tolist() == pytest.approx([1.0, 1.0, -1.0, 0.0, 0.0, 1.0, 1.0, 0.5, 0.0])  # lengths 8 and 5
    a = run.field("advantages")
    assert float(a[2, 0]) == pytest.approx(-1.0 - 1 / 3)
    assert run.metrics["fastadv/census/solved"] == 5.0, "solved is what the environment says, penalised or not"


def test_zero_on_cap(queue: None) -> None:
    rows = VerlRows().add("a", 0, 0, [1] * 8, 1.0).add("a", 1, 0, [1], 1.0)
    zeroed = Run(rows, "fastadv_rloo", own={"trainer": {"reward": {"zero_on_cap": "zero"}, "end_ids": []}})
    assert zeroed.field("rm_scores").sum(1).tolist() == [0.0, 1.0]
    kept = Run(rows, "fastadv_rloo", own={"trainer": {"reward": {"zero_on_cap": "keep"}, "end_ids": []}})
    assert kept.field("rm_scores").sum(1).tolist() == [1.0, 1.0]


def test_an_agent_loops_own_ending(queue: None) -> None:
    rows = VerlRows().add("a", 0, 0, [1], 0.0, extra={"why": "length"}).add("a", 1, 0, [1], 1.0, extra={"why": "stop"})
    own = {"trainer": {"ending_field": "why", "ending_system": "vllm"}}
    assert Run(rows, own=own).metrics["fastadv/census/budget"] == 1.0
    assert Run(rows).metrics["fastadv/census/budget"] == 0.0


# ---- what is logged --------------------------------------------------------------------------------------------------


def test_records_are_written_when_verl_has_its_metrics(queue: None, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run = Run(agents(), own={"trainer": {"record": str(path), "run": "seed 1"}})
    base = next(c for c in type(run.trainer).__mro__ if c.__name__ == "PPOTrainer")
    with pytest.MonkeyPatch.context() as patch:  # verl's own metrics want a cluster
        patch.setattr(base, "_compute_metrics", lambda *args, **kwargs: None)
        run.metrics["actor/pg_clipfrac"] = 0.125
        run.trainer._compute_metrics(run.batch, run.metrics, {"step": 2.5}, global_steps=3, epoch=0)
        run.trainer._compute_metrics(run.batch, run.metrics, {"step": 2.5}, global_steps=4, epoch=0)
    (record,) = fa.read_records(path)
    assert (record.step, record.arm, record.run, record.rollouts) == (3, "turn-reached", "seed 1", 7)
    assert (record.clip_ratio, record.wall_clock_s) == (0.125, 2.5)
    assert record.versions["verl"] == verl_module("verl").__version__
    assert record.b == pytest.approx(run.metrics["fastadv/b"])
    assert record.extra["local_update"] == 0
    assert json.loads(path.read_text())["census"] == {"solved": 5, "failed": 1, "budget": 1, "infra": 0}


def test_rollouts_are_written_for_replay(queue: None, tmp_path: Path) -> None:
    """A batch with sessions of several outputs has no ids; one without has them, the response at the end of each
    row."""
    several = Run(agents(), own={"trainer": {"rollouts": str(tmp_path / "several")}})
    batch = portable.read(tmp_path / "several" / "step_00000003_0.safetensors", ReadOptions()).batch
    assert batch.token_ids is None
    assert batch.num_rollouts == 7
    assert batch.census().counts[fa.Outcome.SOLVED] == 5
    assert int(batch.capped.sum()) == 1
    rows = VerlRows().add("a", 0, 0, [1, 0, 1], 1.0, prompt=2).add("padx", 0, 0, [0], 0.0).add("a", 1, 0, [1], 0.0)
    Run(rows, own={"trainer": {"rollouts": str(tmp_path / "one")}})
    batch = portable.read(tmp_path / "one" / "step_00000003_0.safetensors", ReadOptions()).batch
    assert batch.token_ids.ids.tolist() == [0, 1, 10, 11, 12, 0, 1, 2, 10]
    assert batch.mask.tolist() == [True, False, True, True]
    assert batch.rewards.tolist() == [1.0, 0.0]
    expected = torch.cat([rows.fields[0]["rollout_log_probs"], rows.fields[2]["rollout_log_probs"]])
    assert torch.equal(batch.rollout_log_probs, expected)
    before = sorted(path.name for path in (tmp_path / "one").iterdir())
    Run(rows, own={"trainer": {"rollouts": str(tmp_path / "one")}})  # after a restart
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == before
    assert several.metrics


def test_metrics_are_numbers(queue: None) -> None:
    metrics = Run(agents()).metrics
    assert all(isinstance(value, float) for name, value in metrics.items() if name.startswith("fastadv/"))
    aggregator = verl_module("verl.trainer.ppo.v1.utils").MetricsAggregator()
    for weight in (1, 3):
        aggregator.add_step_metrics(metrics, sample_count=weight)
    kept = aggregator.get_aggregated_metrics()
    assert {name: kept[name] for name in metrics} == pytest.approx(metrics), "no name is one that verl adds up"


# ---- the example, and what the page says -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of what verl, hydra and transformers say to each other
def test_a_step_of_verl_on_the_committed_rollouts(queue: None, tmp_path: Path) -> None:
    """docs/verl.md's first step, and the same with verl's own names: what should be equal is."""
    path = tmp_path / "record.jsonl"
    metrics = smoke.run([f"algorithm.fastadv.trainer.record={path}"])
    (line,) = fa.read_records(path)
    assert line.arm == "turn-reached"
    assert line.wall_clock_s > 0
    rollouts = smoke.rollouts()
    counts = rollouts.census().counts
    # A rollout that fails with its last turn cannot be told from one that was stopped there.
    at_the_cap = (rollouts.outcomes == fa.Outcome.FAILED) & (rollouts.segments.turns() == smoke.MAX_TURNS)
    late = int(at_the_cap.sum())
    assert 0 < late < 10
    assert metrics["fastadv/census/solved"] == counts[fa.Outcome.SOLVED]
    assert metrics["fastadv/census/failed"] == counts[fa.Outcome.FAILED] - late
    assert metrics["fastadv/census/budget"] == counts[fa.Outcome.BUDGET] + late
    assert metrics["actor/grad_norm"] > 0
    own = [
        "trainer.v1.trainer_mode=sync",
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
        "algorithm.adv_estimator=grpo",
    ]
    record = f"algorithm.fastadv.trainer.record={tmp_path / 'grpo.jsonl'}"
    ours = ["algorithm.adv_estimator=fastadv_grpo", "~algorithm.fastadv.kappa", record]
    theirs, found = smoke.run(own), smoke.run(ours)
    shared = set(theirs) & set(found)
    assert {"actor/pg_loss", "actor/grad_norm", "critic/advantages/max", "actor/pg_clipfrac"} <= shared
    timed = {name for name in shared if name.startswith(("timing", "perf"))}
    assert {name: found[name] for name in shared - timed} == pytest.approx(
        {name: theirs[name] for name in shared - timed}, rel=1e-4, abs=1e-5
    )


def test_the_page_has_every_key_and_every_name() -> None:
    page = (DOCS / "verl.md").read_text()
    keys = [f.name for f in fields(trainer.TrainerOptions) if f.name not in ("reward", "own")]
    keys += ["reward.overlong.cache_length", "reward.zero_on_cap", "reward.stop_properly"]
    for name in (*keys, *NAMED, *POLICY_LOSSES, *MODES):
        assert re.search(rf"[`=]{re.escape(name)}[` ,.]", page), name
