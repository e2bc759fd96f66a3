"""What a segment Gram will take, counted from the model's shape before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastadv import validation
from fastadv.gradproj import flash
from fastadv.gradproj.families import FAMILIES
from fastadv.gradproj.head import slice_width
from fastadv.gradproj.streams import LEVELS
from fastadv.ops.segment_weight_gram import TRIANGLE_BLOCKS

OP = "plan"
GIGA = 1e9


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

        family = read("model_type")
        if family not in FAMILIES:
            raise ValueError(f"{OP}: model_type is {family!r}; supported are {', '.join(FAMILIES)}")
        hidden, heads = read("hidden_size", "n_embd"), read("num_attention_heads", "n_head")
        head = read("head_dim", default=hidden // heads)
        q, kv = heads * head, read("num_key_value_heads", default=heads) * head
        gpt2 = family == "gpt2"
        inner = read("n_inner", "intermediate_size", default=4 * hidden)
        attention = [(3 * hidden, hidden)] if gpt2 else [(q, hidden), (kv, hidden), (kv, hidden)]
        mlp = [(inner, hidden)] * (1 if gpt2 else 2) + [(hidden, inner)]
        return cls(
            layers=read("num_hidden_layers", "n_layer"),
            hidden=hidden,
            attention=q,
            vocabulary=read("vocab_size"),
            tied=read("tie_word_embeddings", default=gpt2),
            matrices=(*attention, (hidden, q), *mlp),
            inputs=2 * hidden + q + inner,
            positions=read("max_position_embeddings", "n_positions") if gpt2 else 0,
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

        def gigabytes(value: float) -> str:
            return f"{value / GIGA:,.1f} GB"

        each = f"per GPU, of {self.gpus}" if self.gpus > 1 else "on one GPU"
        lines = [
            f"segment Gram, level {self.level}: {self.tokens:,} tokens ({self.loss_tokens:,} sampled), "
            f"{self.rollouts:,} rollouts, {self.segments:,} segments",
            f"model: {shape.layers} layers of {shape.layer / 1e6:,.1f}M weights, hidden size {shape.hidden:,}, "
            f"vocabulary {shape.vocabulary:,} ({'tied' if shape.tied else 'untied'} head), "
            f"{shape.parameters / 1e9:.2f}B parameters",
            f"attention: {self.attention.name} ({self.attention.why})",
            "",
            f"streams: {self.streams}; cut behind each segment's last token, they are {self.backward:.1f} backward "
            "passes over all tokens",
            f"operations: {self.operations:.3g}, {self.steps:.2f} times one checkpointed forward and backward pass",
            f"  at {self.rate / 1e12:,.0f}e12 a second and GPU (assumed): {self.compute_hours:.3f} hours, beside "
            f"{self.step_operations / (self.rate * self.gpus) / 3600:.3f} for that pass",
            "",
            f"memory {each}:",
            f"  weights, and one layer gathered: {gigabytes(self.weight_bytes)}",
            f"  inputs and output gradients of one layer: {gigabytes(self.layer_bytes)}",
            f"  cotangents at a layer's two ends: {gigabytes(self.cotangent_bytes)}",
            f"  a tile of gradients: {gigabytes(self.scratch_bytes)}",
            f"  the head's hidden states and logits of a slice: {gigabytes(self.head_bytes)}",
            f"  the Gram, float64: {gigabytes(self.gram_bytes)}",
            f"  together: {gigabytes(self.device_bytes)}",
            f"  inputs of every layer, which a host could hold and this version keeps here: "
            f"{gigabytes(self.boundary_bytes)}",
        ]
        if self.gpus > 1:
            lines += [
                "",
                f"over links, sent per GPU: {gigabytes(self.link_bytes)}, at {self.link_rate / GIGA:,.0f} GB/s "
                f"(assumed) {self.link_hours:.3f} hours if nothing overlaps",
                "  (float32 tiles from whoever has the rollouts to whoever multiplies the tile; each layer's weights "
                "gathered twice for the whole batch; the Gram added up once)",
                f"This version of segment_gram runs on one GPU; for {self.gpus} this is arithmetic on how the work "
                "divides.",
            ]
        lines += ["", "Counted from the model's shape. Not measured."]
        return "\n".join(lines)


def plan(
    model: Any,
    *,
    tokens: int,
    rollouts: int,
    turns: int = 1,
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

    Rollouts are taken to be of equal length, and turns to be spread evenly over them.

    Args:
        model: a causal language model of a supported family, its configuration, or a mapping like its config.json.
        tokens: of all rollouts, prompts included.
        rollouts: their number.
        turns: turns of a rollout.
        level: "rollout" or "turn".
        gpus: among which rollouts, and of each layer the weights, are divided.
        loss_tokens: sampled tokens; None: all.
        value_bytes: of a weight or an activation; 2 for bfloat16.
        scratch_bytes: of a tile.
        rate: operations a second that a GPU sustains. The default is an assumption for an H100 in bfloat16.
        link_rate: bytes a second that a GPU sends. The default is an assumption for NVLink.
        attention: as `segment_gram` takes it. A configuration is on no device: there, "auto" counts as "blocks".

    Raises:
        ValueError: a number below 1, an unknown level or attention, a configuration of another family.
        BackendUnavailableError: attention "flash" on a model that it cannot run.
    """
    loss_tokens = tokens if loss_tokens is None else loss_tokens
    for name, value in (("tokens", tokens), ("rollouts", rollouts), ("turns", turns), ("gpus", gpus)):
        if value < 1:
            raise ValueError(f"{OP}: {name} is {value}; it must be at least 1")
    validation.choice(OP, "level", level, LEVELS)
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

    layers = shape.layers * shape.layer
    attend = 2.0 * tokens * (tokens / rollouts) * shape.attention * shape.layers  # a causal forward: two products
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
