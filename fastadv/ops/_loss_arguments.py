"""The arguments of the policy losses, checked and brought into the form that backends take."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastadv import validation
from fastadv.losses import SEQUENCE_LOSSES, LossConfig, SequenceMask
from fastadv.ops.covariance_selection import covariance_selection
from fastadv.ops.sequence_log_ratios import log_ratios_of
from fastadv.ops.token_counts import Denominators, counts_of
from fastadv.reference.corrections import weigh
from fastadv.reference.sequence_log_ratios import SequenceLogRatios
from fastadv.rows import Rows
from fastadv.segment_table import Segments, SegmentTable

TOKEN, ROW, SEGMENT = 0, 1, 2  # AdvantageKind in csrc/cpu/kernels.h


class Advantages(NamedTuple):
    """Advantages as backends take them."""

    kind: int
    values: Tensor  # per token, [B] or [S]
    turn_ids: Tensor | None  # of a segment table
    offsets: Tensor | None  # [B + 1] int64, of a segment table


def per_token_or_row(op: str, name: str, value: Any, rows: Rows, device: torch.device) -> int:
    """Whether a tensor has one value per token or per rollout."""
    validation.tensor(op, name, value, device=device)
    token, row = tuple(value.shape) == tuple(rows.shape), tuple(value.shape) == (rows.count,)
    if not token and not row:
        raise ValueError(
            f"{op}: {name} has shape {list(value.shape)}; expected {list(rows.shape)} (per token) or "
            f"[{rows.count}] (per rollout)"
        )
    both = token and row and rows.count > 1 and rows.cu_seqlens is not None
    if both and validation.reads_values(rows.cu_seqlens) and bool((rows.lengths() != 1).any()):
        raise ValueError(
            f"{op}: {name} has shape [{rows.count}], which is both the number of tokens and of rollouts; pass a "
            "SegmentTable or spread it over the tokens to say which is meant"
        )
    return TOKEN if token else ROW


def advantages(op: str, given: Any, turn_ids: Any, rows: Rows, device: torch.device) -> Advantages:
    """Advantages per token, per rollout or in a segment table."""
    if not isinstance(given, SegmentTable):
        kind = per_token_or_row(op, "advantages", given, rows, device)
        validation.tensor(op, "advantages", given, dtypes=validation.FLOATS)
        if turn_ids is not None:
            raise ValueError(f"{op}: turn_ids is given, but advantages is a tensor; turn_ids belongs to a SegmentTable")
        return Advantages(kind, given, None, None)
    index, values = given.segments, given.values
    validation.tensor(op, "advantages.values", values, shape=(index.count,), dtypes=validation.FLOATS, device=device)
    ids = index.turn_ids if turn_ids is None else turn_ids.turn_ids if isinstance(turn_ids, Segments) else turn_ids
    validation.tensor(op, "turn_ids", ids, shape=tuple(rows.shape), dtypes=(torch.int32, torch.int64), device=device)
    validation.tensor(op, "advantages.segments.offsets", index.offsets, device=device)
    if index.num_rows != rows.count:
        raise ValueError(f"{op}: advantages is a table of {index.num_rows} rollouts, log_probs has {rows.count}")
    if turn_ids is None or isinstance(turn_ids, Segments):
        (index if turn_ids is None else turn_ids).check_layout(op, rows)
    return Advantages(SEGMENT, values, ids, index.offsets)


def weights(op: str, given: Any, rows: Rows, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """(per token, per rollout as float64); at most one is there."""
    if given is None:
        return None, None
    validation.tensor(op, "weights", given, dtypes=(*validation.FLOATS, *validation.INTEGERS, torch.bool))
    if per_token_or_row(op, "weights", given, rows, device) == ROW:
        return None, given.detach().to(torch.float64).contiguous()
    return given if given.is_floating_point() else given.to(torch.float32), None


def no_gradient(op: str, receivers: str, **tensors: Any) -> None:
    """Raises if a tensor that gets no gradient asks for one."""
    for name, t in tensors.items():
        if isinstance(t, Tensor) and t.requires_grad:
            raise ValueError(
                f"{op}: {name} requires grad, but gradient flows to {receivers} only; pass {name}.detach()"
            )


def check_sampler(op: str, config: LossConfig, log_probs: Tensor | None, ratios: SequenceLogRatios | None) -> None:
    """Raises where a correction or a sequence mask lacks what it is made from, or there is none to read it."""
    masked = config.sequence_mask is not None and config.sequence_mask.log_probs == "rollout"
    if log_probs is None and masked:
        raise ValueError(f"{op}: rollout_log_probs is None; a sequence_mask of log_probs 'rollout' needs it")
    by_token = config.token_correction is not None or any(c.missing == "exclude" for c in config.corrections)
    if log_probs is None and (by_token or (config.corrections and ratios is None)):
        raise ValueError(f"{op}: rollout_log_probs is None; a correction needs it")
    if log_probs is not None and not config.corrections and not masked:
        raise ValueError(
            f"{op}: rollout_log_probs is given, but nothing reads it; a correction would, set one or leave it out"
        )


def check_sequence_mask(op: str, mask: SequenceMask, old_log_probs: Tensor | None, **parts: Any) -> None:
    """Raises where a sequence mask lacks old log-probs, or the call says that it has parts of rollouts."""
    if old_log_probs is None and mask.log_probs == "old":
        raise ValueError(f"{op}: old_log_probs is None; a sequence_mask of log_probs 'old' needs it")
    for name, given in parts.items():
        if given is not None:
            raise ValueError(
                f"{op}: {name} is given, but a sequence_mask looks at whole rollouts; hand them over whole, without it"
            )


def used_by(op: str, **given: tuple[Any, bool, str]) -> None:
    """Raises where an argument is missing that the configuration needs, or is given and would be ignored."""
    for name, (value, needed, option) in given.items():
        if needed and value is None:
            raise ValueError(f"{op}: {name} is None; {option} needs it")
        if value is not None and not needed:
            raise ValueError(f"{op}: {name} is given, but nothing reads it; {option} would, set it or leave {name} out")


def check_ratios(op: str, name: str, given: Any, rows: Rows, device: torch.device) -> None:
    """Raises unless these are log-ratios of this batch's rollouts."""
    if not isinstance(given, SequenceLogRatios):
        raise TypeError(f"{op}: {name} is a {type(given).__name__}; pass what fastadv.sequence_log_ratios gives")
    for field, value in given._asdict().items():
        validation.tensor(op, f"{name}.{field}", value, shape=(rows.count,), device=device)


# ---- whole rollouts --------------------------------------------------------------------------------------------------


def active(mask: Tensor, token_weights: Tensor | None) -> Tensor:
    """The mask without the tokens that weights exclude: what lies there may be anything, so no sum may hold it."""
    return mask if token_weights is None else (mask != 0) & (token_weights != 0)


def row_log_ratios(
    op: str,
    config: LossConfig,
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    mask: Tensor,
    rows: Rows,
    given: SequenceLogRatios | None,
    weighted: bool,
    backend: str,
) -> Tensor | None:
    """Log-ratio `[B]` that a sequence loss is made of; None where the backend finds it itself, or none is needed."""
    if given is not None:
        if config.loss not in ("gspo", "vespo"):
            why = "clips each token's" if config.loss == "gmpo" else "has a ratio per token"
            raise ValueError(f"{op}: sequence_log_ratios is given, but the {config.loss!r} loss {why}")
        if config.sequence_gradient == "mean":
            raise ValueError(
                f"{op}: sequence_log_ratios is given, but sequence_gradient='mean' needs all of a rollout's tokens in "
                "one call; use 'straight-through', which is the same where advantages are constant on a rollout"
            )
        if config.loss == "vespo" and weighted:
            raise ValueError(
                f"{op}: sequence_log_ratios is given, but importance weights belong into the sum over a 'vespo' "
                "rollout too, which a part of it does not have; hand whole rollouts over"
            )
        check_ratios(op, "sequence_log_ratios", given, rows, mask.device)
        return given.sum.detach() if config.loss == "vespo" else given.mean().detach()
    if backend == "reference" or config.loss not in SEQUENCE_LOSSES or old_log_probs is None:
        return None
    return log_ratios_of(op, log_probs, old_log_probs, mask, rows, False, backend).mean()


def row_corrections(
    op: str,
    config: LossConfig,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor | None,
    mask: Tensor,
    row_weights: Tensor | None,
    rows: Rows,
    given: SequenceLogRatios | None,
    backend: str,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Importance weights of whole rollouts, `[B]` float64, and their metrics; None where the configuration has none."""
    by_row = [c for c in config.corrections if c.level != "token"]
    vetoes = [c.veto for c in config.corrections if c.veto is not None]
    if not by_row and not vetoes:
        if given is not None:
            raise ValueError(f"{op}: rollout_log_ratios is given, but no correction of the configuration reads it")
        return None, {}
    if given is None:
        assert rollout_log_probs is not None
        given = log_ratios_of(op, old_log_probs, rollout_log_probs, mask, rows, True, backend)
    check_ratios(op, "rollout_log_ratios", given, rows, mask.device)
    live = given.tokens > 0  # [B]
    if row_weights is not None:
        live = live & (row_weights != 0)
    count = live.sum().clamp(min=1)

    def share(rows_with: Tensor) -> Tensor:
        return ((rows_with & live).sum() / count).to(torch.float32)

    weight = torch.ones_like(given.sum)
    metrics = {"rollouts": live.sum().to(torch.float64)}
    rejected, capped = torch.zeros_like(live), torch.zeros_like(live)
    for correction in by_row:
        w = weigh(given.sum if correction.level == "sequence" else given.mean(), correction)
        weight, rejected, capped = weight * w.weight, rejected | w.rejected, capped | w.capped
    if by_row:
        metrics["is_row_rejected_fraction"] = share(rejected)
        metrics["is_row_capped_fraction"] = share(capped)
    if vetoes:
        vetoed = given.minimum < math.log(max(vetoes))
        weight = torch.where(vetoed, 0.0, weight)
        metrics["is_veto_fraction"] = share(vetoed)
    return weight, metrics


def selection(
    op: str,
    config: LossConfig,
    given: Tensor | None,
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    values: Tensor,
    mask: Tensor,
    whole: bool,
) -> Tensor:
    """Tokens that a covariance loss treats apart; `whole` where the call's tokens are all that are chosen from."""
    if given is not None:
        validation.tensor(op, "selected", given, shape=tuple(mask.shape), dtypes=(torch.bool,), device=mask.device)
        return given
    if not whole:
        raise ValueError(
            f"{op}: the {config.loss!r} loss picks tokens out of the whole step, and a denominator says that this call "
            "has a part of it; pass selected, a part of fastadv.covariance_selection of the step"
        )
    assert old_log_probs is not None
    return covariance_selection(log_probs.detach(), old_log_probs, values, mask, config=config)


# ---- denominators ----------------------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """What the sum is multiplied by: the numerator over the divisor, and NaN unless that is positive."""

    numerator: float = 1.0
    divisor: Tensor | None = None  # 0-d float64; None: 1
    row_tokens: Tensor | None = None  # [B] int64: what each row is divided by first


def scale(
    op: str, config: LossConfig, denominator: Any, mask: Tensor, rows: Rows, row_tokens: Tensor | None, backend: str
) -> Scale:
    """What the sum over a batch is multiplied by. The backend divides: no operation is launched for it here."""
    name, horizon, ranks = config.denominator_name, config.horizon, 1
    by_row = config.loss_agg_mode == "seq-mean-token-mean"
    if row_tokens is not None:
        if not by_row:
            raise ValueError(f"{op}: row_tokens is given, but loss_agg_mode {config.loss_agg_mode!r} ignores it")
        validation.tensor(
            op, "row_tokens", row_tokens, shape=(rows.count,), dtypes=validation.INTEGERS, device=mask.device
        )
        row_tokens = row_tokens.to(torch.int64).contiguous()
    counts = None
    counted = denominator is None and name in ("tokens", "sequences")
    if counted or (by_row and row_tokens is None):
        counts = counts_of(op, mask, rows, backend)
    divisor: Any = 1.0
    if isinstance(denominator, Denominators):
        horizon, ranks = config.horizon or denominator.horizon, denominator.ranks
        divisor = 1.0 if name == "one" else getattr(denominator, name)
    elif denominator is not None:
        divisor = _number(op, denominator)
    elif name == "candidates":
        divisor = float(rows.count)
    elif counts is not None and counted:
        # In float64 what stands for no count does not wrap around: the sum is negative, of rollouts too.
        divisor = (counts if name == "tokens" else counts.clamp(max=1)).sum(dtype=torch.float64)
    if config.loss_agg_mode == "seq-mean-token-sum-norm":
        if horizon is None:
            raise ValueError(
                f"{op}: loss_agg_mode 'seq-mean-token-sum-norm' divides by a constant length; set horizon in the config"
            )
    else:
        horizon = None

    numerator = ranks / (horizon or 1)
    if not isinstance(divisor, Tensor) and torch.compiler.is_compiling():
        # A number in the formula would be a constant of the graph, which is compiled again for the next one.
        divisor = torch.full((), divisor, dtype=torch.float64, device=mask.device)
    if not isinstance(divisor, Tensor):
        numerator, divisor = numerator / divisor if divisor > 0 else math.nan, None
    elif divisor.dtype != torch.float64 or divisor.dim() or divisor.device != mask.device:
        divisor = divisor.to(torch.float64).to(mask.device).reshape(())
    return Scale(numerator, divisor, (counts if row_tokens is None else row_tokens) if by_row else None)


def _number(op: str, denominator: Any) -> Any:
    if not isinstance(denominator, (int, float, Tensor)) or isinstance(denominator, bool):
        raise TypeError(
            f"{op}: denominator is a {type(denominator).__name__}; pass a number, a 0-d tensor or Denominators"
        )
    if isinstance(denominator, Tensor) and denominator.numel() != 1:
        raise ValueError(f"{op}: denominator has shape {list(denominator.shape)}; pass one number")
    # A graph that looked at the number would be compiled again for the next one.
    readable = validation.reads_values(denominator if isinstance(denominator, Tensor) else None)
    if readable and not 0 < float(denominator) < float("inf"):
        raise ValueError(f"{op}: denominator is {float(denominator)}; it must be positive")
    return denominator
