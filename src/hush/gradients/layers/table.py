"""Which rule reads which node: one dictionary, by the name of the node. All other nodes go the slow way (slow.py)."""

from hush.gradients.layers import elementwise as broadcast
from hush.gradients.layers import embedding, linear, norm, recurrent
from hush.gradients.layers.convolution import rule as conv
from hush.gradients.sums.per_example import Rule

RULES: dict[str, Rule] = {
    **linear.RULES,
    **conv.RULES,
    **embedding.RULES,
    **norm.RULES,
    **recurrent.RULES,
    **broadcast.RULES,
}

RESHAPES = frozenset(
    {
        "TBackward0",
        "TransposeBackward0",
        "TransposeBackward1",
        "PermuteBackward0",
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "UnsqueezeBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
        "ToCopyBackward0",
        "CloneBackward0",
        "AliasBackward0",
        "SliceBackward0",
        "SelectBackward0",
        "SplitBackward0",
        "SplitWithSizesBackward0",
        "UnsafeSplitBackward0",
        "UnbindBackward0",
        "FlipBackward0",
        "RollBackward0",
    }
)
"""Nodes that only move the entries of their one input, or pick some: a gradient keeps its norm on the way back."""
