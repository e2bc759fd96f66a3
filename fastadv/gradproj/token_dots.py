"""How much every token's log-prob changes along a direction in parameter space: an independent way to products of
gradients.

`delta_t = <grad log pi_t, v>` comes out of one forward-mode pass for all tokens at once, without a backward. With v the
gradient of an arm, `v = sum_t A_t grad log pi_t`,

    sum_t A_t delta_t = |v|^2        and        sum_{t in s} delta_t = (H A)_s

for every segment s of the Gram matrix H: what a Gram matrix is checked by that does not come from the code it checks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fastadv import validation
from fastadv.batch import Batch
from fastadv.responses import Responses, without_prompt


def directional_derivative(
    function: Callable[[dict[str, Tensor]], Tensor],
    parameters: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
) -> Tensor:
    """Derivative of a function of named parameters along a direction, by forward-mode differentiation.

    Attention runs on PyTorch's own products: its fused forms have no forward-mode derivative.

    Args:
        function: from parameters by name to a tensor, any shape.
        parameters: where to differentiate.
        direction: a tensor like the parameter for each name; 0 along parameters that it leaves out.

    Returns:
        Like what the function returns, without a graph.

    Raises:
        ValueError: a direction along no parameter, or of another shape than its parameter.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not isinstance(direction, Mapping) or not direction:
        raise ValueError(f"the direction is {direction!r}; pass a mapping from names of parameters to tensors")
    for name, tangent in direction.items():
        validation.tensor("directional_derivative", f"the direction along {name}", tangent)
        if name not in parameters:
            raise ValueError(f"the direction names {name!r}, which is no parameter; names are {_some(parameters)}")
        if tangent.shape != parameters[name].shape:
            shapes = list(tangent.shape), list(parameters[name].shape)
            raise ValueError(f"the direction along {name} has shape {shapes[0]}, the parameter {shapes[1]}")
    primals = {name: p.detach() for name, p in parameters.items()}
    tangents = {
        name: direction[name].detach().to(p) if name in direction else torch.zeros_like(p)
        for name, p in primals.items()
    }
    with warnings.catch_warnings(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        # At its first use PyTorch compiles rules of its own with what it calls deprecated.
        warnings.filterwarnings("ignore", ".*torch.jit.script.*", DeprecationWarning)
        derivative: Tensor = torch.func.jvp(function, (primals,), (tangents,))[1]
    return derivative


def token_dots(
    model: nn.Module,
    batch: Batch,
    direction: Mapping[str, Tensor],
    *,
    temperature: float = 1.0,
    max_tokens: int = 4096,
) -> Tensor:
    """`<grad log pi_t, direction>` for every response token.

    Costs a forward pass and its tangent, about three forwards, and the activations of one layer twice. Several
    directions are several calls.

    Args:
        model: a causal language model in the manner of transformers: takes `input_ids` and `attention_mask`, gives
            `.logits`. Dropout has to be off.
        batch: packed rollouts with token ids.
        direction: by names as in `model.named_parameters()`, such as `{name: p.grad for name, p in ...}`.
        temperature: what logits are divided by.
        max_tokens: padded tokens of a micro-batch.

    Returns:
        `[N]` on the model's device, in the order of the packed tokens, masked ones too; float32, or float64 of a model
        in float64.

    Raises:
        ValueError: a model with dropout on, a batch without token ids or with a rollout that has no prompt, a direction
            that does not fit the parameters.
    """
    op = "token_dots"
    validation.count(op, "temperature", temperature, positive=True)
    validation.integer(op, "max_tokens", max_tokens, least=1)
    if not isinstance(batch, Batch):
        raise TypeError(f"{op}: batch is a {type(batch).__name__}; pass a Batch, see Batch.of")
    batch = batch.packed()
    if batch.token_ids is None:
        raise ValueError(f"{op}: the batch carries no token ids; pass them to Batch.of")
    rollout = without_prompt(batch)
    if rollout is not None:
        raise ValueError(f"{op}: rollout {rollout} has no prompt: nothing predicts its first response token")
    dropping = [name for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.training and m.p > 0]
    if dropping:
        raise ValueError(f"{op}: dropout is on in {_some(dropping)}; call model.eval()")
    parameters = dict(model.named_parameters())
    found = [
        directional_derivative(_log_probs(model, batch, rows, temperature), parameters, direction)
        for rows in batch.micro_batches(max_tokens)
    ]
    return torch.cat(found) if found else torch.zeros(0)


def segment_dots(dots: Tensor, batch: Batch) -> Tensor:
    """Sums of `token_dots` over the masked tokens of each segment, `[S]` float64: `(H A)_s` along an arm's gradient.

    Args:
        dots: `[N]`, what `token_dots` gave for the batch.
        batch: the batch.

    Raises:
        ValueError: another number of tokens.
    """
    validation.tensor("segment_dots", "dots", dots, dtypes=validation.FLOATS)
    batch = batch.packed()
    if dots.shape != batch.mask.shape:
        raise ValueError(f"segment_dots: dots has shape {list(dots.shape)}, the batch {batch.mask.shape[0]} tokens")
    segments = batch.segments
    on = batch.mask & (segments.turn_ids >= 0)
    number = batch.rows.spread(segments.offsets[:-1]) + segments.turn_ids  # [N]
    sums = torch.zeros(segments.count, dtype=torch.float64, device=dots.device)
    return sums.index_add(0, number[on].to(dots.device), dots[on.to(dots.device)].to(torch.float64))


def _log_probs(
    model: nn.Module, batch: Batch, rows: tuple[int, int], temperature: float
) -> Callable[[dict[str, Tensor]], Tensor]:
    """Log-probs `[n]` of the response tokens of rollouts `rows[0] .. rows[1] - 1`, as a function of the parameters."""
    responses = Responses.of(batch, *rows, next(model.parameters()).device)

    def function(parameters: dict[str, Tensor]) -> Tensor:
        output = torch.func.functional_call(model, parameters, kwargs=responses.arguments())
        return responses.log_probs(output.logits, temperature)

    return function


def _some(names: Mapping[str, Tensor] | list[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")
