"""Tables of gradients: as flat ones give them, and from a segment Gram, with intervals."""

from __future__ import annotations

import math

from fastadv.gradproj.projections import Projections
from fastadv.gradproj.scopes import TURN_NAMES
from fastadv.gradproj.statistics import PLUG_IN, U_STATISTIC, Comparison
from fastadv.intervals import Interval
from fastadv.monitoring.difficulty import DIFFICULTIES
from fastadv.replay.errors import short
from fastadv.replay.gradients import GradientRow
from fastadv.replay.tables import Table, number

TITLE = "Gradients at the checkpoint"
PARTS = {
    "Gradients by turn": (TURN_NAMES, "over the tokens of these turns; the first is turn 1"),
    "Gradients by difficulty": (
        DIFFICULTIES,
        "over the prompts of this difficulty, the success rate of the other half of a rollout's group",
    ),
}
QUANTITIES = {
    "cosine": "cosine", "norm_ratio": "norm ratio", "difference": "|difference|", "cap_projection": "on grad P(cap)",
    "cap_cosine": "its cosine", "explained": "explained", "cap_slope": "slope", "alignment": "alignment",
}  # fmt: skip
MEANING = (
    "cosine: of g and g_a. norm ratio: |g| / |g_a|. |difference|: |g - g_a| / |g_a|. on grad P(cap): how far g - g_a "
    "points towards running into the cap, in units of |g_a|; the direction comes from the other half of each group, so "
    "that no rollout is on both sides. its cosine: of g - g_a with that direction. slope: the b for which "
    "b x grad P(cap) fits g - g_a, an implied subsidy; – where the halves' estimates of grad P(cap) do not agree in "
    "direction."
)


def _noise_floor(value: float, reference: str) -> str:
    return (
        f" Noise floor: {number(value)}, the cosine of arm ({reference})'s gradients from the two halves of each "
        "group, each with a baseline of its own: 1 without noise, about 0 with nothing else."
    )


def flat_tables(gradients: list[GradientRow], noise_floor: float | None) -> list[Table]:
    """What flat gradients give: one number each."""
    reference = short(gradients[0].arm)
    caption = f"Each arm's gradient g against g_a, that of arm ({reference}). {MEANING}"
    caption += "" if noise_floor is None else _noise_floor(noise_floor, reference)
    found = [_flat_table(TITLE, caption, gradients, ("all",))]
    for title, (scopes, what) in PARTS.items():
        if any(row.scope in scopes for row in gradients):
            found.append(_flat_table(title, _part_caption(what), gradients, scopes))
    return found


def _part_caption(what: str) -> str:
    return f"As above, {what}. A part has less data than the whole, and so more noise."


def _flat_table(title: str, caption: str, gradients: list[GradientRow], scopes: tuple[str, ...]) -> Table:
    names = [name for name in QUANTITIES if name not in ("explained", "alignment")]
    rows = [
        [row.scope, short(row.arm), *(number(getattr(row, name), 4 if name == "cosine" else 3) for name in names)]
        for scope in scopes
        for row in gradients
        if row.scope == scope
    ]
    return Table(title, caption, ["scope", "arm", *(QUANTITIES[name] for name in names)], rows)


# ---- from a Gram -----------------------------------------------------------------------------------------------------


def projection_tables(projections: Projections) -> list[Table]:
    """Every arm against the first: both estimators side by side, then the parts."""
    reference = projections.rows[0].arm if projections.rows else ""
    found = {(row.scope, row.arm, row.estimator): row.comparison for row in projections.rows if row.arm != reference}
    tables = [Table(TITLE, _caption(projections, reference), COLUMNS, _side_by_side(found))]
    for title, (scopes, what) in PARTS.items():
        rows = [
            _part_row(scope, arm, one, found[scope, arm, U_STATISTIC])
            for name in scopes
            for (scope, arm, estimator), one in found.items()
            if scope == name and estimator == PLUG_IN
        ]
        if rows:
            caption = f"{_part_caption(what)} The plug-in, and the alignment's U-statistic; all others are in the JSON."
            tables.append(Table(title, caption, PART_COLUMNS, rows))
    return tables


COLUMNS = ["arm", "", "plug-in", "interval", "U-statistic", "interval "]
PART_COLUMNS = ["scope", "arm", "cosine", "|difference|", "explained", "alignment (U)"]


def _side_by_side(found: dict[tuple[str, str, str], Comparison]) -> list[list[str]]:
    rows = []
    for (scope, arm, estimator), plug_in in found.items():
        if scope == "all" and estimator == PLUG_IN:
            u_statistic = found[scope, arm, U_STATISTIC]
            for name, shown in QUANTITIES.items():
                batch, population = getattr(plug_in, name), getattr(u_statistic, name)
                value = number(population.value) if math.isfinite(population.low) else "–"
                # A slope's denominator may be noise around 0: without an interval it says nothing.
                silent = name == "cap_slope" and not math.isfinite(batch.low)
                first = "–" if silent else number(batch.value)
                rows.append([short(arm), shown, first, interval(batch), value, interval(population)])
    return rows


def interval(e: Interval) -> str:
    """The two ends; a dash where an end is open."""
    return "–" if math.isnan(e.low) else f"{number(e.low, 2)} to {number(e.high, 2)}"


def _part_row(scope: str, arm: str, c: Comparison, u: Comparison) -> list[str]:
    shown = [number(c.cosine.value, 4), *(number(e.value) for e in (c.difference, c.explained))]
    known = math.isfinite(u.alignment.low)
    return [scope, short(arm), *shown, f"{number(u.alignment.value)}, {interval(u.alignment)}" if known else "–"]


def _caption(projections: Projections, reference: str) -> str:
    signal, floor = projections.signal, _noise_floor(projections.noise_floor, short(reference))
    return (
        f"Each arm's gradient g against g_a, that of arm ({short(reference)}). plug-in: as they are in these rollouts. "
        "U-statistic: from pairs of different prompts alone, so that no prompt's noise counts as agreement: what the "
        "rollouts say about the policy. Its cosines may come out beyond 1, and it is – where noise is all there is. "
        f"Intervals are 95 %, by a bootstrap over {projections.prompts:,} prompts; – where an end is open, and then no "
        f"slope. {MEANING} (The U-statistic needs no halves.) explained: the share of |g - g_a|² along grad P(cap). "
        "alignment: "
        "of g - g_a with grad P(cap) from the same rollouts; the plug-in is the cosine that noise on both sides makes "
        "out of nothing, the U-statistic what is left of it: no effect is shown where its interval holds 0."
        f"{floor} Signal: {number(signal.value, 2)} of |g_a|² is more than noise ({interval(signal)})."
    )
