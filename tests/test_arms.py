"""Arms on batches: what their conditions and weights look at, what has a name, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from draws import NATIVE
from torch import Tensor

import fastadv as fa
from fastadv.arms import (
    CAPPED,
    Arm,
    Condition,
    Continuation,
    InverseProbability,
    PrefixCut,
    Rescue,
    StaleTokens,
    TokenCoins,
    TurnMask,
)
from fastadv.arms.known import sampled_ranks
from fastadv.arms.rules import repeating
from fastadv.outcomes import Ending, Outcome

S, F, B = Outcome.SOLVED, Outcome.FAILED, Outcome.BUDGET


def make(*, response: list[int] | None = None, **more: Any) -> fa.Batch:
    """Two prompts of four rollouts, each of two turns of two tokens with a tool result between them; ids from 100."""
    mask = torch.tensor([1, 1, 0, 1, 1] * 8)
    lengths = torch.full((8,), 5)
    ids = torch.arange(6 * 8) + 1000 if response is None else torch.tensor(response)
    given: dict[str, Any] = {
        "mask": mask,
        "cu_seqlens": torch.arange(9) * 5,
        "rewards": torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 0]),
        "group_ids": [7] * 4 + [3] * 4,
        "outcomes": [S, F, B, S, S, S, B, B],
        "capped": torch.tensor([0, 1, 1, 1, 0, 0, 1, 1]).bool(),
        "row_ids": torch.arange(8) + 100,
        "token_ids": fa.TokenIds(ids, torch.arange(9) * 6),
        "endings": torch.tensor([0, 3, 3, 2, 0, 1, 4, 5]),
        "versions": torch.cat([torch.tensor([v, v, -1, v + 1, v + 1]) for v in (5, 5, 5, 5, 7, 7, 7, 6)]),
        **more,
    }
    assert int(lengths.sum()) == mask.shape[0]
    return fa.Batch.of(**given)


def excluded(arm: Arm, batch: fa.Batch, **known: Any) -> list[int]:
    return arm.apply(batch, None, known=fa.Known(**known)).excluded.nonzero().squeeze(1).tolist()


@pytest.mark.row(4, 5)
def test_which_rollouts_an_arm_excludes() -> None:
    batch = make()
    assert excluded(fa.ARMS["mask"](), batch) == [2, 6, 7]
    assert excluded(Arm("x", (F, B)), batch) == [1, 2, 6, 7]
    assert excluded(fa.ARMS["skywork-after"](), batch) == [1, 2, 3, 6, 7]  # cut off and solved too
    assert excluded(fa.ARMS["truncated-zero-reward"](), batch) == [1, 2, 6, 7]  # cut off and passed stays
    assert excluded(fa.ARMS["mini-o3"](), batch) == [3, 6]
    assert excluded(fa.ARMS["compact"](), batch) == excluded(fa.ARMS["compact-survivors"](), batch) == [1, 2, 3, 6, 7]
    assert excluded(Arm("x", (B,), endings=(Ending.TURN_CAP,)), batch) == [2, 3, 6, 7]  # either of the two
    assert excluded(Arm("x", (B,), condition=Condition(reward_at_most=-1)), batch) == []
    assert excluded(Arm("x", (B,), population="removed"), replace(batch, outcomes=torch.tensor([0] * 7 + [2]))) == [
        4, 5, 6, 7,
    ]  # fmt: skip


@pytest.mark.row(4)
def test_microcoder_spares_the_wrong_and_the_repeating() -> None:
    """Rows 1 and 2 hit the length cap: 1 is wrong, 2 is not, unless it repeats its last two tokens."""
    microcoder = fa.ARMS["microcoder"](rho=1.0, window=2)
    assert excluded(microcoder, make()) == [2]
    ids = (torch.arange(48) + 1000).tolist()
    ids[14:18] = [5, 6, 5, 6]
    assert excluded(microcoder, make(response=ids)) == []
    ids[17] = 9
    assert excluded(microcoder, make(response=ids)) == [2]
    longer = fa.ARMS["microcoder"](rho=1.0, window=3)  # six tokens: more than there are
    assert excluded(longer, make(response=[5] * 48)) == [2]
    shares = [len(excluded(fa.ARMS["microcoder"](rho=rho, window=2), replace(make(), endings=torch.full((8,), 3))))
              for rho in (0.0, 1.0)]  # fmt: skip
    assert shares == [0, 7]


def test_a_response_that_is_two_windows_long_can_repeat_itself() -> None:
    ids = torch.tensor([9, 1, 2, 1, 2, 9, 1, 2, 2, 1])  # a prompt token, then four
    batch = fa.Batch.of(
        mask=torch.ones(8), cu_seqlens=torch.tensor([0, 4, 8]), rewards=torch.zeros(2), group_ids=[0, 0],
        outcomes=["budget"] * 2, token_ids=fa.TokenIds(ids, torch.tensor([0, 5, 10])),
    )  # fmt: skip
    assert repeating("test", batch, 2).tolist() == [True, False]
    assert repeating("test", batch, 1).tolist() == [False, False]
    assert repeating("test", batch, 3).tolist() == [False, False]


@pytest.mark.row(5, 21)
def test_skywork_before_is_the_survivors_and_after_is_all() -> None:
    batch = make(outcomes=[S, F, B, B, S, S, F, B], rewards=torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0]),
                 capped=torch.tensor([0, 0, 1, 1, 0, 0, 0, 1]).bool())  # fmt: skip
    before, after = (fa.ARMS[name]() for name in ("skywork-before", "skywork-after"))
    kept = batch.outcomes != B
    alive = batch.rewards[:2]
    live = before.apply(batch, None).advantages.values[::2]
    torch.testing.assert_close(live[:2], (alive - alive.mean()) / (alive.std() + 1e-6))
    frozen = before.apply(batch, before.freeze(batch)).advantages.values[::2]
    torch.testing.assert_close(frozen[:2], (alive - alive.mean()) / (batch.rewards[:4].std() + 1e-6))
    four = batch.rewards[:4]
    everyone = after.apply(batch, fa.freeze(batch)).advantages.values[::2]
    torch.testing.assert_close(everyone[:4], kept[:4] * (four - four.mean()) / (four.std() + 1e-6))


@pytest.mark.row(41)
def test_stale_tokens_are_masked_and_their_rollouts_vote() -> None:
    batch = make()
    arm = fa.ARMS["stale-tokens"](after=2)  # the newest version is 8
    result = arm.apply(batch, fa.freeze(batch))
    assert arm.mask_kind == "outcome"
    assert any("depends on the outcome" in flag for flag in arm.flags)
    assert result.token_weights is not None
    assert torch.equal(result.token_weights[batch.mask] == 1, batch.versions[batch.mask] >= 6)
    assert not result.excluded.any()
    assert torch.equal(result.advantages.values, fa.ARMS["none"]().apply(batch, fa.freeze(batch)).advantages.values)
    later = arm.apply(batch, fa.freeze(batch), known=fa.Known(train_version=20)).token_weights
    assert later is not None
    assert not later[batch.mask].any()
    torch.testing.assert_close(result.loss_weights(batch), result.token_weights)


@pytest.mark.row(26, 28)
def test_stale_groups_are_dropped_or_rescued_by_one_coin_a_group() -> None:
    batch = make()
    assert excluded(fa.ARMS["drop-stale"](after=2), batch) == [0, 1, 2, 3]
    assert excluded(fa.ARMS["drop-stale"](after=1), batch) == list(range(8))  # row 7 takes its group along
    assert excluded(fa.ARMS["drop-stale"](), batch, stale=torch.arange(8) == 5) == [4, 5, 6, 7]
    rescue = fa.ARMS["rescue"](a=0.25, after=2)
    seen = set()
    for seed in range(40):
        weights = replace(rescue, seed=seed).apply(batch, fa.freeze(batch)).weights
        assert weights[4:].tolist() == [1.0] * 4
        assert weights[:4].unique().numel() == 1
        seen.add(float(weights[0]))
    assert seen == {0.0, 4.0}
    one_stale = fa.ARMS["rescue"](after=1)  # row 7 makes its group stale
    for seed in range(9):
        assert replace(one_stale, seed=seed).apply(batch, None).weights[4:].tolist() in ([0.0] * 4, [4.0] * 4)


@pytest.mark.row(28, 29)
def test_the_coins_of_groups_are_a_function_of_their_ids() -> None:
    batch, rescue = make(), fa.ARMS["rescue"](a=0.5)
    stale, names = torch.ones(8).bool(), ["x"] * 4 + ["y"] * 4
    for seed in range(20):  # the same for the part of a batch, by names and by row ids
        for known in ({"group_ids": names}, {}):
            whole = replace(rescue, seed=seed).apply(batch, None, known=fa.Known(stale=stale, **known)).weights
            if known:
                assert torch.equal(whole.float(), fa.coins.rescue_weights(seed, names, stale, 0.5))
            part = {"group_ids": names[4:]} if known else {}
            second = batch.take(torch.arange(4, 8))
            again = replace(rescue, seed=seed).apply(second, None, known=fa.Known(stale=stale[4:], **part)).weights
            assert torch.equal(whole[4:], again)


def test_dynamic_sampling_removes_groups_from_the_denominators() -> None:
    batch = make(outcomes=[S, S, S, S, S, F, B, S], rewards=torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 1]))
    arm = fa.ARMS["dynamic-sampling"]()
    result = arm.apply(batch, fa.freeze(batch))
    assert result.removed is not None
    assert result.removed.tolist() == [True] * 4 + [False] * 4
    assert torch.equal(result.excluded, result.removed)
    assert any("edits the mask" in flag for flag in arm.flags)
    failed = arm.apply(replace(batch, outcomes=torch.tensor([1] * 4 + [0] * 4)), None)
    assert failed.removed is not None
    assert failed.removed.all()
    assert fa.ARMS["mask"]().apply(batch, fa.freeze(batch)).removed is None


@pytest.mark.row(30)
def test_divisors_are_said() -> None:
    rescue = Rescue(0.5)
    assert Arm("x", row_weights=rescue).apply(make(), None).divisor == "candidates"
    hajek = Arm("x", row_weights=rescue, divisor="hajek")
    assert hajek.apply(make(), None).divisor == "hajek"
    assert any("biased" in flag for flag in hajek.flags)


# ---- weights of tokens -----------------------------------------------------------------------------------------------


def token_weights(rule: Any, batch: fa.Batch, seed: int = 0) -> Tensor:
    weights = Arm("x", token_weights=rule, seed=seed).apply(batch, None).token_weights
    assert weights is not None
    return weights


@pytest.mark.row(37)
def test_turn_masks() -> None:
    batch = make()
    sampled = batch.mask
    assert torch.equal(token_weights(TurnMask(below=1), batch)[sampled], (batch.turn_ids == 0)[sampled].double())
    assert torch.equal(token_weights(TurnMask(skip=(0,)), batch)[sampled], (batch.turn_ids == 1)[sampled].double())


RULES = [TurnMask(below=1), StaleTokens(2), TokenCoins(0.5), PrefixCut(), PrefixCut(2), Continuation((1,), 0.5)]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_weights_do_not_depend_on_the_layout(rule: Any) -> None:
    batch = make(mask=torch.tensor([1, 1, 0, 1, 1] * 7 + [1, 1, 0, 1, 0]))
    plain = token_weights(rule, batch)
    padded = token_weights(rule, batch.padded(9))
    assert padded.shape == (8, 9)
    assert torch.equal(padded[:, :5].flatten()[batch.mask], plain[batch.mask])
    part = batch.take(torch.tensor([5, 2]))
    rows = torch.cat([torch.arange(25, 30), torch.arange(10, 15)])
    known = fa.Known(train_version=8)
    again = Arm("x", token_weights=rule).apply(part, None, known=known).token_weights
    assert again is not None
    assert torch.equal(again[part.mask], plain[rows][part.mask])


def test_coins_of_tokens_are_their_own() -> None:
    """Half of the tokens of each place, and no place or rollout like another."""
    many = 4000
    batch = fa.Batch.of(mask=torch.ones(many * 4), cu_seqlens=torch.arange(many + 1) * 4, rewards=torch.zeros(many),
                        group_ids=torch.arange(many), outcomes=torch.ones(many, dtype=torch.int64))  # fmt: skip
    kept = token_weights(TokenCoins(0.5), batch).view(many, 4)
    assert kept.unique().tolist() == [0.0, 2.0]
    assert (kept.mean(0) - 1).abs().max() < 5 / many**0.5
    centred = kept - 1
    assert ((centred.T @ centred) / many - torch.eye(4)).abs().max() < 5 / many**0.5
    cut = token_weights(PrefixCut(), batch).view(many, 4)
    assert (cut.mean(0) - 1).abs().max() < 5 * (3 / many) ** 0.5  # the last one's weight is 4 or 0
    assert ((cut[:, :-1] > 0) | (cut[:, 1:] == 0)).all()  # a prefix
    assert (token_weights(PrefixCut(3), batch).view(many, 4)[:, :3] == 1).all()
    going = token_weights(Continuation((1,), 0.5), fa.Batch.of(
        mask=torch.tensor([1, 0, 1] * many), cu_seqlens=torch.arange(many + 1) * 3, rewards=torch.zeros(many),
        group_ids=torch.arange(many), outcomes=torch.ones(many, dtype=torch.int64))).view(many, 3)  # fmt: skip
    assert (going[:, 0] == 1).all()
    assert going[:, 2].unique().tolist() == [0.0, 2.0]
    assert going[:, 2].mean().item() == pytest.approx(1.0, abs=5 / many**0.5)


def test_ranks_of_sampled_tokens() -> None:
    batch = make()
    assert sampled_ranks(batch)[batch.mask].tolist() == [0, 1, 2, 3] * 8
    assert torch.equal(sampled_ranks(batch.padded(7))[:, :5].flatten(), sampled_ranks(batch))


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("name", fa.ARMS)
def test_named_arms_on_the_kernels(name: str, backend: str) -> None:
    batch, arm = make(), fa.ARMS[name]()
    results = [arm.apply(batch, arm.freeze(batch), backend=one) for one in (backend, "reference")]
    torch.testing.assert_close(results[0].advantages.values, results[1].advantages.values, rtol=1e-14, atol=1e-15)
    for result in results:
        row = torch.repeat_interleave(torch.arange(8), result.advantages.segments.turns())
        assert not result.advantages.values[result.excluded[row]].any()


@pytest.mark.parametrize("name", fa.ARMS)
def test_named_arms_have_step_records(name: str) -> None:
    batch, arm = make(), fa.ARMS[name](seed=5)
    statistics = arm.freeze(batch)
    record = fa.StepRecord.of(batch, arm.apply(batch, statistics), statistics, step=0, arm=arm)
    assert fa.arm_from_dict({"name": name, **record.arm_settings}) == arm
    assert record.coin_seed == (5 if arm.tosses else None)


def test_a_loss_takes_what_an_arm_gives() -> None:
    """Every named arm, packed and padded: the same gradient."""
    for name, named in fa.ARMS.items():
        arm, found = named(), []
        for batch in (make(), make().padded(6)):
            result = arm.apply(batch, arm.freeze(batch))
            log_probs = torch.zeros(batch.mask.shape, requires_grad=True)
            out = fa.policy_loss(
                log_probs, None, result.advantages, batch.mask, cu_seqlens=batch.cu_seqlens,
                config=fa.LossConfig("reinforce", loss_agg_mode="token-sum"),
                weights=result.loss_weights(batch).float(),
            )  # fmt: skip
            out.loss.backward()
            found.append(log_probs.grad[batch.mask])
        torch.testing.assert_close(found[0], found[1], msg=name)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_names_and_parameters() -> None:
    for name, named in fa.ARMS.items():
        assert named.name == name == named().name
        assert named().description
        assert named.equation
        assert named.owner
        assert fa.named_arm(name, seed=4) == named(seed=4)
    assert fa.named_arm("rescue:a=0.5, after=3") == fa.ARMS["rescue"](a=0.5, after=3)
    assert fa.named_arm("rescue:a=0.5").name == "rescue:a=0.5"
    assert fa.named_arm("rescue:a=0.25").name == "rescue"
    assert fa.named_arm("position-buckets:edges=2+4").position_edges == (2, 4)
    assert fa.named_arm("random-mask:seed=9", seed=1).seed == 9
    kinds = {name: named().mask_kind for name, named in fa.ARMS.items()}
    assert [name for name, kind in kinds.items() if kind == "predictable"] == ["predictable"]
    assert {name for name, kind in kinds.items() if kind == "none"} == {
        "none", "turn-reached", "nat-urs", "nat-rpc", "stopd", "never-drop", "rescue", "oracle", "position-buckets",
    }  # fmt: skip
    levels = {name: named().level for name, named in fa.ARMS.items()}
    assert {name for name, level in levels.items() if level == "token"} == {
        "stale-tokens", "nat-urs", "nat-rpc", "position-buckets",
    }  # fmt: skip
    assert {name for name, level in levels.items() if level == "turn"} == {"turn-reached", "stopd", "predictable"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("masc", "'masc' is no arm .did you mean 'mask'..; they are none, mask, survivors"),
        ("rescue:b=1", "'b=1' is no parameter=value of a, after, seed"),
        ("rescue:a", "'a' is no parameter=value of a, after, seed"),
        ("rescue:a=x", "a is 'x', which is no float"),
        ("rescue:after=1.5", r"after is '1\.5', which is no int"),
        ("rescue:a=0", r"keep is 0\.0; it must be in \(0, 1\]"),
        ("position-buckets:edges=3+x", r"edges is '3\+x'; join integers with \+"),
        ("nat-urs:r=1.5", r"TokenCoins: keep is 1\.5"),
    ],
)
def test_wrong_names(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fa.named_arm(text)


def test_a_named_arm_refuses_other_parameters() -> None:
    with pytest.raises(ValueError, match="'a' is no parameter; it has none"):
        fa.ARMS["mask"](a=1)


# ---- contradictions --------------------------------------------------------------------------------------------------


@pytest.mark.row(5, 28, 30, 42)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"population": "survivors"}, "population is 'survivors', but nothing is excluded"),
        ({"population": "removed"}, "population is 'removed', but nothing is excluded"),
        ({"fraction": 0.5}, "fraction is 0.5, but nothing is excluded that it could be a share of"),
        ({"excludes": CAPPED, "population": "removed", "fraction": 0.5}, "Rescue tosses one coin a group"),
        ({"excludes": CAPPED, "row_weights": InverseProbability()}, "kept with probability 0, and no weight brings it"),
        ({"condition": Condition(capped=True), "population": "survivors", "row_weights": InverseProbability()},
         "inverse-probability weights with fraction 1"),
        ({"condition": Condition(stale_after=1), "row_weights": Rescue(0.5)}, "take one of the two"),
        ({"row_weights": Rescue(0.5), "weighted": "reward", "scale": "std"}, "scale 'std' divides them out again"),
        ({"row_weights": InverseProbability(), "weighted": "reward"}, "a reward multiplier is no loss weight"),
        ({"weighted": "reward"}, "there are no row_weights"),
        ({"divisor": "hajek"}, "without row_weights their sum is a count"),
        ({"position_edges": (4,)}, "baseline 'loo' looks at no position"),
        ({"position_edges": (4, 4), "baseline": "turn-reached"}, "they must be positive and increase"),
        ({"position_edges": (0, 4), "baseline": "turn-reached"}, "they must be positive and increase"),
        ({"groups": "some"}, "groups is 'some'"),
        ({"divisor": "kept"}, "divisor is 'kept'"),
        ({"scale": "var"}, "scale is 'var'"),
        ({"weighted": "advantage"}, "weighted is 'advantage'"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_contradictions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arm("x", **fields)


def test_what_a_batch_does_not_hold_is_asked_for() -> None:
    bare = make(endings=None, versions=None, token_ids=None)
    for name, message in (
        ("mini-o3", "ended by TURN_CAP, CONTEXT_CAP, but the batch does not say how its rollouts ended"),
        ("stale-tokens", "the batch has no versions"),
        ("drop-stale", "the batch has no versions"),
        ("rescue", r"the batch has no versions.*Known\(stale=\[B\]\)"),
    ):
        with pytest.raises(ValueError, match=message):
            fa.ARMS[name]().apply(bare, None)
    with pytest.raises(ValueError, match="does not say how its rollouts ended"):
        fa.ARMS["mini-o3"]().apply(replace(bare, endings=torch.full((8,), 9)), None)
    with pytest.raises(ValueError, match="the batch has no token ids"):
        fa.ARMS["microcoder"]().apply(make(token_ids=None), None)
    weighted = Arm("x", row_weights=InverseProbability())
    with pytest.raises(ValueError, match=r"no probability is known.*Known\(keep_probability"):
        weighted.apply(bare, None)
    for bad in (0.0, 1.5, float("nan")):
        known = fa.Known(keep_probability=torch.tensor([1.0] * 7 + [bad]))
        with pytest.raises(ValueError, match=r"keep_probability\[7\]"):
            weighted.apply(bare, None, known=known)
    with pytest.raises(ValueError, match="keep_probability has shape"):
        weighted.apply(bare, None, known=fa.Known(keep_probability=torch.ones(3)))
    with pytest.raises(ValueError, match="group_ids has 3 ids, the batch has 8"):
        fa.ARMS["rescue"]().apply(bare, None, known=fa.Known(stale=torch.ones(8).bool(), group_ids=[1, 2, 3]))
    with pytest.raises(ValueError, match="stale has shape"):
        fa.ARMS["drop-stale"]().apply(bare, None, known=fa.Known(stale=torch.ones(3).bool()))


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        (Condition, {}, ValueError, "nothing is asked of a rollout"),
        (Condition, {"not_repeating": -1}, ValueError, "not_repeating is -1"),
        (Condition, {"stale_after": 1.5}, TypeError, "stale_after is 1.5; pass an integer"),
        (TurnMask, {}, ValueError, "no turn is masked"),
        (TurnMask, {"below": 0}, ValueError, "below is 0; it must be at least 1"),
        (TurnMask, {"skip": (-1,)}, ValueError, "skip is -1"),
        (StaleTokens, {"after": -1}, ValueError, "after is -1"),
        (TokenCoins, {"keep": 0}, ValueError, r"keep is 0; it must be in \(0, 1\], since what is kept is weighted by"),
        (Rescue, {"keep": True}, TypeError, "keep is a bool"),
        (PrefixCut, {"least": 0}, ValueError, "least is 0"),
        (Continuation, {"turns": (), "keep": 0.5}, ValueError, "no turn is named"),
        (Continuation, {"turns": (0,), "keep": 0.5}, ValueError, "turns is 0; it must be at least 1"),
        (Continuation, {"turns": (3, 2), "keep": 0.5}, ValueError, "they must increase"),
        (Arm, {"name": "x", "excludes": ("budget",)}, TypeError, "excludes holds 'budget'; pass members of Outcome"),
        (Arm, {"name": "x", "excludes": (Ending.TIMEOUT,)}, TypeError, "pass members of Outcome: SOLVED, FAILED"),
        (Arm, {"name": "x", "endings": (2,)}, TypeError, "endings holds 2; pass members of Ending: SUBMITTED"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_rules_refuse_what_means_nothing(kind: Any, arguments: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        kind(**arguments)


def test_a_condition_that_no_reward_meets() -> None:
    with pytest.raises(ValueError, match="reward_at_most is nan, and no reward is at most that"):
        fa.Arm("x", condition=Condition(reward_at_most=float("nan")))


@pytest.mark.parametrize(
    "given",
    [
        {"name": 3}, {"description": 4}, {"matched_update": 1}, {"fraction": torch.tensor(0.5)}, {"fraction": True},
        {"position_edges": (1.5,), "baseline": "turn-reached"}, {"position_edges": (True,), "baseline": "turn-reached"},
    ],
)  # fmt: skip
def test_settings_that_no_file_could_hold_are_refused(given: dict[str, object]) -> None:
    field = next(iter(given))
    with pytest.raises(TypeError, match=field):
        fa.Arm(**{"name": "x", "excludes": (fa.Outcome.BUDGET,), **given})


def test_a_misspelt_arm_is_guessed() -> None:
    with pytest.raises(ValueError, match=r"'turn-reachd' is no arm \(did you mean 'turn-reached'\?\); they are"):
        fa.named_arm("turn-reachd")
