"""The checklist of docs/arms.md: every row has something here, and tests that carry its number."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from operator import attrgetter
from pathlib import Path

import pytest

import fastadv as fa

ROOT = Path(__file__).parent.parent
LAST = 50
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \| ([\w, ]+) \|$", re.MULTILINE)
ROWS = {
    int(number): (here, set(tests.split(", ")))
    for number, _, here, tests in ROW.findall((ROOT / "docs" / "arms.md").read_text())
}


def marked() -> dict[int, set[str]]:
    """Test files by the rows that their tests carry."""
    found = defaultdict(set)
    for file in sorted((ROOT / "tests").glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.row":
                for number in node.args:
                    found[ast.literal_eval(number)].add(file.stem.removeprefix("test_"))
    return found


def test_every_row_is_there_and_lists_its_tests() -> None:
    assert sorted(ROWS) == list(range(1, LAST + 1))
    assert {number: tests for number, (_, tests) in ROWS.items()} == marked()


@pytest.mark.parametrize("number", ROWS)
def test_what_a_row_names_exists(number: int) -> None:
    here, _ = ROWS[number]
    for name in re.findall(r"`fa\.([\w.]+)`", here):
        assert attrgetter(name)(fa) is not None
    for name in re.findall(r"arm `([\w-]+)`", here):
        assert name in fa.ARMS
    for name in re.findall(r"`(\w+/[\w-]+)`", here):
        assert name in fa.ESTIMATORS
