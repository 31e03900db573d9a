"""Nodes through which values, not shapes, may decide where the rows of an example go: those must be looked at again.

A layout that was learnt on a slice holds for every batch of the same graph if nothing on the way can send rows
elsewhere. The list below names what cannot. Whatever it does not name, and whatever it names but joins rows along the
dimension of the examples (a product with a matrix of zeros and ones, a broadcast mask), is a mover.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hush.gradients.graph import LEAF, Edge, Graph
from hush.gradients.sums.per_example import Layout


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = _names("""
    Add Sub Rsub Mul Div Neg Reciprocal Abs Sgn Sign Exp Exp2 Expm1 Log Log1P Log2 Log10 Sqrt Rsqrt Pow Square Tanh
    Sigmoid Relu LeakyRelu Elu Celu Selu Gelu Silu Mish Softplus Hardtanh Hardsigmoid Hardswish Hardshrink Softshrink
    Threshold LogSigmoid Clamp ClampMin ClampMax Maximum Minimum Fmax Fmin Where MaskedFill Lerp Addcmul Addcdiv Erf
    Erfc Erfinv Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh Atan2 Hypot Logaddexp Logaddexp2 Xlogy Fmod
    Remainder Lgamma Digamma Polygamma I0 I0E Sinc Logit NativeDropout FusedDropout RreluWithNoise PreluKernel Fill
    Round Floor Ceil Trunc Frac NanToNum SmoothL1Loss HuberLoss MseLoss BinaryCrossEntropy
    BinaryCrossEntropyWithLogits KlDiv SoftMarginLoss Copy Expand TanhBackward SigmoidBackward ThresholdBackward
    GeluBackward SiluBackward SoftplusBackward Conj Real Imag Complex Angle
""")
"""One entry of the output for one of each input, broadcast."""
_BY_SHAPE = _names("""
    T Transpose Permute View UnsafeView ReshapeAlias Unsqueeze Squeeze ToCopy Clone Alias Slice Select Split
    SplitWithSizes UnsafeSplit Unbind Flip Roll Repeat Cat Stack ConstantPadNd ReflectionPad1D ReflectionPad2D
    ReflectionPad3D ReplicationPad1D ReplicationPad2D ReplicationPad3D AsStrided Unfold Diagonal DiagEmbed Tril Triu
    PixelShuffle PixelUnshuffle ViewAsReal ViewAsComplex Resolve Glu Narrow Detach Im2Col Col2Im ChannelShuffle
    Sum Mean Var Std VarMean StdMean Norm LinalgVectorNorm Prod Cumsum Cumprod Logcumsumexp Logsumexp Softmax LogSoftmax
    SoftmaxBackwardData LogSoftmaxBackwardData NllLoss NllLoss2D NllLossNd NativeLayerNorm NativeGroupNorm
    NativeBatchNorm CudnnBatchNorm MiopenBatchNorm FusedRmsNorm Convolution ConvolutionBackward SlowConvTranspose2D
    MkldnnRnnLayer CudnnRnn AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveAvgPool1D AvgPool1D
    MaxPool2DWithIndices MaxPool3DWithIndices AdaptiveMaxPool2D AdaptiveMaxPool3D UpsampleNearest1D UpsampleNearest2D
    UpsampleNearest3D UpsampleLinear1D UpsampleBilinear2D UpsampleBicubic2D UpsampleTrilinear3D UpsampleNearestExact1D
    UpsampleNearestExact2D UpsampleBilinear2DAa UpsampleBicubic2DAa FftR2C FftC2R FftC2C Embedding Trilinear Dot
    LinalgMatrixExp LinalgInvEx LinalgSolveEx LinalgCholeskyEx LinalgSolveTriangular LinalgCross LinalgDet
""")
"""Shapes and whole numbers say where an entry goes, or it only meets entries of its own row."""
_PRODUCTS = {"Mm": 0, "Bmm": 0, "Mv": 0, "Addmm": 1, "Baddbmm": 1, "Addmv": 1, "Addbmm": 1}
"""Matrix products, and which of their inputs is the left factor."""
_ATTENTION = "ScaledDotProduct"
_ALONG = _names("""
    Gather Scatter ScatterAdd ScatterReduce IndexSelect IndexAdd IndexCopy IndexFill Sort Topk Max Min Median Nanmedian
    Kthvalue Mode Cummax Cummin TakeAlongDim Amax Amin Aminmax Argsort
""")
"""Values pick along a dimension that the node names."""
_INDEX = frozenset(("Index", "UnsafeIndex", "IndexPut", "IndexPutImpl"))


def short(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name)


@dataclass(frozen=True)
class Mover:
    """A node that may move rows; with both layouts, one whose indices can be compared with where rows should be."""

    node: int
    into: Layout | None = None
    out: Layout | None = None

    def in_place(self, graph: Graph) -> bool:
        """Whether all indices along the examples point to the examples' own rows in this batch."""
        if self.into is None or self.out is None:
            return False
        into, out, index = self.into, self.out, getattr(graph.nodes[self.node], "_saved_indices", None)
        if index is None or any(one is None or one.dtype not in _WHOLE for one in index[: into.dim + 1]):
            return False
        full = torch.broadcast_tensors(*[one for one in index if one is not None])[into.dim]
        if out.dim >= full.dim():
            return False
        here = torch.arange(full.shape[out.dim], device=full.device) // out.inner % graph.batch
        shape = [-1 if dim == out.dim else 1 for dim in range(full.dim())]
        return bool((full // into.inner % graph.batch == here.view(shape)).all())


_WHOLE = (torch.int64, torch.int32)


def suspects(graph: Graph, side: list[bool]) -> list[int]:
    """Nodes with data in them that may be movers, by name and shapes; where their rows lie decides."""
    found = []
    for node, name in enumerate(graph.names):
        if side[node] or node == 0 or name == LEAF:
            continue
        kind = short(name)
        if kind in _BY_SHAPE:
            continue
        if kind in _ELEMENTWISE:
            shapes = [graph.shape(*edge) for edge in graph.inputs[node] if edge is not None and not side[edge[0]]]
            if all(shape == graph.shape(node, 0) for shape in shapes):
                continue
        found.append(node)
    return found


def edges_of(graph: Graph, node: int, side: list[bool]) -> list[Edge]:
    """Where rows must be known to judge a suspect: its own output, and its inputs with data in them."""
    return [(node, 0), *[edge for edge in graph.inputs[node] if edge is not None and not side[edge[0]]]]


def mover(graph: Graph, node: int, side: list[bool], where: Mapping[Edge, Layout | None]) -> Mover | None:
    """The suspect as a mover, or None where its rows stay with their examples whatever the values are."""
    kind, out = short(graph.names[node]), where.get((node, 0))
    data = {place: e for place, e in enumerate(graph.inputs[node]) if e is not None and not side[e[0]]}
    if not data:
        return None
    into = {place: where.get(edge) for place, edge in data.items()}
    if kind in _ELEMENTWISE:
        rank = len(graph.shape(node, 0))
        kept = out is not None and all(
            one is not None and one.dim - len(graph.shape(*data[place])) == out.dim - rank
            for place, one in into.items()
        )
        return None if kept else Mover(node)
    if kind in _PRODUCTS:
        return None if _keeps(kind, out, into, len(graph.shape(node, 0))) else Mover(node)
    if kind.startswith(_ATTENTION):
        kept = out is not None and out.dim == 0 and all(one is not None and one.dim == 0 for one in into.values())
        return None if kept else Mover(node)
    first = into.get(0)
    if kind in _ALONG and first is not None:
        rank = len(graph.shape(*data[0]))
        named = getattr(graph.nodes[node], "_saved_dim", None)
        dims = [named] if isinstance(named, int) else list(named or range(rank))
        along = {(dim - (1 << 64) if dim >= 1 << 63 else dim) % max(1, rank) for dim in dims}
        return Mover(node) if first.dim in along else None
    if kind in _INDEX and first is not None:
        index = graph.nodes[node]._saved_indices  # type: ignore[attr-defined]
        whole = all(one is None or one.dtype in _WHOLE for one in index)
        if whole and (first.dim >= len(index) or index[first.dim] is None):
            return None
        if kind in ("Index", "UnsafeIndex"):
            return Mover(node, first, out)
    return Mover(node)


def _keeps(kind: str, out: Layout | None, into: Mapping[int, Layout | None], rank: int) -> bool:
    """Whether a product keeps examples apart along a dimension that it does not sum over."""
    if out is None:
        return False
    first = _PRODUCTS[kind]
    for place, layout in into.items():
        if layout is None:
            return False
        if place < first:  # what is added
            kept = True
        elif rank == 3 and layout.dim == 0:
            kept = out.dim == 0
        elif place == first:
            kept = out.dim == layout.dim == max(0, rank - 2)
        else:
            kept = rank > 1 and out.dim == layout.dim == rank - 1
        if not kept:
            return False
    return True
