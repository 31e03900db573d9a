"""Which rule reads which node: one dictionary, by the name of the node. All other nodes go to the generic rule."""

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

_PARAMETRIC = """
    Add Sub Rsub Mul Div Neg Reciprocal Abs Sign Exp Expm1 Log Log1P Sqrt Rsqrt Pow Square Tanh Sigmoid Relu LeakyRelu
    Elu Gelu Silu Softplus Hardtanh Clamp ClampMin ClampMax Maximum Minimum Where MaskedFill Lerp Erf Sin Cos
    Softmax LogSoftmax Sum Mean Prod Cumsum Std Var Norm LinalgVectorNorm Amax Amin WeightNormInterface
    Mm Addmm Bmm Baddbmm Mv Addmv Dot Vdot Ger Kron
    Cat Stack Expand Repeat ConstantPadNd Index IndexSelect IndexPut Gather Scatter CopySlices Copy
    Tril Triu Diagonal DiagEmbed AsStrided Unfold Trace
    LinalgMatrixExp LinalgInvEx LinalgSolveEx LinalgHouseholderProduct LinalgQr LinalgLuFactorEx LinalgCholeskyEx
    LinalgSolveTriangular LinalgSvd MatrixExp NativeDropout Bernoulli Addcmul Addcdiv Fill SmoothL1Loss
"""
PARAMETRIC = frozenset(f"{name}Backward{version}" for name in _PARAMETRIC.split() for version in range(4))
"""Nodes that may stand between a parameter and the place where it meets data (weight norm, adapters, pruning)."""

PRODUCTS = {
    **dict.fromkeys(("MmBackward0", "BmmBackward0", "MvBackward0"), 0),
    **dict.fromkeys(("AddmmBackward0", "BaddbmmBackward0", "AddmvBackward0", "SparseAddmmBackward0"), 1),
}
"""Nodes that multiply two of their inputs as matrices, and which of them is the left one; the right one follows it."""

_BROADCASTS = "Add Sub Rsub Mul Div Pow Maximum Minimum Fmax Fmin Where MaskedFill Lerp Addcmul Addcdiv Expand"
BROADCASTS = frozenset(f"{name}Backward{version}" for name in _BROADCASTS.split() for version in range(4))
"""Nodes whose inputs may be stretched along dimensions of their output."""

_MOVERS = """
    Index IndexSelect IndexPut IndexPutImpl IndexAdd IndexCopy MaskedSelect MaskedScatter Gather Scatter ScatterAdd
    ScatterReduce Take TakeAlongDim Put PackPaddedSequence Sort Topk Embedding EmbeddingBag SegmentReduce IndexReduce
    UnsafeIndex UnsafeMaskedIndex IndexFill
"""
MOVERS = frozenset(f"{name}Backward{version}" for name in _MOVERS.split() for version in range(4))
"""Nodes that move entries to places that values (not shapes) decide: where examples lie may change with the data."""

SPREADERS = frozenset({"ExpandBackward0", "RepeatBackward0", "StackBackward0", "CatBackward0"})
"""Nodes that may hand the same parameters to every example."""

_GATES = "Mul Where MaskedFill Addcmul Lerp NativeDropout"
GATES = frozenset(f"{name}Backward{version}" for name in _GATES.split() for version in range(4))
"""Nodes through which zeros of a saved tensor let no gradient pass."""

_ROUTERS = "Max Min Amax Amin Aminmax Median Nanmedian Mode Kthvalue Cummax Cummin"
ROUTERS = frozenset(f"{name}Backward{version}" for name in _ROUTERS.split() for version in range(4))
"""Nodes that hand a gradient to the place of one value along the dimensions that they reduce."""
