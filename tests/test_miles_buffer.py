"""RESCUE's data buffer over both layouts of Miles' own."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from fastadv.integrations import miles
from fastadv.integrations.miles.buffer import MODULE, Decisions, rescue_data_buffer
from fastadv.integrations.miles.samples import LOSS_WEIGHT, STALENESS, TAKEN
from miles_standins import BUFFERS, AugustBuffer, BufferInput, Entry, arguments, make

import fastadv as fa

RESCUE = {"arm": "rescue:a=0.25,after=1", "seed": 5}


@pytest.fixture(params=BUFFERS)
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """A Miles with this buffer."""
    names = MODULE.split(".")
    for end in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:end]), ModuleType(".".join(names[:end])))
    sys.modules[MODULE].DefaultDataBuffer = request.param  # type: ignore[attr-defined]
    rescue_data_buffer.cache_clear()
    yield request.param
    rescue_data_buffer.cache_clear()


def group_of(number: int, version: int, nested: bool = False, size: int = 2) -> Entry:
    samples = [make(1.0, group=number, index=size * number + i, weight_versions=[str(version)]) for i in range(size)]
    return Entry(samples, [[s] for s in samples] if nested else samples)  # type: ignore[arg-type]


def buffer(mapping: dict[str, Any], **flags: Any) -> tuple[Any, list[Any]]:
    """A buffer, and where it puts what it does not use."""
    unused: list[Any] = []
    args = arguments(mapping, **{"max_weight_staleness": 1, "async_unused_samples_handler": "drop", **flags})
    return miles.RescueDataBuffer(BufferInput(args, unused.append)), unused


def fill(buffer: Any, entries: list[Entry]) -> None:
    async def put() -> None:
        for entry in entries:
            await buffer.put(entry)

    asyncio.run(put())


def take(buffer: Any, groups: int, version: int) -> list[Entry]:
    async def get() -> list[Entry]:
        if isinstance(buffer, AugustBuffer):
            return [await buffer.get(current_version=version) for _ in range(groups)]
        return await buffer.get(num_groups=groups, current_version=version)  # type: ignore[no-any-return]

    return asyncio.run(get())


def numbers(entries: list[Entry]) -> list[int]:
    return [next(iter(e.prompt_group)).group_index for e in entries]


@pytest.mark.parametrize("nested", [False, True])
def test_stale_groups_are_kept_by_their_coins(installed: type, nested: bool) -> None:
    held, unused = buffer(RESCUE)
    assert isinstance(held, installed)
    versions = torch.randint(4, (60,), generator=torch.Generator().manual_seed(0)).tolist()  # at 3: 0 and 1 are stale
    fill(held, [group_of(g, version, nested) for g, version in enumerate(versions)])
    stale = [3 - version > 1 for version in versions]
    coins = fa.keep(5, list(range(60)), 0.25, stream="rescue").tolist()
    kept = [g for g in range(60) if not stale[g] or coins[g]]
    taken = take(held, len(kept), 3)
    assert numbers(taken) == kept
    assert [p[0].group_index for p in unused] == [g for g in range(60) if stale[g] and not coins[g]]
    for entry in taken:
        for sample in entry.prompt_group:
            g = sample.group_index
            assert sample.metadata[LOSS_WEIGHT] == (4.0 if stale[g] else 1.0)
            assert sample.metadata[STALENESS] == 3 - versions[g]
    last_stale = max((g for g in range(60) if stale[g] and not coins[g]), default=-1)
    every = sum(entry.prompt_group[0].metadata[TAKEN] for entry in taken)
    beyond = 60 - max(*kept, last_stale if installed is not AugustBuffer else 0) - 1
    assert every == (60 if installed is not AugustBuffer else kept[-1] + 1)
    assert beyond >= 0
    found = held.get_metrics()
    assert found["rollout/fastadv/groups_taken"] == every
    assert found["rollout/fastadv/stale_groups_rescued"] == sum(stale[g] for g in kept)
    assert found["rollout/fastadv/true_staleness_max"] == max(3 - versions[g] for g in kept)
    assert found["rollout/fastadv/mean_weight"] == pytest.approx(sum(4.0 if stale[g] else 1 for g in kept) / every)
    assert found["rollout/fully_async/stale_groups_filtered"] == len(unused)
    assert held.get_metrics()["rollout/fastadv/groups_taken"] == 0  # a window


def test_a_group_that_is_looked_at_again_meets_the_same_coin(installed: type) -> None:
    """The newer buffer asks at every step about all it holds: with new coins the chance to stay would be a^k."""
    held, unused = buffer(RESCUE)
    fill(held, [group_of(g, 0) for g in range(400)])
    coins = fa.keep(5, list(range(400)), 0.25, stream="rescue").tolist()
    found: list[int] = []
    for version in range(2, 12):
        found += numbers(take(held, 4, version))
        held.get_metrics()
    assert found == [g for g in range(400) if coins[g]][:40]
    assert all(not coins[prompts[0].group_index] for prompts in unused)


def test_a_restart_tosses_the_same_coins(installed: type) -> None:
    runs = []
    for _ in range(2):
        held, _ = buffer(RESCUE)
        fill(held, [group_of(g, 0) for g in range(50)])
        runs.append(numbers(take(held, 5, 9)))
    assert runs[0] == runs[1]


def test_hook_and_buffer_agree(installed: type) -> None:
    held, _ = buffer(RESCUE)
    entries = [group_of(g, g % 4) for g in range(40)]
    for entry in entries:
        for number, sample in enumerate(entry.prompt_group):
            sample.reward = float(number)
    fill(held, entries)
    samples = [s for entry in take(held, 8, 3) for s in entry.prompt_group]
    _, advantages = miles.reward_post_process(arguments({**RESCUE, "divisor": "kept"}), samples)
    weights = [s.metadata[LOSS_WEIGHT] for s in samples]
    assert {1.0, 4.0} == set(weights)
    assert advantages == pytest.approx([w * (2 * s.reward - 1) for w, s in zip(weights, samples, strict=True)])
    _, scaled = miles.reward_post_process(arguments(RESCUE), samples)
    every = sum({s.group_index: s.metadata[TAKEN] for s in samples}.values())
    assert every > 8
    assert scaled == pytest.approx([x * 7 / (every - 1) for x in advantages])


def test_before_the_first_update_nothing_is_stale(installed: type) -> None:
    held, unused = buffer(RESCUE)
    fill(held, [group_of(g, 0) for g in range(3)])

    async def get() -> Any:
        if isinstance(held, AugustBuffer):
            return await held.get()
        return (await held.get(num_groups=1, current_version=None))[0]

    entry = asyncio.run(get())
    assert entry.prompt_group[0].metadata == {LOSS_WEIGHT: 1.0, TAKEN: 1}
    assert unused == []


@pytest.mark.parametrize(
    ("mapping", "limit", "kept"),
    [({"arm": "drop-stale:after=1"}, 1, [2, 3]), ({"arm": "never-drop"}, None, [0, 1, 2, 3])],
)
def test_the_other_arms(installed: type, mapping: dict[str, Any], limit: int | None, kept: list[int]) -> None:
    held, unused = buffer(mapping, max_weight_staleness=limit)
    fill(held, [group_of(g, g) for g in range(4)])  # at 3: staleness 3, 2, 1, 0
    taken = take(held, len(kept), 3)
    assert numbers(taken) == kept
    assert len(unused) == 4 - len(kept)
    assert {s.metadata[LOSS_WEIGHT] for e in taken for s in e.prompt_group} == {1.0}
    samples = [s for e in taken for s in e.prompt_group]
    for sample in samples:
        sample.reward = float(sample.index % 2)
    _, advantages = miles.reward_post_process(arguments({**mapping, "divisor": "kept"}), samples)
    assert advantages == pytest.approx([-1.0, 1.0] * len(kept))


@pytest.mark.parametrize(
    ("mapping", "flags", "message"),
    [
        (RESCUE, {"max_weight_staleness": 3}, "stale after 1 versions, --max-weight-staleness is 3"),
        (RESCUE, {"max_weight_staleness": None}, "--max-weight-staleness is None"),
        (RESCUE, {"async_unused_samples_handler": "retry"}, "--async-unused-samples-handler retry"),
        (RESCUE, {"normalize_advantages": True}, "--normalize-advantages"),
        (RESCUE, {"advantage_estimator": "reinforce_plus_plus"}, "--advantage-estimator reinforce_plus_plus"),
        ({"arm": "never-drop"}, {}, "never-drop keeps all groups, and --max-weight-staleness 1 drops some"),
        ({"arm": "oracle"}, {}, "leave --fully-async out"),
        ({"arm": "drop-stale:after=4"}, {}, "stale after 4 versions, --max-weight-staleness is 1"),
    ],
)
def test_what_would_destroy_the_weights_is_refused_when_the_buffer_is_made(
    installed: type, mapping: dict[str, Any], flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        buffer(mapping, **flags)


def test_terms_that_keep_weight_1_are_named(installed: type, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fastadv"):
        buffer(RESCUE)
        assert caplog.text == ""
        buffer(RESCUE, use_kl_loss=True, kl_loss_coef=0.01, entropy_coef=0.0)
    assert "--kl-loss-coef keep weight 1" in caplog.text


def test_a_group_without_an_id_is_refused(installed: type) -> None:
    held, _ = buffer(RESCUE)
    entry = group_of(0, 0)
    for sample in entry.prompt_group:
        sample.group_index = None
    fill(held, [entry])
    with pytest.raises(ValueError, match="no group_index"):
        take(held, 1, 9)


def test_without_miles_the_error_says_what_is_missing() -> None:
    rescue_data_buffer.cache_clear()
    with pytest.raises(ImportError, match=r"made of miles\.rollout\.fully_async_data_buffer\.DefaultDataBuffer"):
        _ = miles.RescueDataBuffer


def test_decisions_take_microseconds() -> None:
    args = arguments(RESCUE, max_weight_staleness=1)
    decisions = Decisions(args)
    groups = [group_of(g, 0, size=8).group for g in range(300)]
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for group in groups:
            decisions.staleness(group, 3)
        best = min(best, time.perf_counter() - begin)
    assert best / len(groups) < 100e-6  # some 5 on an idle machine, for groups of 8
