"""verl's FSDP engine with fused log-probs and the matched update: `VERL_ENGINE_VENDOR=fastadv`.

verl picks an engine by device and vendor, and takes its own for whatever this vendor has none for (critics, Megatron).
The engine here is verl's, with two methods more:

- With `actor_rollout_ref.model.use_fused_kernels=True`, log-probs and entropies come from `fastadv.linear_log_probs`:
  no logits. The sum of squared probabilities, which verl's fused kernels do not give, comes along (optimal token
  baseline).
- A batch with advantages of a reference arm (a trainer of `fastadv.integrations.verl.trainer` writes them where the arm
  has matched_update) is stepped with learning rates that make its update as long as the reference's would be.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from fastadv.integrations.verl.trainer_rows import REFERENCE
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from verl.models.transformers.dense_common import CausalLMOutputForPPO, forward_base_model
from verl.utils import tensordict_utils as tu
from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from fastadv import linear_log_probs, matched_update

VENDOR = "fastadv"
SUM_P2 = "calculate_sum_pi_squared"


def fused_forward(
    self: Any,
    input_ids: Tensor | None = None,
    labels: Tensor | None = None,
    return_dict: bool | None = None,
    temperature: float = 1.0,
    shift_labels: Tensor | None = None,
    logits_to_keep: int = 0,
    **inputs: Any,
) -> CausalLMOutputForPPO:
    """Forward of a causal language model of transformers that ends with log-probs instead of logits.

    Args:
        self: the model: `model` gives hidden states, `lm_head` is linear.
        input_ids: `[B, T]`; labels are these, shifted, unless others are given.
        labels: `[B, T]`, unshifted.
        return_dict: has to be true, as verl passes it.
        temperature: one number.
        shift_labels: `[B, T]`, shifted already, as verl passes packed sequences.
        logits_to_keep: not used: there are no logits.
        inputs: what else the model takes.

    Returns:
        log_probs, entropy and sum_pi_squared `[B, T]` float32, of the label of each token.
    """
    if not return_dict:
        raise NotImplementedError("fused_forward returns an output object; pass return_dict=True")
    outputs = forward_base_model(self, input_ids=input_ids, **inputs)
    if shift_labels is None:
        source = input_ids if labels is None else labels
        if source is None:
            raise ValueError("fused_forward: pass input_ids, labels or shift_labels")
        shift_labels = torch.roll(source, -1, dims=-1)
    head = self.lm_head
    found = linear_log_probs(
        outputs[0], head.weight, shift_labels, bias=getattr(head, "bias", None), temperature=float(temperature),
        softcap=getattr(self.config, "final_logit_softcapping", None), return_entropy=True, return_sum_p2=True,
    )  # fmt: skip
    result = CausalLMOutputForPPO(log_probs=found.log_probs, entropy=found.entropy)
    result.sum_pi_squared = found.sum_p2  # not a field of verl's
    return result


class MatchedUpdateEngine:
    """Mixin over an engine of verl: steps a batch by its own arm's gradient, as far as the reference arm would go."""

    module: Any
    optimizer: torch.optim.Optimizer
    optimizer_config: Any

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        """verl's step; with advantages of a reference arm in the batch, twice forward and backward and a scaled step.

        Raises:
            ValueError: float16 with a loss scale, whose gradients are not the optimizer's.
        """
        if REFERENCE not in data:
            return super().train_batch(data, loss_function)  # type: ignore[misc]
        if getattr(self, "scaler", None) is not None:
            raise ValueError(
                "actor.fsdp_config.mixed_precision.param_dtype is fp16, whose gradients are scaled; the matched update "
                "needs bf16 or fp32"
            )
        other = data.clone(recurse=False)
        other["advantages"] = data[REFERENCE]
        self.optimizer_zero_grad()  # type: ignore[attr-defined]
        self.forward_backward_batch(other, loss_function, forward_only=False)  # type: ignore[attr-defined]
        self._fastadv_clip()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        reference = [None if p.grad is None else p.grad.clone() for p in parameters]
        self.optimizer_zero_grad()  # type: ignore[attr-defined]
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)  # type: ignore[attr-defined]
        norm = self._fastadv_clip()
        sharded = isinstance(self.module, (FullyShardedDataParallel, FSDPModule))
        group = self.get_data_parallel_group() if sharded else None  # type: ignore[attr-defined]
        matched = matched_update(self.optimizer, reference, None, process_group=group)
        with matched.scaled_learning_rates(self.optimizer):
            self.optimizer_step()  # type: ignore[attr-defined]
        if self.is_mp_src_rank_with_outputs():  # type: ignore[attr-defined]
            outputs["metrics"]["grad_norm"] = norm
            outputs["metrics"]["fastadv/update_norm"] = matched.scaled.update
            outputs["metrics"]["fastadv/learning_rate_multiplier"] = matched.multiplier
        return outputs

    def _fastadv_clip(self) -> float:
        """Clips the gradients as verl's step does, and returns their norm before; clipping them again changes
        nothing."""
        most = self.optimizer_config.clip_grad
        if isinstance(self.module, FullyShardedDataParallel):
            norm = self.module.clip_grad_norm_(most)
        elif isinstance(self.module, FSDPModule):
            norm = fsdp2_clip_grad_norm_(self.module.parameters(), max_norm=most)  # type: ignore[attr-defined]
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm=most)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu", "cpu"], vendor=VENDOR
)
class FastadvEngine(MatchedUpdateEngine, FSDPEngineWithLMHead):
    """verl's FSDP engine with fastadv's log-probs and matched update."""

    def _build_module(self) -> Any:
        module = super()._build_module()
        if self.model_config.use_fused_kernels:
            if not hasattr(module, "lm_head") or not hasattr(module, "model"):
                raise ValueError(
                    f"actor_rollout_ref.model.use_fused_kernels: {type(module).__name__} has no `model` and "
                    "`lm_head`, so "
                    f"fastadv cannot put its log-probs there; unset VERL_ENGINE_VENDOR for verl's own fused kernels"
                )
            module.forward = MethodType(fused_forward, module)
        return module

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        """verl's, with the sum of squared probabilities that its fused kernels have not."""
        flags = {
            key: tu.get_non_tensor_data(data=micro_batch, key=key, default=False)
            for key in (SUM_P2, "use_fused_kernels")
        }
        if not all(flags.values()):
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        tu.assign_non_tensor(micro_batch, **{SUM_P2: False})
        found = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        # The same way as the log-probs go: packed, gathered, and as long as the sequences.
        stand_in = CausalLMOutputForPPO(log_probs=output.sum_pi_squared, entropy=output.entropy)
        squares = super().prepare_model_outputs(stand_in, output_args, micro_batch, logits_processor_func)
        tu.assign_non_tensor(micro_batch, **{SUM_P2: True})
        found["sum_pi_squared"] = squares["log_probs"]
        return found
