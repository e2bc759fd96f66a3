"""Trains the policy on FrozenLake through fastadv: `python -m examples.frozen_lake.train --help`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from transformers import LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import fastadv as fa
from examples.frozen_lake.environment import MAX_TURNS, NUM_MAPS
from examples.frozen_lake.policy import full_pass, load_policy, new_policy, save_policy
from examples.frozen_lake.rollouts import Rollout, sample_rollouts, save_dump, to_batch

# Dr. GRPO's aggregation: the sum over tokens divided by a constant, so that no length and no mask changes the scale.
LOSS = fa.LossConfig("ppo", loss_agg_mode="seq-mean-token-sum-norm", denominator="candidates", horizon=MAX_TURNS)
WARM_UP = 10  # iterations until the learning rate is reached
LOG_STREAM = 2**32  # added to the seed of logged rollouts, so that they are not those of the first iteration
WINDOW = 25  # iterations a row of the table


@dataclass(frozen=True)
class Settings:
    """What a training run depends on, beside the arm."""

    iterations: int = 75
    seed: int = 0
    maps: int = 16  # a group each
    rollouts: int = 8  # of each map
    learning_rate: float = 1e-3
    entropy_bonus: float = 0.03


class Step(NamedTuple):
    """What is shown of an iteration; rates are shares of its rollouts, which were sampled before its update."""

    solved: float
    failed: float
    capped: float
    entropy: float  # mean over sampled tokens, nats
    update_norm: float  # Euclidean length of the change of all parameters


class Loss(NamedTuple):
    """The training loss of a batch, and what it was made of."""

    total: Tensor  # 0-d
    entropy: Tensor  # 0-d, mean over sampled tokens, nats, without gradient
    treated: fa.ArmResult
    statistics: fa.FrozenStatistics
    metrics: dict[str, Tensor]


def arms(seed: int = 0) -> dict[str, fa.Arm]:
    """The arms that can be trained, by name."""
    return {arm.name: arm for arm in fa.arms.question_one_arms(seed=seed)}


def training_loss(model: LlamaForCausalLM, batch: fa.Batch, arm: fa.Arm, entropy_bonus: float) -> Loss:
    """The arm's policy loss minus the entropy bonus, both divided by rollouts * MAX_TURNS, whatever the arm masks.

    The bonus covers the tokens that the arm keeps, as the policy loss does. On all tokens it would weigh more against
    the reward in an arm that masks some of them.

    Args:
        model: the policy.
        batch: packed rollouts with token ids and log-probs of the sampler.
        arm: which rollouts count, and against which baseline.
        entropy_bonus: reward for entropy, in reward a nat.
    """
    statistics = fa.freeze(batch)
    treated = arm.apply(batch, statistics)
    log_probs, entropy = full_pass(model, batch)  # [N], [N]
    policy_loss, metrics = fa.policy_loss(
        log_probs,
        batch.rollout_log_probs,
        treated.advantages,
        batch.mask,
        config=LOSS,
        cu_seqlens=batch.cu_seqlens,
        weights=treated.weights,
        denominator=statistics.denominators,
    )
    kept = (entropy * batch.rows.spread(treated.weights)).sum()
    bonus = entropy_bonus * kept / (batch.num_rollouts * MAX_TURNS)
    mean_entropy = entropy.detach().sum() / batch.mask.sum()
    return Loss(policy_loss - bonus, mean_entropy, treated, statistics, {**metrics, "entropy": mean_entropy})


def train(
    model: LlamaForCausalLM, arm: fa.Arm, settings: Settings, writer: fa.RecordWriter | None = None
) -> Iterator[Step]:
    """Trains in place, on-policy, with one update an iteration; yields after each, and writes its step record.

    Deterministic: the same settings and number of threads give the same weights.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / WARM_UP))
    for iteration in range(settings.iterations):
        began = time.perf_counter()
        rollouts = sample_rollouts(model, draw_maps(settings.maps, settings.rollouts, generator), generator)
        batch = to_batch(rollouts, first_id=iteration * len(rollouts))
        loss = training_loss(model, batch, arm, settings.entropy_bonus)
        before = parameters_to_vector(model.parameters()).detach()
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        warm_up.step()
        after = parameters_to_vector(model.parameters()).detach()
        update_norm = (after - before).norm()
        if writer is not None:
            record = fa.StepRecord.of(
                batch, loss.treated, loss.statistics, step=iteration, arm=arm, run=f"seed {settings.seed}",
                loss_metrics=loss.metrics, update_norm=update_norm, wall_clock_s=time.perf_counter() - began,
            )  # fmt: skip
            writer.write(record)
        yield Step(*outcome_rates(batch), float(loss.entropy), float(update_norm))


def draw_maps(maps: int, rollouts: int, generator: torch.Generator) -> list[int]:
    """Ids of different maps, each of them `rollouts` times in a row."""
    return torch.randperm(NUM_MAPS, generator=generator)[:maps].repeat_interleave(rollouts).tolist()


def outcome_rates(batch: fa.Batch) -> tuple[float, float, float]:
    """Shares of solved, failed and capped rollouts."""
    census = batch.census()
    return census.rate(fa.Outcome.SOLVED), census.rate(fa.Outcome.FAILED), census.rate(fa.Outcome.BUDGET)


def log_rollouts(model: LlamaForCausalLM, maps: int, settings: Settings) -> list[Rollout]:
    """Rollouts of a finished policy on `maps` maps, from a stream of randomness that training does not use."""
    generator = torch.Generator().manual_seed(LOG_STREAM + settings.seed)
    return sample_rollouts(model, draw_maps(maps, settings.rollouts, generator), generator)


# ---- the command -----------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False)
ARM_HELP = "; ".join(f"{name}: {arm.description}" for name, arm in arms().items())


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for policy/, rollouts.pt and record.jsonl.")] = Path(
        "out/frozen_lake"
    ),
    arm: Annotated[str, typer.Option(help=f"How rollouts at the turn cap are treated. {ARM_HELP}.")] = "a",
    iterations: Annotated[int, typer.Option(min=1, help="Updates; about 0.3 s each.")] = Settings.iterations,
    seed: Annotated[int, typer.Option(min=0, help="First weights, maps, slips, actions and coins.")] = Settings.seed,
    rollouts: Annotated[
        int, typer.Option(min=0, max=NUM_MAPS, help="Maps in rollouts.pt, 8 rollouts each, sampled from the policy.")
    ] = 0,
    learning_rate: Annotated[float, typer.Option(min=0, help="Of Adam.")] = Settings.learning_rate,
    entropy_bonus: Annotated[float, typer.Option(min=0, help="In reward a nat.")] = Settings.entropy_bonus,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; results depend on them in the last bits.")] = 1,
    overwrite: Annotated[bool, typer.Option(help="Replace what is in the folder.")] = False,
) -> None:
    """Train a small language model to cross frozen lakes, turn by turn, and log what it does.

    An episode ends at the goal (solved, reward 1), in a hole (failed), or
    after 12 turns (capped): the three outcomes that arms treat differently.
    Advantages and the policy loss are fastadv's.

    policy/ loads with transformers' AutoModelForCausalLM, rollouts.pt is a
    Miles debug dump; `fastadv replay` reads both. record.jsonl has a line an
    iteration; `fastadv record` draws it, beside those of other arms.
    """
    choices = arms(seed)
    if arm not in choices:
        raise typer.BadParameter(f"{arm!r} is none of {', '.join(choices)}", param_hint="--arm")
    policy_dir, rollouts_path, record_path = out / "policy", out / "rollouts.pt", out / "record.jsonl"
    present = [str(path) for path in (policy_dir, rollouts_path, record_path) if path.exists()]
    if present and not overwrite:
        raise typer.BadParameter(f"{' and '.join(present)} would be replaced; add --overwrite", param_hint="--out")

    torch.set_num_threads(threads)
    disable_progress_bar()  # of transformers, for loading 20 small tensors
    settings = Settings(iterations, seed, learning_rate=learning_rate, entropy_bonus=entropy_bonus)
    model = new_policy(seed)
    console = Console()
    policy_dir.mkdir(parents=True, exist_ok=True)
    record_path.unlink(missing_ok=True)  # a writer appends
    with fa.RecordWriter(record_path) as writer:
        steps = _followed(train(model, choices[arm], settings, writer), settings, console)
    console.print(_table(f"arm {arm}, seed {seed}", steps))
    save_policy(model, policy_dir)
    rollouts_path.unlink(missing_ok=True)  # never the log of another policy beside this one
    if rollouts:
        _log(load_policy(policy_dir), rollouts, settings, rollouts_path, console)


def _followed(steps: Iterator[Step], settings: Settings, console: Console) -> list[Step]:
    """Runs the training and shows where it stands."""
    done = []
    columns = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=settings.iterations)
        for step in steps:
            done.append(step)
            shares = f"{step.solved:.0%} solved, {step.failed:.0%} failed, {step.capped:.0%} capped"
            numbers = f"entropy {step.entropy:.2f}, update norm {step.update_norm:.2f}"
            progress.update(task, advance=1, description=f"{shares}, {numbers}")
    return done


def _table(title: str, steps: Sequence[Step]) -> Table:
    """Means over windows of iterations."""
    table = Table("iterations", *(name.replace("_", " ") for name in Step._fields), title=title)
    for first in range(0, len(steps), WINDOW):
        window = steps[first : first + WINDOW]
        means = (sum(values) / len(window) for values in zip(*window, strict=True))
        table.add_row(f"{first + 1}-{first + len(window)}", *(f"{mean:.3f}" for mean in means))
    return table


def _log(model: LlamaForCausalLM, maps: int, settings: Settings, path: Path, console: Console) -> None:
    """Samples, checks and saves rollouts of the saved policy."""
    rollouts = log_rollouts(model, maps, settings)
    save_dump(rollouts, path)
    batch = to_batch(rollouts)
    assert batch.rollout_log_probs is not None
    with torch.no_grad():
        difference = (full_pass(model, batch).log_probs - batch.rollout_log_probs).abs().max()
    solved, failed, capped = outcome_rates(batch)
    console.print(
        f"{path}: {len(rollouts)} rollouts, solved {solved:.3f}, failed {failed:.3f}, capped {capped:.3f}; "
        f"log-probs of a full pass differ by at most {difference:.1e}"
    )


if __name__ == "__main__":
    app()
