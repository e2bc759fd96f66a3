"""Our hooks under Miles' and slime's own code: `make test-miles`, with checkouts named by FASTADV_MILES and
FASTADV_SLIME. Neither is on PyPI, so that other runs test against stand-ins only."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from fastadv.integrations import miles
from fastadv.integrations.miles.buffer import rescue_data_buffer
from fastadv.integrations.miles.context_parallel import Place, local_spans, local_tokens
from fastadv.integrations.miles.samples import LOSS_WEIGHT, TAKEN
from fastadv.integrations.miles.turns import apply_turn_advantages
from miles_standins import arguments, drawn
from test_miles_losses import PLAIN, VOCABULARY, logits_of, whole

import fastadv as fa
from fastadv.replay.readers.miles import read
from fastadv.replay.readers.rollouts import ReadOptions

pytestmark = pytest.mark.trainers

MILES = pytest.mark.skipif("FASTADV_MILES" not in os.environ, reason="FASTADV_MILES names no checkout of Miles")
SLIME = pytest.mark.skipif("FASTADV_SLIME" not in os.environ, reason="FASTADV_SLIME names no checkout of slime")
FLAGS = {"use_opd": True, "opd_type": "sglang", "opd_kl_coef": -1.0}


@pytest.fixture(autouse=True)
def _checkouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FASTADV_MILES", "FASTADV_SLIME"):
        if name in os.environ:
            monkeypatch.syspath_prepend(os.environ[name])
    rescue_data_buffer.cache_clear()


def real(samples: list[Any], framework: str = "miles") -> list[Any]:
    """The same samples as the framework's own class."""
    kind: Any = import_module(f"{framework}.utils.types").Sample
    found = []
    for sample in samples:
        own = kind(
            group_index=sample.group_index, index=sample.index, rollout_id=sample.rollout_id,
            tokens=list(sample.tokens), response_length=sample.response_length, reward=sample.reward,
            loss_mask=list(sample.loss_mask),
            weight_versions=list(sample.weight_versions), status=kind.Status(sample.status.value),
            metadata=dict(sample.metadata),
        )  # fmt: skip
        found.append(own)
    return found


def namespace(mapping: dict[str, Any], **flags: Any) -> Namespace:
    """Flags that Miles' own functions read."""
    usual = {
        "rewards_normalization": True, "grpo_std_normalization": True, "use_dynamic_global_batch_size": False,
        "kl_coef": 0.0, "use_rollout_logprobs": False, "skip_actor_forward_only": False, "qkv_format": "thd",
        "gamma": 1.0, "lambd": 1.0,
    }  # fmt: skip
    return arguments(mapping, **(usual | flags))


def one_rank() -> None:
    """Tells Miles that this is the only rank."""
    parallel = import_module("miles.backends.training_utils.parallel")
    one = import_module("miles.utils.ft_utils.process_group_utils").GroupInfo(rank=0, size=1, group=None)
    names = ("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp", "indep_dp")
    parallel.set_parallel_state(parallel.ParallelState(**dict.fromkeys(names, one)))


def converted(args: Namespace, samples: list[Any]) -> dict[str, Any]:
    convert = import_module("miles.ray.rollout.train_data_conversion").convert_samples_to_train_data
    found: dict[str, Any] = convert(args, samples, {}, None, miles.reward_post_process)
    return found


@MILES
@pytest.mark.parametrize("seed", range(5))
def test_its_own_normalisation_is_our_estimator(seed: int) -> None:
    own = import_module("miles.ray.rollout.train_data_conversion")._post_process_rewards
    args = namespace({"estimator": "grpo/miles"})
    samples = real(drawn(torch.Generator().manual_seed(seed), 6))
    _, expected = own(args, samples, None)
    raw, found = miles.reward_post_process(args, samples)
    assert found == pytest.approx(expected, abs=2e-6)
    assert raw == [s.reward for s in samples]


@MILES
def test_convert_carries_what_the_hook_sets() -> None:
    samples = real(drawn(torch.Generator().manual_seed(1), 6))
    data = converted(namespace({"arm": "mask", "exclusion": "mask"}), samples)
    gone = [s.remove_sample for s in samples]
    assert any(gone)
    assert not all(gone)
    for mask, total, removed in zip(data["loss_masks"], data["rollout_mask_sums"], gone, strict=True):
        assert (sum(mask) == total == 0) == removed
    assert [r == 0 for r, removed in zip(data["rewards"], gone, strict=True) if removed] == [True] * sum(gone)
    turned = converted(namespace({"arm": "turn-reached", "turns": "init"}), samples)
    assert all("fastadv_turn_advantages" in item for item in turned["round_number"])
    flagged = converted(namespace({"arm": "turn-reached", "turns": "flags"}, **FLAGS), samples)
    assert [len(kl) for kl in flagged["opd_reverse_kl"]] == data["response_lengths"]


@MILES
@pytest.mark.parametrize("size", [2, 4, 8])
def test_parts_of_sequences_are_its_own(size: int) -> None:
    tools = import_module("miles.backends.training_utils.cp_utils")
    generator = torch.Generator().manual_seed(size)
    for _ in range(60):
        prompt, response = (int(torch.randint(1, 30, (), generator=generator)) for _ in range(2))
        total, width = prompt + response, prompt + response + 7
        for rank in range(size):
            for qkv_format, padded in (("thd", None), ("bshd", width)):
                offsets = tools.get_logits_and_tokens_offset_with_cp(total, response, qkv_format, padded, rank, size)[2]
                expected = [i - (prompt - 1) for begin, end in offsets for i in range(begin, end)]
                spans = local_spans(total, response, Place(rank, size), width=padded)
                assert local_tokens(torch.arange(response), spans).tolist() == expected


@MILES
def test_both_routes_give_its_loss_the_same_advantages() -> None:
    """Through opd_reverse_kl with its own function, and through the init hook."""
    loss = import_module("miles.backends.training_utils.loss")
    one_rank()
    found = {}
    for route in ("flags", "init"):
        samples = real(drawn(torch.Generator().manual_seed(2), 5))
        args = namespace({"arm": "turn-reached", "turns": route}, **(FLAGS if route == "flags" else {}))
        data = converted(args, samples)
        data["total_lengths"] = [len(s.tokens) for s in samples]
        data["loss_masks"] = [torch.tensor(mask, dtype=torch.int) for mask in data["loss_masks"]]
        data["log_probs"] = [torch.zeros(length) for length in data["response_lengths"]]
        if route == "flags":
            data["opd_reverse_kl"] = [torch.tensor(kl, dtype=torch.float32) for kl in data["opd_reverse_kl"]]
        loss.compute_advantages_and_returns(args, data)
        if route == "init":
            apply_turn_advantages(data, Place(0, 1))
        masked = [torch.where(m > 0, a, 0.0) for m, a in zip(data["loss_masks"], data["advantages"], strict=True)]
        found[route] = torch.cat(masked)
    torch.testing.assert_close(found["flags"], found["init"], rtol=0, atol=1e-6)
    assert len(found["init"].unique()) > 5


@MILES
def test_its_buffer_keeps_what_the_coins_say() -> None:
    buffers = import_module("miles.rollout.fully_async_data_buffer")
    mapping = {"arm": "rescue:a=0.5,after=0", "seed": 3}
    args = namespace(
        mapping, max_weight_staleness=0, async_unused_samples_handler="drop", async_data_buffer_capacity_factor=50.0,
        dynamic_sampling_filter_path=None,
    )  # fmt: skip
    unused: list[Any] = []
    held = miles.RescueDataBuffer(buffers.DataBufferConstructorInput(args=args, unused_handler_fn=unused.append))
    groups = []
    for number in range(30):
        samples = drawn(torch.Generator().manual_seed(number), 1)
        for row, sample in enumerate(samples):
            sample.group_index, sample.index, sample.weight_versions = number, 10 * number + row, [str(number % 3)]
        groups.append(real(samples))
    coins = fa.keep(3, list(range(30)), 0.5, stream="rescue").tolist()
    kept = [g for g in range(30) if g % 3 == 2 or coins[g]]

    async def run() -> list[Any]:
        for group in groups:
            await held.put(buffers.DataBufferInput(prompt_group=group, group=group))
        return [await held.get(current_version=2) for _ in kept]

    taken = asyncio.run(run())
    assert [entry.group[0].group_index for entry in taken] == kept
    assert [entry.group[0].metadata[LOSS_WEIGHT] for entry in taken] == [1.0 if g % 3 == 2 else 2.0 for g in kept]
    assert sum(entry.group[0].metadata[TAKEN] for entry in taken) == kept[-1] + 1
    metrics = held.get_metrics()
    assert (
        metrics["rollout/fastadv/stale_groups_dropped"]
        == len(unused)
        == metrics["rollout/fully_async/stale_groups_filtered"]
    )


def dumped(framework: str, path: Path) -> list[Any]:
    samples = real(drawn(torch.Generator().manual_seed(4), 5), framework)
    torch.save({"rollout_id": 0, "samples": [sample.to_dict() for sample in samples], "metadata": {}}, path)
    return samples


@pytest.mark.parametrize("framework", [pytest.param("miles", marks=MILES), pytest.param("slime", marks=SLIME)])
def test_a_replay_is_the_hook(framework: str, tmp_path: Path) -> None:
    """Dumped samples, read back by `fastadv replay`, give the arms that the hook gave."""
    samples = dumped(framework, tmp_path / "dump.pt")
    batch = read(tmp_path / "dump.pt", ReadOptions()).batch
    assert batch is not None
    for name in ("mask", "survivors", "none"):
        _, advantages = miles.reward_post_process(arguments({"arm": name}), samples)
        arm = fa.named_arm(name)
        result = arm.apply(batch, arm.freeze(batch))
        offline = result.advantages.values[result.advantages.segments.offsets[:-1]] * result.weights
        assert advantages == pytest.approx(offline.tolist(), abs=1e-6)


@SLIME
def test_slimes_samples_have_what_the_hook_reads() -> None:
    samples = real(drawn(torch.Generator().manual_seed(4), 5), "slime")
    _, advantages = miles.reward_post_process(arguments({"arm": "turn-reached", "turns": "init"}), samples)
    assert len(advantages) == len(samples)
    assert all(s.metadata["round_number"] for s in samples)


def loss_flags(mapping: dict[str, Any], **flags: Any) -> Namespace:
    """What Miles' policy loss reads; log-probs are plain PyTorch, without Megatron."""
    usual = PLAIN | {
        "observe_training_entropy": False, "get_mismatch_metrics": False, "custom_tis_function_path": None,
        "custom_pg_loss_reducer_function_path": None, "rollout_temperature": 1.0, "true_on_policy_mode": True,
        "dump_details": None, "log_probs_chunk_size": -1, "allgather_cp": False, "vocab_size": VOCABULARY,
    }  # fmt: skip
    return namespace(mapping, **(usual | flags))


def micro_batch(args: Namespace, seed: int) -> tuple[dict[str, Any], torch.Tensor, Any]:
    """A micro-batch, its logits, and Miles' reducer of it."""
    tools = import_module("miles.backends.training_utils.cp_utils")
    batch = {name: values[:3] for name, values in whole(seed).items()}  # not the response of one token, whose
    logits = logits_of(seed)[:, : sum(batch["total_lengths"])]  # log-probs Miles squeezes to no dimension
    given = (batch["total_lengths"], batch["response_lengths"], batch["loss_masks"])
    reduce = tools.get_sum_of_sample_mean(
        *given, args.calculate_per_token_loss, "thd", None, denominators=batch["rollout_mask_sums"]
    )
    return batch, logits, reduce


LOSSES: tuple[dict[str, Any], ...] = (
    {}, {"eps_clip_c": 3.0}, {"advantage_estimator": "gspo"}, {"use_tis": True}, {"calculate_per_token_loss": True},
    {"entropy_coef": 0.02, "use_kl_loss": True}, {"use_rollout_logprobs": True},
    {"use_kl_loss": True, "kl_loss_type": "k3", "use_unbiased_kl": True},
)  # fmt: skip


@MILES
@pytest.mark.parametrize("case", LOSSES, ids=lambda case: "-".join(case) or "plain")
def test_its_own_loss_function_is_our_custom_loss(case: dict[str, Any]) -> None:
    losses = import_module("miles.backends.training_utils.loss_hub.losses")
    one_rank()
    args = loss_flags({}, **case)
    for seed in range(3):
        batch, logits, reduce = micro_batch(args, seed)
        expected, theirs = losses.policy_loss_function(args, batch, logits, reduce)
        (gradient,) = torch.autograd.grad(expected, logits)
        loss, ours = miles.custom_loss(args, batch, logits, reduce)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], gradient, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ours["pg_loss"], theirs["pg_loss"], rtol=1e-5, atol=1e-6)
        assert set(ours) <= set(theirs) | {"tis_clipfrac"}


@MILES
@pytest.mark.parametrize("per_token", [False, True])
def test_our_importance_weights_in_its_loss_are_its_own(per_token: bool) -> None:
    losses = import_module("miles.backends.training_utils.loss_hub.losses")
    one_rank()
    found = []
    for path in (None, "fastadv.integrations.miles.tis"):
        args = loss_flags({}, use_tis=True, custom_tis_function_path=path, calculate_per_token_loss=per_token)
        batch, logits, reduce = micro_batch(args, 1)
        loss, metrics = losses.policy_loss_function(args, batch, logits, reduce)
        found.append((loss, torch.autograd.grad(loss, logits)[0], metrics))
    (a, ga, ma), (b, gb, mb) = found
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ga, gb, rtol=1e-5, atol=1e-7)
    for name in ("tis", "tis_clipfrac", "tis_abs"):
        torch.testing.assert_close(ma[name], mb[name], rtol=1e-5, atol=1e-6)


@MILES
def test_our_reducer_in_its_loss_divides_by_a_constant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = import_module("miles.backends.training_utils.loss_hub.losses")
    one_rank()
    (tmp_path / "run.yaml").write_text("fastadv: {horizon: 8}")
    monkeypatch.setenv("FASTADV_CONFIG", str(tmp_path / "run.yaml"))
    args = loss_flags({}, custom_pg_loss_reducer_function_path="fastadv.integrations.miles.pg_loss_reducer")
    batch, logits, reduce = micro_batch(args, 1)
    loss, _ = losses.policy_loss_function(args, batch, logits, reduce)
    plain = loss_flags({}, calculate_per_token_loss=True)
    batch, logits, reduce = micro_batch(plain, 1)
    torch.testing.assert_close(loss * 8, losses.policy_loss_function(plain, batch, logits, reduce)[0])


@MILES
def test_its_trackers_get_our_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    metrics = import_module("miles.ray.rollout.metrics")
    logged: dict[str, Any] = {}
    monkeypatch.setattr(metrics.tracking, "log", lambda args, numbers, step_key: logged.update(numbers))
    for name in ("_compute_metrics_from_samples", "_compute_perf_metrics_from_samples"):  # read flags of the engine
        monkeypatch.setattr(metrics, name, lambda *args: {})
    monkeypatch.setattr(metrics, "compute_rollout_step", lambda args, rollout_id: rollout_id)
    args = namespace(
        {"arm": "mask", "record": str(tmp_path / "steps.jsonl")}, load_debug_rollout_data=None, log_passrate=False,
        custom_rollout_log_function_path="fastadv.integrations.miles.rollout_log",
    )  # fmt: skip
    samples = real(drawn(torch.Generator().manual_seed(6), 5))
    metrics.log_rollout_data(3, args, samples, {"rollout/own": 1.0}, 2.0)
    assert logged["rollout/own"] == 1
    assert logged["rollout/step"] == 3
    (record,) = fa.read_records(tmp_path / "steps.jsonl")
    assert logged["rollout/fastadv/census/budget"] == record.census.budget > 0
    assert record.versions["miles"]
