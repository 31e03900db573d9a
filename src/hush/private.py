"""Private: the DP-SGD step. Charges before it computes, clips, adds noise once, divides by the plan's constant L.

The model is never wrapped and nothing is attached to it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from hush.checks import provenance
from hush.checks.guards import Guard, check_groups
from hush.checks.optimizers import check_optimizers
from hush.checks.processes import require_one_process
from hush.checks.watch import Watch
from hush.clipping.clips import Clip
from hush.clipping.written import clip_from_dict, clip_to_dict
from hush.gradients.engine import Gradients
from hush.gradients.sums.lot_sum import LotSum
from hush.ledger import Ledger
from hush.ledger.charged_sampler import ChargedSampler
from hush.ledger.charging import ChargeAccount, do_preprocessing, open_account, resume_account
from hush.machine import Machine
from hush.noise.pca import projections_behind, refuse_uncharged
from hush.noise.release import Due, Releaser, distance_of_run, tell_noise
from hush.plan import Plan
from hush.report.spoken import Spoken
from hush.sampling.batches import Batch
from hush.sampling.loader import Loader
from hush.sampling.lot import Lot

if TYPE_CHECKING:
    from hush.captured.lot import CapturedRun

LossesOf = Callable[..., Tensor]
Book = str | PathLike[str] | Ledger | ChargeAccount | Callable[[float], ChargeAccount] | None


class Private(Spoken):
    """Runs a plan on a plain model, with a plain loop and a plain optimizer.

    Guarantee: what `step` writes into the gradients, over all lots together, is the plan's event on the data, charged
    before each lot is handed out: one charge and one noise for each step, also for an empty lot. Sums are divided by
    the plan's expected lot size, never by the real one.

    `losses_of(model, *inputs)` gives one loss for each row and keeps no state. With `data` (arrays, a dataset, a
    Loader) it is checked before an account is opened, and `add` reads the rows of a batch; without, the check comes
    at the first `add`. `ledger` is a path, a Ledger, an account, or None for one in memory. With `seed` the run is
    reproducible and NOT PRIVATE. `public_buffers` are patterns of buffers that may change because they hold nothing
    of the data. A `with` block left by an exception leaves the account open for `Private.resume`.

    >>> import hush
    >>> model, x = nn.Linear(2, 1), torch.zeros(100, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> lots, clip = hush.PoissonLots(examples=100, lot_size=10), hush.FlatClip(1.0)
    >>> plan = Plan(lots=lots, steps=3, clip=clip, noise_multiplier=1.0)
    >>> with Private(model, plan, lambda model, x: model(x).square().squeeze(1), data=x) as private:
    ...     for lot in private.lots():
    ...         for batch in lot.batches(8):
    ...             private.add(batch)
    ...         private.step(optimizer)
    >>> private.steps_done
    3
    """

    _sum: LotSum
    _clip: Clip
    _closed: bool
    _lot: Lot | None
    _due: Due
    captured: "CapturedRun | None"

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        losses_of: LossesOf,
        *,
        data: Any = None,
        ledger: Book = None,
        machine: Machine | None = None,
        seed: int | None = None,
        public_buffers: Sequence[str] = (),
    ) -> None:
        self._prepare(model, plan, losses_of, data, machine, public_buffers)
        seeded = seed is not None
        if callable(ledger):
            account: ChargeAccount | None = ledger(self.distance)
        else:
            account = open_account(plan, ledger, distance=self.distance, seeded=seeded)
        self._begin(account, seed)
        if plan.access is not None:
            do_preprocessing(plan.access, self._course.account)
            self._guard.begin_anew()  # it may have filled buffers

    @classmethod
    def resume(
        cls,
        state: Mapping[str, Any],
        model: nn.Module,
        losses_of: LossesOf,
        *,
        data: Any = None,
        ledger: Book = None,
        machine: Machine | None = None,
    ) -> "Private":
        """Go on where `state_dict` stood, on the ledger that was charged; put model and optimizer back yourself.

        With a seed it continues bit for bit. Without one it draws a new key, and gives a begun epoch of lots up.
        """
        private, plan = cls.__new__(cls), Plan.from_dict(state["plan"])
        private._prepare(model, plan, losses_of, data, machine, tuple(state["public_buffers"]))
        given = ledger(private.distance) if callable(ledger) else ledger
        account = resume_account(plan, given, state["account"], state["charged"])
        private._begin(account, state["seed"])
        private._load(state)
        return private

    def lots(self) -> Iterator[Lot]:
        """The remaining lots of the plan; each is charged before it is handed out, and must be followed by `step`.

        Raises BudgetExhausted where the account has no units left (a resumed run whose lost steps were not reserved).
        """
        if self._course.step >= self.plan.steps and self._lots_were_taken:
            how = "for epoch in private.epochs(): for lot in epoch: ..."
            raise RuntimeError(
                f"all {self.plan.steps} steps of the plan are done, in one pass of lots(); in epochs: {how}"
            )
        return self._lots(self.plan.steps)

    def epochs(self) -> Iterator[Iterator[Lot]]:
        """The same lots, epoch by epoch: `for epoch in private.epochs(): for lot in epoch: ...`."""
        per_epoch = self.plan.lots.steps_per_epoch
        while self._course.step < self.plan.steps:
            end = min(self.plan.steps, (self._course.step // per_epoch + 1) * per_epoch)
            yield self._lots(end)
            if self._course.step < end:
                raise RuntimeError("an epoch was left before its end; go on with its lots, or leave both loops")

    def add(self, batch: Batch, /, *inputs: Any, **named: Any) -> None:
        """Add the clipped gradients of the batch's examples to the sum of the lot; the batch is used up by that.

        What follows it are the inputs of losses_of for its rows; with `data=` they are read if left out. Rows that only
        fill up never count, an example whose gradient is not finite is zero. If it fails, nothing was added; after an
        interrupt in the addition itself the lot has to be begun again or given up, and `step` says so.
        """
        lot, due, additions = self._open_lot("add"), self._due, self._sum.additions
        lot.take(batch)
        try:
            rows = self._watch.rows(batch, inputs, named)
            if self.captured is not None:
                self._watch.before(rows, lot.step, batch)
                self.captured.add(self._sum, rows, batch, due)
                return
            self._guard.must_train(due.parameters)
            self._watch.before(rows, lot.step, batch)
            mask = batch.counting(self._device)
            clipped = self.gradients.clipped_sum(rows, due.clip, mask=mask, rows=batch.size)
            self._guard.after_forward()
            self._sum.add(clipped, due.clip)
        except BaseException:
            if self._sum.additions == additions:
                lot.give_back(batch)
            raise

    def skip(self, batch: Batch) -> None:
        """Leave a batch out on purpose. Never because of what is in it: the statement will name that a batch was."""
        self._open_lot("skip").take(batch)
        self.note("Batches were left out by the user's own code; the guarantee needs that no record decided which.")

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        """Release the lot's sum with noise, divided by L, as the gradient, and let the optimizers use it.

        Together they hold the trainable parameters, each once. Without any, `p.grad` is yours to use.
        """
        self._open_lot("step").must_be_used_up()
        self._sum.must_be_whole()
        check_optimizers(optimizers, self._due.parameters, self.model, first=self._due.step == 0)
        update = None if self.captured is None else self.captured.step(optimizers, self._sum, self._due)
        if update is not None:
            self._close_lot()  # before the noise is used: whatever happens, it is never drawn again
            update()
            return
        deviations, following = self._releaser.release(self._sum, self._due)
        parameters, self._clip = self._due.parameters, following or self._clip
        self._close_lot()  # before the optimizers: whatever happens there, this lot's noise is never drawn again
        for optimizer in optimizers:
            tell_noise(optimizer, parameters, deviations)
            optimizer.step()

    def restart(self) -> None:
        """Forget what was added up for the open lot and hand its batches out again (after out-of-memory, say)."""
        lot = self._open_lot("restart")
        self._sum.clear()  # first: no ticket is free again while anything of it is kept
        lot._restart()

    def abandon(self) -> None:
        """Give the open lot up: it stays charged, and the parameters stay as they are."""
        self._open_lot("abandon")
        self._close_lot()

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, in plain values: never a key, never a sum. Settles the account; between lots only."""
        if self._lot is not None:
            raise RuntimeError(f"lot {self._lot.step} is open; save after private.step(optimizer)")
        self._guard.must_hold_nothing_new()
        to_dict = getattr(self._course.account, "to_dict", None)
        return self._course.state_dict() | {
            "seed": self._course.seed,
            "account": None if to_dict is None else to_dict(),
            "public_buffers": list(self._guard.public),
            "clip": clip_to_dict(self._clip),
            "notes": list(self.notes),
            "seeded_parts": self.seeded_parts,
        }

    def close(self) -> None:
        """End the run: close the account, clear the gradients. Nothing was ever attached to the model."""
        if self._closed:
            return
        self._closed, self._lot = True, None
        self._sum.clear()
        self.model.zero_grad()
        if self.account is not None:
            self.account.close()

    def __enter__(self) -> "Private":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()

    def _prepare(
        self,
        model: nn.Module,
        plan: Plan,
        losses_of: LossesOf,
        data: Any,
        machine: Machine | None,
        public_buffers: Sequence[str],
    ) -> None:
        """Everything that can be refused before there is an account."""
        require_one_process()
        if not callable(losses_of):
            raise TypeError(
                f"expected losses_of(model, *inputs) after the plan, got {type(losses_of).__name__}; a ledger is given "
                "by name: ledger=..."
            )
        self.model, self.plan, self.machine, self.notes = model, plan, machine or Machine(), list[str]()
        self._guard = Guard(model, public_buffers)
        parameters = self._guard.begin_lot()  # what cannot be trained is refused before anything is charged
        check_groups(plan.clip.at(0), parameters, noisy=plan.noise_at(0) > 0)
        self._device = next(iter(parameters.values())).device
        everything = dict(model.named_parameters())  # frozen ones too, which may be trained later
        self.distance = distance_of_run(plan.steps + plan.reserve, everything) if plan.noise == "float_safe" else 0.0
        self._clip, self._sum, self._lot, self._closed, self._lots_were_taken = plan.clip, LotSum(), None, False, False
        self.gradients = Gradients(losses_of, model, engine=self.machine.engine)
        self._loader = None if data is None else Loader.of(data)
        self.data_name = "the training set" if self._loader is None else self._loader.name
        self.public_buffers = self._guard.public
        self._watch = Watch(self.gradients, public_buffers, self._loader, self._device)
        self._watch.whole_way(plan.lots.examples)
        arrays = [] if self._loader is None else self._loader.tensors
        self.seeded_parts = refuse_uncharged(projections_behind(model, arrays), plan.preprocessing)
        self.notes += provenance.notes_on(model, self._loader)

    def _load(self, state: Mapping[str, Any]) -> None:
        self._course.load_state_dict(dict(state))
        self._releaser.take(self._course.key)
        self._clip, self._sum = clip_from_dict(state["clip"]), LotSum()
        self.notes, self.seeded_parts = list(state["notes"]), self.seeded_parts or state["seeded_parts"]

    def _begin(self, account: ChargeAccount | None, seed: int | None) -> None:
        self._course = ChargedSampler(self.plan, account, seed, distance=self.distance)
        discrete, clip = self.plan.noise == "float_safe", self.plan.clip
        self._releaser = Releaser(self._course.key, lot_size=self.plan.lots.lot_size, discrete=discrete)
        self.captured = None
        if self.machine.captures(self._device, clip.at(0), clip.at(self.plan.steps - 1)):
            from hush.captured.lot import CapturedRun

            fused = self.machine.compile is True
            self.captured = CapturedRun(self.gradients, self._guard, self._releaser, compile=fused)

    def _lots(self, end: int) -> Iterator[Lot]:
        while self._course.step < end:
            if self._closed:
                raise RuntimeError("this run was ended by close(); make a new Private")
            if self._lot is not None:
                words = "call private.step(optimizer) after its batches, also after an empty lot, or private.abandon()"
                raise RuntimeError(f"lot {self._lot.step} was charged but not used: {words} to give it up")
            self._lots_were_taken = True
            self.model.zero_grad()
            self._sum.clear()
            step = self._course.step
            parameters = self._guard.begin_lot(step)
            lot = self._course.next_lot()
            lot.read_with(self._loader, pad=self.captured is not None)
            self._due = Due(parameters, self._clip.at(step), self._course.noise(), step)
            self._lot = lot  # last: an interrupt before it loses a charge, and leaves no lot half open
            yield lot

    def _open_lot(self, wanted: str) -> Lot:
        if self._lot is None:
            raise RuntimeError(f"{wanted} needs an open lot, one of `for lot in private.lots():`")
        self._course.must_be_held()
        return self._lot

    def _close_lot(self) -> None:
        provenance.note_release(self.model)
        self._sum.clear()
        self._course.step += 1  # while the lot is open: an interrupt may cost a step, and never gives one twice
        self._lot = None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a run cannot be copied: both copies would add to one sum; save its state_dict()")
