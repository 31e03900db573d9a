"""One training from its beginning to its end: account, lots, evaluation, checkpoints, report."""

import math
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hush import accounting
from hush.accounting.approximate_noise import epsilon_of_inexact
from hush.clipping.written import clip_from_dict
from hush.ledger import BudgetExhausted, Ledger, checkpoints
from hush.ledger.checkpoints import Checkpoint
from hush.machine import Machine
from hush.plan import Plan
from hush.private import Private
from hush.report import statement_of, write_report
from hush.report.facts import finite
from hush.sampling.loader import Loader
from hush.training import run_folder as saving
from hush.training.account import Charged, open_charged, resume_charged
from hush.training.callbacks import Averaging
from hush.training.choosing import Judge
from hush.training.diagnostics import unsafe_diagnostics
from hush.training.evaluation import HeldOut
from hush.training.physical_batches import LotRunner, first_size
from hush.training.preflight import try_held_out
from hush.training.progress import Progress, announce
from hush.training.record import facts_of_training
from hush.training.result import Result
from hush.training.run import Run
from hush.training.warnings import PrivacyWarning, about_delta

_SECONDS_BETWEEN = 20.0  # a checkpoint costs tens of milliseconds; a crash loses at most an epoch or so many seconds


class Trainer:
    """The state of a training: what moves, what was measured, where it is saved."""

    def __init__(
        self,
        model: nn.Module,
        loader: Loader,
        losses_of: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        held_out: HeldOut | None,
        run: Run,
        machine: Machine,
        device: torch.device,
    ) -> None:
        self.model, self.loader, self.losses_of, self.optimizer = model, loader, losses_of, optimizer
        self.plan, self.held_out, self.run, self.machine, self.device = plan, held_out, run, machine, device
        averages = [callback for callback in run.callbacks if isinstance(callback, Averaging)]
        self.averaging = averages[0] if averages else None
        self.judge = Judge(model, held_out, self.averaging, device)
        self.history: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.ended: str | None = None
        self.preprocessing = "none" if plan.access is None else "begun"
        self.shown = run.unsafe_diagnostics
        """Whether unsafe diagnostics were ever shown; it never becomes false again."""
        self.resumed = 0
        self.earlier_seconds, self.began = 0.0, time.monotonic()
        # As it begins: where memory runs out it is halved, which a large lot may decide, and which is kept nowhere.
        size = machine.batch_size
        self.batch_size = min(size, loader.examples) if size else first_size(plan.lots, device)
        self.saved_at = -math.inf
        self.private: Private | None = None
        self.book: Ledger | None = None

    # Beginning -----------------------------------------------------------------------------------------------------

    def begin(self, folder: Path | None, saved: Checkpoint | None) -> None:
        """Take the account and make the run; or stand where the saved run stood."""
        self.folder = folder
        if saved is not None:
            self._resume(saved)
            return
        assert self.plan.budget is not None
        self._warn(about_delta(self.plan.budget.delta, self.loader.examples))
        self.private = Private(
            self.model,
            self.plan,
            self.losses_of,
            data=self.loader,
            ledger=self._open,  # once the model was found right
            machine=self.machine,
            seed=self.run.seed,
            public_buffers=self.run.about.public_buffers,
        )
        self.preprocessing = "none" if self.plan.access is None else "done"
        self._save()

    def _open(self, distance: float) -> Any:
        self._warn(try_held_out(self.model, self.loader, self.held_out, self.device))
        self._take(open_charged(self.plan, self.run, self.folder, self._known_by(), distance=distance))
        if self.plan.access is not None:
            self._save()  # on record as begun: after a crash in it nobody does it a second time for one price
        return self.charged.account

    def _resume(self, saved: Checkpoint) -> None:
        facts = saved.facts
        if facts["preprocessing"]["state"] == "begun":
            raise ValueError(
                f"the run was interrupted during its preprocessing ({facts['preprocessing']['name']}), whose result is "
                "lost and stays charged; begin again in another folder"
            )
        self.preprocessing, self.notes = facts["preprocessing"]["state"], list(facts["notes"])
        self.history, self.shown = list(facts["history"]), self.shown or facts["unsafe_diagnostics"]
        self.ended, self.judge.since_best = facts["ended"], facts["since_best"]
        self.earlier_seconds, self.resumed = facts["seconds"], facts["resumed"] + 1
        self.batch_size = facts["batch_size"] if self.machine.batch_size is None else self.batch_size
        saving.unpack(saved.state, self.model, self.optimizer, self.run.callbacks, self.judge)
        assert self.folder is not None
        self._take(resume_charged(saved, self.run, self.folder, self._known_by()))
        account: Any = self.charged.account
        self.private = Private.resume(
            facts["run"], self.model, self.losses_of, data=self.loader, ledger=account, machine=self.machine
        )
        if "random" in saved.state:
            saving.set_random_state(saved.state["random"], self.device)

    def _known_by(self) -> Any:
        """What a ledger takes the fingerprint of; a dataset read item by item is read whole only for a shared one."""
        if self.loader.fingerprint is not None:
            return self.loader.fingerprint
        if self.run.ledger is not None or self.loader.in_memory:
            return self.loader.data
        count = len(self.loader)  # of a dataset some records, so that another one is noticed when the run is resumed
        return [count, *(self.loader.data[i] for i in sorted({0, 1, count // 2, count - 1}) if 0 <= i < count)]

    def _take(self, charged: Charged) -> None:
        self.charged, self.book = charged, charged.book
        if self.run.progress and self.ended is None:
            announce(self.plan, resumed=self.resumed > 0, accountant=self.plan.accountant)

    # The loop ------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Lot by lot until the plan, the account or patience is at an end."""
        assert self.plan.budget is not None
        if self.ended is not None:
            return
        lots = self.plan.lots
        progress = Progress(
            steps=self.plan.steps,
            steps_per_epoch=lots.steps_per_epoch,
            lot_size=lots.lot_size,
            budget=self.plan.budget,
            show=self.run.progress,
        )
        with progress:
            try:
                self._lots(progress)
            except BudgetExhausted:
                self.ended = "account"
                self._warn(
                    f"the run ended after {self._private.steps_done} of {self.plan.steps} steps: steps that a crash "
                    "lost stay spent, and its account holds no more. A reserve in the plan keeps some for that"
                )
                self._measure(progress, last=True)
            except KeyboardInterrupt:
                with suppress(RuntimeError):  # there may be no open lot
                    self._private.abandon()
                self._save()  # nothing but the open lot is lost
                raise
            finally:
                for callback in self.run.callbacks:
                    callback.end()

    def _lots(self, progress: Progress) -> None:
        private, per_epoch = self._private, self.plan.lots.steps_per_epoch
        compile = self.machine.compile if self.run.seed is None or self.machine.compile != "auto" else False
        padded = private.captured is not None or (self.device.type == "cpu" and self.loader.in_memory)
        runner = LotRunner(private, self.batch_size, self.device, padded=padded, compile=compile)
        assert private.account is not None
        self._units_before, self._steps_before = private.account.taken, private.steps_done
        if not self.history:
            self._measure(progress)
        for lot in private.lots() if private.steps_done < self.plan.steps else ():
            runner(lot)
            private.step(self.optimizer)
            step = private.steps_done
            ended = step % per_epoch == 0
            for callback in self.run.callbacks:
                callback.after_step(step, epoch_ended=ended)
            if ended or step == self.plan.steps:
                self._measure(progress, last=step == self.plan.steps)
            if step < self.plan.steps and self._save_is_due(step):
                self._save()
            progress.reach(step)
            if self.judge.impatient:
                self.ended = "held-out"
                return
        self.ended = "budget" if self.plan.cut_short else "finished"

    def _save_is_due(self, step: int) -> bool:
        """Every so many steps; by default at the ends of epochs, unless the last checkpoint is only seconds old."""
        if self.run.checkpoint_every is not None:
            return step % self.run.checkpoint_every == 0
        return step % self.plan.lots.steps_per_epoch == 0 and time.monotonic() - self.saved_at > _SECONDS_BETWEEN

    def _measure(self, progress: Progress, *, last: bool = False) -> None:
        """Epsilon by now, and what the held-out set says where a measurement is due."""
        step, per_epoch = self._private.steps_done, self.plan.lots.steps_per_epoch
        entry: dict[str, Any] = {
            "step": step,
            "epoch": step / per_epoch,
            "epsilon": self._spent(),
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
        }
        held_out = self.held_out
        if held_out is not None and (last or step // per_epoch % held_out.every == 0):
            entry |= self.judge.measure(step)
        for callback in self.run.callbacks:
            callback.measured(finite(entry))
        if self.run.unsafe_diagnostics:
            clip = clip_from_dict(self._private.state_dict()["clip"]).at(min(step, self.plan.steps - 1))
            entry |= unsafe_diagnostics(self._private.gradients, self.loader, clip, self.device)
        self.history.append(entry)
        label = held_out.label if held_out is not None else ""
        ahead = self._spent(more_steps=per_epoch)  # what the bar shows until then must not be less than what is spent
        progress.learn(epsilon=ahead, step=step, note=f"{label} {entry[label]:.4f}" if label in entry else "")

    def _spent(self, *, more_steps: int = 0) -> float:
        """Epsilon charged so far, by the accountant of the plan, or after so many steps more; infinite if seeded."""
        if not self._private.protects:
            return math.inf
        assert self.plan.budget is not None
        per_unit, most = self.plan.lots.steps_per_unit, self.plan.steps + self.plan.reserve
        units = -(-(self._private.steps_done - self._steps_before + more_steps) // per_unit)
        event = self.plan.event_after(min((self._units_before + units) * per_unit, most))
        return epsilon_of_inexact(
            lambda delta: accounting.epsilon(event, delta=delta, accountant=self.plan.accountant),
            delta=self.plan.budget.delta,
            distance=self._private.distance,
        ).upper

    # The end -------------------------------------------------------------------------------------------------------

    def finish(self) -> Result:
        """The last checkpoint, the end of the account, the chosen parameters into the model, the report."""
        with saving.only_warned("the last checkpoint was not written"):
            self._save()
        facts = facts_of_training(self)
        with saving.only_warned("the account was not closed, and all its units stay spent"):
            self._private.close()
        self.judge.put_back()
        statement = statement_of(facts)
        with saving.only_warned("the ledger was not read, and the statement is without it"):
            statement = statement_of(facts, ledger=self.book)
        report = None
        if self.folder is not None:
            with saving.only_warned("the model was not written"):
                saving.write_model(self.folder, self.model)
            with saving.only_warned("the report was not written"):
                report = write_report(self.folder, statement)
        ended, steps, seconds = str(self.ended), self._private.steps_done, facts["seconds"]
        return Result(self.model, statement, tuple(self.history), ended, steps, seconds, report)

    def close_book(self) -> None:
        """Close the ledger's file if this run has opened it; its accounts stay as they are."""
        if self.book is not None and self.book is not self.run.ledger:
            self.book.close()

    @property
    def _private(self) -> Private:
        assert self.private is not None
        return self.private

    def _save(self) -> None:
        """A checkpoint, where the run has a folder; the facts settle the account first, so the head includes that."""
        if self.folder is None:
            return
        facts = facts_of_training(self)
        state = saving.pack(self.model, self.optimizer, self.run.callbacks, self.judge)
        if self.run.seed is not None:
            state["random"] = saving.random_state(self.device)
        seen = None if self.book is None else self.book.head()
        checkpoints.save(self.folder / saving.CHECKPOINT, Checkpoint(state=state, facts=facts, seen=seen))
        self.saved_at = time.monotonic()

    def _warn(self, message: str | None) -> None:
        if message is not None:
            self.notes.append(message)
            warnings.warn(message, PrivacyWarning, stacklevel=4)
