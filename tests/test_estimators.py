"""`fa.estimate`: names, what they read, known values, and loops over Python floats beside every rollout-level one."""

from __future__ import annotations

import math
from typing import Any

import estimator_oracle as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_cases import BACKENDS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fastadv as fa

ON = pytest.mark.parametrize("backend", BACKENDS)
ROLLOUT = sorted(name for name, e in fa.ESTIMATORS.items() if e.level == "rollout")
FORMS = sorted(oracle.FORMS)
NAN = math.nan


def close(actual: Any, expected: Any, tolerance: float = 1e-9, *, name: str = "") -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(
        actual.double(), expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}" if name else m
    )


def test_the_oracle_knows_every_estimator_of_rollouts() -> None:
    """All but the two whose rows are turns and the one that normalises twice, which have tests of their own."""
    assert set(ROLLOUT) - set(FORMS) == {"grpo/verl-agent", "grpo/areal-adv-norm"}
    assert set(FORMS) <= set(ROLLOUT)


@pytest.mark.parametrize("name", FORMS)
def test_the_registry_says_what_the_oracle_does(name: str) -> None:
    """Two lists of conventions, written apart."""
    entry, form = fa.ESTIMATORS[name], oracle.FORMS[name]
    assert entry.name == name
    assert entry.method == name.split("/")[0]
    assert (entry.ddof, entry.eps) == ((None, None) if form.where == "none" else (form.ddof, form.eps))
    assert entry.eps_form == (None if form.where == "none" else form.where)
    assert entry.singleton == ("error" if form.method == "passk" else form.lone)
    assert ("filtered rollouts do not vote" in entry.masking) == form.survivors
    assert ("NaN rewards do not vote" in entry.masking) == form.nan
    assert ("without a token" in entry.masking) == ("mask" in entry.reads)
    assert "R" in entry.equation
    assert ":" in entry.code_path or "(" in entry.code_path
    assert callable(entry.function)


# ---- against loops ---------------------------------------------------------------------------------------------------

REWARD = st.sampled_from([0.0, 1.0, 0.25, -2.5, 0.3, 7.0])


@st.composite
def batches(draw: Any, *, smallest: int = 1) -> dict[str, Any]:
    """Groups of any size, interleaved, some without spread, some far from 0, some rows filtered or unscored."""
    sizes = draw(st.lists(st.integers(smallest, 5), min_size=1, max_size=5))
    rows: list[tuple[int, float]] = []
    for label, size in enumerate(sizes):
        offset = draw(st.sampled_from([0.0, 0.0, 1e6, -3e4]))
        equal = draw(st.booleans())
        values = [draw(REWARD)] * size if equal else [draw(REWARD) for _ in range(size)]
        rows += [(label, offset + value) for value in values]
    rows = draw(st.permutations(rows))
    count = len(rows)
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    return {
        "labels": [label for label, _ in rows],
        "rewards": [reward for _, reward in rows],
        "include": draw(flags),
        "absent": draw(flags),
        "lengths": draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)),
    }


def rewards_of(batch: dict[str, Any]) -> Tensor:
    return torch.tensor(batch["rewards"], dtype=torch.float64)


# A batch serves all estimators of a method: to draw it takes longer than to run them.
METHODS = sorted({form.method for form in oracle.FORMS.values()})


def of_method(method: str) -> list[tuple[str, oracle.Form]]:
    return [(name, form) for name, form in sorted(oracle.FORMS.items()) if form.method == method]


@pytest.mark.row(39, 50)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("method", METHODS)
@given(data=st.data())
def test_loops(method: str, backend: str, data: Any) -> None:
    batch = data.draw(batches(smallest=2 if method == "passk" else 1))
    lengths = batch["lengths"] if method == "length" else None
    extra = {} if lengths is None else {"lengths": torch.tensor(lengths)}
    groups = [[row for row, other in enumerate(batch["labels"]) if other == label] for label in set(batch["labels"])]
    equal = [rows for rows in groups if len(rows) > 1 and len({batch["rewards"][row] for row in rows}) == 1]
    for name, form in of_method(method):
        actual = fa.estimate(name, rewards_of(batch), batch["labels"], backend=backend, **extra).advantages
        close(actual, oracle.rollouts(form, batch["rewards"], batch["labels"], lengths=lengths), name=name)
        assert actual.dtype == torch.float64
        narrow = fa.estimate(name, rewards_of(batch).float(), batch["labels"], backend=backend, **extra).advantages
        assert narrow.dtype == torch.float32
        for rows in equal:  # exactly 0 without spread
            assert not actual[rows].any(), name
            assert not narrow[rows].any(), name


@pytest.mark.row(4, 5, 50)
@pytest.mark.parametrize("method", METHODS)
@given(data=st.data())
def test_loops_with_filtered_rollouts(method: str, data: Any) -> None:
    """Filtered rollouts get 0; whether they vote is the owner's affair, and where they do not, NaN may stand there."""
    batch = data.draw(batches(smallest=2))
    include = batch["include"]
    if method == "passk":
        include = [True] * 2 * len(include)  # a filtered rollout still votes, and there is no group of one
        include = include[: len(batch["rewards"])]
    lengths = batch["lengths"] if method == "length" else None
    extra = {} if lengths is None else {"lengths": torch.tensor(lengths)}
    kept = torch.tensor(include)
    for name, form in of_method(method):
        if "include" not in fa.ESTIMATORS[name].reads:
            continue
        known = zip(batch["rewards"], include, strict=True)
        rewards = [r if keep or not form.survivors else NAN for r, keep in known]
        given = torch.tensor(rewards, dtype=torch.float64)
        actual = fa.estimate(name, given, batch["labels"], include=kept, **extra).advantages
        exact = oracle.rollouts(form, rewards, batch["labels"], include=include, lengths=lengths)
        close(actual, exact, name=name)
        assert not actual[~kept].any(), name


@given(batch=batches())
def test_loops_with_unscored_rollouts(batch: dict[str, Any]) -> None:
    rewards = [NAN if gone else r for r, gone in zip(batch["rewards"], batch["absent"], strict=True)]
    for name in (n for n in FORMS if oracle.FORMS[n].nan):
        for include in (None, batch["include"]):
            extra = {} if include is None else {"include": torch.tensor(include)}
            actual = fa.estimate(name, torch.tensor(rewards, dtype=torch.float64), batch["labels"], **extra).advantages
            close(actual, oracle.rollouts(oracle.FORMS[name], rewards, batch["labels"], include=include), name=name)


@given(batch=batches())
def test_loops_with_empty_rollouts(batch: dict[str, Any]) -> None:
    """Padded and packed; a rollout without a token does not vote, and its reward may be NaN."""
    present = [not gone for gone in batch["absent"]]
    rewards = [r if here else NAN for r, here in zip(batch["rewards"], present, strict=True)]
    tensor = torch.tensor(rewards, dtype=torch.float64)
    mask = torch.arange(3) < 2 * torch.tensor(present)[:, None]
    cu_seqlens = torch.tensor([0, *present]).cumsum(0)
    packed = torch.ones(sum(present))
    for name in (n for n in FORMS if "mask" in fa.ESTIMATORS[n].reads and "passk" not in n):
        expected = oracle.rollouts(oracle.FORMS[name], rewards, batch["labels"], present=present)
        close(fa.estimate(name, tensor, batch["labels"], mask=mask).advantages, expected, name=name)
        found = fa.estimate(name, tensor, batch["labels"], mask=packed, cu_seqlens=cu_seqlens).advantages
        close(found, expected, name=name)


@given(batch=batches())
def test_populations_can_be_asked_for(batch: dict[str, Any]) -> None:
    """Another population than the owner's is an option of every estimator that reads include."""
    include = torch.tensor(batch["include"])
    for name, other in (("grpo/verl", "survivors"), ("rloo/nemo-rl", "all"), ("maxrl/skyrl", "survivors")):
        form = oracle.Form(**{**vars(oracle.FORMS[name]), "survivors": other == "survivors"})
        actual = fa.estimate(name, rewards_of(batch), batch["labels"], include=include, population=other).advantages
        close(actual, oracle.rollouts(form, batch["rewards"], batch["labels"], include=batch["include"]))


def test_opo_counts_the_tokens_of_a_mask() -> None:
    rewards, labels = torch.tensor([1.0, 0.0, 0.5]), [0, 0, 0]
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    by_mask = fa.estimate("opo/verl", rewards, labels, mask=mask).advantages
    assert torch.equal(by_mask, fa.estimate("opo/verl", rewards, labels, lengths=mask.sum(1)).advantages)
    close(by_mask[:2], [1 - 2 / 6, -2 / 6], 1e-6)


# ---- known values ----------------------------------------------------------------------------------------------------

TRUTH, RECORDED = [1.0, 1, 1, 1, 0, 0, 0, 0], [1.0, 1, 0, 0, 0, 0, 0, 0]
FINISHED = torch.tensor([True, True, False, False, True, True, True, True])


@ON
@pytest.mark.parametrize(
    ("name", "rewards", "right", "wrong"),
    [
        ("grpo/rllm", TRUTH, 1.0, -1.0),
        ("grpo/verl", TRUTH, 0.935, -0.935),
        ("grpo/trl-async", RECORDED, 1.732, -0.577),
        ("grpo/verl", RECORDED, 1.620, -0.540),
        ("grpo/prime-rl", RECORDED, 0.75, -0.25),
    ],
)
def test_eight_responses(name: str, rewards: list[float], right: float, wrong: float, backend: str) -> None:
    """Two finished right, two truncated that would be right, four wrong: the mean is .5, and .25 as recorded."""
    advantages = fa.estimate(name, torch.tensor(rewards), [0] * 8, backend=backend).advantages
    close(advantages, [right if r else wrong for r in rewards], 5e-4)


@ON
@pytest.mark.row(5, 21)
def test_eight_responses_of_survivors(backend: str) -> None:
    for name, right, wrong in (("grpo/rllm", 1.414, -0.707), ("grpo/verl", 1.291, -0.645)):
        found = fa.estimate(
            name, torch.tensor(RECORDED), [0] * 8, include=FINISHED, population="survivors", backend=backend
        )
        close(found.advantages, [right, right, 0, 0, wrong, wrong, wrong, wrong], 5e-4)
    # Masked after the statistics, the two truncated ones are 0 and nothing else moves.
    masked = fa.estimate("grpo/trl-async", torch.tensor(RECORDED), [0] * 8, include=FINISHED, backend=backend)
    close(masked.advantages, [1.732, 1.732, 0, 0, -0.577, -0.577, -0.577, -0.577], 5e-4)


@pytest.mark.row(20)
@ON
def test_dr_grpo_does_not_divide(backend: str) -> None:
    rewards, labels = torch.tensor([1.0, 0.0, 0.5, 3.0]), [0, 0, 0, 1]
    close(fa.estimate("dr_grpo/verl", rewards, labels, backend=backend).advantages, [0.5, -0.5, 0.0, 3.0])
    close(fa.estimate("dr_grpo/understand-r1-zero", rewards, labels, backend=backend).advantages, [0.5, -0.5, 0.0, 0.0])
    loo = fa.estimate("rloo/verl", rewards, labels, backend=backend).advantages
    close(loo[:3], [0.5 * 3 / 2, -0.5 * 3 / 2, 0.0])  # G / (G - 1) times the same


def test_areal_gives_a_masked_rollout_an_advantage_again() -> None:
    """Its reward is zeroed after the group's normalisation and before the batch's."""
    rewards, labels = torch.tensor([1.0, 0.0, 0.0, 1.0]), [0] * 4
    include, lengths = torch.tensor([True, True, True, False]), torch.full((4,), 7)
    centred = fa.estimate("grpo/areal", rewards, labels, include=include).advantages
    scale = math.sqrt(1 / 3) + 1e-5
    close(centred, [0.5 / scale, -0.5 / scale, -0.5 / scale, 0.0], 1e-6)
    again = fa.estimate("grpo/areal-adv-norm", rewards, labels, include=include, lengths=lengths, std=False)
    close(again.advantages * scale, [0.625, -0.375, -0.375, 0.125], 1e-6)
    both = fa.estimate("grpo/areal-adv-norm", rewards, labels, include=include, lengths=lengths).advantages.double()
    tokens = torch.repeat_interleave(both, lengths)
    assert float(tokens.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(tokens.std()) == pytest.approx(1.0, abs=1e-4)


def test_nemo_leaves_the_rollout_out_of_the_standard_deviation() -> None:
    rewards, labels = torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.float64), [0] * 4
    others = math.sqrt(4 / 3)  # std of 0, 0, 2
    first = fa.estimate("grpo/nemo-rl", rewards, labels).advantages[0]
    close(first, (1 - 2 / 3) / (others + 1e-6))
    # Others without spread: not scaled, whatever a difference of squares would have left.
    lone = fa.estimate("grpo/nemo-rl", torch.tensor([0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]), [0] * 7).advantages
    close(lone[0], 0.2, 1e-6)


def test_passk_rewards_the_lead_of_the_best() -> None:
    rewards, labels = torch.tensor([0.0, 3.0, 2.0, 5.0, 5.0]), [0, 0, 0, 1, 1]
    close(fa.estimate("passk/verl", rewards, labels, std=False).advantages, [0.0, 1.0, 0.0, 0.0, 0.0])
    close(fa.estimate("passk/verl", rewards, labels).advantages[1], 1 / (math.sqrt(7 / 3) + 1e-6), 1e-6)
    with pytest.raises(ValueError, match="has one rollout that votes"):
        fa.estimate("passk/verl", rewards, [0, 0, 0, 1, 2])


def test_maxrl() -> None:
    rewards, labels = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0]), [0, 0, 0, 0, 1, 1, 2]
    close(fa.estimate("maxrl/prime-rl", rewards, labels).advantages, [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0])
    skyrl = fa.estimate("maxrl/skyrl", rewards, labels).advantages
    close(skyrl, [0.75 / 0.250001, *[-0.25 / 0.250001] * 3, 0.0, 0.0, 4.0], 1e-6)
    negative = torch.tensor([-1.0, -3.0])
    assert fa.estimate("maxrl/prime-rl", negative, [0, 0]).advantages.tolist() == [0.0, 0.0]


def test_returns_are_the_advantages_where_the_owner_has_them() -> None:
    rewards, labels = torch.tensor([1.0, 0.0]), [0, 0]
    verl = fa.estimate("grpo/verl", rewards, labels)
    assert verl.returns is verl.advantages
    assert fa.estimate("grpo/trl", rewards, labels).returns is None


# ---- names and inputs ------------------------------------------------------------------------------------------------

R, LABELS = torch.tensor([1.0, 0.0]), [0, 0]


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"no estimator 'rloo' .did you mean 'rloo/fastadv' or 'rloo/nemo-rl' or"):
        fa.estimate("rloo", torch.ones(2), [0, 0])
    with pytest.raises(ValueError, match=r"'grpo/verll' .did you mean 'grpo/verl'\?\); names are .*rloo/trl"):
        fa.estimate("grpo/verll", R, LABELS)
    with pytest.raises(ValueError, match="no estimator 'nothing like it'; names are"):
        fa.estimate("nothing like it", R, LABELS)
    with pytest.raises(ValueError, match="no estimator None"):
        fa.estimate(None, R, LABELS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("grpo/verl", {"lengths": torch.ones(2)}, "lengths is given, but this estimator does not read it"),
        ("grpo/trl", {"mask": torch.ones(2, 3)}, "mask is given, but this estimator does not read it"),
        ("grpo/verl", {"cu_seqlens": torch.tensor([0, 1, 2])}, "cu_seqlens is given, but nothing that is packed"),
        ("opo/verl", {}, "lengths or mask is missing; pass lengths"),
        ("opo/verl", {"lengths": torch.ones(2), "mask": torch.ones(2, 3)}, "lengths and mask are both given"),
        ("grpo/verl-agent", {}, "turn_ids is missing; pass turn_ids"),
        ("grpo/verl", {"gamma": 0.9}, "there is no option 'gamma'; options are population"),
        ("grpo/verl", {"population": "most"}, "population is 'most'; it must be one of 'all', 'survivors'"),
        ("grpo/verl", {"population": 1}, "population is 1; pass a str"),
        ("grpo/verl", {"population": "survivors"}, "population is 'survivors' but include is not given"),
        ("passk/verl", {"std": 0}, "std is 0; pass a bool"),
        ("grpo/verl", {"include": torch.ones(3, dtype=torch.bool)}, r"include has shape \[3\]; expected \[2\]"),
        ("grpo/verl", {"mask": torch.ones(3, 4)}, "mask"),
        ("grpo/verl-agent-trajectory", {"population": "all"}, "no option 'population'; this estimator has none"),
        ("turn_reached/fastadv", {"turn_ids": torch.zeros(2, 1).int(), "kappa": NAN}, "kappa is nan; pass a finite"),
    ],
)
def test_bad_inputs(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fa.estimate(name, R, LABELS, **given)


def test_missing_rewards_and_groups() -> None:
    with pytest.raises(ValueError, match="rewards is missing"):
        fa.estimate("grpo/verl", group_ids=LABELS)
    with pytest.raises(ValueError, match="group_ids is missing"):
        fa.estimate("grpo/verl", R)
    with pytest.raises(TypeError, match="rewards is a list"):
        fa.estimate("grpo/verl", [1.0, 0.0], LABELS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rewards has shape \[2\]; expected \[3\]"):
        fa.estimate("grpo/verl", R, [0, 0, 1])
    with pytest.raises(ValueError, match="must be finite"):
        fa.estimate("grpo/verl", torch.tensor([NAN, 1.0]), LABELS)


def test_rewards_carry_no_graph() -> None:
    for name in FORMS:
        extra = {"lengths": torch.ones(2)} if name == "opo/verl" else {}
        assert not fa.estimate(name, R.clone().requires_grad_(), LABELS, **extra).advantages.requires_grad


def test_the_registry_cannot_be_written() -> None:
    with pytest.raises(TypeError):
        fa.ESTIMATORS["mine/me"] = fa.ESTIMATORS["grpo/verl"]  # type: ignore[index]
    from fastadv.estimators.registry import estimator

    with pytest.raises(ValueError, match="'grpo/verl' is taken"):
        estimator("grpo/verl", equation="", code_path="")
    with pytest.raises(ValueError, match="an input is 'nonsense'"):
        estimator("mine/me", equation="", code_path="", needs=("nonsense",))


@pytest.mark.row(50)
@pytest.mark.parametrize("name", FORMS)
def test_an_empty_batch(name: str) -> None:
    extra = {"lengths": torch.ones(0)} if name == "opo/verl" else {}
    assert fa.estimate(name, torch.ones(0), [], **extra).advantages.shape == (0,)
    nobody = {"include": torch.zeros(2, dtype=torch.bool)} if "include" in fa.ESTIMATORS[name].reads else {}
    if nobody:
        extra = {"lengths": torch.ones(2)} if name == "opo/verl" else {}
        assert not fa.estimate(name, R, LABELS, **nobody, **extra).advantages.any()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_low_precision_and_whole_rewards(name: str, dtype: torch.dtype) -> None:
    rewards, labels = torch.tensor([1, 0, 4, 2, 2]), [0, 1, 0, 1, 0]
    extra = {"lengths": torch.tensor([1, 2, 3, 4, 5])} if name == "opo/verl" else {}
    exact = fa.estimate(name, rewards.double(), labels, **extra).advantages
    result = fa.estimate(name, rewards.to(dtype), labels, **extra).advantages
    assert result.dtype == torch.float32
    close(result, exact, 1e-6)


@given(batch=batches(smallest=2), seed=st.integers(0, 99))
def test_order_labels_and_other_groups_do_not_matter(batch: dict[str, Any], seed: int) -> None:
    """Permuted rows give permuted advantages, and each group alone gives what it gives in the batch. (Not of gpg, whose
    factor is the whole batch's.)"""
    rewards, labels = rewards_of(batch), torch.tensor(batch["labels"])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    one = labels == labels[0]
    for name in (n for n in FORMS if oracle.FORMS[n].method != "gpg"):
        extra = {"lengths": torch.tensor(batch["lengths"])} if name == "opo/verl" else {}
        whole = fa.estimate(name, rewards, labels, **extra).advantages
        moved = {key: value[order] for key, value in extra.items()}
        close(fa.estimate(name, rewards[order], 7 - labels[order], **moved).advantages, whole[order], name=name)
        alone = {key: value[one] for key, value in extra.items()}
        assert torch.equal(fa.estimate(name, rewards[one], labels[one], **alone).advantages, whole[one]), name


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", FORMS)
def test_nothing_waits_for_a_device(name: str, backend: str) -> None:
    """Given index objects: on tensors without values, whatever reads one raises."""
    groups = fa.group_index([0, 0, 1, 1, 1])
    with FakeTensorMode() as mode:
        index = fa.GroupIndex(*(mode.from_tensor(t) for t in (groups.index, groups.order, groups.offsets)))
        for include in (None, torch.ones(5, dtype=torch.bool)):
            extra = {"lengths": torch.ones(5)} if name == "opo/verl" else {}
            if include is not None and "include" in fa.ESTIMATORS[name].reads:
                extra["include"] = include
            advantages = fa.estimate(name, torch.rand(5), index, backend=backend, **extra).advantages
            assert advantages.shape == (5,)


@pytest.mark.parametrize("name", ["grpo/verl", "grpo/trl", "grpo/nemo-rl", "gpg/verl", "maxrl/skyrl", "passk/verl"])
def test_compile(name: str) -> None:
    groups, rewards = fa.group_index([0, 0, 1, 1, 1, 0]), torch.tensor([1.0, 0.0, 2.0, 0.5, 0.5, 1.0])
    compiled = torch.compile(lambda r: fa.estimate(name, r, groups).advantages, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(rewards), fa.estimate(name, rewards, groups).advantages)
