"""The segment Gram with flash-attn's attention, which is a stand-in here, and how it is chosen."""

from __future__ import annotations

import importlib.abc
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_stand_in import HALVES, FlashAttn, install
from gradproj_models import FAMILIES, equal_batch, ragged_batch, relative_error, small_model, written_out
from rollout_files import samples, write_dump, write_policy

import fastadv as fa
from fastadv import gradproj
from fastadv.gradproj import attention, flash
from fastadv.gradproj.streams import Packed
from fastadv.replay.errors import ReplayError
from fastadv.replay.pipeline import ReplayOptions, replay
from fastadv.replay.policy import Policy

EVERY = (*HALVES, torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def _found_again() -> Iterator[None]:
    """What one test put in flash-attn's place is not what the next one finds."""
    flash._varlen.cache_clear()
    yield
    flash._varlen.cache_clear()


@pytest.fixture
def batch() -> fa.Batch:
    return ragged_batch()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> FlashAttn:
    """Takes float64 too, so that results can be compared to the last digits."""
    module = FlashAttn(EVERY)
    install(monkeypatch, module, dtypes=EVERY)
    return module


# ---- the same Gram ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["rollout", "turn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gram_is_that_of_the_other_attention(family: str, level: str, batch: fa.Batch, stand_in: FlashAttn) -> None:
    model = small_model(family)
    u = written_out(model, batch, level)
    found = gradproj.segment_gram(model, batch, level=level, max_tokens=30, attention="flash")
    assert relative_error(found.gram, u @ u.T) < 1e-12
    blocks = gradproj.segment_gram(model, batch, level=level, max_tokens=30, attention="blocks")
    assert relative_error(found.gram, blocks.gram) < 1e-12
    assert stand_in.calls


def test_padding_is_left_out_and_streams_end_at_their_last_token(batch: fa.Batch, stand_in: FlashAttn) -> None:
    model = small_model("llama", num_hidden_layers=1)
    gradproj.segment_gram(model, batch, level="turn", max_tokens=10**6, attention="flash")
    last = [int((batch.mask & (batch.turn_ids >= 0))[a:b].nonzero()[-1]) for a, b in _bounds(batch)]
    prompts = batch.token_ids.cu_seqlens.diff() - batch.lengths
    reach = [int(p) + n for p, n in zip(prompts, last, strict=True)]
    first = stand_in.calls[0]
    assert first["ends"] == [0, *torch.tensor(reach).cumsum(0).tolist()]
    assert first["rows"] < len(reach) * max(reach)  # there was padding
    streams = [call["rows"] for call in stand_in.calls if call["gradient"]][2:]  # behind those of the mates' check
    assert len(streams) == int(batch.segments.turns().max())
    assert min(streams) < max(streams) <= sum(reach)
    assert sum(streams) < len(streams) * sum(reach)


def _bounds(batch: fa.Batch) -> list[tuple[int, int]]:
    return list(pairwise(batch.cu_seqlens.tolist()))


def test_every_call_is_deterministic_and_causal(batch: fa.Batch, stand_in: FlashAttn) -> None:
    gradproj.segment_gram(small_model("qwen3"), batch, attention="flash")
    assert {(c["deterministic"], c["causal"], c["dropout"], c["window"]) for c in stand_in.calls} == {
        (True, True, 0.0, (-1, -1))
    }


def test_sliding_windows_are_the_layers_own(batch: fa.Batch, stand_in: FlashAttn) -> None:
    model = small_model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    u = written_out(model, batch, "turn")
    found = gradproj.segment_gram(model, batch, level="turn", max_tokens=40, attention="flash")
    assert relative_error(found.gram, u @ u.t()) < 1e-12
    assert {call["window"] for call in stand_in.calls} == {(-1, -1), (3, 0)}


def test_scores_are_scaled_as_the_layer_says(batch: fa.Batch, stand_in: FlashAttn) -> None:
    model = small_model("gpt2", scale_attn_by_inverse_layer_idx=True)
    found, blocks = (gradproj.segment_gram(model, batch, attention=name).gram for name in ("flash", "blocks"))
    assert relative_error(found, blocks) < 1e-12
    model.config.scale_attn_by_inverse_layer_idx = False
    for block in model.transformer.h:
        block.attn.scaling = block.attn.head_dim**-0.5
    assert relative_error(gradproj.segment_gram(model, batch).gram, blocks) > 1e-3


def test_one_pass_at_a_time(batch: fa.Batch, stand_in: FlashAttn) -> None:
    model = small_model("llama")
    for other in ("flash", "blocks"):
        with pytest.raises(ValueError, match="another pass runs on this model"):
            gradproj.segment_gram(
                model,
                batch,
                attention="flash",
                progress=lambda *_, other=other: gradproj.segment_gram(model, batch, attention=other),
            )


def test_rollouts_without_a_loss_token_have_no_rows(stand_in: FlashAttn) -> None:
    batch = ragged_batch()
    mask = batch.mask.clone()
    for row in (0, batch.num_rollouts - 1):
        mask[slice(*_bounds(batch)[row])] = False
    quiet = replace(batch, mask=mask)
    model = small_model("llama")
    u = written_out(model, quiet, "rollout")
    found = gradproj.segment_gram(model, quiet, max_tokens=10**6, attention="flash")
    assert relative_error(found.gram, u @ u.t()) < 1e-12
    assert len(stand_in.calls[0]["ends"]) == batch.num_rollouts - 2 + 1


def test_equal_rollouts_are_not_gathered(stand_in: FlashAttn) -> None:
    batch, model = equal_batch(3, 1, 5), small_model("gpt2")
    u = written_out(model, batch, "rollout")
    assert relative_error(gradproj.segment_gram(model, batch, attention="flash").gram, u @ u.t()) < 1e-12
    assert stand_in.calls[0]["ends"] == [0, 5, 10, 15]


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision(dtype: torch.dtype, batch: fa.Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """As flash-attn takes it: the two differ by rounding."""
    install(monkeypatch, FlashAttn())
    model = small_model("qwen2", initializer_range=0.1)
    exact = gradproj.segment_gram(model, batch).gram
    found = gradproj.segment_gram(model.to(dtype), batch, attention="flash").gram
    assert relative_error(found, exact) < 0.05


# ---- batch mates -----------------------------------------------------------------------------------------------------


def test_a_leak_between_rollouts_is_found(batch: fa.Batch, stand_in: FlashAttn) -> None:
    model = small_model("llama")
    stand_in.leak = 1e-9
    with pytest.raises(ValueError, match=r"flash-attn's output of a rollout beside others differs by .*'blocks'"):
        gradproj.segment_gram(model, batch, attention="flash")
    assert model.config._attn_implementation not in (attention.NAME, flash.NAME)


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_a_leak_in_the_backward_alone_is_found(name: str, batch: fa.Batch, stand_in: FlashAttn) -> None:
    """A kernel whose forward keeps rollouts apart and whose backward does not."""
    which, sound = ("dq", "dk", "dv").index(name), stand_in.flash_attn_varlen_func

    class Leaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
            return t.view_as(t)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] + 1e-6 * gradients[0].abs().sum()

    def leaking(*given: Any, softmax_scale: Any = None, window_size: Any = None, deterministic: bool = False, **o: Any):
        qkv = [Leaks.apply(t) if i == which else t for i, t in enumerate(given[:3])]
        return sound(
            *qkv, *given[3:], softmax_scale=softmax_scale, window_size=window_size, deterministic=deterministic, **o
        )

    stand_in.flash_attn_varlen_func = leaking  # type: ignore[method-assign]
    flash._varlen.cache_clear()
    with pytest.raises(ValueError, match=f"flash-attn's {name} of a rollout beside others differs by"):
        gradproj.segment_gram(small_model("llama"), batch, attention="flash")


def test_a_rollout_of_one_row_has_mates_too(stand_in: FlashAttn) -> None:
    """Its dq and dk are 0: differences are held against the largest of all results."""
    packed = Packed.of(torch.tensor([7, 0, 1]), 9, torch.device("cpu"))
    flash.check_batch_mates(small_model("qwen2"), packed)
    assert [call["ends"] for call in stand_in.calls] == [[0, 7, 8], [0, 7, 8], [0, 1], [0, 1]]


# ---- what is chosen --------------------------------------------------------------------------------------------------


def test_auto_takes_flash_where_it_runs(monkeypatch: pytest.MonkeyPatch, batch: fa.Batch) -> None:
    module = FlashAttn()
    install(monkeypatch, module)
    model = small_model("llama")
    assert flash.choose("auto", model).name == "blocks"
    assert "torch.float64, and flash-attn takes bfloat16 and float16" in flash.choose("auto", model).why
    gradproj.segment_gram(model, batch)
    assert module.calls == []
    model.bfloat16()
    assert flash.choose("auto", model).name == "flash"
    gradproj.segment_gram(model, batch)
    assert module.calls
    assert flash.choose("blocks", model).name == "blocks"


def test_a_name_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, batch: fa.Batch) -> None:
    def why(model: Any) -> str:
        with pytest.raises(fa.BackendUnavailableError, match="attention 'flash' cannot run: ") as caught:
            gradproj.segment_gram(model, batch, attention="flash")
        return str(caught.value)

    model = small_model("llama").bfloat16()
    install(monkeypatch, FlashAttn(), on_cpu=False)
    assert "the model is on cpu, and flash-attn runs on CUDA devices; move it to one" in why(model)
    install(monkeypatch, FlashAttn())
    assert "the model is torch.float32, and flash-attn takes bfloat16 and float16" in why(model.float())
    model.bfloat16().config.head_dim = 320
    assert "heads have 320 numbers, and flash-attn takes 256 at most" in why(model)
    model.config.head_dim = 4
    install(monkeypatch, None)  # Python's way of saying that a module is not there
    assert "flash-attn is not installed; pip install 'fastadv[flash]'" in why(model)
    old = types.ModuleType("flash_attn")
    old.flash_attn_varlen_func = lambda q, k, v, cu_seqlens_q, softmax_scale, window_size: q  # type: ignore[attr-defined]
    install(monkeypatch, old)
    assert (
        "flash-attn is too old, its flash_attn_varlen_func has no deterministic; pip install 'fastadv[flash]'"
        in why(model)
    )
    with pytest.raises(ValueError, match="attention is 'sdpa'; it must be one of 'auto', 'blocks', 'flash'"):
        gradproj.segment_gram(model, batch, attention="sdpa")


class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A package whose extension was built for another torch: Dao-AILab/flash-attention#1612 (B40)."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == "flash_attn" else None

    def exec_module(self, module: types.ModuleType) -> None:
        raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda14ExchangeDeviceEa")


def test_b40_a_package_that_does_not_load(monkeypatch: pytest.MonkeyPatch, batch: fa.Batch) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    model = small_model("llama").bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is not imported where it could not run
        expected = gradproj.segment_gram(model, batch).gram
    monkeypatch.setattr(flash, "DEVICES", ("cpu",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(gradproj.segment_gram(model, batch).gram, expected)
        assert flash.choose("auto", model).name == "blocks"
        assert "undefined symbol" in flash.choose("auto", model).why
        with pytest.raises(fa.BackendUnavailableError, match=r"does not load \(ImportError: .*undefined symbol"):
            gradproj.segment_gram(model, batch, attention="flash")
    assert len(caught) == 1
    assert "undefined symbol" in str(caught[0].message)


def test_a_dependency_that_is_absent_is_a_broken_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "exec_module", lambda *_: __import__("a_package_that_nobody_has"))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.setattr(flash, "DEVICES", ("cpu",))
    with pytest.warns(RuntimeWarning, match="No module named 'a_package_that_nobody_has'"):
        assert flash.choose("auto", small_model("llama").bfloat16()).name == "blocks"


def test_masks_that_are_more_than_causal_are_refused(stand_in: FlashAttn) -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="Module attends with a mask that is more than causal"):
        flash.attend(torch.nn.Module(), q, q, q, torch.ones(1, 1, 2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="Module attends with softcap, which is not supported"):
        flash.attend(torch.nn.Module(), q, q, q, None, softcap=30.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_on_a_card(batch: fa.Batch) -> None:
    pytest.importorskip("flash_attn", reason="flash-attn is not installed", exc_type=ImportError)
    model = small_model("qwen3", initializer_range=0.1).to("cuda", torch.bfloat16)
    assert flash.choose("auto", model).name == "flash"
    found, again = (gradproj.segment_gram(model, batch, level="turn", attention="flash").gram for _ in range(2))
    assert torch.equal(found, again)
    blocks = gradproj.segment_gram(model, batch, level="turn", attention="blocks").gram
    assert relative_error(found, blocks) < 0.05


# ---- the replay ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy's folder and a dump of rollouts that it can score."""
    folder = tmp_path_factory.mktemp("replayed")
    return write_policy(folder / "policy"), write_dump(folder / "dump.pt", samples(4, 4))


def test_the_replay_says_which_attention_it_runs(rollouts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, dump = rollouts
    module, options = FlashAttn(), ReplayOptions(p1_prompts=0, buckets=False)
    install(monkeypatch, module)
    half = Policy.load(folder, dtype=torch.bfloat16)
    result = replay([dump], half, options)
    assert "attention: flash (the model and this machine allow it)" in result.plan
    assert module.calls
    assert result.gram is not None
    assert result.gram.dtype == "bfloat16"
    calls = len(module.calls)
    blocks = replay([dump], half, replace(options, attention="blocks"))
    assert "attention: blocks (asked for by name)" in blocks.plan
    assert len(module.calls) == calls
    assert relative_error(result.gram.gram, blocks.gram.gram) < 0.05
    single = replay([dump], Policy.load(folder), options)
    assert "attention: blocks (flash cannot run: the model is torch.float32" in single.plan


def test_a_replay_by_name_never_runs_another_attention(
    rollouts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, dump = rollouts
    install(monkeypatch, FlashAttn())
    options = ReplayOptions(p1_prompts=0, buckets=False, attention="flash")
    with pytest.raises(ReplayError, match=r"--attention flash: .* cannot run: the model is torch\.float32"):
        replay([dump], Policy.load(folder), options)
    odd = Policy.load(folder, dtype=torch.bfloat16)
    odd.model.transformer.h[0].register_parameter("scale", torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
    with pytest.raises(ReplayError, match=r"--attention flash: segment_gram: .* owns scale, and no interceptor"):
        replay([dump], odd, options)
    odd.model.config.model_type = "mamba"
    with pytest.raises(ReplayError, match=r"--attention flash: .*model_type 'mamba'"):
        replay([dump], odd, options)
    for other in ({"gradients": "cells"}, {"loss": "ppo"}):
        with pytest.raises(ReplayError, match=r"--attention flash does not go with .* run the model's own attention"):
            replace(options, **other)
    with pytest.raises(ReplayError, match="--attention is 'sdpa'; it must be one of auto, blocks, flash"):
        replace(options, attention="sdpa")


def test_the_plan_counts_the_forward_that_flash_runs_again(stand_in: FlashAttn) -> None:
    model = small_model("llama")
    sizes: dict[str, Any] = {"tokens": 800, "rollouts": 4, "turns": 3, "level": "turn"}
    flash_, blocks = (gradproj.plan(model, attention=name, **sizes) for name in ("flash", "blocks"))
    attend = 2 * 800 * 200 * 16 * 2
    squares = 4 * 7 / 18  # (1 + 4 + 9) / 9
    assert flash_.operations - blocks.operations == pytest.approx(attend * squares)
    assert "attention: flash (asked for by name)" in flash_.explain()
    assert "attention: blocks (counted from a configuration)" in gradproj.plan(model.config, **sizes).explain()
    assert gradproj.plan(model.config, attention="flash", **sizes).operations == flash_.operations
    with pytest.raises(ValueError, match="plan: attention is 'sdpa'"):
        gradproj.plan(model.config, attention="sdpa", **sizes)
