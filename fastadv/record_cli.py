"""`fastadv record`: training runs from their step records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

PAGE = "record.html"


def record(
    files: Annotated[
        list[Path],
        typer.Argument(help="Step records, JSON lines as fastadv.RecordWriter writes them.", show_default=False),
    ],
    out: Annotated[
        Path, typer.Option(help=f"Folder for {PAGE}; made if it is not there.", show_default=False)
    ],
    role: Annotated[
        list[str] | None,
        typer.Option(
            help="ROLE=FILE: what a file is in the predictions, where its arm's settings do not say it: reference, "
            "mask, matched, survivors, drop, never, or rescue:A with the probability A. May be repeated.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier page in --out.")] = False,
) -> None:  # fmt: skip
    """Compare training runs: every logged number against steps and against b, and predictions P3 to P6.

    Example: fastadv record a.jsonl b.jsonl --out report/
    """
    from fastadv import cli  # which imports this module
    from fastadv.replay.record_report import record_page, record_tables, report
    from fastadv.replay.terminal import safe, show_tables

    cli.claim(out, overwrite, (PAGE,))
    found = report(files, role or ())
    console = Console()
    show_tables(record_tables(found), console)
    for remark in found.remarks:
        console.print(f"• {safe(remark)}")
    page = record_page(found)
    with cli.writing(out):
        out.mkdir(parents=True, exist_ok=True)
        cli.write(out / PAGE, page)
    console.print(f"\nwrote {safe(str(out / PAGE))}", soft_wrap=True)
