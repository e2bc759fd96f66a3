"""Inner products of noisy gradients: as they are in a batch, and what they say about the policy.

A gradient of a batch is a sum over prompts, g = Σₓ gₓ with independent gₓ. The plug-in <g, h> = Σₓᵧ <gₓ, hᵧ> has the
noise of each prompt in it, Σₓ <gₓ, hₓ>, which does not average out: with one batch on both sides it is what makes a
cosine out of nothing. The U-statistic n/(n - 1) Σ_{x≠y} <gₓ, hᵧ> over pairs of different prompts estimates
n² <E gₓ, E hₓ> without bias (docs/theory.md, 17).

Everything is float64, and differences of gradients are vectors of their own: |g - h|² from |g|², <g, h> and |h|² loses
all digits where g and h are nearly one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fastadv.intervals import Interval

PLUG_IN, U_STATISTIC = "plug-in", "u-statistic"
LEVEL = 0.95  # of intervals
FEWEST_PROMPTS = 4  # of fewer there is no interval: resampling them shows nothing


@dataclass(frozen=True)
class Comparison:
    """One gradient g against a reference r and a direction c: how large and how similar, and what of g - r is along c.

    Norms are of the mean over rollouts. The plug-in takes c from the other half of each prompt's rollouts, so that no
    rollout is on both sides; the U-statistic, which pairs different prompts only, takes the whole of c.
    """

    norm: Interval  # |g|
    cosine: Interval  # of g and r
    norm_ratio: Interval  # |g| / |r|
    difference: Interval  # |g - r| / |r|
    cap_projection: Interval  # of g - r on c / |c|, over |r|
    cap_cosine: Interval  # of g - r and c
    explained: Interval  # share of |g - r|^2 that lies along c: projection^2 / difference^2
    cap_slope: Interval  # b of the fit g - r ~ b c
    alignment: Interval  # <g - r, c> from the same rollouts, over norms with their noise: defined without any signal


QUANTITIES = tuple(field.name for field in fields(Comparison))


def prompt_products(gram: Tensor, prompts: Tensor, n: int, left: Tensor, right: Tensor) -> Tensor:
    """Inner products of pairs of gradients, by prompt.

    Args:
        gram: `[S, S]` float64 inner products of the segments' gradients.
        prompts: `[S]` int64, prompt of each segment from 0.
        n: number of prompts.
        left, right: `[P, S]` float64 coefficients: pair p are the gradients `left[p] U` and `right[p] U`.

    Returns:
        `[P, n, n]` float64: entry (p, x, y) is the product of left p's part from prompt x and right p's from prompt y.
    """
    products = left.new_zeros(left.shape[0], n, n)
    sizes = torch.bincount(prompts, minlength=n).tolist()
    for prompt, members in enumerate(torch.split(prompts.argsort(stable=True), sizes)):
        used = members[(left[:, members] != 0).any(0)]
        if used.numel():
            rows = left[:, used] @ gram[used] * right  # [P, S]
            products[:, prompt].index_add_(1, prompts, rows)
    return products


def plug_in(products: Tensor) -> Tensor:
    """<g, h> of the batch's own gradients, `[P]` from `[P, n, n]`."""
    return products.sum((1, 2))


def u_statistic(products: Tensor) -> Tensor:
    """n² <E gₓ, E hₓ> without bias, `[P]` from `[P, n, n]`: from pairs of different prompts. NaN for one prompt."""
    n = products.shape[-1]
    if n < 2:
        return products.new_full(products.shape[:1], math.nan)
    return (products.sum((1, 2)) - _diagonal(products).sum(1)) * (n / (n - 1))


def resamples(prompts: int, draws: int, seed: int) -> Tensor:
    """How often each prompt is drawn, `[draws, n]` float64; no draws of fewer than FEWEST_PROMPTS."""
    draws = draws if prompts >= FEWEST_PROMPTS else 0
    generator = torch.Generator().manual_seed(seed % 2**64)  # any integer
    picks = torch.randint(0, max(1, prompts), (draws, prompts), generator=generator)
    ones = torch.ones_like(picks, dtype=torch.float64)
    return torch.zeros_like(ones).scatter_add_(1, picks, ones)


def all_and(counts: Tensor) -> Tensor:
    """Each prompt once, and then the resamples of the prompts `[D, n]`: `[1 + D, n]`."""
    return torch.cat([counts.new_ones(1, counts.shape[1]), counts])


def plug_in_draws(products: Tensor, counts: Tensor) -> Tensor:
    """The plug-in of resampled prompts, `[P, D]` from `[P, n, n]` and `[D, n]`: copies meet their copies."""
    return ((counts @ products) * counts).sum(-1)


def u_statistic_draws(products: Tensor, counts: Tensor, plug_ins: Tensor) -> Tensor:
    """The U-statistic of resampled prompts, `[P, D]` from `[P, n, n]`, `[D, n]` and the plug-in's draws.

    Two copies of one prompt are no pair of different prompts: their product, the prompt's noise squared, stays out.
    """
    n = products.shape[-1]
    same = _diagonal(products) @ counts.square().mT  # [P, D]
    pairs = n * n - counts.square().sum(1)  # [D]: of different prompts
    return torch.where(pairs > 0, (plug_ins - same) / pairs * (n * n), math.nan)


def _diagonal(products: Tensor) -> Tensor:
    return products.diagonal(dim1=1, dim2=2)  # [P, n]


def interval(draws: Tensor) -> tuple[float, float]:
    """The middle LEVEL of the draws. A draw that is not finite might have been anything, so it counts as lower than the
    lower end and higher than the upper one; (NaN, NaN) if that leaves an end open, or without draws."""
    count = draws.shape[0]
    cut = int(count * (1 - LEVEL) / 2)
    if not count:
        return math.nan, math.nan
    ordered = draws[draws.isfinite()].sort().values
    lost = count - ordered.shape[0]
    if lost > cut:
        return math.nan, math.nan
    return float(ordered[cut - lost]), float(ordered[ordered.shape[0] - 1 - (cut - lost)])


def bootstrapped(values: Tensor) -> Interval:
    """A number and its interval, from its value and its draws, `[1 + D]`."""
    value = float(values[0])
    return Interval(value if math.isfinite(value) else math.nan, *interval(values[1:]))


# ---- one gradient against a reference and a direction ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Directions:
    """The direction that differences are projected on, as coefficients: over all rollouts, and from either half.

    Attributes:
        whole: `[S]`, over whole groups.
        halves: `[2, S]`, each from the rollouts of one half of each group alone.
        half: `[S]` int64, half of each segment's rollout.
    """

    whole: Tensor  # [S]
    halves: Tensor  # [2, S]
    half: Tensor  # [S]


def compare(
    gram: Tensor,
    prompts: Tensor,
    reference: Tensor,
    difference: Tensor,
    directions: Directions,
    counts: Tensor,
    rollouts: int,
) -> dict[str, Comparison]:
    """A gradient against a reference, by both estimators.

    Args:
        gram: `[S, S]` float64.
        prompts: `[S]` int64, prompt of each segment from 0.
        reference: `[S]` float64 coefficients of the reference.
        difference: `[S]` float64 coefficients of the gradient less those of the reference.
        directions: what the difference is projected on.
        counts: `[D, n]`, see `resamples`.
        rollouts: that the gradients are sums over.

    Returns:
        A Comparison for PLUG_IN and one for U_STATISTIC.
    """
    c, (c0, c1) = directions.whole, directions.halves
    d0, d1 = (torch.where(directions.half == half, difference, 0.0) for half in (0, 1))
    pairs = {
        "rr": (reference, reference), "rd": (reference, difference), "dd": (difference, difference),
        "dc": (difference, c), "cc": (c, c), "d0c1": (d0, c1), "d1c0": (d1, c0), "d0d0": (d0, d0), "d1d1": (d1, d1),
        "c0c0": (c0, c0), "c1c1": (c1, c1), "c0c1": (c0, c1),
    }  # fmt: skip
    left, right = (torch.stack(side) for side in zip(*pairs.values(), strict=True))
    products = prompt_products(gram, prompts, counts.shape[1], left, right)
    draws = plug_in_draws(products, counts)  # [P, D]
    batch = torch.cat([plug_in(products)[:, None], draws], 1)  # [P, 1 + D]
    population = torch.cat([u_statistic(products)[:, None], u_statistic_draws(products, counts, draws)], 1)
    m, u = (dict(zip(pairs, values, strict=True)) for values in (batch, population))
    dd, cc = list(pairs).index("dd"), list(pairs).index("cc")
    scale = (noisy_square(products[dd]) * noisy_square(products[cc])).sqrt()
    return {PLUG_IN: _plug_in_comparison(m, rollouts), U_STATISTIC: _u_comparison(u, scale, rollouts)}


def noisy_square(products: Tensor) -> Tensor:
    """A gradient's squared norm in the batch, from `[n, n]`; or that of its noise, where prompts happen to cancel."""
    return torch.maximum(products.sum(), products.diagonal().sum())


def _plug_in_comparison(m: dict[str, Tensor], rollouts: int) -> Comparison:
    """Cross-fitted: each half of the difference on the direction from the other half."""
    crossed = m["d0c1"] + m["d1c0"]
    along = _over(m["d0c1"], m["c1c1"].sqrt()) + _over(m["d1c0"], m["c0c0"].sqrt())
    cosines = _over(m["d0c1"], _norms(m, "d0d0", "c1c1")) + _over(m["d1c0"], _norms(m, "d1d1", "c0c0"))
    # Twice the halves' product estimates |c|^2 / 2: not positive if noise is all there is.
    slope = _over(crossed, 2 * m["c0c1"])
    found = _comparison(m, rollouts, along, cosines / 2, slope, _over(m["dc"], _norms(m, "dd", "cc")))
    # Resampled prompts have the noise of their copies too, so that all norms come out larger than the batch's.
    return replace(found, norm=Interval(found.norm.value))


def _u_comparison(u: dict[str, Tensor], scale: Tensor, rollouts: int) -> Comparison:
    """From pairs of prompts throughout. A squared norm that comes out negative has no root: noise is all there is."""
    along, slope = _over(u["dc"], u["cc"].sqrt()), _over(u["dc"], u["cc"])
    cosine = _over(u["dc"], _norms(u, "dd", "cc"))
    return _comparison(u, rollouts, along, cosine, slope, _over(u["dc"], scale))


def _comparison(
    m: dict[str, Tensor], rollouts: int, along: Tensor, cosine: Tensor, slope: Tensor, alignment: Tensor
) -> Comparison:
    whole = m["rr"] + 2 * m["rd"] + m["dd"]  # |g|^2
    norm, difference = m["rr"].sqrt(), m["dd"].sqrt()
    return Comparison(
        norm=bootstrapped(whole.sqrt() / max(1, rollouts)),
        cosine=bootstrapped(_over(m["rr"] + m["rd"], whole.sqrt() * norm)),
        norm_ratio=bootstrapped(_over(whole.sqrt(), norm)),
        difference=bootstrapped(_over(difference, norm)),
        cap_projection=bootstrapped(_over(along, norm)),
        cap_cosine=bootstrapped(cosine),
        explained=bootstrapped(_over(along, difference).square()),
        cap_slope=bootstrapped(slope),
        alignment=bootstrapped(alignment),
    )


def _norms(m: dict[str, Tensor], a: str, b: str) -> Tensor:
    """|a| |b|; NaN where either has no norm."""
    return m[a].sqrt() * m[b].sqrt()


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; NaN unless the denominator is positive."""
    return torch.where(denominator > 0, numerator / denominator, math.nan)


def cosine(products: Tensor) -> float:
    """Cosine from the products (a, a), (b, b) and (a, b), `[3, n, n]`, as they are in the batch."""
    aa, bb, ab = plug_in(products)
    return float(_over(ab, aa.sqrt() * bb.sqrt()))


def signal_share(products: Tensor, counts: Tensor) -> Interval:
    """Share of a gradient's squared norm that is no noise, from its products `[1, n, n]` with itself."""
    draws = u_statistic_draws(products, counts, plug_in_draws(products, counts))
    values = torch.cat([u_statistic(products)[:, None], draws], 1)[0]
    return bootstrapped(_over(values, noisy_square(products[0])))
