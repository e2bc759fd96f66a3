"""docs/estimators.md lists every estimator of rollouts and turns as the registry has it. A script: prints them."""

from __future__ import annotations

from pathlib import Path

import pytest

import fastadv as fa

PAGE = (Path(__file__).parent.parent / "docs" / "estimators.md").read_text()
ENTRIES = {name: entry for name, entry in sorted(fa.ESTIMATORS.items()) if entry.level in ("rollout", "turn")}


def line(entry: fa.estimators.Estimator) -> str:
    """The estimator's line of the page's table."""
    ddof = "–" if entry.ddof is None else f"{entry.ddof:g}"
    scale = "–" if entry.eps is None else f"{ddof}, {entry.eps:g} ({entry.eps_form or 'add'})"
    path, _, date = entry.code_path.partition(" (")
    where = f"`{path}`" + (f" ({date}" if date else "")
    return f"| `{entry.name}` | {entry.equation} | {scale} | {entry.singleton} | {entry.masking} | {where} |"


@pytest.mark.parametrize("name", ENTRIES)
def test_the_page_says_what_the_registry_says(name: str) -> None:
    assert line(ENTRIES[name]) in PAGE


def test_the_page_lists_no_other() -> None:
    listed = [row.split("`")[1] for row in PAGE.splitlines() if row.startswith("| `") and "/" in row.split("`")[1]]
    assert sorted(listed) == list(ENTRIES)


def test_inputs_and_options_are_named() -> None:
    for entry in ENTRIES.values():
        for name in (*entry.needs, *entry.reads, *entry.options):
            for one in name.split("|"):
                assert f"`{one}`" in PAGE, one


if __name__ == "__main__":
    print("\n".join(line(entry) for entry in ENTRIES.values()))
