"""Without a GPU the kernels run in Triton's interpreter, which has to be chosen before anything imports Triton."""

import importlib.util
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Their doctests cannot be looked for where Triton, which exists for Linux alone, cannot be imported.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["src/hush/kernels/*/[!_]*.py"]
