"""Every family of models against gradients that are written out, and what cannot be projected."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gradproj_models import (
    FAMILIES,
    VOCABULARY,
    equal_batch,
    ragged_batch,
    relative_error,
    rollout_log_probs,
    small_model,
    written_out,
)
from torch import Tensor, nn
from torch.nn import functional

import fastadv as fa
from fastadv import gradproj
from fastadv.gradproj import attention, interceptors
from fastadv.gradproj.interceptors import Tape
from fastadv.gradproj.streams import Stream
from fastadv.ops.segment_weight_gram import Run
from fastadv.replay.readers import ReadOptions, read


@pytest.fixture(scope="module")
def batch() -> fa.Batch:
    return ragged_batch()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gram_is_that_of_gradients_written_out(family: str, tied: bool, batch: fa.Batch) -> None:
    model = small_model(family, tied=tied)
    for level in ("rollout", "turn"):
        u = written_out(model, batch, level, temperature=0.7)
        found = gradproj.segment_gram(model, batch, level=level, temperature=0.7, max_tokens=30, scratch_bytes=20_000)
        assert relative_error(found.gram, u @ u.T) < 1e-12
        assert found.covered == found.total == sum(p.numel() for p in model.parameters())


def test_the_committed_policy() -> None:
    """Rollouts of the example under the example's policy, as written out."""
    from examples.frozen_lake.policy import load_policy

    folder = Path(__file__).parent.parent / "examples" / "frozen_lake"
    rollouts = read(folder / "rollouts.pt", ReadOptions()).batch
    short = rollouts.lengths.argsort(stable=True)[[0, 5, 100, -1]]
    some, model = rollouts.take(short), load_policy(folder / "policy").double()
    u = written_out(model, some, "turn")
    found = gradproj.segment_gram(model, some, level="turn")
    assert relative_error(found.gram, u @ u.t()) < 1e-12
    assert found.covered == 84_608


def test_frozen_parameters_are_left_out(batch: fa.Batch) -> None:
    model = small_model("llama", tied=True)
    for name in (
        "embed_tokens.weight", "layers.0.mlp.up_proj.weight", "layers.1.self_attn.q_proj.bias",
        "layers.0.input_layernorm.weight", "norm.weight",
    ):  # fmt: skip
        model.model.get_parameter(name).requires_grad_(False)
    u = written_out(model, batch, "turn")
    found = gradproj.segment_gram(model, batch, level="turn")
    assert relative_error(found.gram, u @ u.t()) < 1e-12
    assert found.covered == u.shape[1] < found.total
    assert not any(p.requires_grad for p in (model.model.norm.weight, model.lm_head.weight))


@pytest.mark.parametrize("part", ["model.embed_tokens", "lm_head"])
def test_a_frozen_end(part: str, batch: fa.Batch) -> None:
    model = small_model("qwen2")
    model.get_submodule(part).requires_grad_(False)
    u = written_out(model, batch, "rollout")
    assert relative_error(gradproj.segment_gram(model, batch).gram, u @ u.t()) < 1e-12


def test_a_head_with_a_bias_and_a_padding_row(batch: fa.Batch) -> None:
    model = small_model("qwen2", pad_token_id=3)
    model.lm_head = nn.Linear(16, VOCABULARY, bias=True).double()
    assert model.model.embed_tokens.padding_idx == 3
    u = written_out(model, batch, "turn", temperature=1.3)
    found = gradproj.segment_gram(model, batch, level="turn", temperature=1.3, scratch_bytes=3000)
    assert relative_error(found.gram, u @ u.t()) < 1e-12


def test_sliding_windows_go_along(batch: fa.Batch) -> None:
    model = small_model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    u = written_out(model, batch, "turn")
    found = gradproj.segment_gram(model, batch, level="turn", max_tokens=40)
    assert relative_error(found.gram, u @ u.t()) < 1e-12


# ---- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("heads", [2, 4], ids=["own keys", "shared keys"])
def test_attention_is_torchs(heads: int, window: int | None) -> None:
    """Over several blocks of queries, forward and backward, and on the rows of one stream."""
    tokens, reach = 2 * attention.BLOCK + 22, attention.BLOCK + 5
    q, k, v = (torch.randn(3, h, tokens, 8, dtype=torch.float64, requires_grad=True) for h in (heads, 2, 2))
    behind = torch.arange(tokens)[:, None] - torch.arange(tokens)
    looks = (behind >= 0) & (behind < (window or tokens))
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=looks, scale=0.3, enable_gqa=True)
    tape = Tape(3)
    token = attention.TAPE.set(tape)
    try:
        mask = None if window is None else looks.expand(3, 1, tokens, tokens)
        found = attention.attention(nn.Module(), q, k, v, mask, scaling=0.3)[0].transpose(1, 2)
    finally:
        attention.TAPE.reset(token)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for rows in (tokens, reach):
        runs = [Run(i, 0, 0, rows - i) for i in range(3)]
        nothing = torch.zeros(0, dtype=torch.int64)
        tape.stream = Stream(None, [], nothing, runs, nothing, nothing, nothing)
        dy = torch.randn_like(found) * (torch.arange(tokens) < rows)[:, None]
        gradients = torch.autograd.grad(found, (q, k, v), dy, retain_graph=True)
        for ours, theirs in zip(
            gradients, torch.autograd.grad(expected, (q, k, v), dy, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_attention_that_is_more_than_softmax_is_refused() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="Module attends with softcap, which is not supported"):
        attention.attention(nn.Module(), q, q, q, None, softcap=30.0)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_rollouts_of_many_blocks(family: str) -> None:
    model = small_model(family, max_position_embeddings=256, initializer_range=0.2)
    long = equal_batch(2, 3, 60)
    u = written_out(model, long, "turn")
    found = gradproj.segment_gram(model, long, level="turn")
    assert relative_error(found.gram, u @ u.t()) < 1e-12


# ---- modules that are not known --------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A norm of another kind: it scales by 1 + weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 0.1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class ScaledRMSNormLike(Scaled):
    """Named like what it is not."""


def test_an_unknown_module_is_named(batch: fa.Batch) -> None:
    model = small_model("llama")
    model.model.layers[1].input_layernorm = ScaledRMSNormLike(16)
    before = torch.is_grad_enabled()
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.input_layernorm \(ScaledRMSNormLike\) owns weight, and no interceptor"
    ):
        gradproj.segment_gram(model, batch)
    assert torch.is_grad_enabled() == before
    found = gradproj.segment_gram(model, batch, strict=False)
    assert found.covered == found.total - 16
    u = written_out(model, batch, "rollout")
    names = [name for name, p in model.named_parameters() for _ in range(p.numel())]
    inside = torch.tensor([name != "model.layers.1.input_layernorm.weight" for name in names])
    assert relative_error(found.gram, u[:, inside] @ u[:, inside].t()) < 1e-12


def test_a_registered_interceptor_makes_it_known(batch: fa.Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptors, "_REGISTRY", list(interceptors._REGISTRY))

    @gradproj.register_interceptor(Scaled)
    class ScaledInterceptor(gradproj.NormInterceptor):
        def normalised(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

        def scale(self, n: Tensor) -> Tensor:
            return n * (1 + self.module.weight.detach())

        def backward(self, dy: Tensor, n: Tensor) -> Tensor:
            return super().backward(dy, n) + dy

    model = small_model("llama")
    model.model.layers[1].input_layernorm = Scaled(16)
    u = written_out(model, batch, "turn")
    assert relative_error(gradproj.segment_gram(model, batch, level="turn").gram, u @ u.t()) < 1e-12


def test_torchs_own_rms_norm_is_one(batch: fa.Batch) -> None:
    model = small_model("llama")
    model.model.layers[0].post_attention_layernorm = nn.RMSNorm(16).double()
    with torch.no_grad():
        model.model.layers[0].post_attention_layernorm.weight.mul_(torch.rand(16) + 0.5)
    found = gradproj.segment_gram(model, batch)
    assert found.covered == found.total
    u = torch.stack([torch.cat([g.reshape(-1) for g in gradients]) for gradients in _gradients(model, batch)])
    assert relative_error(found.gram, u @ u.t()) < 1e-6  # the other norms are float32 inside here


def _gradients(model: Any, batch: fa.Batch) -> list[tuple[Tensor, ...]]:
    found = []
    for row in range(batch.num_rollouts):
        tokens = slice(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))
        loss = (rollout_log_probs(model, batch, row) * batch.mask[tokens]).sum()
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    return found


class Twice(nn.Module):
    """A layer that runs one of its modules twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner(2 * x)


def test_a_module_that_runs_twice_is_named(batch: fa.Batch) -> None:
    model = small_model("llama")
    model.model.layers[0].mlp.up_proj = Twice(model.model.layers[0].mlp.up_proj)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj\.inner runs twice"):
        gradproj.segment_gram(model, batch)


def test_parameters_that_are_shared(batch: fa.Batch) -> None:
    model = small_model("llama")
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj.weight = first.up_proj.weight
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight and .*layers\.1\.mlp\.up_proj\.weight are"):
        gradproj.segment_gram(model, batch)


# ---- what cannot be projected ----------------------------------------------------------------------------------------


def test_other_families_are_refused(batch: fa.Batch) -> None:
    with pytest.raises(
        ValueError, match=r"model is a Linear \(model_type None\); supported are .* llama, qwen2, qwen3, gpt2"
    ):
        gradproj.segment_gram(nn.Linear(1, 1), batch)
    model = small_model("llama")
    with pytest.raises(ValueError, match=r"LlamaModel of family llama without model; pass the causal"):
        gradproj.segment_gram(model.model, batch)
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="lm_head is a Sequential, which cannot be intercepted"):
        gradproj.segment_gram(model, batch)
    model = small_model("gpt2")
    model.transformer.wpe.max_norm = 1.0
    with pytest.raises(ValueError, match=r"transformer\.wpe has max_norm"):
        gradproj.segment_gram(model, batch)


def test_dropout_that_is_on_is_refused(batch: fa.Batch) -> None:
    model = small_model("gpt2").train()
    with pytest.raises(ValueError, match=r"transformer\.drop drops out with p = 0\.1"):
        gradproj.segment_gram(model, batch)
    model = small_model("llama", attention_dropout=0.2).train()
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn drops out with p = 0\.2"):
        gradproj.segment_gram(model, batch)
    assert model.training
    quiet = small_model("llama")
    expected = gradproj.segment_gram(quiet, batch).gram
    quiet.train()
    quiet._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=lambda *given: pytest.fail("recomputed"))
    assert torch.equal(gradproj.segment_gram(quiet, batch).gram, expected)
    assert all(module.training for module in quiet.modules())


def test_rollouts_that_the_model_cannot_score(batch: fa.Batch) -> None:
    model = small_model("gpt2")
    with pytest.raises(ValueError, match="the batch has no token_ids"):
        gradproj.segment_gram(model, replace(batch, token_ids=None))
    foreign = fa.TokenIds(batch.token_ids.ids + VOCABULARY, batch.token_ids.cu_seqlens)
    with pytest.raises(ValueError, match=r"vocabulary is 0 \.\. 22: the rollouts come from another"):
        gradproj.segment_gram(model, replace(batch, token_ids=foreign))
    padded = fa.TokenIds(batch.token_ids.ids - VOCABULARY, batch.token_ids.cu_seqlens)
    with pytest.raises(ValueError, match=r"the batch holds token id -\d+, "):
        gradproj.segment_gram(model, replace(batch, token_ids=padded))
    with pytest.raises(ValueError, match=r"rollout \d has \d+ tokens, the model's context ends at 5"):
        gradproj.segment_gram(small_model("gpt2", n_positions=5, max_position_embeddings=5), batch)
    bare = fa.Batch.of(
        mask=torch.ones(3), rewards=torch.ones(1), group_ids=[0], outcomes=torch.tensor([0]),
        token_ids=fa.TokenIds(torch.ones(3, dtype=torch.int32), torch.tensor([0, 3])),
    )  # fmt: skip
    with pytest.raises(ValueError, match="rollout 0 has no prompt"):
        gradproj.segment_gram(model, bare)


def test_options_that_are_none(batch: fa.Batch) -> None:
    model = small_model("gpt2")
    with pytest.raises(ValueError, match="level is 'token'; it must be one of 'rollout', 'turn'"):
        gradproj.segment_gram(model, batch, level="token")
    for temperature in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="temperature is"):
            gradproj.segment_gram(model, batch, temperature=temperature)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        gradproj.segment_gram(model, batch, max_tokens=0)
    with pytest.raises(ValueError, match="scratch_bytes is -1"):
        gradproj.segment_gram(model, batch, scratch_bytes=-1)
    with pytest.raises(ValueError, match=r"token_weights has shape \[1\]"):
        gradproj.segment_gram(model, batch, token_weights=torch.ones(1))
    weights = torch.ones(batch.mask.shape[0])
    weights[2] = math.nan
    with pytest.raises(ValueError, match=r"token_weights\[2\] is not finite"):
        gradproj.segment_gram(model, batch, token_weights=weights)


def test_a_model_in_two_places_is_refused(batch: fa.Batch) -> None:
    model = small_model("gpt2")
    model.transformer.ln_f.to("meta")
    with pytest.raises(ValueError, match="the model is on cpu, meta; a segment Gram is computed on one device: move"):
        gradproj.segment_gram(model, batch)
    split = small_model("llama")
    split.model.rotary_emb.to("meta")  # buffers only
    with pytest.raises(ValueError, match="the model is on cpu, meta; "):
        gradproj.segment_gram(split, batch)
    with pytest.raises(ValueError, match="the model is on the meta device and has no values"):
        gradproj.segment_gram(small_model("llama").to("meta"), batch)
    fields = {name: value.to("meta") for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    with pytest.raises(ValueError, match="the batch is on the meta device and has no values"):
        gradproj.segment_gram(small_model("llama"), replace(batch, **fields))


def test_gradients_that_are_not_finite(batch: fa.Batch) -> None:
    """Finite log-probs, but products beyond float64; and a model that holds NaN."""
    model = small_model("qwen2")
    huge = torch.full(batch.mask.shape, 1e200, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"gradients of model\.norm are not finite"):
        gradproj.segment_gram(model, batch, token_weights=huge)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="log-probs are not finite: it holds NaN"):
        gradproj.segment_gram(model, batch)


# ---- the model afterwards --------------------------------------------------------------------------------------------


def state(model: Any) -> list[Any]:
    """What a pass could leave behind."""
    modules = list(model.modules())
    return [
        [sorted(m.__dict__) for m in modules],
        [m.training for m in modules],
        [len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in modules],
        [p.requires_grad for p in model.parameters()],
        [p.grad for p in model.parameters()],
        model.config._attn_implementation,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.is_grad_enabled(),
    ]


@pytest.mark.parametrize("fault", ["none", "not finite", "in the middle", "hook"])
def test_the_model_is_left_as_it_was(fault: str, batch: fa.Batch) -> None:
    model = small_model("llama").train()
    model.config._attn_implementation = "eager"
    own = model.model.norm.forward
    model.model.norm.forward = lambda x: own(x)  # someone else's patch
    before, patch = state(model), model.model.norm.forward

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    if fault == "none":
        gradproj.segment_gram(model, batch)
    elif fault == "not finite":
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan
        with pytest.raises(ValueError, match="log-probs are not finite"):
            gradproj.segment_gram(model, batch)
    elif fault == "in the middle":
        with pytest.raises(KeyboardInterrupt):
            gradproj.segment_gram(model, batch, progress=lambda done, total: stop() if done == 2 else None)
    else:
        hook = model.model.layers[1].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            gradproj.segment_gram(model, batch)
        hook.remove()
    assert state(model) == before
    assert model.model.norm.forward is patch


def test_progress_counts_layers(batch: fa.Batch) -> None:
    seen: list[tuple[int, int]] = []
    gradproj.segment_gram(small_model("gpt2"), batch, progress=lambda *given: seen.append(given))
    assert seen == [(i, 4) for i in (1, 2, 3, 4)]


@pytest.mark.parametrize("around", ["inference_mode", "no_grad", "autocast"])
def test_what_runs_around_it_does_not_matter(around: str, batch: fa.Batch) -> None:
    model = small_model("qwen3").float()
    expected = gradproj.segment_gram(model, batch).gram
    context = {"inference_mode": torch.inference_mode(), "no_grad": torch.no_grad(), "autocast": torch.autocast("cpu")}
    with context[around]:
        found = gradproj.segment_gram(model, batch).gram
    assert torch.equal(found, expected)


# ---- batch mates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollout_does_not_see_its_batch_mates(family: str, batch: fa.Batch) -> None:
    model = small_model(family)
    row = 2
    alone = gradproj.segment_gram(model, batch.take(torch.tensor([row])), level="turn").gram
    together = gradproj.segment_gram(model, batch, level="turn")
    mine = together.rows == row
    assert relative_error(together.gram[mine][:, mine], alone) < 1e-12


def test_a_model_that_looks_at_batch_mates_is_refused(batch: fa.Batch) -> None:
    model = small_model("llama")
    plain = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: plain(x) + 1e-3 * x.mean(0, keepdim=True)
    with pytest.raises(ValueError, match=r"log-probs beside others differ by .* nats from those alone"):
        gradproj.segment_gram(model, batch)


def test_layers_that_are_not_a_chain_are_refused(batch: fa.Batch) -> None:
    model = small_model("gpt2", embd_pdrop=0.5)
    model.transformer.drop.forward = lambda x: 2 * x
    with pytest.raises(ValueError, match="does not run its 2 layers on its embeddings"):
        gradproj.segment_gram(model, batch)


def test_two_passes_at_once_on_one_model_are_refused(batch: fa.Batch) -> None:
    """Both would put the model back to what they found, the second one to what the first had made of it."""
    model = small_model("qwen2")
    expected, attention = gradproj.segment_gram(model, batch).gram, model.config._attn_implementation
    refused = []

    def again(done: int, total: int) -> None:
        with pytest.raises(ValueError, match="another pass runs on this model") as error:
            gradproj.segment_gram(model, batch)
        refused.append(error)

    assert torch.equal(gradproj.segment_gram(model, batch, progress=again).gram, expected)
    assert len(refused) == 4
    assert model.config._attn_implementation == attention
    assert torch.equal(gradproj.segment_gram(model, batch).gram, expected)


def test_importing_it_loads_no_models() -> None:
    code = (
        "import sys, fastadv.gradproj; "
        "print([n for n in ('transformers', 'triton', 'fastadv._cpu_baseline', 'fastadv._cuda') if n in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
