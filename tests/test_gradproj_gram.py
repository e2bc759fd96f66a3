"""The segment Gram against the gradients that it is made of, and what it costs."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gradproj_models import equal_batch, ragged_batch, relative_error, rollout_log_probs, small_model, written_out
from rollout_files import samples, write_dump
from torch import Tensor, nn

import fastadv as fa
from fastadv import gradproj
from fastadv.arms import freeze, question_one_arms
from fastadv.gradproj.embedding import EmbeddingRows
from fastadv.gradproj.interceptors import LinearInterceptor
from fastadv.gradproj.streams import layout
from fastadv.ops.segment_weight_gram import GramSum, tile_shape
from fastadv.reference.segment_weight_gram import segment_weight_gram as reference
from fastadv.replay.gradients import Weighted, partition, policy_gradients
from fastadv.replay.policy import Policy
from fastadv.replay.readers import ReadOptions, read


@pytest.fixture(scope="module")
def batch() -> fa.Batch:
    return ragged_batch()


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return small_model("gpt2", tied=True)


# ---- against the naive way -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [10**6, 60], ids=["one micro-batch", "many"])
def test_arms_and_buckets_are_the_replays_gradients(gpt2: Any, tmp_path: Path, max_tokens: int) -> None:
    """Every arm, whole and cut by turn and by difficulty, from one Gram that knows of none of them."""
    rollouts = read(write_dump(tmp_path / "dump.pt", samples(prompts=4)), ReadOptions()).batch
    statistics, cells = freeze(rollouts), partition(rollouts, 0)
    wanted, coefficients = [], []
    for arm in question_one_arms():
        result = arm.apply(rollouts, statistics)
        rows = torch.repeat_interleave(torch.arange(rollouts.num_rollouts), rollouts.segments.turns())
        masks = [torch.ones_like(rows, dtype=torch.bool)]
        masks += [cells.turn == t for t in cells.turn.unique()]
        masks += [cells.difficulty[rows] == d for d in cells.difficulty.unique()]
        for mask in masks:
            values = torch.where(mask, result.advantages.values, 0.0)
            wanted.append(Weighted(fa.SegmentTable(values, rollouts.segments), result.weights))
            coefficients.append(values.double() * result.weights.double()[rows])
    flat = policy_gradients(Policy(gpt2, 23, 64), rollouts, wanted, max_tokens=100)  # [K, P]
    a = torch.stack(coefficients)
    found = gradproj.segment_gram(gpt2, rollouts, level="turn", max_tokens=max_tokens)
    assert relative_error(a @ found.gram @ a.t(), flat @ flat.t()) < 1e-12
    assert len(a) > 40


def test_rollouts_are_sums_of_turns(gpt2: Any, batch: fa.Batch) -> None:
    turns = gradproj.segment_gram(gpt2, batch, level="turn")
    rollouts = gradproj.segment_gram(gpt2, batch)
    sums = torch.nn.functional.one_hot(turns.rows).double().t()  # [B, S]
    assert relative_error(sums @ turns.gram @ sums.t(), rollouts.gram) < 1e-12
    assert turns.turns.tolist() == [t for n in batch.segments.turns().tolist() for t in range(n)]
    assert rollouts.rows.tolist() == list(range(batch.num_rollouts))
    assert set(rollouts.turns.tolist()) == {-1}
    assert torch.equal(turns.gram, turns.gram.t())


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_float32_is_right_to_a_millionth(family: str, batch: fa.Batch) -> None:
    model = small_model(family, tied=True, initializer_range=0.1)
    u = written_out(model, batch, "turn")
    found = gradproj.segment_gram(model.float(), batch, level="turn", max_tokens=30)
    assert found.gram.dtype == torch.float64
    assert relative_error(found.gram, u @ u.t()) < 1e-6


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_bfloat16_models_are_multiplied_in_float32(family: str, batch: fa.Batch) -> None:
    """The weights' rounding stays, and that of every activation; a slice of the head is widened at a time."""
    model = small_model(family, initializer_range=0.1).bfloat16()
    u = written_out(small_model(family, initializer_range=0.1), batch, "rollout")
    found = gradproj.segment_gram(model, batch, scratch_bytes=1000)
    assert relative_error(found.gram, u @ u.t()) < 0.03


def test_float32_products_are_not_rounded_further(batch: fa.Batch) -> None:
    """TF32 on a GPU, bfloat16 on some CPUs: an error of a thousandth, and gradients longer than their norms."""
    model, setting = small_model("llama", initializer_range=0.1).float(), torch.backends.cuda.matmul
    expected, seen = gradproj.segment_gram(model, batch).gram, []
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        found = gradproj.segment_gram(
            model, batch, progress=lambda done, total: seen.append(setting.fp32_precision)
        ).gram
        after = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(found, expected)
    assert set(seen) == {"ieee"}
    assert after == "medium"


def test_token_weights_and_several_batches(gpt2: Any, batch: fa.Batch) -> None:
    other = ragged_batch(3, seed=5)
    parts = (batch, other)
    weights = [torch.rand(b.mask.shape[0], dtype=torch.float64) + 0.5 for b in parts]
    u = torch.cat([written_out(gpt2, b, "turn", weights=w) for b, w in zip(parts, weights, strict=True)])
    found = gradproj.segment_gram(gpt2, parts, level="turn", token_weights=torch.cat(weights), max_tokens=40)
    assert relative_error(found.gram, u @ u.t()) < 1e-12
    assert found.rows.max() == batch.num_rollouts + other.num_rollouts - 1


def test_padded_batches_and_rollouts_without_loss_tokens(gpt2: Any, batch: fa.Batch) -> None:
    expected = gradproj.segment_gram(gpt2, batch, level="turn")
    assert torch.equal(gradproj.segment_gram(gpt2, batch.padded(), level="turn").gram, expected.gram)
    silent = replace(batch, mask=batch.mask & (batch.rows.row_of_token() != 2))
    found = gradproj.segment_gram(gpt2, silent, level="turn").gram
    quiet = expected.rows == 2
    assert not found[quiet].any()
    assert relative_error(found[~quiet][:, ~quiet], expected.gram[~quiet][:, ~quiet]) < 1e-12
    nothing = replace(batch, mask=torch.zeros_like(batch.mask))
    assert not gradproj.segment_gram(gpt2, nothing).gram.any()
    empty = batch.take(torch.zeros(0, dtype=torch.int64))
    assert gradproj.segment_gram(gpt2, empty, level="turn").gram.shape == (0, 0)


def test_tokens_outside_of_turns_count_in_neither_level(gpt2: Any, batch: fa.Batch) -> None:
    outside = batch.turn_ids == 1
    moved = replace(batch, turn_ids=torch.where(outside, -1, batch.turn_ids))
    unmasked = replace(batch, mask=batch.mask & ~outside)
    found = gradproj.segment_gram(gpt2, moved).gram
    assert relative_error(found, gradproj.segment_gram(gpt2, unmasked).gram) < 1e-12
    assert relative_error(found, gradproj.segment_gram(gpt2, batch).gram) > 0.01


def test_the_cross_term_of_a_tied_head_counts(batch: fa.Batch) -> None:
    """As two parameters of the same values, the embedding and the head would give another Gram."""
    tied = small_model("llama", tied=True)
    apart = small_model("llama", tied=False)
    apart.load_state_dict(tied.state_dict())
    together, separate = (gradproj.segment_gram(model, batch).gram for model in (tied, apart))
    assert relative_error(separate, together) > 1e-3
    u = written_out(tied, batch, "rollout")
    assert relative_error(together, u @ u.t()) < 1e-12


# ---- causality -------------------------------------------------------------------------------------------------------


def test_a_turns_gradient_is_exactly_zero_behind_its_last_token(batch: fa.Batch) -> None:
    """What lets a stream be cut there."""
    model = small_model("qwen2")
    row = int(batch.segments.turns().argmax())
    outputs: dict[str, Tensor] = {}
    for name, module in model.model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, i, o, name=name: outputs.__setitem__(name, o))
    log_probs = rollout_log_probs(model, batch, row)
    assert batch.cu_seqlens is not None
    assert batch.token_ids is not None
    tokens = slice(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))
    turns, mask = batch.turn_ids[tokens], batch.mask[tokens]
    prompt = int(batch.token_ids.cu_seqlens.diff()[row]) - len(mask)
    for turn in range(int(turns.max()) + 1):
        inside = mask & (turns == turn)
        end = prompt + int(inside.nonzero().max())  # rows 0 .. end - 1 predict up to the turn's last token
        gradients = torch.autograd.grad((log_probs * inside).sum(), list(outputs.values()), retain_graph=True)
        for gradient in gradients:
            assert (gradient[0, end:] == 0).all()
            assert (gradient[0, :end] != 0).any()
    (one,) = (
        m for m in layout([batch.take(torch.tensor([row]))], "turn", 10**6, None, torch.device("cpu")).micro_batches
    )
    last = [prompt + int((mask & (turns == j)).nonzero().max()) for j in range(int(turns.max()) + 1)]
    assert [stream.rows for stream in one.streams] == last


def test_a_turns_share_is_that_of_its_loss_not_of_its_positions(batch: fa.Batch) -> None:
    """Attributed by where activations are, turns get other shares of the same sum."""
    model = small_model("qwen2")
    row = int(batch.segments.turns().argmax())
    layer = model.model.layers[0].mlp.up_proj
    kept: dict[str, Tensor] = {}
    layer.register_forward_hook(lambda m, i, o: kept.update(x=i[0], y=o))
    log_probs = rollout_log_probs(model, batch, row)
    assert batch.cu_seqlens is not None
    tokens = slice(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))
    turns, mask = batch.turn_ids[tokens], batch.mask[tokens]
    by_loss = [torch.autograd.grad((log_probs * (mask & (turns == j))).sum(), kept["y"], retain_graph=True)[0][0]
               for j in range(int(turns.max()) + 1)]  # fmt: skip
    x, whole = kept["x"][0], torch.stack(by_loss).sum(0)
    reference_gradient = whole.t() @ x
    loss_shares = torch.stack([((dy.t() @ x) * reference_gradient).sum() for dy in by_loss])
    place = torch.cat([torch.full((len(x) - len(turns),), -1), turns])[1:]  # the token that each row predicts
    rows = ((whole @ reference_gradient)[: len(place)] * x[: len(place)]).sum(-1)
    position_shares = torch.stack([rows[place == j].sum() for j in range(len(by_loss))])
    elsewhere = rows[place < 0].sum()
    torch.testing.assert_close(loss_shares.sum(), position_shares.sum() + elsewhere, rtol=1e-12, atol=0)
    assert ((loss_shares - position_shares).abs() / loss_shares.abs()).max() > 0.1


# ---- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["rollout", "turn"])
def test_operations_are_linear_in_tokens_and_do_not_know_of_arms(level: str) -> None:
    from bench.gradproj import Operations

    model = small_model("llama", num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=128)
    counts = []
    for tokens in (20, 30, 40):
        with Operations() as counted:
            found = gradproj.segment_gram(model, equal_batch(3, 3, tokens), level=level, max_tokens=10**6)
        attention = counted.by_name["aten.bmm"]
        counts.append(counted.total - attention)
    assert counts[2] - counts[1] == counts[1] - counts[0] > 0
    for arms in (6, 600):  # all arms there ever are cost what S x S numbers cost
        with Operations() as counted:
            a = torch.rand(arms, len(found.rows), dtype=torch.float64)
            assert (a @ found.gram @ a.t()).shape == (arms, arms)
        if arms == 6:
            assert counted.total < counts[0] / 1000


def test_operations_beside_one_checkpointed_step() -> None:
    from bench.gradproj import operation_ratios

    ratios = operation_ratios()
    assert ratios["rollout"] <= 1.12
    assert ratios["turn"] <= 3.8


@pytest.mark.slow
def test_memory_beside_one_checkpointed_step() -> None:
    from bench.gradproj import one_layer, peaks

    found = peaks()
    assert found["rollout"] < found["step"] + one_layer("rollout")


def test_no_graph_lives_when_a_layer_is_multiplied(gpt2: Any, batch: fa.Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input that is kept with its graph keeps every activation of every micro-batch."""
    plain, parts = LinearInterceptor.add_to, 0

    def add_to(self: LinearInterceptor, gram: GramSum, scratch_bytes: int) -> None:
        nonlocal parts
        parts += len(self.parts)
        gc.collect()
        graphs = [t.shape for t in gc.get_objects() if type(t) is Tensor and t.grad_fn is not None]
        assert not graphs
        assert not any(part.inputs.requires_grad or part.output_gradients.requires_grad for part in self.parts)
        plain(self, gram, scratch_bytes)
        assert not self.parts

    gc.collect()
    monkeypatch.setattr(LinearInterceptor, "add_to", add_to)
    gradproj.segment_gram(gpt2, batch, max_tokens=30)
    assert parts >= 2 * 8  # two micro-batches of eight linear layers


def test_inputs_are_kept_once_for_the_layers_that_share_them(batch: fa.Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v multiply one input."""
    kept: dict[int, Counter[str]] = {}
    plain = LinearInterceptor.add_to

    def add_to(self: LinearInterceptor, gram: GramSum, scratch_bytes: int) -> None:
        for part in self.parts:
            kept.setdefault(part.inputs.data_ptr(), Counter())[self.name.rsplit(".")[-1]] += 1
        plain(self, gram, scratch_bytes)

    monkeypatch.setattr(LinearInterceptor, "add_to", add_to)
    gradproj.segment_gram(small_model("qwen2", num_hidden_layers=1), batch)
    assert {"q_proj", "k_proj", "v_proj"} in [set(names) for names in kept.values()]


# ---- the pieces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scratch_bytes", [1, 500, None])
@pytest.mark.parametrize("layout_of", ["contiguous", "strided"])
def test_segment_weight_gram(scratch_bytes: int | None, layout_of: str) -> None:
    cu_seqlens = torch.tensor([0, 0, 3, 4, 4, 10, 10])
    x, dy = torch.randn(10, 7, dtype=torch.float64), torch.randn(10, 40, dtype=torch.float64)
    if layout_of == "strided":
        x, dy = torch.randn(7, 20, dtype=torch.float64)[:, ::2].t(), torch.randn(40, 10, dtype=torch.float64).t()
    gram = torch.ones(6, 6, dtype=torch.float64)
    gradproj.segment_weight_gram(x, dy, cu_seqlens, gram, scratch_bytes=scratch_bytes)
    torch.testing.assert_close(gram, 1 + reference(x, dy, cu_seqlens), rtol=1e-12, atol=1e-12)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-6)):
        low_x, low_dy, gram = x.to(dtype), dy.to(dtype), torch.zeros(6, 6, dtype=torch.float64)
        gradproj.segment_weight_gram(low_x, low_dy, cu_seqlens, gram, scratch_bytes=scratch_bytes)
        assert relative_error(gram, reference(low_x, low_dy, cu_seqlens)) < tolerance


def test_segment_weight_gram_of_nothing() -> None:
    none, empty = torch.zeros(0, 0, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    gradproj.segment_weight_gram(torch.zeros(0, 3), torch.zeros(0, 4), torch.tensor([0]), none)
    gradproj.segment_weight_gram(torch.zeros(0, 3), torch.zeros(0, 4), torch.tensor([0, 0, 0]), empty)
    gradproj.segment_weight_gram(torch.zeros(2, 0), torch.zeros(2, 4), torch.tensor([0, 1, 2]), empty)
    assert not empty.any()


def test_segment_weight_gram_refuses_what_does_not_fit() -> None:
    x, dy, ends, gram = torch.zeros(4, 3), torch.zeros(4, 2), torch.tensor([0, 4]), torch.zeros(1, 1).double()
    run = gradproj.segment_weight_gram
    with pytest.raises(ValueError, match=r"output_gradients \[3, 2\]"):
        run(x, dy[:3], ends, gram)
    with pytest.raises(TypeError, match=r"output_gradients has dtype torch\.float64"):
        run(x, dy.double(), ends, gram)
    with pytest.raises(ValueError, match="ends at 5, but inputs has 4 tokens"):
        run(x, dy, torch.tensor([0, 5]), gram)
    with pytest.raises(ValueError, match=r"gram has shape \[1, 1\]; expected \[2, 2\]"):
        run(x, dy, torch.tensor([0, 2, 4]), gram)
    with pytest.raises(TypeError, match=r"gram has dtype torch\.float32"):
        run(x, dy, ends, gram.float())
    with pytest.raises(ValueError, match="scratch_bytes is 0"):
        run(x, dy, ends, gram, scratch_bytes=0)


def test_tiles_fit_the_scratch() -> None:
    for segments in (1, 16, 1000):
        for d_out, d_in in ((1, 1), (512, 192), (3, 5000), (5000, 3)):
            for scratch in (1, 4096, 2**20):
                rows, columns = tile_shape(segments, d_out, d_in, 4, scratch)
                assert 1 <= rows <= d_out
                assert 1 <= columns <= d_in
                assert 4 * segments * rows * columns <= max(scratch, 4 * segments)
                # Nothing is left over that would have held twice as much.
                assert (rows, columns) == (d_out, d_in) or 16 * segments * rows * columns >= min(scratch, 16 * segments)


def test_only_one_triangle_is_multiplied() -> None:
    from bench.gradproj import Operations

    vectors = torch.randn(128, 1000, dtype=torch.float64)
    total = GramSum(128, vectors.device)
    with Operations() as counted:
        total.add(vectors)
    assert counted.total == 36 / 64 * 2 * 128 * 128 * 1000
    torch.testing.assert_close(total.whole(), vectors @ vectors.t())


def test_float32_sums_go_to_float64_in_time() -> None:
    """2^22 equal products: one float32 sum of them stops growing at 2^24 times the smallest."""
    vectors = torch.full((1, 2**22), 1.1)
    total = GramSum(1, vectors.device)
    total.add(vectors)
    assert float(total.whole()) == pytest.approx(2**22 * float(vectors[0, 0].double() ** 2), rel=1e-6)


@pytest.mark.parametrize("scratch_bytes", [1, 300, 10**6])
def test_embedding_rows_meet_by_token(scratch_bytes: int) -> None:
    one = layout([ragged_batch()], "turn", 10**6, None, torch.device("cpu"))
    rows, dense = EmbeddingRows(padding=3), torch.zeros(one.segments, 23, 5, dtype=torch.float64)
    for stream in one.micro_batches[0].streams:
        cotangent = torch.randn(stream.rows, 5, dtype=torch.float64)
        ids = stream.gather(one.micro_batches[0].ids.flatten())
        rows.keep(ids, stream, cotangent)
        for run in stream.runs:
            there = slice(run.gradient_row, run.gradient_row + run.rows)
            dense[run.segment].index_add_(0, ids[there], cotangent[there])
    dense[:, 3] = 0
    total = GramSum(one.segments, dense.device)
    rows.add_to(total, scratch_bytes)
    torch.testing.assert_close(total.whole(), dense.flatten(1) @ dense.flatten(1).t())
