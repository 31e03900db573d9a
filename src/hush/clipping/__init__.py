"""Clips, the sum that carries its own bound, and what floating point can add to it."""

from hush.clipping.bounded_sum import BoundedSum, Group
from hush.clipping.clips import AutomaticClip, Clip, FlatClip, PerLayerClip, QuantileClip

__all__ = ["AutomaticClip", "BoundedSum", "Clip", "FlatClip", "Group", "PerLayerClip", "QuantileClip"]
