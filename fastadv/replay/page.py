"""The report as one self-contained page: no scripts, nothing loaded, every string of a rollout escaped."""

from __future__ import annotations

from importlib.resources import files

from fastadv.replay.errors import counted
from fastadv.replay.pipeline import ReplayResult
from fastadv.replay.plots import figures
from fastadv.replay.report import headline, remarks, tables, warnings


def render(result: ReplayResult) -> str:
    """The page."""
    import jinja2

    from fastadv import __version__

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files("fastadv.replay").joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        headline=headline(result),
        total=counted(result.census.total, "rollout"),
        warnings=warnings(result),
        remarks=remarks(result),
        tables=tables(result),
        figures=figures(result),  # drawn from numbers; the only part that is not escaped
        version=__version__,
    )
