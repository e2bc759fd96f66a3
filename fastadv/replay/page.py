"""The report as one self-contained page: no scripts, nothing loaded, every string of a rollout escaped."""

from __future__ import annotations

from importlib.resources import files

from fastadv.replay.pipeline import ReplayResult
from fastadv.replay.plots import figures
from fastadv.replay.report import remarks, tables


def render(result: ReplayResult) -> str:
    """The page."""
    import jinja2

    from fastadv import __version__

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files("fastadv.replay").joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        result=result,
        headline=headline(result),
        remarks=remarks(result),
        tables=tables(result),
        figures=figures(result),  # drawn from numbers; the only part that is not escaped
        version=__version__,
    )


def headline(result: ReplayResult) -> str:
    """What came out, in one sentence."""
    verdicts = [f"{p.name}: {p.verdict}" for p in result.predictions]
    return ". ".join(verdicts) + "." if verdicts else "Census only."
