"""Streamed gradient projections: how the gradients of many arms lie to each other, none of them flattened."""

from fastadv.gradproj.accumulator import GramAccumulator
from fastadv.gradproj.collector import SketchCollector
from fastadv.gradproj.gram import SegmentGram
from fastadv.gradproj.interceptors import Interceptor, LinearInterceptor, NormInterceptor, register_interceptor
from fastadv.gradproj.layer_major import segment_gram
from fastadv.gradproj.plan import Plan, plan
from fastadv.gradproj.projections import Projections, project
from fastadv.gradproj.sharding import fsdp2_filter, megatron_filter, sum_gradients
from fastadv.gradproj.sketch import RolloutSketches, SketchEstimate
from fastadv.gradproj.token_dots import directional_derivative, segment_dots, token_dots
from fastadv.ops.count_sketch import count_sketch, sketch_values
from fastadv.ops.segment_weight_gram import segment_weight_gram

__all__ = [
    "GramAccumulator",
    "Interceptor",
    "LinearInterceptor",
    "NormInterceptor",
    "Plan",
    "Projections",
    "RolloutSketches",
    "SegmentGram",
    "SketchCollector",
    "SketchEstimate",
    "count_sketch",
    "directional_derivative",
    "fsdp2_filter",
    "megatron_filter",
    "plan",
    "project",
    "register_interceptor",
    "segment_dots",
    "segment_gram",
    "segment_weight_gram",
    "sketch_values",
    "sum_gradients",
    "token_dots",
]
