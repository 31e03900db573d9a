"""What `Private` looks at in every step: layers that mix examples, buffers and parameters that are written, optimizers.

These checks see flags and version counters, so they wait for no device and say nothing of the data. What `.data` writes
without a trace is found by what the tensors hold: after the first forward pass, before lots 1, 2, 4, 8, ... and
whenever the state is saved. What only a second forward pass can show is the business of `check`.
"""

import math
from collections.abc import Mapping, Sequence
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
        if isinstance(public_buffers, str):
            raise TypeError(f"public_buffers are several patterns: write ({public_buffers!r},)")
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
        self._kept: dict[str, tuple[tuple[int, int], int]] = {}
        """Of what must not change in the run: version and place, and the bits."""

    def begin_lot(self, step: int = 0) -> dict[str, nn.Parameter]:
        """The trainable parameters of this lot; refuses layers that mix examples, and buffers that changed since."""
        survey = [] if self._scripted else _survey(self._modules)
        if survey and survey == self._survey:
            if self._suspects and any(map(mixes_examples, self._suspects)):
                refuse_mixing(self._model)
            self._compare(always=step & (step - 1) == 0)
            self._versions = self._versions_now()
            self._sums = None if self._sums is None else self._sums_now()
            return self._trainable
        refuse_mixing(self._model)
        trainable = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError("the model has no trainable parameter: every parameter has requires_grad=False")
        self._buffers = {name: b for name, b in self._model.named_buffers() if not is_public(name, self.public)}
        self._weights = {
            name: p for name, p in self._model.named_parameters() if p.requires_grad or not is_public(name, self.public)
        }
        self._compare(always=True)
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

    def begin_anew(self) -> None:
        """What buffers and frozen parameters hold now is what they held when the run began."""
        self._survey, self._kept = [], {}
        self.begin_lot()

    def must_train(self, parameters: Mapping[str, Tensor]) -> None:
        """Refuse other trainable parameters than those of the lot."""
        now = {name: id(p) for name, p in self._model.named_parameters() if p.requires_grad}
        if now != {name: id(p) for name, p in parameters.items()}:
            changed = sorted(now.keys() ^ parameters.keys()) or ["(replaced)"]
            raise RuntimeError(
                f"the trainable parameters changed inside a lot: {', '.join(changed[:4])}. Freeze, unfreeze and add "
                "parameters between lots; private.abandon() gives this lot up"
            )

    def must_hold_nothing_new(self) -> None:
        """Refuse buffers and frozen parameters that are not what they were when the run began."""
        self._compare(always=True)

    def _compare(self, *, always: bool) -> None:
        """What buffers and frozen parameters hold now, against the beginning of the run; public ones may change.

        Versions tell at once what was written by an operation, even between lots; `always` looks at the bits as well.
        """
        watched = dict(self._buffers) | {name: p for name, p in self._weights.items() if not p.requires_grad}
        for name in self._kept.keys() - watched.keys():
            del self._kept[name]  # trained by now, or gone
        for name, tensor in watched.items():
            seen = (tensor._version, tensor.data_ptr())
            if name in self._kept and not always and self._kept[name][0] == seen:
                continue
            bits = int(_sum_of_bits(tensor))
            if name in self._kept and self._kept[name][1] != bits:
                raise RuntimeError(
                    f"{name!r} of {owner_of(self._model, name)} was changed during the run, and not by private.step. "
                    "A buffer or a frozen parameter that is filled from the examples (prototypes, a memory bank, "
                    "running statistics) carries raw data into the model without noise. Leave it as it was; if what it "
                    f"holds does not depend on the examples, declare it: Private(..., public_buffers=({name!r},))"
                )
            self._kept[name] = (seen, bits)

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
                f"buffer {name!r} of {owner_of(self._model, name)} was changed between the start of the lot and the "
                "end of add. A buffer that the forward pass fills from the batch carries raw data into the model "
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
    """A number for the bits and their places: rows that change places change it."""
    flat = (tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()).contiguous()
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    words = flat.view(_BITS[flat.element_size()]).reshape(-1)
    weights = torch.arange(1, 2 * len(words), 2, device=words.device)  # odd, so that every bit counts modulo 2^64
    return (words.long() * weights).sum() if len(words) else torch.zeros((), dtype=torch.int64)


def written_parameter(name: str) -> str:
    """What to say of a parameter that changed without a release."""
    return (
        f"parameter {name!r} was written between the start of the lot and the end of add, by the forward pass or "
        "beside it. Only private.step may change parameters by what is in the data: an Embedding with max_norm scales "
        "the rows that occur in a batch, statistics kept in a frozen parameter hold raw data. Leave max_norm out; "
        "change weights between lots; declare a frozen parameter that knows nothing of the data with public_buffers"
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


def must_match(model: nn.Module, patterns: Sequence[str]) -> None:
    """Refuse a declaration that matches nothing: it was mistyped, or is about another model."""
    names = [name for name, _ in [*model.named_buffers(), *model.named_parameters()]]
    names += [f"{at}.{name}" if at else name for at, module in model.named_modules() for name in vars(module)]
    names += [f"{at}.extra state" if at else "extra state" for at, _ in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"public_buffers has {pattern!r}, which matches no buffer of the model: mistyped?")


def owner_of(model: nn.Module, buffer: str) -> str:
    """The class of the module that owns the buffer."""
    return type(model.get_submodule(buffer.rpartition(".")[0])).__name__


def check_groups(clip: Clip, parameters: Mapping[str, Tensor], *, noisy: bool) -> None:
    """Refuse a clip that does not fit the parameters, or whose bound is infinite where noise is to be scaled by it."""
    for group in clip.groups(parameters):
        if noisy and not math.isfinite(group.bound):
            raise ValueError(
                f"the clipping bound of {', '.join(group.names[:4])} is infinite, and so would be its noise: give a "
                "finite bound, or noise_multiplier=0 for a run that is NOT PRIVATE"
            )
