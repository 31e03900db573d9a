"""The ways to take one training step on a case: not private (eager, compiled, captured), hush, Opacus, jax-privacy.

Each is a function that builds everything it needs and returns the step, a function without arguments. All of them use
the same fixed batch, clip norm 1, noise multiplier 1 and SGD; reading data from a disk is nobody's part. A private step
is lot drawing, forward, backward, clipping, noise from the secure stream, and the update.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from cases import Case
from torch import Tensor, nn

from hush.clipping.clips import FlatClip
from hush.machine import Machine
from hush.plan import Plan
from hush.private import Private
from hush.sampling.lots import PoissonLots

Step = Callable[[], None]
WARM_UP = 3
PEERS = ("opacus", "jax")
SELDOM = ("plain captured", "hush captured")
"""Ways that come last for large models: graphs that are not compiled, which take most memory."""


class Unavailable(Exception):
    """This way cannot be taken here; the message says why."""


def prepare(case: Case, device: str) -> tuple[nn.Module, Tensor, Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with torch.device(device):  # large models are drawn faster where they will live
        model = case.model().train()
        x, y = case.batch()
    if case.channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return model, x, y, torch.optim.SGD(trainable, lr=1e-3)


def plain(case: Case, device: str) -> Step:
    """The non-private step, eager."""
    model, x, y, optimizer = prepare(case, device)

    def step() -> None:
        optimizer.zero_grad()
        case.forward(model, x, y).mean().backward()
        optimizer.step()

    return step


def plain_compiled(case: Case, device: str) -> Step:
    """The non-private step with torch.compile on forward, loss and backward."""
    model, x, y, optimizer = prepare(case, device)

    @torch.compile
    def loss() -> Tensor:
        return case.forward(model, x, y).mean()

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def plain_captured(case: Case, device: str) -> Step:
    """The whole non-private step as one CUDA graph."""
    return captured(plain(case, device))


def plain_compiled_captured(case: Case, device: str) -> Step:
    """The compiled non-private step as one CUDA graph."""
    return captured(plain_compiled(case, device))


def captured(step: Step) -> Step:
    """A step as one CUDA graph."""
    if not torch.cuda.is_available():
        raise Unavailable("a CUDA graph needs a GPU")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Workspaces of products, in this thread and in that of backward passes, before large blocks are freed from
        # which they would be cut: they would keep these alive, which is nobody's need.
        small = torch.ones(16, 16, device="cuda", requires_grad=True)
        small.mm(small).sum().backward()
        for _ in range(WARM_UP):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()

    def replay(step: Step = step) -> None:  # the model and the batch must outlive the graph that reads them
        graph.replay()

    return replay


class Eager(Machine):
    """A machine that captures nothing."""

    def captures(self, *_: object) -> bool:
        return False


def _private(
    case: Case, device: str, machine: Machine
) -> tuple[Private, nn.Module, Tensor, Tensor, torch.optim.Optimizer]:
    model, x, y, optimizer = prepare(case, device)
    lots = PoissonLots(examples=len(x), lot_size=len(x))  # rate 1: every lot is the whole batch
    plan = Plan(lots=lots, steps=10**6, clip=FlatClip(1.0), noise_multiplier=1.0)
    losses_of = lambda model, x, y: case.forward(model, x, y)  # noqa: E731
    return Private(model, plan, losses_of, machine=machine), model, x, y, optimizer


def hush_eager(case: Case, device: str) -> Step:
    """The level-2 loop of hush."""
    return _steps(*_private(case, device, Eager()))


def _steps(private: Private, model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> Step:
    lots = private.lots()

    def step() -> None:
        for batch in next(lots).batches(len(x)):
            private.add(batch, x, y)
        private.step(optimizer)

    return step


def hush_compiled(case: Case, device: str) -> Step:
    """As `hush_captured`, the region compiled by Inductor before it is captured."""
    return hush_captured(case, device, compile=True)


def hush_captured(case: Case, device: str, compile: bool = False) -> Step:
    """hush with forward, backward, norms and clipping as one region, a CUDA graph on a GPU; batches carry a mask."""
    return _steps(*_private(case, device, Machine(compile=compile)))


def opacus_hooks(case: Case, device: str) -> Step:
    """Opacus with per-example gradients from hooks."""
    _need_opacus()
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model, x, y, optimizer = prepare(case, device)
    model = GradSampleModule(_for_opacus(model).to(device))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    optimizer = DPOptimizer(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(x))

    def step() -> None:
        optimizer.zero_grad()
        case.forward(model, x, y).mean().backward()
        optimizer.step()

    return step


def opacus_ghost(case: Case, device: str) -> Step:
    """Opacus with ghost clipping, two backward passes."""
    _need_opacus()
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model, x, y, optimizer = prepare(case, device)
    model = GradSampleModuleFastGradientClipping(
        _for_opacus(model).to(device), max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="mean"
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    optimizer = DPOptimizerFastGradientClipping(
        optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(x)
    )

    class Criterion:
        reduction = "mean"

        def __call__(self, out: Tensor, y: Tensor) -> Tensor:
            return case.losses(out.float(), y)

    criterion = DPLossFastGradientClipping(model, optimizer, Criterion(), loss_reduction="mean")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=case.autocast):
            out = model(x)
        criterion(out, y).backward()
        optimizer.step()

    return step


def _need_opacus() -> None:
    try:
        import opacus  # noqa: F401
    except ImportError as missing:
        raise Unavailable("opacus is not installed (pip install 'hush[bench]')") from missing


def _for_opacus(model: nn.Module) -> nn.Module:
    """Opacus refuses the fused LSTM: its own takes the place."""
    from opacus.validators import ModuleValidator

    return ModuleValidator.fix(model)


def forms(device: str, case: Case | None = None) -> dict[str, Callable[[Case, str], Step]]:
    """All ways on a device, for images also with channels last; ratios are relative to the first."""
    found: dict[str, Callable[[Case, str], Step]] = {"plain": plain}
    if device == "cuda":
        found |= {"plain compiled": plain_compiled, "plain captured": plain_captured}
        found |= {"plain compiled+captured": plain_compiled_captured}
        if case is not None and case.images:
            found["plain captured, channels last"] = _channels_last(plain_captured)
            found["plain compiled+captured, channels last"] = _channels_last(plain_compiled_captured)
    found["hush"] = hush_eager
    if device == "cuda":
        found |= {"hush captured": hush_captured, "hush compiled+captured": hush_compiled}
    found |= {"opacus hooks": opacus_hooks, "opacus ghost": opacus_ghost}
    from jax_forms import ways  # it needs what stands above; JAX itself is imported when a way of it is built

    return found | ways()


def _channels_last(build: Callable[[Case, str], Step]) -> Callable[[Case, str], Step]:
    return lambda case, device: build(replace(case, channels_last=True), device)
