"""One run from its beginning to its end: account, upfront access, lots, evaluation, checkpoints, report."""

import math
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hush import accounting
from hush.accounting.approximate_noise import epsilon_of_inexact
from hush.checks.processes import require_one_process
from hush.ledger import BudgetExhausted, Ledger, checkpoints
from hush.ledger.checkpoints import Checkpoint
from hush.plan import Plan, clip_from_dict
from hush.private import Private
from hush.report import statement_of, write_report
from hush.sampling.loader import Loader
from hush.training import run_folder as saving
from hush.training.account import Charged, open_charged, resume_charged
from hush.training.choosing import Judge
from hush.training.diagnostics import unsafe_diagnostics
from hush.training.options import Conduct, Job
from hush.training.physical_batches import first_size, make_runner
from hush.training.planning import PrivacyWarning, check_delta, make_plan, planned_steps
from hush.training.preflight import check_model, device_of, ledger_data, reproducible
from hush.training.progress import Progress, announce
from hush.training.record import facts_of
from hush.training.result import Result
from hush.training.schedules import check_scheduler
from hush.training.tensorboard import Scribe, open_scribe, require_tensorboard

_SECONDS_BETWEEN = 20.0  # a checkpoint costs tens of milliseconds; a crash loses at most an epoch or so many seconds


def train(job: Job, conduct: Conduct) -> Result:
    """Run the job under the conduct; `fit` and `hush train` end here."""
    require_one_process()
    folder = None if conduct.out is None else Path(conduct.out)
    with saving.held(folder):
        return _train(job, conduct, folder)


def _train(job: Job, conduct: Conduct, folder: Path | None) -> Result:
    saved = saving.find_saved(folder, resume=conduct.resume)
    device = device_of(job, conduct)
    loader = Loader(job.train_set, collate=job.collate, workers=job.workers)
    if saved is None:
        plan = make_plan(job, conduct, loader.examples)
    else:
        plan = saving.check_same_run(saved, job, conduct, loader.examples)
    check_scheduler(job.scheduler, job.optimizer, job.held_out)
    if conduct.tensorboard:
        require_tensorboard(folder)
    job.model.to(device)
    with reproducible(conduct.seed, device):
        run = Run(job, conduct, plan, loader, device)
        try:
            run.begin(folder, saved)
            run.train()
            return run.finish()
        finally:
            run.close_book()


class Run:
    """The state of a run: what moves, what was measured, where it is saved."""

    def __init__(self, job: Job, conduct: Conduct, plan: Plan, loader: Loader, device: torch.device) -> None:
        self.job, self.conduct, self.plan, self.loader, self.device = job, conduct, plan, loader, device
        self.losses_of = job.losses_of()
        self.judge = Judge(job, device)
        self.history: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.ended: str | None = None
        self.upfront = "none" if job.upfront is None else "begun"
        self.resumed = 0
        self.earlier_seconds, self.began = 0.0, time.monotonic()
        # As it begins: where memory runs out it is halved, which a large lot may decide, and which is kept nowhere.
        self.batch_size = min(job.batch_size, loader.examples) if job.batch_size else first_size(plan.lots, device)
        self.saved_at = -math.inf
        self.private: Private | None = None
        self.book: Ledger | None = None

    # Beginning -----------------------------------------------------------------------------------------------------

    def begin(self, folder: Path | None, saved: Checkpoint | None) -> None:
        """Check the model, take the account, do the upfront access; or stand where the saved run stood."""
        self.folder = folder
        data = ledger_data(self.job, self.conduct, self.loader)
        if saved is not None:
            self._resume(saved, data)
            return
        if (doubt := check_delta(self.conduct.budget.delta, self.loader.examples)) is not None:
            self._warn(doubt)
        check_model(self.job, self.plan, self.loader, self.device)
        self._take(open_charged(self.plan, self.conduct, folder, data))
        self._do_upfront()
        self.private = self._make_private()
        self._save()

    def _do_upfront(self) -> None:
        if self.job.upfront is None:
            return
        self._save()  # on record as begun: after a crash in it nobody does it a second time for one price
        found = self.job.upfront.run()
        if found != self.job.upfront.event:
            raise ValueError(
                f"the upfront access {self.job.upfront.name!r} was {found}, but {self.job.upfront.event} was charged: "
                "declare the event that it really is"
            )
        self.upfront = "done"

    def _resume(self, saved: Checkpoint, data: Any) -> None:
        facts = saved.facts
        if facts["upfront"]["state"] == "begun":
            raise ValueError(
                f"the run was interrupted during its upfront access ({facts['upfront']['name']}), whose result is lost "
                "and stays charged; begin again in another folder"
            )
        self.upfront, self.history, self.notes = facts["upfront"]["state"], list(facts["history"]), list(facts["notes"])
        self.ended, self.judge.since_best = facts["ended"], facts["since_best"]
        self.earlier_seconds, self.resumed = facts["seconds"], facts["resumed"] + 1
        self.batch_size = facts["batch_size"] if self.job.batch_size is None else self.batch_size
        saving.unpack(saved.state, self.job, self.judge)
        assert self.folder is not None
        self._take(resume_charged(saved, self.conduct, self.folder, data))
        self.private = self._make_private()
        self.private.load_state_dict(facts["run"])
        if "random" in saved.state:
            saving.set_random_state(saved.state["random"], self.device)

    def _take(self, charged: Charged) -> None:
        self.charged, self.book = charged, charged.book
        if self.conduct.progress and self.ended is None:
            announce(self.plan, resumed=self.resumed > 0, accountant=self.conduct.accountant)

    def _make_private(self) -> Private:
        return Private(
            self.job.model,
            self.plan,
            self.charged.account,
            seed=self.conduct.seed,
            noise=self.conduct.noise,
            public_buffers=self.job.public_buffers,
        )

    # The loop ------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """All lots that are left."""
        if self.ended is not None:
            return
        lots = self.plan.lots
        progress = Progress(
            steps=self.plan.steps,
            steps_per_epoch=lots.steps_per_epoch,
            lot_size=lots.expected_size,
            budget=self.conduct.budget,
            show=self.conduct.progress,
        )
        with progress, open_scribe(self.folder, self.conduct.tensorboard) as scribe:
            try:
                self._lots(progress, scribe)
            except BudgetExhausted:
                self.ended = "account"
                self._warn(
                    f"the run ended after {self._private.steps_done} of {self.plan.steps} steps: steps that a crash "
                    "lost stay spent, and its account holds no more. A reserve in the plan keeps some for that"
                )
                self._measure(progress, scribe, last=True)
            except KeyboardInterrupt:
                with suppress(RuntimeError):  # there may be no open lot
                    self._private.abandon()
                self._save()  # nothing but the open lot is lost
                raise

    def _lots(self, progress: Progress, scribe: Scribe) -> None:
        private, per_epoch = self._private, self.plan.lots.steps_per_epoch
        runner = make_runner(private, self.loader, self.losses_of, self.conduct, self.device, self.batch_size)
        assert private.account is not None
        self._units_before, self._steps_before = private.account.taken, private.steps_done
        if not self.history:
            self._measure(progress, scribe)
        for lot in private.lots():
            runner(lot)
            private.step(self.job.optimizer)
            step = private.steps_done
            self._after_step(step)
            if step % per_epoch == 0 or step == self.plan.steps:
                self._measure(progress, scribe, last=step == self.plan.steps)
            if step < self.plan.steps and self._save_is_due(step):
                self._save()
            progress.reach(step)
            if self.judge.impatient:
                self.ended = "held-out"
                return
        self.ended = "finished" if self.plan.steps >= planned_steps(self.job, self.plan.lots) else "budget"

    def _save_is_due(self, step: int) -> bool:
        """Every so many steps; by default at the ends of epochs, unless the last checkpoint is only seconds old."""
        if self.conduct.checkpoint_every is not None:
            return step % self.conduct.checkpoint_every == 0
        return step % self.plan.lots.steps_per_epoch == 0 and time.monotonic() - self.saved_at > _SECONDS_BETWEEN

    def _after_step(self, step: int) -> None:
        if self.judge.average is not None:
            self.judge.average.update()
        scheduler = self.job.scheduler
        if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
            return
        if self.job.scheduler_every == "step" or step % self.plan.lots.steps_per_epoch == 0:
            scheduler.step()

    def _measure(self, progress: Progress, scribe: Scribe, *, last: bool = False) -> None:
        """Epsilon by now, and what the held-out set says where a measurement is due."""
        step, per_epoch = self._private.steps_done, self.plan.lots.steps_per_epoch
        entry: dict[str, Any] = {
            "step": step,
            "epoch": step / per_epoch,
            "epsilon": self._spent(),
            "learning_rate": float(self.job.optimizer.param_groups[0]["lr"]),
        }
        held_out = self.job.held_out
        if held_out is not None and (last or step // per_epoch % held_out.every == 0):
            entry |= self.judge.measure(step)
        if self.conduct.unsafe_diagnostics:
            clip = clip_from_dict(self._private.state_dict()["clip"]).at(min(step, self.plan.steps - 1))
            trained = {name: p for name, p in self.job.model.named_parameters() if p.requires_grad}
            entry |= unsafe_diagnostics(self.losses_of, self.loader, trained, clip, self.device)
        self.history.append(entry)
        label = held_out.label if held_out is not None else ""
        ahead = self._spent(more_steps=per_epoch)  # what the bar shows until then must not be less than what is spent
        progress.learn(epsilon=ahead, step=step, note=f"{label} {entry[label]:.4f}" if label in entry else "")
        scribe.write(entry)

    def _spent(self, *, more_steps: int = 0) -> float:
        """Epsilon charged so far, by the accountant of the run, or after so many steps more."""
        per_unit, most = self.plan.lots.steps_per_unit, self.plan.steps + self.plan.reserve
        units = -(-(self._private.steps_done - self._steps_before + more_steps) // per_unit)
        event = self.plan.event_after(min((self._units_before + units) * per_unit, most))
        return epsilon_of_inexact(
            lambda delta: accounting.epsilon(event, delta=delta, accountant=self.conduct.accountant),
            delta=self.conduct.budget.delta,
            distance=self._private.distance,
        ).upper

    # The end -------------------------------------------------------------------------------------------------------

    def finish(self) -> Result:
        """The last checkpoint, the end of the account, the chosen parameters into the model, the report."""
        with saving.only_warned("the last checkpoint was not written"):
            self._save()
        with saving.only_warned("the account was not closed, and all its units stay spent"):
            self._private.detach()
        self.judge.put_back()
        facts = facts_of(self)
        statement = statement_of(facts)
        with saving.only_warned("the ledger was not read, and the statement is without it"):
            statement = statement_of(facts, ledger=self.book)
        report = None
        if self.folder is not None:
            with saving.only_warned("the model was not written"):
                saving.write_model(self.folder, self.job.model)
            with saving.only_warned("the report was not written"):
                report = write_report(self.folder, statement)
        ended, steps, seconds = str(self.ended), self._private.steps_done, facts["seconds"]
        return Result(self.job.model, statement, tuple(self.history), ended, steps, seconds, report)

    def close_book(self) -> None:
        """Close the ledger's file if this run has opened it; its accounts stay as they are."""
        if self.book is not None and self.book is not self.conduct.ledger:
            self.book.close()

    @property
    def _private(self) -> Private:
        assert self.private is not None
        return self.private

    def _save(self) -> None:
        """A checkpoint, where the run has a folder; facts_of settles the account first, so the head includes that."""
        if self.folder is None:
            return
        facts = facts_of(self)
        state = saving.pack(self.job, self.judge)
        if self.conduct.seed is not None:
            state["random"] = saving.random_state(self.device)
        seen = None if self.book is None else self.book.head()
        checkpoints.save(self.folder / saving.CHECKPOINT, Checkpoint(state=state, facts=facts, seen=seen))
        self.saved_at = time.monotonic()

    def _warn(self, message: str) -> None:
        self.notes.append(message)
        warnings.warn(message, PrivacyWarning, stacklevel=4)
