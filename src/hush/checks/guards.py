"""What `Private` looks at in every step: the losses' shape, layers that mix examples, buffers, the optimizer.

These checks see shapes, flags and version counters, so they wait for no device and say nothing of the data; only the
first forward pass of a model is followed by a look at what its parameters and buffers hold, since `.data` is written
without a trace. What only a second forward pass can show is the business of `selfcheck`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter, itemgetter

import torch
from torch import Tensor, nn

from hush.checks.batchnorm import may_mix, mixes_examples
from hush.clipping.clips import Clip

_version = attrgetter("_version")
_PARTS = itemgetter("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")


def _survey(modules: Sequence[nn.Module]) -> list[object]:
    """What these modules consist of and how they are set, in one quick walk; empty where that cannot be told.

    A child that is not one of them shows in its parent.
    """
    found: list[object] = []
    add = found.append
    for module in modules:
        inside = module.__dict__
        parameters, buffers, children, hooks, pre_hooks = _PARTS(inside)
        if parameters.__class__ is not dict:
            return []
        add(module.__class__)
        add(inside.get("training"))
        if hooks or pre_hooks:
            found += (len(hooks), *hooks, *pre_hooks)
        if parameters:
            found += parameters
            for parameter in parameters.values():
                add(id(parameter))
                add(parameter is not None and parameter.requires_grad)
        if buffers:
            found += buffers
            found += map(id, buffers.values())
        if children:
            found += children
            found += map(id, children.values())
    return found


def _slow_survey(model: nn.Module) -> list[object]:
    """The same by the names that a module itself gives."""
    modules = [(name, type(module), module.training) for name, module in model.named_modules()]
    return [*modules, *[(name, p.requires_grad) for name, p in model.named_parameters()]]


def _scripted(model: nn.Module) -> bool:
    """Whether a part of the model keeps its parameters where a quick walk does not see them."""
    return any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())


class Guard:
    """Watches one model; `public_buffers` are patterns of buffers that may change because they tell nothing of data."""

    def __init__(self, model: nn.Module, public_buffers: Sequence[str] = ()) -> None:
        self._model = model
        self.public = tuple(public_buffers)
        self._changes = 0
        self._survey: list[object] = []
        self._scripted = False
        self._modules: list[nn.Module] = []
        self._alive: list[object] = []
        self._suspects: list[nn.Module] = []
        self._all_buffers: list[Tensor] = []
        self._trainable: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._versions: list[int] = []
        self._names: set[str] = set()
        self._sums: list[int] | None = None
        """Of the bits of all watched tensors, until the first forward pass was looked at."""

    def begin_lot(self) -> dict[str, nn.Parameter]:
        """The trainable parameters of this lot; notes the buffers, refuses layers that mix or remember examples."""
        survey = [] if self._scripted else _survey(self._modules)
        if survey and survey == self._survey:
            if self._suspects and any(map(mixes_examples, self._suspects)):
                refuse_mixing(self._model)
            self._versions = self._versions_now()
            self._sums = None if self._sums is None else self._sums_now()
            return self._trainable
        refuse_mixing(self._model)
        trainable = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError("the model has no trainable parameter: every parameter has requires_grad=False")
        self._buffers = {name: b for name, b in self._model.named_buffers() if not is_public(name, self.public)}
        self._weights = {name: p for name, p in self._model.named_parameters() if not is_public(name, self.public)}
        self._versions, self._sums = self._versions_now(), self._sums_now()
        self._names = {name for name, _ in self._model.named_buffers()}
        self._trainable, self._suspects = trainable, [module for module in self._model.modules() if may_mix(module)]
        self._all_buffers = list(self._model.buffers())
        self._modules, self._scripted = list(self._model.modules()), _scripted(self._model)
        self._alive = [*self._modules, *self._model.parameters()]  # so that none of their ids comes again
        survey = _slow_survey(self._model) if self._scripted else _survey(self._modules)
        if not survey or survey != self._survey:
            self._survey, self._changes = survey, self._changes + 1
        return trainable

    def _versions_now(self) -> list[int]:
        """How often each watched tensor was written into, buffers, then parameters; then where the buffers lie."""
        buffers = self._buffers.values()
        return [*map(_version, buffers), *map(_version, self._weights.values()), *map(Tensor.data_ptr, buffers)]

    def _sums_now(self) -> list[int]:
        """A number for what each watched tensor holds, in the same order; waits for the device."""
        sums = [_sum_of_bits(tensor) for tensor in (*self._buffers.values(), *self._weights.values())]
        return [int(one) for one in sums]

    def state(self) -> tuple[int, ...]:
        """Other numbers whenever a lot began with other modules, modes, hooks, parameters or buffers than before."""
        return self._changes, *map(Tensor.data_ptr, self._all_buffers)

    def at_backward(self, losses: Tensor, rows: int, copies: int) -> None:
        """Refuse losses that are not one per example, and a forward pass that wrote into buffers or parameters."""
        check_losses(losses, rows, copies)
        self.after_forward()

    def after_forward(self) -> None:
        """Refuse a forward pass that mixed examples or wrote into buffers or parameters."""
        refuse_mixing(self._model)
        now = dict(self._model.named_buffers())
        written = self._written()
        fresh = [name for name in now if name not in self._names and not is_public(name, self.public)]
        replaced = [name for name, buffer in self._buffers.items() if now.get(name) is not buffer]
        buffers = [*fresh, *replaced, *(name for name in written if name in self._buffers)]
        if buffers:
            name = buffers[0]
            raise RuntimeError(
                f"buffer {name!r} of {owner_of(self._model, name)} was changed between the start of the lot and "
                "backward. A buffer that the forward pass fills from the batch carries raw data into the model "
                "without noise. Freeze it (eval mode, track_running_stats=False); if what it holds does not depend on "
                f"the examples (a counter, say), declare it: Private(..., public_buffers=({name!r},))"
            )
        if written:
            raise RuntimeError(written_parameter(written[0]))

    def _written(self) -> list[str]:
        """The watched tensors that are not what they were when the lot began."""
        names = [*self._buffers, *self._weights]
        now, before = self._versions_now(), self._versions
        found = {name for name, one, other in zip(names + names, now, before, strict=False) if one != other}
        if self._sums is not None:
            sums = self._sums_now()
            found |= {name for name, one, other in zip(names, sums, self._sums, strict=True) if one != other}
            self._sums = self._sums if found else None
        return [name for name in names if name in found]


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(tensor: Tensor) -> Tensor:
    flat = (tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()).contiguous()
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    return flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64)


def written_parameter(name: str) -> str:
    """What to say of a parameter that changed without a release."""
    return (
        f"parameter {name!r} was written between the start of the lot and backward, by the forward pass or beside it. "
        "Only private.step may change parameters by what is in the data: an Embedding with max_norm scales the rows "
        "that occur in a batch, statistics kept in a frozen parameter hold raw data. Leave max_norm out; change "
        "weights between lots; declare a frozen parameter that knows nothing of the data with public_buffers"
    )


def refuse_mixing(model: nn.Module) -> None:
    """Refuse layers that, as they stand now, take statistics over the batch or remember them."""
    for name, module in model.named_modules():
        if mixes_examples(module):
            raise RuntimeError(
                f"{type(module).__name__} at {name or 'the root'!r} is in training mode: it takes statistics over the "
                "batch, so that one example moves the gradients of all others, or remembers them. Replace it with "
                "hush.replace_batchnorm(model) before making the optimizer, or freeze it with .eval()"
            )


def is_public(buffer: str, patterns: Sequence[str]) -> bool:
    """Whether the buffer was declared to hold nothing of the data."""
    return any(fnmatchcase(buffer, pattern) for pattern in patterns)


def owner_of(model: nn.Module, buffer: str) -> str:
    """The class of the module that owns the buffer."""
    return type(model.get_submodule(buffer.rpartition(".")[0])).__name__


def check_losses(losses: Tensor, rows: int, copies: int = 1) -> None:
    """Refuse anything but a vector with one loss for each row (times copies)."""
    if not isinstance(losses, Tensor):
        raise TypeError(f"losses must be a tensor with one loss for each example, got {type(losses).__name__}")
    if losses.ndim == 0:
        raise ValueError(
            "expected one loss for each example, got a scalar. A loss that is averaged or summed over the batch "
            "cannot be clipped example by example: use reduction='none'. A term for the whole batch (a penalty on the "
            "weights, say) belongs into the optimizer (weight_decay) or, per example, into each loss"
        )
    if not losses.is_floating_point():
        raise TypeError(f"losses must be floating point, got {losses.dtype}")
    expected = {(rows * copies,), (rows, copies)} if copies > 1 else {(rows,)}
    if tuple(losses.shape) not in expected:
        raise ValueError(
            f"expected losses of shape {' or '.join(map(str, sorted(expected)))}, one for each example of the batch"
            f"{f' and each of its {copies} copies' if copies > 1 else ''}, got {tuple(losses.shape)}. Average tokens "
            "or pixels per example first; for several augmentations of an example call backward(losses, copies=K)"
        )


def check_groups(clip: Clip, parameters: Mapping[str, Tensor], *, noisy: bool) -> None:
    """Refuse a clip that does not fit the parameters, or whose bound is infinite where noise is to be scaled by it."""
    for group in clip.groups(parameters):
        if noisy and not math.isfinite(group.bound):
            raise ValueError(
                f"the clipping bound of {', '.join(group.names[:4])} is infinite, and so would be its noise: give a "
                "finite bound, or noise_multiplier=0 for a run that is NOT PRIVATE"
            )


def check_optimizer(optimizer: torch.optim.Optimizer, covered: Collection[Tensor]) -> None:
    """Refuse an optimizer that would use a gradient that is not the released one."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS evaluates the loss again inside its step, without noise or charge; use another one")
    ours: set[int] | None = None
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            ours = ours or set(map(id, covered))
            if id(parameter) not in ours:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} in group {number} of the optimizer has a gradient "
                    "that is not private: it is not a trainable parameter of the model in this lot. Take it out of "
                    "the optimizer, set its .grad to None, or freeze and unfreeze parameters only between lots"
                )
