"""The command as tests call it, in their own process."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fastadv import cli

DOCS = Path(__file__).parent.parent / "docs"


class Run(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def fastadv(*arguments: Any, columns: int = 200) -> Run:
    """The command in this process, in a terminal of this width: what it prints and its exit status."""
    stdout, stderr = io.StringIO(), io.StringIO()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small products, whose threads would wait for each other where a machine is busy
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["fastadv", *map(str, arguments)])
        patch.setenv("COLUMNS", str(columns))
        try:
            cli.main()
            code = 0
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        finally:
            torch.set_num_threads(threads)
    return Run(code, stdout.getvalue(), stderr.getvalue())


def fails(*arguments: Any, message: str) -> None:
    """Exit status 2, the message, and no traceback."""
    run = fastadv(*arguments)
    assert run.returncode == 2, run.stdout + run.stderr
    assert re.search(message, run.stderr), run.stderr
    assert "Traceback" not in run.stderr


def keys_of(value: Any, outcomes: frozenset[str]) -> set[str]:
    """Every key in a JSON value, but for outcomes and the names of a prediction's statistics."""
    if isinstance(value, list):
        return set().union(*(keys_of(item, outcomes) for item in value)) if value else set()
    if not isinstance(value, dict):
        return set()
    own = set(value) - outcomes
    return own.union(*(keys_of(item, outcomes) for item in value.values())) if value else own


def documented(page: str) -> set[str]:
    """What the first column of a page's tables names."""
    cells = re.findall(r"^\| (`.+?) \|", (DOCS / page).read_text(), re.MULTILINE)
    return {word for cell in cells for word in re.findall("`(.+?)`", cell)}
