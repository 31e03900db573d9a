"""Private: the DP-SGD step. Charges before it computes, clips, adds noise once, divides by the plan's constant L.

The model is never wrapped and nothing is attached to it; this is the only file that writes `p.grad`.
"""

from collections.abc import Callable, Iterator, Sequence
from os import PathLike, cpu_count
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hush.accounting.bounds import Bounds
from hush.accumulation import LotSum
from hush.capture import PlannedRelease, Region, Update
from hush.charging import ChargeAccount, open_account
from hush.course import Course
from hush.discrete import add_discrete_noise
from hush.gradients.clip import QuantileClip
from hush.gradients.clipped import clipped_sum
from hush.guards import Guard, check_groups, check_optimizer
from hush.ledger import Ledger
from hush.lots import Lot
from hush.noise import Part, add_noise, standard_deviations
from hush.normals import Normals
from hush.optim import NoiseAware
from hush.padding import Handed
from hush.plan import Plan, clip_from_dict, clip_to_dict
from hush.selfcheck import check

_WORTH_PREPARING = 20_000  # numbers; below that handing them to another thread costs more than drawing them


class Private:
    """Runs a plan on a plain model, with a plain loop and a plain optimizer.

    Guarantee: what `step` writes into the gradients, over all lots together, is the plan's event on the data, charged
    to the account before each lot is handed out. There is one charge and one noise for each step, also for an empty
    lot; sums are divided by the plan's expected lot size, never by the real one.

    `ledger` is a path, a Ledger, an account that was opened or resumed before, or None for an account in memory. With
    `seed` lots and noise are reproducible, and the run is NOT PRIVATE (`private.private` is False). With
    noise="discrete" sums are released as integers on a fixed grid, safe against attacks on floating point.
    `public_buffers` are patterns of buffers that may change in training because they hold nothing of the data.
    selfcheck=False leaves out the check of captured forward passes and lets some of them leave parameters unused.

    >>> from hush.gradients.clip import FlatClip
    >>> from hush.lots import PoissonLots
    >>> model, x = nn.Linear(2, 1), torch.zeros(100, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> plan = Plan(lots=PoissonLots(100, 10), steps=3, clip=FlatClip(1.0), noise_multiplier=1.0)
    >>> private = Private(model, plan)
    >>> for lot in private.lots():
    ...     for index in lot.batches(8):
    ...         private.backward(model(x[index]).square().squeeze(1))
    ...     private.step(optimizer)
    >>> private.steps_done
    3
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        ledger: str | PathLike[str] | Ledger | ChargeAccount | None = None,
        *,
        seed: int | None = None,
        selfcheck: bool = True,
        noise: Literal["gaussian", "discrete"] = "gaussian",
        public_buffers: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.plan = plan
        if noise not in ("gaussian", "discrete"):
            raise ValueError(f"noise must be 'gaussian' or 'discrete', got {noise!r}")
        self._selfcheck = selfcheck
        self._discrete = noise == "discrete"
        self._guard = Guard(model, public_buffers)
        self._parameters = self._guard.begin_lot()  # what cannot be trained is refused before anything is charged
        check_groups(plan.clip.at(0), self._parameters, noisy=plan.noise_at(0) > 0)
        self._course = Course(plan, open_account(plan, ledger), seed)
        self._normals, self._count_normals = Normals(self._course.key), Normals(self._course.key, "count")
        self._clip = plan.clip
        self._sum = LotSum()
        self._update = Update()
        self._lot: Lot | None = None
        self._closed = False

    # The loop ------------------------------------------------------------------------------------------------------

    def lots(self) -> Iterator[Lot]:
        """The remaining lots of the plan; each is charged before it is handed out, and must be followed by `step`.

        Raises BudgetExhausted where the account has no units left (a resumed run whose lost steps were not reserved).
        """
        while self._course.step < self.plan.steps:
            if self._closed:
                raise RuntimeError("this run was ended by detach(); make a new Private")
            if self._lot is not None:
                raise RuntimeError(
                    f"lot {self._lot.step} was charged but not used: call private.step(optimizer) after its batches, "
                    "also after an empty lot, or private.abandon() to give it up"
                )
            self._clear_gradients()
            self._parameters = self._guard.begin_lot()
            self._lot = self._course.next_lot()
            self._prepare_noise()
            yield self._lot

    def backward(self, losses: Tensor, mask: Tensor | None = None, *, copies: int = 1) -> None:
        """Add the clipped gradients of a batch's examples to the sum of the lot.

        `losses` has one entry for each row of the batch that was handed out last; rows with mask False do not count,
        and rows that pad the batch never do. With `copies` = K the losses are those of K augmentations of each
        example, next to each other, and are averaged before clipping. An example whose gradient is not finite counts
        as zero.
        """
        handed = self._in_hand()
        self._guard.at_backward(losses, handed.rows, copies)
        if copies > 1:
            losses = losses.reshape(handed.rows, copies).mean(1)
        mask = _both(mask, handed.mask, losses.device)
        clip, unused = self._clip.at(self._course.step), not self._selfcheck
        batch = clipped_sum(losses, self._parameters, clip, mask=mask, rows=handed.size, allow_unused=unused)
        self._sum.add(batch, clip)
        self._open_lot("backward").in_hand = None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Release the lot's sum with noise, divided by L, as the gradient, and let the optimizer use it."""
        self._open_lot("step")
        check_optimizer(optimizer, self._parameters.values())
        update = self._captured_update(optimizer)
        if update is not None:
            self._close_lot()  # before the noise is used: whatever happens, it is never drawn again
            update()
            return
        deviations = self._release()
        self._close_lot()  # before the optimizer: whatever happens there, this lot's noise is never drawn again
        if isinstance(optimizer, NoiseAware):
            optimizer.expect_noise({self._parameters[name]: deviation for name, deviation in deviations.items()})
        optimizer.step()

    def restart(self) -> None:
        """Forget what was added up for the open lot and hand its batches out again (after out-of-memory, say)."""
        self._open_lot("restart").restart()
        self._sum.clear()

    def abandon(self) -> None:
        """Give the open lot up: it stays charged, and the parameters stay as they are."""
        self._open_lot("abandon")
        self._close_lot()

    def capture(self, losses_of: Callable[..., Tensor], *, copies: int = 1, compile: bool = False) -> "Captured":
        """The forward pass as a function of a batch, so that it runs with backward as one region.

        `run = private.capture(losses_of)` is called in the loop as `run(*batch, mask=mask)` in place of computing the
        losses and calling `backward`, with the same results. On a GPU, padded batches with their mask are captured
        once and replayed; with `compile` Inductor fuses them first, which takes a minute for a large model and rounds
        half precision in other places. The first call checks `losses_of` as `hush.check` does, unless the run has
        selfcheck=False.
        """
        return Captured(self, losses_of, copies, compile)

    # What was spent, and where the run stands ------------------------------------------------------------------------

    @property
    def private(self) -> bool:
        """Whether the run protects anybody: a plan with noise, and randomness that nobody can repeat."""
        return self.plan.private and self._course.key.private

    @property
    def steps_done(self) -> int:
        """Steps of the plan that are behind, abandoned ones included."""
        return self._course.step

    @property
    def account(self) -> ChargeAccount | None:
        """The account that is charged; None for a plan without noise."""
        return self._course.account

    def spent(self, *, delta: float) -> Bounds:
        """Epsilon of all that was charged so far.

        True for a run that was always meant to end here. If it ends early because of something seen in the data, its
        guarantee is `plan.epsilon(delta=delta)`, the whole plan's.
        """
        return self._course.spent(delta)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, in plain values: never a key, never a sum. Settles the account; between lots only."""
        self._require_no_lot("save")
        return self._course.state_dict() | {"clip": clip_to_dict(self._clip), "slack": self._sum.slack}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` stood.

        With a seed the run continues bit for bit. Without one it draws a new key; an allocated or shuffled epoch that
        was begun is given up and stays charged, since its remaining lots cannot be drawn again without the old key.
        """
        self._require_no_lot("load")
        self._course.load_state_dict(state)
        self._normals.close()
        self._normals, self._count_normals = Normals(self._course.key), Normals(self._course.key, "count")
        self._clip, self._sum = clip_from_dict(state["clip"]), LotSum(state["slack"])

    def detach(self) -> None:
        """End the run: close the account, clear the gradients. Nothing was ever attached to the model."""
        if self._closed:
            return
        self._closed, self._lot = True, None
        self._sum.clear()
        self._clear_gradients()
        self._normals.close()
        if self._course.account is not None:
            self._course.account.close()

    # Inside --------------------------------------------------------------------------------------------------------

    def _open_lot(self, wanted: str) -> Lot:
        if self._lot is None:
            raise RuntimeError(
                f"{wanted} needs an open lot: call it once for each lot of `for lot in private.lots():`. Without a "
                "lot there is no charge"
            )
        return self._lot

    def _require_no_lot(self, wanted: str) -> None:
        if self._lot is not None:
            raise RuntimeError(f"lot {self._lot.step} is open; {wanted} after private.step(optimizer)")

    def _in_hand(self) -> Handed:
        lot = self._open_lot("backward")
        if lot.in_hand is None:
            raise RuntimeError(
                f"no batch of lot {lot.step} is waiting for backward: take batches from lot.batches(size) or "
                "Loader.batches(lot, size) one by one (not into a list), and call backward once for each. A second "
                "call would count its examples twice; add several losses of an example up instead"
            )
        return lot.in_hand

    def _release(self) -> dict[str, float]:
        """Write the released gradients; returns the standard deviation of the noise in each."""
        step, joint, clip = self._course.step, self._course.noise(), self._clip.at(self._course.step)
        total = self._sum.total(self._parameters, clip)
        noise = clip.gradient_noise(joint) * (1 + 1e-12) if isinstance(clip, QuantileClip) else joint
        scale = 1 / self.plan.lots.expected_size
        places = {name: _place(total.tensors[name], parameter) for name, parameter in self._parameters.items()}
        release = add_discrete_noise if self._discrete and joint else add_noise
        release(total, noise_multiplier=noise, normals=self._normals, step=step, scale=scale, out=places)
        for name, parameter in self._parameters.items():
            parameter.grad = places[name]
        if isinstance(clip, QuantileClip) and total.count is not None:
            alone = clip.count_noise if joint else 0.0
            noised = release(total.count, noise_multiplier=alone, normals=self._count_normals, step=step)
            self._clip = clip.updated(noised_count=noised["count"].item(), expected_size=self.plan.lots.expected_size)
        return {name: deviation * scale for name, deviation in standard_deviations(total, noise).items()}

    def _captured_update(self, optimizer: torch.optim.Optimizer) -> Callable[[], None] | None:
        """Noise and optimizer as one CUDA graph, where the sum lies in tensors that a graph will write again."""
        joint, clip = self._course.noise(), self._clip.at(self._course.step)
        if not self._sum.borrowed or self._discrete or joint == 0 or isinstance(clip, QuantileClip):
            return None
        total = self._sum.total(self._parameters, clip)
        deviations = standard_deviations(total, joint)
        parts = [Part(total.tensors[name], deviations[name], total.tensors[name]) for name in self._parameters]
        planned = PlannedRelease(parts, 1 / self.plan.lots.expected_size, self._normals, self._course.step)
        return self._update.prepare(optimizer, list(self._parameters.values()), planned)

    def _prepare_noise(self) -> None:
        """Let the noise of this lot be drawn while its gradients are computed, where a core is free for that."""
        if torch.get_num_threads() >= (cpu_count() or 1):
            return  # both would wait for each other: benchmarks/NOTES.md
        count = sum(parameter.numel() for parameter in self._parameters.values())
        on_cpu = all(parameter.device.type == "cpu" for parameter in self._parameters.values())
        if on_cpu and count >= _WORTH_PREPARING and self._course.noise() > 0 and not self._discrete:
            self._normals.prepare(self._course.step, count)

    def _close_lot(self) -> None:
        self._lot = None
        self._sum.clear()
        self._course.step += 1

    def _clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


class Captured:
    """The forward pass of a run as one region with backward; made by `Private.capture`."""

    def __init__(self, private: Private, losses_of: Callable[..., Tensor], copies: int, compile: bool) -> None:
        self._private = private
        self._losses_of = losses_of
        self._copies = copies
        unused = not private._selfcheck
        self._region = Region(losses_of, copies=copies, allow_unused=unused, compile=compile)
        self._checked = not private._selfcheck

    def __call__(self, *batch: Any, mask: Tensor | None = None) -> None:
        """Compute the losses of the batch in hand and add its clipped gradients to the sum of the lot."""
        run, handed = self._private, self._private._in_hand()
        if not self._checked:
            check(run.model, self._losses_of, *batch, copies=self._copies, public_buffers=run._guard.public)
            self._checked = True
        device = next(iter(run._parameters.values())).device
        handed = handed._replace(mask=_both(mask, handed.mask, device))
        clip = run._clip.at(run._course.step)
        run._sum.keep()  # the region writes where it wrote before
        total = self._region(run._parameters, clip, batch, handed)
        if not self._region.replayed:
            run._guard.after_forward()
        run._sum.add(total, clip, borrowed=True)
        run._open_lot("backward").in_hand = None


def _both(mask: Tensor | None, own: Tensor | None, device: torch.device) -> Tensor | None:
    """Rows that count by the user's mask and by the lot's own: padding never counts, whatever the user passes."""
    masks = [one.to(device, non_blocking=True) for one in (mask, own) if one is not None]
    return masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None


def _place(total: Tensor, parameter: Tensor) -> Tensor:
    """Where the released gradient goes: over the sum itself, where the dtypes are the same."""
    return total if total.dtype == parameter.dtype else torch.empty_like(parameter, requires_grad=False)
