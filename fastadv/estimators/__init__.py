"""Advantage estimators under the names of the frameworks that own them: docs/estimators.md."""

from fastadv.estimators import gigpo, groups, token  # noqa: F401 - importing registers them
from fastadv.estimators.anchors import anchor_groups, similar_anchors
from fastadv.estimators.registry import ESTIMATORS, Estimate, Estimator, estimate

__all__ = ["ESTIMATORS", "Estimate", "Estimator", "anchor_groups", "estimate", "similar_anchors"]
