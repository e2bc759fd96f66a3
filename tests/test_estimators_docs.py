"""docs/estimators.md lists every estimator as the registry has it; run as a script, this prints the lines."""

from __future__ import annotations

from pathlib import Path

import pytest

import fastadv as fa

PAGE = (Path(__file__).parent.parent / "docs" / "estimators.md").read_text()


def line(entry: fa.Estimator) -> str:
    """The estimator's line of the page's table."""
    scale = "–" if entry.eps is None else f"{entry.ddof:g}, {entry.eps:g} ({entry.eps_form})"
    path, _, date = entry.code_path.partition(" (")
    return f"| `{entry.name}` | {entry.equation} | {scale} | {entry.singleton} | {entry.masking} | `{path}` ({date} |"


@pytest.mark.parametrize("name", sorted(fa.ESTIMATORS))
def test_the_page_says_what_the_registry_says(name: str) -> None:
    assert line(fa.ESTIMATORS[name]) in PAGE


def test_the_page_lists_no_other() -> None:
    listed = [row.split("`")[1] for row in PAGE.splitlines() if row.startswith("| `") and "/" in row.split("`")[1]]
    assert sorted(listed) == sorted(fa.ESTIMATORS)


def test_inputs_and_options_are_named() -> None:
    for entry in fa.ESTIMATORS.values():
        for name in (*entry.needs, *entry.reads, *entry.options):
            for one in name.split("|"):
                assert f"`{one}`" in PAGE, one


if __name__ == "__main__":
    print("\n".join(line(entry) for _, entry in sorted(fa.ESTIMATORS.items())))
