"""What the documentation says and shows is so."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

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


def test_the_readmes_speed_is_what_was_measured() -> None:
    """Each factor in the README's table is the committed result's, rounded."""
    results = "".join((ROOT / "bench" / "results" / f"{name}.md").read_text() for name in ("policy_loss", "advantages"))
    measured = [float(x) for x in re.findall(r"\| ([\d.]+)x \|", results)]
    claimed = [float(x) for x in re.findall(r"\| ([\d.]+)x \|", (ROOT / "README.md").read_text())]
    assert len(claimed) == 5
    for factor in claimed:
        assert any(abs(factor - m) <= 0.05 * m for m in measured), factor


def test_the_public_names_are_documented_with_what_a_caller_needs() -> None:
    for name in fa.__all__:
        documented = getattr(fa, name)
        if (
            callable(documented)
            and not isinstance(documented, type)
            and documented.__doc__
            and "Args:" in documented.__doc__
        ):
            for section in ("Returns:", "Raises:"):
                assert section in documented.__doc__, (name, section)
