"""examples/frozen_lake: the game, the policy, the committed artefacts and the training step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from torch.nn.utils.rnn import pad_sequence
from typer.testing import CliRunner

from examples.frozen_lake import environment, train
from examples.frozen_lake.environment import ACTIONS, MAX_TURNS, TURN_TOKENS, WORD_IDS, WORDS, Episode, decode, encode
from examples.frozen_lake.policy import Sampler, full_pass, load_policy, new_policy, save_policy
from examples.frozen_lake.rollouts import Rollout, load_dump, sample_rollouts, save_dump, to_batch
from fastadv import Outcome, outcomes_of, read_records

FOLDER = Path(environment.__file__).parent
MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
BACK = {"L": "R", "R": "L", "U": "D", "D": "U"}


@pytest.fixture(scope="module")
def committed() -> list[Rollout]:
    return load_dump(FOLDER / "rollouts.pt")


@pytest.fixture
def policy() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER / "policy").eval()


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def walk(map_id: int, seed: int, actions: str) -> tuple[str | None, int]:
    """Exit status and number of turns of scripted actions."""
    episode = Episode(map_id, seed)
    for turn, action in enumerate(actions, 1):
        episode.act(WORD_IDS[action])
        if episode.exit_status is not None:
            return episode.exit_status, turn
    return None, len(actions)


def test_words_and_ids_are_one_to_one():
    assert decode(encode(WORDS)) == list(WORDS)
    assert encode(WORDS) == list(range(len(WORDS)))
    assert [WORDS[i] for i in environment.ACTION_IDS] == list(ACTIONS)


@pytest.mark.parametrize(
    ("row", "column", "words"),
    [(0, 1, "row0 col1 lS dF rG u#"), (1, 1, "row1 col1 lF dH rH uF"), (2, 2, "row2 col2 lH d# r# uH")],
)
def test_observation_names_position_and_tiles_around(row, column, words):
    board = [[b"S", b"F", b"G"], [b"F", b"F", b"H"], [b"F", b"H", b"F"]]
    assert environment.observe(board, row, column) == words.split()


def test_transcripts_tell_what_happened_on_the_map(committed):
    """Position, tiles and moves in the words agree with the map that gymnasium generates for the id."""
    slips = moves = 0
    for r in committed:
        board = [[tile.encode() for tile in line] for line in generate_random_map(4 + r.map_id % 3, 0.85, r.map_id)]
        words = decode(r.token_ids)
        turns = [words[i : i + TURN_TOKENS] for i in range(0, len(words) - 1, TURN_TOKENS)]
        positions = [(int(turn[1].removeprefix("row")), int(turn[2].removeprefix("col"))) for turn in turns]
        assert turns[0][:3] == ["<bos>", "row0", "col0"]
        for position, turn in zip(positions, turns, strict=True):
            assert turn[1:] == environment.observe(board, *position)
        for (row, column), there, (action, *_) in zip(positions, positions[1:], turns[1:], strict=False):
            last = len(board) - 1
            reached = {
                side: (min(max(row + down, 0), last), min(max(column + right, 0), last))
                for side, (down, right) in MOVES.items()
                if side != BACK[action]
            }
            assert there in reached.values()
            slips, moves = slips + (there != reached[action]), moves + 1
    assert moves > 500
    assert 0.1 < slips / moves < 0.25  # 0.2, less where a slip along a wall ends in the same place


def test_cap_hole_and_goal_end_an_episode():
    ends = Counter()
    for seed, choices in enumerate(torch.randint(4, (200, MAX_TURNS), generator=rng()).tolist()):
        status, turns = walk(seed, seed, "".join(ACTIONS[i] for i in choices))
        assert status in environment.OUTCOMES
        assert status != "TimeLimitExceeded" or turns == MAX_TURNS
        ends[status] += 1
    assert min(ends["FellIntoHole"], ends["TimeLimitExceeded"]) > 20


def test_goal_in_the_last_turn_is_solved_and_one_turn_less_is_the_cap(monkeypatch):
    walks = ((seed, *walk(0, seed, "DR" * 6)) for seed in range(100))
    seed, turns = next((seed, turns) for seed, status, turns in walks if status == "GoalReached")
    monkeypatch.setattr(environment, "MAX_TURNS", turns)
    assert walk(0, seed, "DR" * 6) == ("GoalReached", turns)
    monkeypatch.setattr(environment, "MAX_TURNS", turns - 1)
    assert walk(0, seed, "DR" * 6) == ("TimeLimitExceeded", turns - 1)


def test_a_word_that_is_no_action_fails():
    episode = Episode(map_id=0, seed=0)
    episode.act(WORD_IDS["row1"])
    assert environment.OUTCOMES[episode.exit_status] == Outcome.FAILED
    with pytest.raises(RuntimeError, match="map 0 is over"):
        episode.act(WORD_IDS["L"])


def test_episodes_on_one_map_do_not_share_state():
    alone = Episode(3, seed=1)
    alone.act(WORD_IDS["D"])
    together, other = Episode(3, seed=1), Episode(3, seed=2)
    other.act(WORD_IDS["R"])
    together.act(WORD_IDS["D"])
    assert together.block == alone.block


def test_policy_survives_saving_with_its_tied_weights(tmp_path):
    model = new_policy(seed=5)
    save_policy(model, tmp_path)
    loaded = load_policy(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name


def test_an_untrained_policy_knows_the_format_and_nothing_else():
    rollouts = sample_rollouts(new_policy(seed=1), train.draw_maps(16, 8, rng()), rng(1))
    counts = Counter(decode(rollout.response_ids)[0] for rollout in rollouts)
    assert set(counts) == set(ACTIONS)
    assert min(counts.values()) > 10  # of 128, 32 expected


def test_sampler_draws_from_the_distribution_whose_log_probs_it_reports():
    block = torch.tensor([Episode(7, seed=0).block]).expand(4000, -1)
    model = load_policy(FOLDER / "policy")
    tokens, log_probs = Sampler(model, rng()).sample(block)
    p = model(block[:1]).logits[0, -1].softmax(-1).detach()  # [V]
    torch.testing.assert_close(log_probs, p.log()[tokens], rtol=0, atol=1e-5)
    share = torch.bincount(tokens, minlength=len(WORDS)) / len(tokens)
    assert bool(((share - p).abs() < 5 * (p * (1 - p) / len(tokens)).sqrt() + 1e-3).all())


def test_sampling_with_a_cache_agrees_with_a_full_pass():
    model = new_policy(seed=2)
    rollouts = sample_rollouts(model, train.draw_maps(8, 4, rng()), rng(3))
    assert len({len(rollout.log_probs) for rollout in rollouts}) > 2  # rows left the batch at different turns
    batch = to_batch(rollouts)
    torch.testing.assert_close(full_pass(model, batch).log_probs, batch.rollout_log_probs, rtol=0, atol=1e-4)


def test_committed_rollouts_are_what_the_readme_promises(committed):
    samples = torch.load(FOLDER / "rollouts.pt", weights_only=True)["samples"]
    outcomes = Counter(rollout.outcome for rollout in committed)
    assert len(committed) == 256
    assert [sample["group_index"] for sample in samples] == [i // 8 for i in range(256)]
    assert set(outcomes) == {Outcome.SOLVED, Outcome.FAILED, Outcome.BUDGET}
    assert 0.15 <= outcomes[Outcome.BUDGET] / 256 <= 0.6
    assert 0.25 <= outcomes[Outcome.SOLVED] / 256 <= 0.45
    for sample, rollout in zip(samples, committed, strict=True):
        assert (sample["status"] == "truncated") == (rollout.outcome == Outcome.BUDGET)
        assert (sample["reward"] == 1) == (rollout.outcome == Outcome.SOLVED)
        assert sample["prompt"].split() + sample["response"].split() == decode(sample["tokens"])
        assert sample["response_length"] == len(sample["loss_mask"]) == len(sample["rollout_log_probs"])
        sampled = torch.tensor(sample["loss_mask"]) == 1
        assert not torch.tensor(sample["rollout_log_probs"])[~sampled].any()


def test_logged_log_probs_are_those_of_the_committed_policy(committed, policy):
    ids = pad_sequence([torch.tensor(rollout.token_ids) for rollout in committed], True)  # [B, T]
    logged = pad_sequence([torch.tensor(rollout.log_probs) for rollout in committed], True, torch.nan)  # [B, turns]
    batch = to_batch(committed)
    with torch.no_grad():
        log_p = policy(ids[:, :-1]).logits.log_softmax(-1)  # [B, T - 1, V]
        ours = full_pass(policy, batch).log_probs
    scored = log_p.gather(2, ids[:, 1:, None])[:, TURN_TOKENS - 1 :: TURN_TOKENS, 0]  # [B, turns]
    torch.testing.assert_close(scored.where(~logged.isnan(), logged), logged, rtol=0, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(ours, batch.rollout_log_probs, rtol=0, atol=1e-4)


def test_mask_and_turns_agree_with_the_number_of_turns(committed):
    batch = to_batch(committed)
    turns = torch.tensor([len(rollout.log_probs) for rollout in committed])
    assert set(range(2, MAX_TURNS + 1)) <= set(turns.tolist())
    assert to_batch(committed[:3], first_id=7).row_ids.tolist() == [7, 8, 9]
    assert torch.equal(batch.segments.turns(), turns)
    assert torch.equal(batch.lengths, TURN_TOKENS * (turns - 1) + 1)
    assert torch.equal(batch.turn_ids[batch.mask], torch.cat([torch.arange(n) for n in turns]).int())
    assert int(batch.mask.sum()) == int(turns.sum())
    assert torch.equal(turns[batch.outcomes == Outcome.BUDGET].unique(), torch.tensor([MAX_TURNS]))
    assert torch.equal(batch.rewards == 1, batch.outcomes == Outcome.SOLVED)
    assert torch.equal(batch.outcomes, outcomes_of(batch.endings, batch.rewards).outcomes)
    response = torch.cat([torch.tensor(rollout.response_ids) for rollout in committed])
    assert {WORDS[i] for i in response[batch.mask]} <= set(ACTIONS)


def test_dump_holds_every_way_to_end(tmp_path):
    path, block = tmp_path / "dump.pt", Episode(4, seed=0).block
    ends = [(4, 1, "FellIntoHole"), (4, 12, "TimeLimitExceeded"), (9, 3, "GoalReached"), (9, 2, "MalformedAction")]
    rollouts = [Rollout(map_id, block * turns + [1], [-0.5] * turns, status) for map_id, turns, status in ends]
    save_dump(rollouts, path)
    assert load_dump(path) == rollouts
    fields = [(s["status"], s["reward"], s["group_index"]) for s in torch.load(path, weights_only=True)["samples"]]
    assert fields == [("completed", 0, 0), ("truncated", 0, 0), ("completed", 1, 1), ("completed", 0, 1)]


def formula(model: torch.nn.Module, rollouts: list[Rollout], arm: str, bonus: float) -> torch.Tensor:
    """The training loss, written out one turn at a time."""
    total = torch.zeros(())
    for i, rollout in enumerate(rollouts):
        if arm in "bc" and rollout.outcome == Outcome.BUDGET:
            continue
        others = [o for j, o in enumerate(rollouts) if o.map_id == rollout.map_id and j != i]
        rewards = [o.reward for o in others if arm != "c" or o.outcome != Outcome.BUDGET]
        ids = torch.tensor(rollout.token_ids)
        logits = model(ids[None, :-1]).logits[0]  # [T - 1, V]
        for turn, logged in enumerate(rollout.log_probs):
            baseline = sum(rewards) / len(rewards) if rewards else rollout.reward
            if arm == "e":
                reached = [o.reward for o in others if len(o.log_probs) > turn]
                shrinkage = len(reached) / (len(reached) + 2)
                baseline += shrinkage * (sum(reached) / len(reached) - baseline) if reached else 0
            at = TURN_TOKENS * (turn + 1)
            ratio = (logits[at - 1].log_softmax(-1)[ids[at]] - logged).exp()
            advantage = rollout.reward - baseline
            p = logits[at - 1, encode(ACTIONS)].softmax(-1)
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total - surrogate + bonus * (p * p.log()).sum()
    return total / (len(rollouts) * MAX_TURNS)


@pytest.mark.parametrize("arm", ["a", "b", "c", "e"])
def test_gradient_of_the_training_loss_is_that_of_the_formula(committed, policy, arm):
    mixed = {r.map_id for r in committed if r.reward} & {r.map_id for r in committed if r.outcome == Outcome.BUDGET}
    rollouts = [rollout for rollout in committed if rollout.map_id in mixed][:24]
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter)  # away from the sampler, so that the clip binds
        batch = to_batch(rollouts)
        ratio = (full_pass(policy, batch).log_probs - batch.rollout_log_probs).exp()
    assert int(((ratio - 1).abs() > 0.2).sum()) > 10
    parameters = list(policy.parameters())
    ours = train.training_loss(policy, batch, train.arms()[arm], 0.1).total
    plain = formula(policy, rollouts, arm, 0.1)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
    gradients = [torch.autograd.grad(loss, parameters) for loss in (ours, plain)]
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)


def test_training_changes_the_weights_and_is_deterministic():
    def trained(seed: int, iterations: int) -> tuple[list[train.Step], torch.Tensor]:
        model, settings = new_policy(0), train.Settings(iterations, seed, maps=2, rollouts=4)
        steps = list(train.train(model, train.arms()["a"], settings))
        return steps, torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    (steps, weights), (again, same) = trained(0, 2), trained(0, 2)
    assert steps == again
    assert torch.equal(weights, same)
    assert not torch.equal(weights, trained(1, 2)[1])
    assert not torch.equal(weights, trained(0, 0)[1])


def test_command_writes_and_does_not_overwrite(tmp_path):
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(train.app, ["--out", str(tmp_path), "--iterations", "1", *arguments])
        return result.exit_code, result.output

    assert run("--rollouts", "2", "--arm", "d0.3")[0] == 0
    weights, log = tmp_path / "policy" / "model.safetensors", tmp_path / "rollouts.pt"
    assert len(load_dump(log)) == 16
    (record,) = read_records(tmp_path / "record.jsonl")
    assert (record.step, record.arm, record.coin_seed, record.run, record.rollouts) == (0, "d0.3", 0, "seed 0", 128)
    assert record.update_norm > 0
    assert record.loss_metrics.keys() >= {"entropy", "approx_kl"}
    assert record.census.solved == record.success_rate * 128
    written = weights.read_bytes(), log.read_bytes()
    code, output = run()
    assert (code, "--overwrite" in output) == (2, True)
    code, output = run("--overwrite", "--arm", "f")
    assert (code, "d0.6" in output) == (2, True)
    assert (weights.read_bytes(), log.read_bytes()) == written
    assert run("--overwrite", "--seed", "1")[0] == 0
    assert weights.read_bytes() != written[0]
    assert [one.arm for one in read_records(tmp_path / "record.jsonl")] == ["a"]
    assert not log.exists()  # it was the log of another policy
