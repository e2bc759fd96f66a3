"""Arms that were thought of after the pass, on the Gram that it left: no model, no dump."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fastadv.arms import ARMS, Arm, arm_to_dict, arms_from_yaml, named_arm
from fastadv.arms.prompt_sums import prompt_sums
from fastadv.arms.text import arm_settings
from fastadv.gradproj.gram import SegmentGram
from fastadv.gradproj.projections import Projections, apply_to_gram, project, turn_weights
from fastadv.outcomes import Outcome
from fastadv.replay.arm_table import ArmRow, arm_row
from fastadv.replay.errors import ReplayError, counted, plain
from fastadv.replay.gradient_tables import projection_tables
from fastadv.replay.report import arms_table, jsonable
from fastadv.replay.tables import Table, percent

FORMAT, VERSION = "fastadv arms", 1  # docs/gram_file.md describes it
NUMBERS = ("fraction", "kappa")
TEXTS = ("baseline", "population", "singleton")


@dataclass(frozen=True, eq=False)
class Answer:
    """What a Gram says about some arms; the first is the reference."""

    gram: SegmentGram
    arms: tuple[Arm, ...]
    rows: list[ArmRow]
    projections: Projections
    seed: int


def parse_arm(text: str, presets: dict[str, Arm], *, seed: int = 0) -> Arm:
    """An arm from a text: the name of one of `presets` or of `fastadv.ARMS`, the latter perhaps with its parameters, or
    "NAME:key=value,..." with the fields of `fastadv.Arm`.

    Raises:
        ReplayError: an unknown name, field or value.
    """
    name, colon, rest = text.partition(":")
    if name.strip() in ARMS:
        return _named(text, seed)
    if not colon:
        if name not in presets:
            raise ReplayError(
                f"--arm {text!r} is none of {', '.join(presets)}; describe another as NAME:key=value,..., for example "
                "half:excludes=budget,fraction=0.5"
            )
        return presets[name]
    name = name.strip()
    if not name:
        raise ReplayError(f"--arm {text!r} has no name before the colon; write NAME{text.strip()}")
    if name in presets:
        raise ReplayError(f"--arm {text!r}: {name!r} is a preset ({presets[name].description}); choose another name")
    if not rest.strip():
        raise ReplayError(f"--arm {text!r} describes nothing; add key=value,..., such as excludes=budget,fraction=0.5")
    fields: dict[str, object] = {"description": rest}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in ("excludes", "seed", *NUMBERS, *TEXTS):
            known = ", ".join(("excludes", *NUMBERS, *TEXTS, "seed"))
            raise ReplayError(f"--arm {text!r}: {part!r} is no key=value of {known}")
        if key in fields:
            raise ReplayError(f"--arm {text!r}: {key} is there twice; give it once (outcomes are joined with +)")
        fields[key] = _value(text, key, value)
    try:
        return Arm(name, **fields)  # type: ignore[arg-type]
    except ValueError as error:
        raise ReplayError(f"--arm {text!r}: {error}") from error


def parse_arms(text: str, presets: dict[str, Arm], *, seed: int = 0) -> list[Arm]:
    """The arms of a YAML file, or the one that `parse_arm` makes of the text."""
    return arms_of_file("--arm", text, seed=seed) or [parse_arm(text, presets, seed=seed)]


def _named(text: str, seed: int) -> Arm:
    try:
        return named_arm(text, seed=seed)
    except (ValueError, TypeError) as error:
        raise ReplayError(str(error)) from error


def _value(text: str, key: str, value: str) -> object:
    if key in TEXTS:
        return value
    try:
        if key == "excludes":
            return tuple(Outcome[name.strip().upper()] for name in value.split("+"))
        return int(value) if key == "seed" else float(value)
    except KeyError as error:
        names = ", ".join(outcome.name.lower() for outcome in Outcome)
        raise ReplayError(f"--arm {text!r}: {value!r} is no outcome; join names with +: {names}") from error
    except ValueError as error:
        kind = "integer" if key == "seed" else "number"
        raise ReplayError(f"--arm {text!r}: {key} is {value!r}, which is no {kind}") from error


def ask(path: Path, arms: list[Arm], *, buckets: bool = True, seed: int = 0) -> Answer:
    """Every arm of a saved Gram against the first.

    Raises:
        ReplayError: a file that is no Gram, or an arm that it cannot answer.
    """
    names = [arm.name for arm in arms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ReplayError(f"two arms are called {twice!r}; give each a name of its own")
    try:
        gram = SegmentGram.load(path)
        rollouts, tokens = gram.rollouts, gram.tokens
        assert rollouts is not None
        rows, weighted = [], []
        for arm in arms:
            result, statistics = apply_to_gram(arm, gram)
            weighted.append(turn_weights(arm, result, rollouts))
            rows.append(arm_row(arm, prompt_sums(arm, result, rollouts, statistics, tokens)))
        projections = project(gram, arms, weighted=weighted, buckets=buckets, seed=seed)
        return Answer(gram, tuple(arms), rows, projections, seed)
    except (ValueError, OSError) as error:
        raise ReplayError(str(error)) from error


def answer_tables(answer: Answer) -> list[Table]:
    """The arms, and their gradients."""
    return [arms_table(answer.rows, ""), *projection_tables(answer.projections)]


def about(answer: Answer) -> list[str]:
    """What the Gram is of, and what was done to its rollouts."""
    gram = answer.gram
    assert gram.rollouts is not None
    share = percent(gram.covered / max(1, gram.total))
    found = [
        f"{counted(gram.size, 'segment')} of {counted(gram.rollouts.num_rollouts, 'rollout')}, "
        f"{counted(answer.projections.prompts, 'prompt')}; gradients of {gram.covered:,} of {gram.total:,} parameters "
        f"({share}), {plain(gram.dtype)}, temperature {gram.temperature:g}",
        f"checkpoint {plain(gram.checkpoint[:16]) or 'unknown'}, rollouts {plain(gram.batch[:16]) or 'unknown'}",
    ]
    return [*found, *(plain(note) for note in gram.notes)]


def answer_json(answer: Answer) -> str:
    """Everything, as JSON; numbers that do not exist are null."""
    from fastadv import __version__

    gram = answer.gram
    assert gram.rollouts is not None
    names = ("size", "level", "covered", "total", "temperature", "dtype", "checkpoint", "batch", "notes")
    document = {
        "format": FORMAT,
        "version": VERSION,
        "fastadv": __version__,
        "seed": answer.seed,
        "gram": {"rollouts": gram.rollouts.num_rollouts, **{name: getattr(gram, name) for name in names}},
        "arms": [
            {**jsonable(row), "settings": jsonable(_settings(arm))}
            for row, arm in zip(answer.rows, answer.arms, strict=True)
        ],
        "projections": jsonable(answer.projections),
    }
    return json.dumps(document, indent=1, allow_nan=False)


def _settings(arm: Arm) -> dict[str, object]:
    """How an arm is described: the fields of the first question's arms and others that are set, as YAML has them."""
    always = ("excludes", *NUMBERS, *TEXTS, "seed")
    return {
        name: value
        for name, value in arm_settings(arm).items()
        if name in always or (name in arm_to_dict(arm) and name != "description")
    }


def chosen_arms(text: str, presets: dict[str, Arm], *, seed: int = 0) -> tuple[Arm, ...]:
    """The arms of `replay --arms`: names joined by commas, or a YAML file; the reference, without a mask, first.

    Raises:
        ReplayError: an unknown name, a file that describes no arms, two arms of one name.
    """
    arms = arms_of_file("--arms", text, seed=seed)
    try:
        arms = arms or [_preset_or_named(one, presets, seed) for one in _split(text)]
    except (ValueError, TypeError) as error:
        raise ReplayError(f"--arms {text}: {error}") from error
    names = [arm.name for arm in arms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ReplayError(f"--arms {text}: two arms are called {twice!r}")
    reference = next((arm for arm in arms if arm.name in ("none", "a")), None) or named_arm("none")
    return (reference, *(arm for arm in arms if arm.name != reference.name))


def arms_of_file(option: str, text: str, *, seed: int = 0) -> list[Arm]:
    """The arms of a YAML file; none where the text does not name such a file.

    Raises:
        ReplayError: a file that describes no arms.
    """
    if Path(text).suffix not in (".yaml", ".yml"):
        return []
    try:
        return list(arms_from_yaml(Path(text).read_text(encoding="utf-8"), seed=seed))
    except (ValueError, TypeError, ImportError) as error:
        raise ReplayError(f"{option} {text}: {error}") from error


def _preset_or_named(text: str, presets: dict[str, Arm], seed: int) -> Arm:
    return presets[text] if text in presets else named_arm(text, seed=seed)


def _split(text: str) -> list[str]:
    """Names at commas; a comma before parameter=value goes on with the parameters of the name before."""
    found: list[str] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        if found and ":" in found[-1] and "=" in part and ":" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    if not found:
        raise ValueError("no arm is named")
    return found
