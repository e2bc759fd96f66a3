"""The report as one self-contained page: no scripts, nothing loaded, every string of a rollout escaped."""

from __future__ import annotations

from importlib.resources import files

from fastadv.replay.errors import counted
from fastadv.replay.pipeline import ReplayResult
from fastadv.replay.plots import Figure, figures
from fastadv.replay.report import headline, remarks, tables, warnings
from fastadv.replay.tables import Table


def render(result: ReplayResult) -> str:
    """The page of a replay."""
    return filled(
        title="fastadv replay",
        heading=f"Replay of {counted(result.census.total, 'rollout')}",
        headline=headline(result),
        warnings=warnings(result),
        remarks=remarks(result),
        tables=tables(result),
        figures=figures(result),
        footer="All numbers are in report.json beside this page; docs/report_json.md says what its keys mean.",
    )


def filled(
    *, title: str, heading: str, headline: str, warnings: list[str], remarks: list[str], tables: list[Table],
    figures: list[Figure], footer: str,
) -> str:  # fmt: skip
    """A page of texts, tables and plots."""
    import jinja2

    from fastadv import __version__

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files("fastadv.replay").joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        heading=heading,
        headline=headline,
        warnings=warnings,
        remarks=remarks,
        tables=tables,
        figures=figures,  # drawn from numbers and from names that `plots.label` cleans; the only part not escaped
        footer=footer,
        version=__version__,
    )
