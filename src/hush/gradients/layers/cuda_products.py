"""Where the kernels of a GPU serve: half precision products, whose numbers are exact in fp32."""

import torch
from torch import Tensor

from hush import kernels

_HALF = (torch.bfloat16, torch.float16)


def on_matrix_units(*tensors: Tensor) -> bool:
    """Whether the kernels serve these tensors: half precision, all of one dtype, on a GPU with Triton."""
    first = tensors[0]
    fits = first.is_cuda and first.dtype in _HALF and all(tensor.dtype == first.dtype for tensor in tensors)
    return fits and kernels.available()
