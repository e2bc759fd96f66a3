"""The command line: `fastadv replay`, `compare`, `record`, `convert`, `arms` and `backends`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fastadv.record_cli import record
from fastadv.replay.errors import ReplayError, counted, finite, plain

if TYPE_CHECKING:
    from fastadv.arms import Arm
    from fastadv.replay.pipeline import Steps

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
console = Console()
errors = Console(stderr=True)

PAGE, NUMBERS, GRAM = "report.html", "report.json", "gram.safetensors"


class Baseline(str, Enum):
    """Baseline of the arms that are not turn-reached."""

    loo = "loo"
    mean = "mean"


class Loss(str, Enum):
    """Loss whose gradient is taken."""

    reinforce = "reinforce"
    ppo = "ppo"


class Gradients(str, Enum):
    """Way that gradients are computed."""

    auto = "auto"
    gram = "gram"
    cells = "cells"


class Precision(str, Enum):
    """Precision of the policy."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"


class Attention(str, Enum):
    """Attention of the Gram's pass."""

    auto = "auto"
    blocks = "blocks"
    flash = "flash"


class CapReward(str, Enum):
    """Reward of a rollout that ran into the cap."""

    zero = "zero"
    logged = "logged"


@app.callback()
def _fastadv() -> None:
    """The advantage-and-loss step of RL post-training for LLM agents."""


class Bars:
    """Progress bars in the terminal."""

    def say(self, text: str) -> None:
        """A text before a stage that takes long."""
        for line in text.split("\n"):
            errors.print(escape(plain(line)), soft_wrap=True)

    @contextmanager
    def stage(self, title: str, total: int | None) -> Iterator[Steps]:
        """A bar that disappears when its stage is over."""
        columns = (
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )  # fmt: skip
        with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
            task = progress.add_task(escape(plain(title)), total=total)
            yield lambda done, total=None: progress.update(task, completed=done, total=total)


@app.command()
def replay(
    dumps: Annotated[
        list[Path],
        typer.Argument(
            help="Logged rollouts: files or folders, each file once. Miles and slime dumps "
            "(--save-debug-rollout-data), verl rollout JSON lines, or the portable format.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(help=f"Folder for {PAGE}, {NUMBERS} and {GRAM}; made if it is not there.", show_default=False),
    ],
    policy: Annotated[
        Path | None,
        typer.Option(help="Folder of the checkpoint, as save_pretrained writes it. Without it: no gradients."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier report in --out.")] = False,
    baseline: Annotated[
        Baseline, typer.Option(help="Baseline of arms (a) to (d): leave-one-out, or the mean with the rollout in it.")
    ] = Baseline.loo,
    kappa: Annotated[float, typer.Option(min=0.0, help="Shrinkage of the turn-reached baseline, in rollouts.")] = 2.0,
    arms: Annotated[
        str | None,
        typer.Option(
            help="Arms: names joined by commas, of `fastadv arms` with their parameters (rescue:a=0.25), or a to e; or "
            "a YAML file (docs/arms.md). The one without a mask comes first, as the reference. Without it: a to e.",
            show_default=False,
        ),
    ] = None,
    cap_reward: Annotated[
        CapReward, typer.Option(help="Reward of a capped, unsolved rollout: 0, or what was logged.")
    ] = CapReward.zero,
    solved_above: Annotated[float, typer.Option(help="A rollout with a reward above this is solved.")] = 0.0,
    reward_key: Annotated[
        str | None, typer.Option(help="Key of the reward where logged rewards are dictionaries.")
    ] = None,
    loss: Annotated[
        Loss, typer.Option(help="Loss of the gradients; ppo takes the logged log-probs as the old ones.")
    ] = Loss.reinforce,
    dtype: Annotated[Precision, typer.Option(help="Precision of the policy.")] = Precision.float32,
    device: Annotated[str, typer.Option(help="Where the policy runs: cpu, cuda or cuda:1.")] = "cpu",
    temperature: Annotated[float, typer.Option(help="Temperature that the rollouts were sampled at.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Padded tokens of a micro-batch.")] = 4096,
    buckets: Annotated[bool, typer.Option(help="Gradients by turn and by difficulty too.")] = True,
    gradients: Annotated[
        Gradients,
        typer.Option(
            help="gram: inner products of all segments' gradients in one pass, layer by layer, for any arm. "
            "cells: a flat gradient for each arm and bucket. auto: gram where loss and model allow it."
        ),
    ] = Gradients.auto,
    attention: Annotated[
        Attention,
        typer.Option(
            help="Attention of --gradients gram. blocks: the library's, float32 at least. flash: flash-attn's, for "
            "bfloat16 on a CUDA device. auto: flash where it can run; the plan says which."
        ),
    ] = Attention.auto,
    max_memory: Annotated[float, typer.Option(min=0.0, help="GiB that the Gram or flat gradients may take.")] = 8.0,
    p1_prompts: Annotated[int, typer.Option(min=0, help="Prompts for the two-outcome check.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of coins, halves and bootstrap.")] = 0,
    trust_dump: Annotated[
        bool, typer.Option("--trust-dump", help="Run the code that a pickle may hold. Only if you trust its author.")
    ] = False,
) -> None:
    """Replay logged rollouts: what does a loss mask do to the gradient?

    Counts how the rollouts ended, computes advantages under each arm with statistics that are frozen from the unmasked
    batch, and, with a policy, every arm's gradient at that checkpoint:

    (a) no mask, R = 0 at the cap; (b) mask, all vote; (c) mask, survivors vote; (d) mask a random share; (e) no mask,
    turn-reached baseline.

    Prints tables, and writes one page with plots, one JSON with all numbers (docs/report_json.md), and the Gram that
    `fastadv compare` asks about other arms, without the model and the dump (docs/gram_file.md).

    Example: fastadv replay rollout_75.pt --policy checkpoint/ --out report/
    """
    finite("--temperature", temperature, above=0)
    finite("--kappa", kappa, least=0)
    finite("--solved-above", solved_above)
    finite("--max-memory", max_memory, least=0)
    claim(out, overwrite)
    import torch

    from fastadv.replay.page import render
    from fastadv.replay.pipeline import ReplayOptions
    from fastadv.replay.pipeline import replay as run
    from fastadv.replay.policy import Policy, device_named
    from fastadv.replay.readers import ReadOptions, find
    from fastadv.replay.report import as_json
    from fastadv.replay.requery import chosen_arms
    from fastadv.replay.terminal import safe, show

    options = ReplayOptions(
        baseline=baseline.value,
        kappa=kappa,
        seed=seed,
        loss=loss.value,
        cap_reward=cap_reward.value,
        max_tokens=max_tokens,
        buckets=buckets,
        gradients=gradients.value,
        attention=attention.value,
        max_memory=int(min(max_memory, 2**30) * 2**30),
        p1_prompts=p1_prompts,
        arms=() if arms is None else chosen_arms(arms, _question_one(baseline, kappa, seed), seed=seed),
        read=ReadOptions(solved_above=solved_above, reward_key=reward_key, trust=trust_dump),
    )
    where = device_named(device)
    paths = find(dumps)
    model = None
    if policy is not None:
        model = Policy.load(policy, dtype=getattr(torch, dtype.value), temperature=temperature, device=where)
    result = run(paths, model, options, Bars())
    show(result, console)
    files = {out / PAGE: render(result), out / NUMBERS: as_json(result)}
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            write(path, text)
        if result.gram is None:
            (out / GRAM).unlink(missing_ok=True)  # an earlier report's, which would pass for this one's
        else:
            result.gram.save(out / GRAM)
    written = [*files, *([out / GRAM] if result.gram is not None else [])]
    console.print(f"\nwrote {', '.join(safe(str(path)) for path in written)}", soft_wrap=True)


@app.command()
def compare(
    gram: Annotated[Path, typer.Argument(help=f"The {GRAM} of a replay.", show_default=False)],
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="An arm: a, b, c, d0.3, d0.6, d1 or e as in replay, a name of `fastadv arms` with its parameters, or "
            "NAME:key=value,... with excludes (outcomes joined by +), fraction, baseline, population, singleton, "
            "kappa, seed as in fastadv.Arm; or a YAML file of arms (docs/arms.md). May be repeated. Without it: a, b, "
            "c, d0.3, d0.6, d1, e.",
            show_default=False,
        ),
    ] = None,
    reference: Annotated[str, typer.Option(help="The arm that the others are held against.")] = "a",
    baseline: Annotated[
        Baseline, typer.Option(help="Baseline of the replay's arms (a) to (d): leave-one-out, or the whole mean.")
    ] = Baseline.loo,
    kappa: Annotated[float, typer.Option(min=0.0, help="Shrinkage of the replay's arm (e), in rollouts.")] = 2.0,
    buckets: Annotated[bool, typer.Option(help="By turn and by difficulty too.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of halves, bootstrap and the coins of the replay's arms.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.", show_default=False)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier file at --out.")] = False,
) -> None:
    """Compare arms on the Gram of an earlier replay, without its model and its dump.

    Prints what replay prints of its gradients, for any arms, also such as nobody had thought of when it ran
    (docs/gram_file.md). Arms that read how rollouts ended or which weights sampled them need a Gram of rollouts that
    say so; arms that treat the tokens of a turn differently need flat gradients (replay --gradients cells).

    Example: fastadv compare report/gram.safetensors --arm b --arm half:excludes=budget,fraction=0.5
    """
    finite("--kappa", kappa, least=0)
    if out is not None:
        with writing(out):
            if os.path.lexists(out) and not overwrite:
                raise ReplayError(f"{out} exists already; --overwrite replaces it")
            if not out.absolute().parent.is_dir():
                raise ReplayError(f"{out} cannot be written: {out.parent} is no folder")
            if out.exists() and gram.exists() and out.samefile(gram):
                raise ReplayError(f"{out} is the Gram that is asked; name another file")
    from fastadv.replay.requery import about, answer_json, answer_tables, ask, parse_arm, parse_arms
    from fastadv.replay.terminal import safe, show_tables

    presets = _question_one(baseline, kappa, seed)
    first = parse_arm(reference, presets, seed=seed)
    asked = arm or [name for name in presets if name != first.name]
    given = [one for text in asked for one in parse_arms(text, presets, seed=seed)]
    answer = ask(gram, [first, *given], buckets=buckets, seed=seed)
    show_tables(answer_tables(answer), console)
    console.print()
    for line in about(answer):
        console.print(f"• {safe(line)}")
    if out is not None:
        with writing(out):
            write(out, answer_json(answer))
        console.print(f"\nwrote {safe(str(out))}", soft_wrap=True)


def _question_one(baseline: Baseline, kappa: float, seed: int) -> dict[str, Arm]:
    """The arms of the first question, by name."""
    from fastadv.arms import question_one_arms

    return {arm.name: arm for arm in question_one_arms(baseline=baseline.value, kappa=kappa, seed=seed)}


def claim(out: Path, overwrite: bool, names: tuple[str, ...] = (PAGE, NUMBERS, GRAM)) -> None:
    """Raises if a report would be overwritten or cannot be written, before anything is computed."""
    with writing(out):
        if out.exists() and not out.is_dir():
            raise ReplayError(f"--out {out} is a file; name a folder")
        present = [name for name in names if (out / name).exists()]
        if present and not overwrite:
            raise ReplayError(f"{out} holds {' and '.join(present)} already; --overwrite replaces them")
        there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
        if not there.is_dir():
            raise ReplayError(f"{out} cannot be made: {there} is a file")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ReplayError(f"{out} cannot be written: {there} does not allow it")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system has against writing, as a message."""
    try:
        yield
    except OSError as error:
        raise ReplayError(f"{path} cannot be written: {error.strerror or error}; name another place") from error


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


@app.command()
def convert(
    dump: Annotated[
        Path,
        typer.Argument(help="A dump with tokens, in any format that replay reads; or its folder.", show_default=False),
    ],
    out: Annotated[Path, typer.Argument(help="Safetensors file to write.", show_default=False)],
    reward_key: Annotated[str | None, typer.Option(help="Key of the reward where rewards are dictionaries.")] = None,
    solved_above: Annotated[float, typer.Option(help="A rollout with a reward above this is solved.")] = 0.0,
    trust_dump: Annotated[bool, typer.Option("--trust-dump", help="Run the code that a pickle may hold.")] = False,
) -> None:
    """Convert a dump to the portable format: one safetensors file, safe to open and fast to read."""
    finite("--solved-above", solved_above)
    with writing(out):
        if os.path.lexists(out):  # a link to nowhere too
            raise ReplayError(f"{out} exists already")
        if not out.absolute().parent.is_dir():
            raise ReplayError(f"{out} cannot be written: {out.parent} is no folder")
    from fastadv.replay.readers import ReadOptions, find, portable, read

    path, *others = find([dump])
    if others:
        raise ReplayError(f"{dump} holds {1 + len(others)} dumps; convert takes one at a time")
    rollouts = read(path, ReadOptions(solved_above=solved_above, reward_key=reward_key, trust=trust_dump))
    if rollouts.batch is None:
        raise ReplayError(f"{dump} cannot be converted: {rollouts.refused}")
    with writing(out):
        portable.write(out, rollouts.batch, rollouts.labels)
    written = counted(rollouts.batch.num_rollouts, "rollout")
    console.print(f"wrote {written} to {escape(plain(str(out)))}", soft_wrap=True)


app.command()(record)


@app.command()
def arms() -> None:
    """List the arms that replay and compare take by name, with their parameters."""
    from fastadv.arms import ARMS
    from fastadv.replay.tables import Table
    from fastadv.replay.terminal import show_tables

    rows = []
    for name, named in ARMS.items():
        arm = named()
        parameters = "".join(f"\n:{key}={value}" for key, value in named.parameters.items())
        what = f"{arm.description}\n{named.owner}"
        rows.append([name + parameters, what, arm.baseline, arm.scale, arm.mask_kind])
    caption = (
        "mask: what decides about it. The outcome's is paid for, a predictable one's is not. docs/arms.md has the "
        "equations, and where their owners have the code."
    )
    columns = ["arm", "what it does, and whose it is", "baseline", "scale", "mask"]
    show_tables([Table("Arms", caption, columns, rows)], console)


@app.command()
def estimators(
    text: Annotated[
        str, typer.Argument(help="Show those whose name, owner or level has this text.", show_default=False)
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that is known of them as JSON.")] = False,
) -> None:
    """List the estimators of fastadv.estimate, with their owners' conventions.

    Example: fastadv estimators rloo
    """
    from fastadv.estimators import ESTIMATORS
    from fastadv.replay.tables import Table
    from fastadv.replay.terminal import show_tables

    found = [e for e in ESTIMATORS.values() if any(text.lower() in part for part in (e.name, e.owner, e.level))]
    if not found:
        raise ReplayError(f"no estimator has {text!r} in its name, owner or level; without a text all are listed")
    if as_json:
        fields = ("name", "level", "equation", "owner", "code_path", "ddof", "eps", "eps_form", "singleton", "masking",
                  "needs", "reads")  # fmt: skip
        typer.echo(json.dumps([{f: getattr(e, f) for f in fields} | {"options": dict(e.options)} for e in found]))
        return
    rows = []
    for e in found:
        std = "–" if e.eps_form is None else f"ddof {e.ddof:g}, eps {e.eps:g}"
        rows.append([e.name, e.equation, e.level, f"{e.singleton}\n{std}"])
    caption = (
        "alone: what a group with one voter gets; std: how a standard deviation is taken. docs/estimators.md and "
        "--json say where owners have the code, who votes, and what an estimator reads."
    )
    show_tables([Table("Estimators", caption, ["estimator", "equation", "level", "alone, std"], rows)], console)


@app.command()
def backends() -> None:
    """List the backends, and why one cannot run."""
    import fastadv

    for name, state in fastadv.backends().items():
        console.print(f"{name:10} {escape(state)}")


def main() -> None:
    """Entry point: a user's mistake is a message and exit status 2, not a traceback."""
    try:
        app()
    except ReplayError as error:
        message = str(error)
    except OSError as error:  # a file that went away, a folder that may not be looked into
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    else:
        return
    errors.print(f"[red]error:[/red] {escape(plain(message))}", soft_wrap=True)
    raise SystemExit(2)
