"""The forward pass as a function of weights and inputs, called many times without a trace of it left behind."""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hush.gradients.inputs import Inputs


class Function:
    """losses_of and its model. Weights that are not given are the model's own; buffers are always written as copies."""

    def __init__(self, losses_of: Callable[..., Tensor], model: nn.Module) -> None:
        self.losses_of = losses_of
        self.model = model
        self._state: tuple[Tensor, Any] | None = None

    def trainable(self) -> dict[str, Tensor]:
        return {name: param for name, param in self.model.named_parameters() if param.requires_grad}

    def __call__(self, inputs: Inputs) -> Tensor:
        """The losses of a step, by the model as it is."""
        self._state = torch.get_rng_state(), random.getstate()
        with torch.enable_grad():
            return check_losses(self.losses_of(self.model, *inputs.args, **inputs.kwargs), inputs.rows)

    def trial(
        self, inputs: Inputs, weights: Mapping[str, Tensor] | None = None, *, seed: int = 0, like_a_batch: bool = False
    ) -> Tensor:
        """The losses of these inputs under these weights, with copies of the buffers and seeded draws.

        `like_a_batch`: the draws begin as those of the last batch, so that the same layers are dropped, say.
        """
        params = dict(self.model.named_parameters())
        new = {id(params[name]): tensor for name, tensor in (weights or {}).items()}
        double = any(tensor.dtype == torch.float64 for tensor in new.values())
        for buffer in self.model.buffers():
            kind = torch.float64 if double and is_real(buffer) else buffer.dtype
            new[id(buffer)] = buffer.detach().to(kind, copy=True)
        for param in params.values() if double else ():
            if id(param) not in new and is_real(param):
                new[id(param)] = param.detach().double()
        if like_a_batch and self._state is not None:
            torch.set_rng_state(self._state[0])
            random.setstate(self._state[1])
        else:
            _seed(seed)
        with torch.enable_grad(), _swapped(self.model, new):
            return check_losses(self.losses_of(self.model, *inputs.args, **inputs.kwargs), inputs.rows)

    def has_drawn(self, seed: int) -> bool:
        """Whether the trial that just ended, under this seed, drew random numbers."""
        after = _generators()
        _seed(seed)
        return after != _generators()

    def jittered(self, *, double: bool = False, by: float = 0.1, seed: int = 1) -> dict[str, Tensor]:
        """Copies of the trainable weights, a little off, so that none is zero and none hides another."""
        generator = torch.Generator().manual_seed(seed)
        found = {}
        for name, param in self.trainable().items():
            value = param.detach().to(torch.float64, copy=True) if double else param.detach().clone()
            if is_real(value) and value.numel():
                noise = torch.randn(value.shape, generator=generator).to(value)
                spread = float(value.float().std(correction=0))
                value.add_(noise, alpha=by * max(spread if spread < float("inf") else 0.0, 0.02))
            found[name] = value.requires_grad_()
        return found


@contextmanager
def _swapped(model: nn.Module, new: Mapping[int, Tensor]) -> Iterator[None]:
    """Other tensors in the place of parameters and buffers, by identity: tied weights and shared modules stay tied.

    What the forward pass writes in their place (new buffers, none) is put back as well.
    """
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    lists: list[tuple[nn.Module, list[Any]]] = []
    try:
        for module in model.modules():
            places: tuple[Any, ...] = module._parameters, module._buffers
            for place in places:
                if type(place) is dict and place:
                    kept.append((place, dict(place)))
                    place.update({name: new.get(id(tensor), tensor) for name, tensor in place.items()})
            flat = module.__dict__.get("_flat_weights")  # where recurrent layers keep their weights a second time
            if flat is not None:
                lists.append((module, flat))
                module.__dict__["_flat_weights"] = [new.get(id(tensor), tensor) for tensor in flat]
        yield
    finally:
        for place, before in kept:
            place.clear()
            place.update(before)
        for module, flat in lists:
            module.__dict__["_flat_weights"] = flat


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor has a float64 form; low-bit weights have none."""
    return tensor.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_losses(losses: Any, rows: int) -> Tensor:
    """[rows], those of several views averaged; refuse anything but one loss for each row, or K for each row."""
    if not isinstance(losses, Tensor):
        raise TypeError(f"losses_of must return a tensor with one loss for each row, got {type(losses).__name__}")
    if losses.ndim == 0:
        raise ValueError(
            "expected one loss for each example, got a scalar. A loss that is averaged or summed over the batch "
            "cannot be clipped example by example: use reduction='none'. A term for the whole batch (a penalty on the "
            "weights, say) belongs into the optimizer (weight_decay) or, per example, into each loss"
        )
    if not losses.is_floating_point():
        raise TypeError(f"losses must be floating point, got {losses.dtype}")
    if losses.ndim > 2 or len(losses) != rows:
        raise ValueError(
            f"expected losses of shape ({rows},), one for each row of the batch, or ({rows}, K) for K views of each, "
            f"got {tuple(losses.shape)}. Average tokens or pixels per example first"
        )
    return losses.mean(1) if losses.ndim == 2 else losses


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def is_recorded() -> bool:
    """Whether this is traced or captured: what has no values cannot be tested; the same was tested right before."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return bool(torch._C._len_torch_dispatch_stack()) or capturing


def _generators() -> tuple[object, ...]:
    """Where the default generators stand."""
    numpy = sys.modules.get("numpy")
    places = (
        None
        if numpy is None
        else [part.tolist() if hasattr(part, "tolist") else part for part in numpy.random.get_state()]
    )
    on_gpu = torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None
    return random.getstate(), torch.get_rng_state().tolist(), places, on_gpu


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Inside, trials may run; afterwards all generators, backends, caches and compiled frames are as before."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with ExitStack() as stack:
        devices = [device.index or 0] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(full_precision())
        if (
            "torch._dynamo" in sys.modules
        ):  # one eager call under a dispatch mode would leave a frame uncompiled for good
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
            torch.clear_autocast_cache()


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 in float32 inside: with tf32, a GPU's choice for convolutions, two ways differ by 1e-3."""
    backends: Any = torch.backends
    places = [
        *(backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn),
        *(backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
    ]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, chosen in zip(places, before, strict=True):
            place.fp32_precision = chosen


_DRAWS = (
    *("bernoulli", "bernoulli_", "uniform_", "normal", "normal_", "rand", "randn", "rand_like", "randn_like"),
    *("exponential_", "log_normal_", "randint", "randint_like"),
)


class SameDraws(TorchDispatchMode):
    """Draws are one number for all rows: who else is there moves nobody's draws.

    Where a draw has one row for each of `rows` examples, each gets a number that its place alone decides, so that a
    comparison or an order of draws still tells examples apart.
    """

    def __init__(self, drawn: float = 0.9, rows: int = 0) -> None:
        super().__init__()
        self._drawn, self._rows = drawn, rows

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first use imports the compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name in ("rrelu_with_noise", "rrelu_with_noise_"):  # how much it draws depends on the signs of all rows
            slope = (float(args[2]) + float(args[3])) / 2 if len(args) > 3 else 11 / 48
            args[1].copy_(torch.where(args[0] >= 0, 1.0, slope))  # its backward pass reads the noise
            return args[0] * args[1]
        out = func(*args, **(kwargs or {}))
        if name not in _DRAWS or not out.numel():
            return out
        if not out.is_floating_point():  # the least that can be drawn
            least = args[1 if name == "randint_like" else 0] if "low" in func._overloadname else 0
            return out.fill_(1 if name.startswith("bernoulli") else least)
        if out.dim() and len(out) == self._rows and not name.startswith("bernoulli"):  # dropout says nothing of places
            places = (self._drawn + 0.618 * torch.arange(self._rows, device=out.device)) % 1
            return out.copy_(places.view(-1, *[1] * (out.dim() - 1)))
        return out.fill_(self._drawn)
