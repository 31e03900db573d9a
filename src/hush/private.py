"""Private: the DP-SGD step. Charges before it computes, clips, adds noise once, divides by the plan's constant L.

The model is never wrapped and nothing is attached to it.
"""

from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hush.accounting.bounds import Bounds
from hush.captured.batch import Region
from hush.checks.check import check
from hush.checks.guards import Guard, check_groups, check_optimizer
from hush.checks.processes import require_one_process
from hush.gradients.clipped import clipped_sum
from hush.gradients.sums.lot_sum import LotSum
from hush.ledger import Ledger
from hush.ledger.charged_sampler import ChargedSampler
from hush.ledger.charging import ChargeAccount, open_account
from hush.noise.release import Due, Releaser, distance_of_run
from hush.plan import Plan, clip_from_dict, clip_to_dict
from hush.sampling.batches import Handed, rows_that_count
from hush.sampling.lots import Lot


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

    >>> from hush.clipping.clips import FlatClip
    >>> from hush.sampling.lots import PoissonLots
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
        require_one_process()
        self.model = model
        self.plan = plan
        if noise not in ("gaussian", "discrete"):
            raise ValueError(f"noise must be 'gaussian' or 'discrete', got {noise!r}")
        self._selfcheck = selfcheck
        self._guard = Guard(model, public_buffers)
        self._parameters = self._guard.begin_lot()  # what cannot be trained is refused before anything is charged
        check_groups(plan.clip.at(0), self._parameters, noisy=plan.noise_at(0) > 0)
        parameters = dict(model.named_parameters())
        distance = distance_of_run(plan.steps + plan.reserve, parameters) if noise == "discrete" else 0.0
        self._course = ChargedSampler(plan, open_account(plan, ledger, distance=distance), seed, distance=distance)
        self._releaser = Releaser(self._course.key, expected_size=plan.lots.expected_size, discrete=noise == "discrete")
        self._clip = plan.clip
        self._sum = LotSum()
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
            step = self._course.step
            self._due = Due(self._parameters, self._clip.at(step), self._course.noise(), step)
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
        mask = rows_that_count(handed._replace(wanted=mask), losses.device)
        clip, unused = self._due.clip, not self._selfcheck
        batch = clipped_sum(losses, self._parameters, clip, mask=mask, rows=handed.size, allow_unused=unused)
        self._sum.add(batch, clip)
        self._open_lot("backward").in_hand = None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Release the lot's sum with noise, divided by L, as the gradient, and let the optimizer use it."""
        self._open_lot("step")
        check_optimizer(optimizer, self._parameters.values())
        update = self._releaser.captured(optimizer, self._sum, self._due)
        if update is not None:
            self._close_lot()  # before the noise is used: whatever happens, it is never drawn again
            update()
            return
        deviations, following = self._releaser.release(self._sum, self._due)
        self._clip = following or self._clip
        self._close_lot()  # before the optimizer: whatever happens there, this lot's noise is never drawn again
        expect_noise = getattr(optimizer, "expect_noise", None)  # a NoiseAware; to ask for the protocol takes long
        if expect_noise is not None:
            expect_noise({self._parameters[name]: deviation for name, deviation in deviations.items()})
        optimizer.step()

    def restart(self) -> None:
        """Forget what was added up for the open lot and hand its batches out again (after out-of-memory, say)."""
        self._open_lot("restart").restart()
        self._sum.clear()

    def abandon(self) -> None:
        """Give the open lot up: it stays charged, and the parameters stay as they are."""
        self._open_lot("abandon")
        self._close_lot()

    def capture(
        self, losses_of: Callable[..., Tensor], *, copies: int = 1, compile: bool = False, in_place: bool = False
    ) -> "Captured":
        """The forward pass as a function of a batch, so that it runs with backward as one region.

        `run = private.capture(losses_of)` is called in the loop as `run(*batch, mask=mask)` in place of computing the
        losses and calling `backward`, with the same results. On a GPU, padded batches with their mask are captured
        once and replayed; with `compile` Inductor fuses them first, which takes a minute for a large model and rounds
        half precision in other places. The only batch of a lot is computed in `step`, for a small model in one launch
        with the update; parameters that change in between are refused. The first call checks `losses_of` as
        `hush.check` does, unless the run has selfcheck=False.

        With `in_place` captured batches are read where they lie, by the work that `step` queues, and not copied: for
        loops that write each batch into the same tensors. They must not be written between the call and `step`; what
        PyTorch notes of that is refused.
        """
        return Captured(self, losses_of, copies=copies, compile=compile, in_place=in_place)

    # What was spent, and where the run stands ------------------------------------------------------------------------

    @property
    def private(self) -> bool:
        """Whether the run protects anybody: a plan with noise, and randomness that nobody can repeat."""
        return self.plan.private and self._course.key.private

    @property
    def distance(self) -> float:
        """How far all that the plan releases may lie from the law that is accounted, in total variation."""
        return self._course.distance

    @property
    def steps_done(self) -> int:
        """Steps of the plan that are behind, abandoned ones included."""
        return self._course.step

    @property
    def account(self) -> ChargeAccount | None:
        """The account that is charged; None for a plan without noise."""
        return self._course.account

    def spent(self, *, delta: float) -> Bounds:
        """Epsilon of all that was charged so far, with what inexact noise ("discrete") adds to delta in the whole plan.

        True for a run that was always meant to end here. If it ends early because of something seen in the data, its
        guarantee is `plan.epsilon(delta=delta)`, the whole plan's.
        """
        return self._course.spent(delta)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, in plain values: never a key, never a sum. Settles the account; between lots only."""
        self._require_no_lot("save")
        return self._course.state_dict() | {"clip": clip_to_dict(self._clip)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` stood.

        With a seed the run continues bit for bit. Without one it draws a new key; an allocated or shuffled epoch that
        was begun is given up and stays charged, since its remaining lots cannot be drawn again without the old key.
        """
        self._require_no_lot("load")
        self._course.load_state_dict(state)
        self._releaser.take(self._course.key)
        self._clip, self._sum = clip_from_dict(state["clip"]), LotSum()

    def detach(self) -> None:
        """End the run: close the account, clear the gradients. Nothing was ever attached to the model."""
        if self._closed:
            return
        self._closed, self._lot = True, None
        self._sum.clear()
        self._clear_gradients()
        self._releaser.close()
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

    def _close_lot(self) -> None:
        self._lot = None
        self._sum.clear()
        self._course.step += 1

    def _clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


class Captured:
    """The forward pass of a run as one region with backward; made by `Private.capture`."""

    def __init__(
        self, private: Private, losses_of: Callable[..., Tensor], *, copies: int, compile: bool, in_place: bool
    ) -> None:
        self._private = private
        self._losses_of = losses_of
        self._copies = copies
        unused = not private._selfcheck
        self._region = Region(losses_of, copies=copies, allow_unused=unused, compile=compile, in_place=in_place)
        self._checked = not private._selfcheck

    def __call__(self, *batch: Any, mask: Tensor | None = None) -> None:
        """Compute the losses of the batch in hand and add its clipped gradients to the sum of the lot."""
        run, handed = self._private, self._private._in_hand()
        if not self._checked:
            check(run.model, self._losses_of, *batch, copies=self._copies, public_buffers=run._guard.public)
            self._checked = True
        if mask is not None:
            handed = handed._replace(wanted=mask)
        clip = run._due.clip
        run._sum.keep()  # the region writes where it wrote before
        placed, replayed = self._region.place(run._parameters, clip, batch, handed, run._guard.state())
        if placed is None:
            run._sum.add(self._region.run(run._parameters, clip, batch, handed), clip)
        if not replayed:
            try:
                run._guard.after_forward()
            except RuntimeError:
                self._region.forget()  # a replay would not be looked at again
                raise
        if placed is not None:
            run._sum.add_later(placed, clip, now=not handed.alone)
        run._open_lot("backward").in_hand = None

    def finish(self) -> None:
        """Queue what was put off until `step`; only a measurement of time needs this."""
        self._private._sum.keep()
