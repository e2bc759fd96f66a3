"""Inner products of the policy gradients of rollouts and turns, without the gradients."""

from fastadv.gradproj.gram import SegmentGram
from fastadv.gradproj.interceptors import Interceptor, LinearInterceptor, NormInterceptor, register_interceptor
from fastadv.gradproj.layer_major import segment_gram
from fastadv.gradproj.plan import Plan, plan
from fastadv.ops.segment_weight_gram import segment_weight_gram

__all__ = [
    "Interceptor",
    "LinearInterceptor",
    "NormInterceptor",
    "Plan",
    "SegmentGram",
    "plan",
    "register_interceptor",
    "segment_gram",
    "segment_weight_gram",
]
