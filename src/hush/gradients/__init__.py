"""Losses, one per example, to a clipped sum of gradients and the bound that travels with it."""

from hush.gradients.bounded import BoundedSum, Group
from hush.gradients.clip import AutomaticClip, Clip, FlatClip, PerLayerClip, QuantileClip
from hush.gradients.clipped import clipped_sum, squared_norms

__all__ = [
    "AutomaticClip",
    "BoundedSum",
    "Clip",
    "FlatClip",
    "Group",
    "PerLayerClip",
    "QuantileClip",
    "clipped_sum",
    "squared_norms",
]
