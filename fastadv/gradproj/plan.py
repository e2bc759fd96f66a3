"""What a segment Gram will take, counted from the model's shape before anything runs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastadv import validation
from fastadv.batch import Batch
from fastadv.gradproj import flash
from fastadv.gradproj.families import FAMILIES
from fastadv.gradproj.gram import batches_of
from fastadv.gradproj.head import slice_width
from fastadv.gradproj.streams import LEVELS, sequences
from fastadv.ops.segment_weight_gram import TRIANGLE_BLOCKS

OP = "plan"
BYTES = (" B", " kB", " MB", " GB", " TB", " PB")
COUNTS = ("", "k", "M", "B", "T")
COLUMNS = 80  # of a terminal


@dataclass(frozen=True)
class Shape:
    """Sizes of a causal language model."""

    layers: int
    hidden: int
    attention: int  # query heads times head size
    vocabulary: int
    tied: bool
    matrices: tuple[tuple[int, int], ...]  # (d_out, d_in) of a layer's linear layers
    inputs: int  # numbers a token that a layer's weight gradients are made from: inputs, each once
    positions: int = 0  # learned position embeddings

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a transformers configuration, or a mapping with its names.

        Raises:
            ValueError: another family, or a size that is missing.
        """

        def read(*names: str, default: Any = None) -> Any:
            for name in names:
                value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
                if value is not None:
                    return value
            if default is None:
                raise ValueError(f"{OP}: the configuration has no {names[0]}")
            return default

        def size(*names: str, default: Any = None) -> int:
            value: int = read(*names, default=default)
            validation.integer(OP, names[0], value, least=1)
            return value

        family = read("model_type")
        if family not in FAMILIES:
            raise ValueError(f"{OP}: model_type is {family!r}; supported are {', '.join(FAMILIES)}")
        hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
        head = size("head_dim", default=hidden // heads)
        q, kv = heads * head, size("num_key_value_heads", default=heads) * head
        gpt2 = family == "gpt2"
        inner = size("n_inner", "intermediate_size", default=4 * hidden)
        attention = [(3 * hidden, hidden)] if gpt2 else [(q, hidden), (kv, hidden), (kv, hidden)]
        mlp = [(inner, hidden)] * (1 if gpt2 else 2) + [(hidden, inner)]
        return cls(
            layers=size("num_hidden_layers", "n_layer"),
            hidden=hidden,
            attention=q,
            vocabulary=size("vocab_size"),
            tied=read("tie_word_embeddings", default=gpt2),
            matrices=(*attention, (hidden, q), *mlp),
            inputs=2 * hidden + q + inner,
            positions=size("max_position_embeddings", "n_positions") if gpt2 else 0,
        )

    @property
    def layer(self) -> int:
        """Weights of a layer, norms and biases not counted."""
        return sum(d_out * d_in for d_out, d_in in self.matrices)

    @property
    def head(self) -> int:
        """Weights of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def outputs(self) -> int:
        """Numbers a token of all outputs of a layer's linear layers."""
        return sum(d_out for d_out, _ in self.matrices)

    @property
    def parameters(self) -> int:
        """Weights of all matrices and embeddings."""
        return self.layers * self.layer + self.head * (1 if self.tied else 2) + self.positions * self.hidden


@dataclass(frozen=True)
class Plan:
    """Counts of one segment Gram. Bytes are those of one GPU."""

    shape: Shape
    level: str
    tokens: int
    loss_tokens: int
    rollouts: int
    turns: int
    segments: int
    gpus: int
    streams: int
    even: bool  # whether rollouts and turns were taken to be of equal length, for want of a batch
    backward: float  # passes over all tokens that the streams' live rows add up to
    operations: float
    step_operations: float  # of one forward and backward pass with checkpointing
    boundary_bytes: float  # every layer's inputs
    cotangent_bytes: float  # of all streams at one boundary, before and after a layer
    layer_bytes: float  # inputs and output gradients of one layer
    scratch_bytes: float  # a tile of gradients
    head_bytes: float  # hidden states of loss tokens, and logits of a slice
    gram_bytes: float
    weight_bytes: float  # this GPU's share, and one layer gathered
    link_bytes: float  # sent by one GPU: tiles to whoever multiplies them, weights gathered twice, the Gram added up
    rate: float
    link_rate: float
    attention: flash.Choice

    @property
    def steps(self) -> float:
        """Operations in units of one checkpointed forward and backward pass over the same tokens."""
        return self.operations / self.step_operations

    @property
    def device_bytes(self) -> float:
        """Memory of one GPU beside the layers' inputs."""
        kept = self.cotangent_bytes + self.layer_bytes + self.scratch_bytes + self.head_bytes
        return self.weight_bytes + kept + self.gram_bytes

    @property
    def compute_hours(self) -> float:
        """Products at the stated rate."""
        return self.operations / (self.rate * self.gpus) / 3600

    @property
    def link_hours(self) -> float:
        """Bytes over the links at the stated rate; what overlaps with products costs nothing."""
        return self.link_bytes / self.link_rate / 3600

    def explain(self) -> str:
        """The plan in words and numbers."""
        shape = self.shape
        even = "taken to be equally long" if self.even else "as they are in the batch"
        each = f"per GPU, of {self.gpus}" if self.gpus > 1 else "on one GPU"
        lines = [
            f"segment Gram, level {self.level}: {self.rollouts:,} rollouts, {self.segments:,} segments, "
            f"{self.tokens:,} tokens",
            f"  sampled tokens: {self.loss_tokens:,}",
            f"model: {shape.layers} layers of {scaled(shape.layer, COUNTS)} weights, hidden size {shape.hidden:,}, "
            f"vocabulary {shape.vocabulary:,} ({'tied' if shape.tied else 'untied'} head), "
            f"{scaled(shape.parameters, COUNTS)} parameters",
            f"attention: {self.attention.name} ({self.attention.why})",
            "",
            f"streams: {self.streams}, {self.level}s {even}; cut behind each segment's last token, they are "
            f"{self.backward:.1f} backward "
            "passes over all tokens",
            f"operations: {self.operations:.3g}, {self.steps:.2f} times one checkpointed forward and backward pass",
            f"  at {self.rate / 1e12:,.0f}e12 a second and GPU (assumed): {self.compute_hours:.3g} hours, beside "
            f"{self.step_operations / (self.rate * self.gpus) / 3600:.3g} for that pass",
            "",
            f"memory {each}:",
            f"  weights, and one layer gathered: {size_of(self.weight_bytes)}",
            f"  inputs and output gradients of one layer: {size_of(self.layer_bytes)}",
            f"  cotangents at a layer's two ends: {size_of(self.cotangent_bytes)}",
            f"  a tile of gradients: {size_of(self.scratch_bytes)}",
            f"  the head's hidden states and logits of a slice: {size_of(self.head_bytes)}",
            f"  the Gram, float64: {size_of(self.gram_bytes)}",
            f"  together: {size_of(self.device_bytes)}",
            f"  inputs of every layer, which a host could hold and this version keeps here: "
            f"{size_of(self.boundary_bytes)}",
        ]
        if self.gpus > 1:
            lines += [
                "",
                f"over links, sent per GPU: {size_of(self.link_bytes)}, at {size_of(self.link_rate)}/s "
                f"(assumed) {self.link_hours:.3g} hours if nothing overlaps",
                "  (float32 tiles from whoever has the rollouts to whoever multiplies the tile; each layer's weights "
                "gathered twice for the whole batch; the Gram added up once)",
                f"This version of segment_gram runs on one GPU; for {self.gpus} this is arithmetic on how the work "
                "divides.",
            ]
        lines += ["", "Counted from the model's shape. Not measured."]
        return "\n".join(_wrapped(line) for line in lines)


def scaled(value: float, units: Sequence[str]) -> str:
    """A number with the unit of a thousand to the n-th that leaves 1 to 1000 of it."""
    power = 0
    while value >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g}{units[power]}"


def size_of(value: float) -> str:
    """Bytes for people."""
    return scaled(value, BYTES)


def _wrapped(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(line, COLUMNS, initial_indent="", subsequent_indent=indent + "  ") if line else ""


def _live_rows(batch: Batch, level: str) -> tuple[Tensor, Tensor]:
    """Tokens of each rollout `[B]` and rows up to the last loss token of each segment `[S]`, float64, on the CPU."""
    batch = batch.packed()
    assert batch.cu_seqlens is not None
    whole = batch.lengths if batch.token_ids is None else batch.token_ids.cu_seqlens.diff()
    rows, on = batch.rows, batch.mask & (batch.turn_ids >= 0)
    place = torch.arange(len(on), device=on.device) - rows.spread(batch.cu_seqlens[:-1] - whole + batch.lengths)  # [N]
    index = batch.segments
    number = rows.spread(index.offsets[:-1]) + batch.turn_ids if level == "turn" else rows.row_of_token()
    live = place.new_zeros(index.count if level == "turn" else batch.num_rollouts)
    live = live.scatter_reduce(0, number[on], place[on], "amax")
    return whole.to("cpu", torch.float64), live.to("cpu", torch.float64)


def plan(
    model: Any,
    *,
    batch: Batch | Sequence[Batch] | None = None,
    tokens: int | None = None,
    rollouts: int | None = None,
    turns: int | None = None,
    level: str = "rollout",
    gpus: int = 1,
    loss_tokens: int | None = None,
    value_bytes: int = 2,
    scratch_bytes: int = 2**30,
    rate: float = 4e14,
    link_rate: float = 4e11,
    attention: str = "auto",
) -> Plan:
    """Counts what `segment_gram` takes, from sizes alone.

    With a batch its rollouts and turns are counted as they are. Without one, rollouts are taken to be of equal length,
    and turns to be spread evenly over them.

    Args:
        model: a causal language model of a supported family, its configuration, or a mapping like its config.json.
        batch: a Batch, or several, whose tokens, rollouts and turns are counted; without token ids, no prompts are.
            Of a rollout that is several sequences, each is counted by itself, as it goes through the model.
        tokens: of all rollouts, prompts included. This and the next two without a batch only.
        rollouts: their number.
        turns: turns of a rollout; None: 1.
        level: "rollout" or "turn".
        gpus: among which rollouts, and of each layer the weights, are divided.
        loss_tokens: sampled tokens; None: those of the batch, or all.
        value_bytes: of a weight or an activation; 2 for bfloat16.
        scratch_bytes: of a tile.
        rate: operations a second that a GPU sustains. The default is an assumption for an H100 in bfloat16.
        link_rate: bytes a second that a GPU sends. The default is an assumption for NVLink.
        attention: as `segment_gram` takes it. A configuration is on no device: there, "auto" counts as "blocks".

    Raises:
        ValueError: a number below 1, an unknown level or attention, a configuration of another family; both a batch
            and sizes, or neither.
        TypeError: a size that is no integer, a batch that is none.
        BackendUnavailableError: attention "flash" on a model that it cannot run.
    """
    validation.choice(OP, "level", level, LEVELS)
    live = lengths = torch.zeros(0)
    if batch is None:
        if tokens is None or rollouts is None:
            raise ValueError(f"{OP}: tokens or rollouts is missing; pass both, or a batch that they are counted in")
        turns = 1 if turns is None else turns
    else:
        if not (tokens is None and rollouts is None and turns is None):
            raise ValueError(f"{OP}: tokens, rollouts and turns are counted in the batch; leave them out")
        batches = batches_of(OP, batch)
        divided = [sequences(one.packed()).batch for one in batches]
        counted = [_live_rows(one, level) for one in divided]
        lengths, live = (torch.cat([torch.zeros(0, dtype=torch.float64), *part]) for part in zip(*counted, strict=True))
        tokens, rollouts = int(lengths.sum()), sum(one.num_rollouts for one in batches)
        turns = max([1, *(int(one.segments.turns().max()) for one in divided if one.num_rollouts)])
        sampled = sum(int((one.mask & (one.turn_ids >= 0)).sum()) for one in batches)
        loss_tokens = sampled if loss_tokens is None else loss_tokens
    loss_tokens = tokens if loss_tokens is None else loss_tokens
    integers = {
        "tokens": tokens, "rollouts": rollouts, "turns": turns, "gpus": gpus, "value_bytes": value_bytes,
        "scratch_bytes": scratch_bytes,
    }  # fmt: skip
    for name, value in integers.items():
        validation.integer(OP, name, value, least=1)
    validation.integer(OP, "loss_tokens", loss_tokens, most=tokens)
    for name, number in (("rate", rate), ("link_rate", link_rate)):
        validation.count(OP, name, number, positive=True)
    shape = Shape.of(getattr(model, "config", model))
    if isinstance(model, nn.Module):
        attends = flash.choose(attention, model)
    else:
        validation.choice(OP, "attention", attention, flash.CHOICES)
        attends = flash.Choice("flash" if attention == "flash" else "blocks", "counted from a configuration")
    streams = turns if level == "turn" else 1
    segments = rollouts * streams
    backward = (streams + 1) / 2  # live rows of all streams, in passes over all tokens
    squares = (streams + 1) * (2 * streams + 1) / (6 * streams)  # and the triangles that they attend in
    pairs = tokens * (tokens / rollouts)  # of tokens of one rollout
    if batch is not None:
        segments, pairs = len(live), float(lengths.square().sum())
        backward, squares = float(live.sum()) / tokens, float(live.square().sum()) / pairs

    layers = shape.layers * shape.layer
    attend = 2.0 * pairs * shape.attention * shape.layers  # a causal forward: two products
    triangle = 1 + 1 / TRIANGLE_BLOCKS  # of a square of 2 segments^2, half and the blocks on the diagonal
    operations = (
        tokens * layers * (2 + 2 + 4 * backward)  # forward, forward again, input and weight gradients
        # Backward, of five products, one is scores again; flash-attn's is behind a whole forward on the live rows.
        + attend * (1 + 1 + (3.5 if attends.name == "flash" else 2.5) * squares)
        + 8.0 * loss_tokens * shape.head  # logits twice, hidden and weight gradients
        + triangle * segments**2 * shape.parameters
    )
    step_operations = 8.0 * tokens * layers + attend * (1 + 1 + 2) + 6.0 * loss_tokens * shape.head

    share = tokens / gpus
    mine = max(1, loss_tokens // gpus)
    width = slice_width(shape.vocabulary, mine, segments * shape.hidden, int(scratch_bytes) // 4)
    sent = (gpus - 1) / gpus
    return Plan(
        shape=shape,
        level=level,
        tokens=tokens,
        loss_tokens=loss_tokens,
        rollouts=rollouts,
        turns=turns,
        segments=segments,
        gpus=gpus,
        streams=streams,
        even=batch is None,
        backward=backward,
        operations=operations,
        step_operations=step_operations,
        boundary_bytes=share * shape.hidden * (shape.layers + 1) * value_bytes,
        cotangent_bytes=2 * share * backward * shape.hidden * value_bytes,
        layer_bytes=share * (shape.inputs + backward * shape.outputs) * value_bytes,
        scratch_bytes=scratch_bytes,
        head_bytes=mine * (shape.hidden * value_bytes + 4.0 * (1 + width)),
        gram_bytes=8.0 * segments**2,
        weight_bytes=value_bytes * (shape.parameters / gpus + (shape.layer if gpus > 1 else 0)),
        link_bytes=sent * (4.0 * segments / gpus * shape.parameters + 2 * value_bytes * shape.parameters)
        + 2 * sent * 8.0 * segments**2,
        rate=rate,
        link_rate=link_rate,
        attention=attends,
    )
