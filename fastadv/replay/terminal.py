"""A replay's tables in the terminal."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from fastadv.replay.errors import plain
from fastadv.replay.pipeline import ReplayResult
from fastadv.replay.report import headline, remarks, tables, warnings
from fastadv.replay.tables import Table

GAP = 2  # blanks between two columns
LABEL = 14  # a column whose cells are no longer is not wrapped
WORD = 24  # a word that is longer may be


def safe(text: str) -> str:
    """Text without control characters but for its line ends, and without rich's markup."""
    return escape("\n".join(plain(line) for line in text.split("\n")))


def show(result: ReplayResult, console: Console) -> None:
    """Prints a result: what came out and what to beware of, the tables, the notes."""
    console.print(safe(headline(result)))
    for warning in warnings(result):
        console.print(f"[bold]• {safe(warning)}[/bold]")
    show_tables(tables(result), console)
    notes = remarks(result)
    if notes:
        console.print()
        for note in notes:
            console.print(f"• {safe(note)}")


def show_tables(found: list[Table], console: Console) -> None:
    """Prints tables with their captions."""
    for table in found:
        rich_table = RichTable(
            title=safe(table.title), title_justify="left", title_style="bold", box=None, pad_edge=False
        )
        for column, width in zip(table.columns, widths(table, console.width), strict=True):
            rich_table.add_column(safe(column), overflow="fold", width=width)
        for row in table.rows:
            rich_table.add_row(*(safe(cell) for cell in row))
        console.print()
        console.print(rich_table)
        console.print(f"[dim]{safe(table.caption)}[/dim]")


def widths(table: Table, available: int) -> list[int]:
    """Widths of the columns: the widest give way, and none breaks a word."""
    natural, least = [], []
    for column, *cells in zip(table.columns, *table.rows, strict=True):
        lines = [line for cell in cells for line in cell.split("\n")]
        longest = max(map(cell_len, lines), default=0)
        natural.append(max(1, cell_len(column), longest))
        if longest > LABEL:
            longest = min(WORD, max(cell_len(word) for line in lines for word in line.split() or [""]))
        least.append(max(1, longest, *(cell_len(word) for word in column.split())))
    while sum(natural) + GAP * (len(natural) - 1) > available:
        excess = [n if n > m else 0 for n, m in zip(natural, least, strict=True)]
        if not any(excess):
            break
        natural[excess.index(max(excess))] -= 1
    return natural
