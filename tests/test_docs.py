"""What the documentation says and shows is so."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastadv as fa

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def test_the_readmes_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue().startswith("cpu tensor(")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_and_targets_exist(page: Path) -> None:
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)`?", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for path in re.findall(r"`((?:fastadv|csrc|tests|bench|docs)/[\w./]+\.(?:py|cpp|h|md))`", text):
        assert (ROOT / path).exists(), path


def test_every_op_has_one_page() -> None:
    """A page's title names the ops that it is about."""
    titles = [page.read_text().partition("\n")[0] for page in (ROOT / "docs" / "ops").glob("*.md")]
    described = sorted(name for title in titles for name in title.removeprefix("# ").split(", "))
    public = [(name, getattr(home, name)) for home in (fa, fa.gradproj) for name in home.__all__]
    ops = {name for name, value in public if inspect.isfunction(value) and value.__module__.startswith("fastadv.ops.")}
    assert described == sorted(ops)


# Each row of the README's table, and the committed comparison that it quotes.
QUOTED = {
    "ppo kernel (loss, gradient, metrics) against verl's eager forward and backward": (
        "policy_loss", "raw op / verl eager forward and backward",
    ),
    "against `torch.compile` of the same formula": (
        "policy_loss", "raw op / torch.compile of the formula",
    ),
    "`policy_loss(...).loss.backward()` against verl's eager forward and backward": (
        "policy_loss", "policy_loss().backward() / verl eager",
    ),
    "against `torch.compile`": (
        "policy_loss", "policy_loss().backward() / torch.compile",
    ),
    "turn-reached advantages to tokens against the PyTorch reference": (
        "advantages", "to tokens / the PyTorch reference",
    ),
    "[1024, 151936] bfloat16 logits to log-probs, entropy, sum of squares, against eager PyTorch": (
        "log_probs", "bfloat16: forward / eager",
    ),
    "against `torch.compile` of that": (
        "log_probs", "bfloat16: forward / torch.compile",
    ),
    "loss and gradients from hidden states [4096, 1024], vocabulary 32,768, 60 % masked, against torch's own": (
        "linear_float32", "linear_policy_loss / torch.nn.functional.linear_cross_entropy",
    ),
    "against chunks of rows with torch's autograd": (
        "linear_float32", "linear_policy_loss / chunks of rows, torch autograd for each",
    ),
}  # fmt: skip
# Factors in the README's prose, each after these words.
QUOTED_FLOORS = {
    r"The kernel takes ([\d.]+) times": ("policy_loss", "raw op / floor of 17 bytes a token"),
    r"the autograd path ([\d.]+) times": ("policy_loss", "policy_loss().backward() / floor"),
    r"\(reinforce\) to ([\d.]+) times\s": ("losses", "gspo/trl / ppo"),
    r"\(gspo/trl\) what ppo takes, sapo ([\d.]+)\.": ("losses", "sapo / ppo"),
    r"turn-reached advantages\s+([\d.]+) times": (
        "advantages", "turn-reached advantages into a buffer / floor of 8 bytes a token",
    ),
}  # fmt: skip


def measured(suite: str, what: str) -> dict[str, Any]:
    """The line of a committed result."""
    lines = json.loads((ROOT / "bench" / "results" / f"{suite}.json").read_text())["lines"]
    (line,) = [line for line in lines if line["what"] == what]
    return line


def rounded_to(text: str, ratio: float) -> bool:
    """Whether a number as it is written is this ratio, rounded to its last digit."""
    digits = len(text.partition(".")[2])
    return abs(float(text) - ratio) <= 0.5001 * 10.0**-digits


def test_the_readmes_speed_is_what_was_measured() -> None:
    """Each factor and bar in the README is that of the comparison that its row names."""
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (.+?) \| ([\d.]+)x \| (?:([\d.]+)x)? ?\|$", readme, re.MULTILINE)
    assert [what for what, _, _ in rows] == list(QUOTED)  # a new row names its comparison in QUOTED
    for what, factor, bar in rows:
        line = measured(*QUOTED[what])
        assert rounded_to(factor, line["ratio"]), (what, factor, line["ratio"])
        assert (float(bar) if bar else None) == line["bar"], what
    for words, where in QUOTED_FLOORS.items():
        (factor,) = re.findall(words, readme)
        assert rounded_to(factor, measured(*where)["ratio"]), (words, factor)


def test_a_wrong_factor_would_be_noticed() -> None:
    assert rounded_to("13", 12.60)
    assert rounded_to("9.2", 9.15)
    assert not rounded_to("13", 12.4)
    assert not rounded_to("62", 45.1)  # another row's


def undocumented(function: Callable[..., Any]) -> list[str]:
    """What a function's docstring lacks: its sections, or a parameter in Args."""
    text, signature = function.__doc__ or "", inspect.signature(function)
    if not signature.parameters:
        return [] if text else ["a docstring"]
    lacking = [section for section in ("Args:", "Returns:", "Raises:") if f"\n    {section}\n" not in text]
    arguments = re.sub(r",\n +", ", ", text.partition("Args:")[2].partition("Returns:")[0])  # names over two lines
    named = {name for names in re.findall(r"^ +([\w, ]+):", arguments, re.MULTILINE) for name in names.split(", ")}
    return lacking + [name for name in signature.parameters if name not in named]


def test_the_public_functions_are_documented_with_what_a_caller_needs() -> None:
    functions = {name: getattr(fa, name) for name in fa.__all__ if inspect.isfunction(getattr(fa, name))}
    assert len(functions) > 15
    assert {name: undocumented(f) for name, f in functions.items() if undocumented(f)} == {}


RESULTS = (
    fa.Arm, fa.ArmResult, fa.Batch, fa.Census, fa.Denominators, fa.FrozenStatistics, fa.GroupIndex, fa.Outcome,
    fa.SegmentTable, fa.Segments, fa.TokenIds,
)  # fmt: skip


def fields_of(kind: Any) -> list[str]:
    """Fields of a dataclass or a named tuple, members of an enumeration."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind.__members__ if hasattr(kind, "__members__") else kind._fields)


@pytest.mark.parametrize("kind", RESULTS, ids=lambda kind: kind.__name__)
def test_every_field_is_described_where_help_shows_it(kind: Any) -> None:
    described = (kind.__doc__ or "").partition("Attributes:\n")[2]
    named = {name for names in re.findall(r"^ {8}([\w, ]+):", described, re.MULTILINE) for name in names.split(", ")}
    assert named == set(fields_of(kind))


def test_a_function_without_its_sections_would_be_noticed() -> None:
    def bare(values: int) -> int:
        """One line."""
        return values

    def other(values: int, more: int) -> int:
        """One line.

        Args:
            values: numbers.

        Returns:
            One.

        Raises:
            ValueError: never.
        """
        return values + more

    assert undocumented(bare) == ["Args:", "Returns:", "Raises:", "values"]
    other.__doc__ = inspect.cleandoc(other.__doc__ or "").replace("\n", "\n    ")
    assert undocumented(other) == ["more"]


def test_the_readmes_gradient_reaches_its_leaf() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "README.md", "exec"), names)
    assert bool(names["log_probs"].grad.any())


def test_the_theorys_turns_and_empty_buckets_are_the_apis() -> None:
    """docs/theory.md, 13: turns from 0, and the target where nobody else got as far, for kappa 0 too."""
    rewards, mask = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1, 0, 1, 1, 1])  # two turns, one, one
    turns = fa.segments(fa.turn_ids_from_mask(mask, cu := torch.tensor([0, 3, 4, 5])), cu)
    assert turns.turn_ids.tolist() == [0, -1, 1, 0, 0]
    for backend in ("reference", "cpu"):
        table = fa.turn_advantages(rewards, [0] * 3, turns, kappa=0.0, output="segments", backend=backend)
        assert table.values.tolist() == [1.0, 1.0, -0.5, -0.5]
