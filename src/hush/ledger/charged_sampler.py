"""Where a run stands in its plan: units are charged, then drawn, then handed out lot by lot."""

import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from hush.accounting.approximate_noise import epsilon_of_inexact
from hush.accounting.bounds import Bounds
from hush.ledger.charging import ChargeAccount
from hush.plan import Plan
from hush.randomness.streams import Key, Stream, this_process
from hush.sampling.draws import Indices
from hush.sampling.lot import Lot


class ChargedSampler:
    """Walks through a plan, one lot at a time.

    Guarantee: no lot is handed out before its unit is on record in the account, and each lot gets the noise of the
    unit that was charged for it, also in a resumed run whose account is ahead of its steps. Lots that were drawn ahead
    stay unknown to everybody; with a secret key neither a forked child nor a resumed run ever uses them.
    """

    def __init__(self, plan: Plan, account: ChargeAccount | None, seed: int | None, *, distance: float = 0.0) -> None:
        self.plan = plan
        self.distance = distance
        """How far all that is released may lie from the law that is accounted, in total variation."""
        self.account = account
        if account is not None:
            account.must_cover(plan.preprocessing, plan.units)
        self.seed = seed
        self.step = 0
        self._unit_number = -1
        self._steps_per_unit, self._units_per_draw = plan.lots.steps_per_unit, plan.lots.units_per_draw
        self._last_paid = plan.steps + plan.reserve - 1
        self._units_drawn = 0
        self._unit: list[Indices] = []
        self._holder: object = None
        self.take_key()

    def take_key(self) -> None:
        """A key of its own for every start: nothing that was drawn before can be drawn again, unless seeded."""
        self.key = Key.from_os() if self.seed is None else Key.from_seed(self.seed)
        self._home = this_process()
        self._draw_number = -1
        self._draw: Sequence[Indices] = []  # the lots of several units

    @property
    def charged(self) -> int:
        """Units of the account that were handed out or are lost; without an account, units drawn."""
        return self.account.taken if self.account is not None else self._unit_number + 1

    def next_lot(self) -> Lot:
        """The lot of the current step; charges and draws a new unit where the last one is used up."""
        if self._home != this_process():
            self._leave_to_parent()
        if not self._unit:
            self._unit_number = self.account.take() if self.account is not None else self._unit_number + 1
            self._unit = self._lots_of(self._units_drawn)
            self._units_drawn += 1
        self._holder = _here()
        return Lot(self.step, self._unit.pop(0))

    def must_be_held(self) -> None:
        """Refuse the lot that was handed out last to a forked child or another thread: each would release it."""
        if self._holder != _here():
            raise RuntimeError(
                "this lot was handed out to another process or thread, and one charge pays for one release: take and "
                "use each lot in one thread, and make a Private of its own in a forked process"
            )

    def noise(self) -> float:
        """The noise multiplier that was paid for the lot that was drawn last."""
        paid = (self._unit_number + 1) * self._steps_per_unit - len(self._unit) - 1
        return self.plan.noise_at(min(paid, self._last_paid))

    def spent(self, delta: float) -> Bounds:
        """Epsilon of all that was charged."""
        account = self.account
        if account is None:
            return self.plan.epsilon(delta=delta)
        beyond = max(0.0, self.distance - account.distance)  # of an account that was opened for other noise
        return epsilon_of_inexact(lambda delta: account.so_far(delta=delta), delta=delta, distance=beyond)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, never a key; what was reserved ahead is given back first."""
        if self.account is not None:
            self.account.settle()
        return {
            "plan": self.plan.to_dict(),
            "step": self.step,
            "charged": self.charged,
            "unit_number": self._unit_number,
            "units_drawn": self._units_drawn,
            "lots_left_in_unit": len(self._unit),
            "seeded": self.seed is not None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where the saved run stood; without a seed a begun epoch is given up and stays charged."""
        if Plan.from_dict(state["plan"]) != self.plan:
            raise ValueError("the saved run follows another plan; make Private with Plan.from_dict(state['plan'])")
        if state["seeded"] != (self.seed is not None):
            was = "seeded, and this one is not" if state["seeded"] else "not seeded, and this one is"
            raise ValueError(f"the saved run was {was}: a run keeps its kind of randomness")
        self.take_key()
        if self.account is not None:
            self.account.spend_up_to(state["charged"])
        self._unit_number = state["unit_number"]
        self.step, self._units_drawn, self._unit = state["step"], state["units_drawn"], []
        left = state["lots_left_in_unit"]
        if self.seed is not None and left:
            self._unit = self._lots_of(self._units_drawn - 1)[-left:]

    def _lots_of(self, unit: int) -> list[Indices]:
        """The lots of one unit, from the draw that it belongs to."""
        number, place = divmod(unit, self._units_per_draw)
        if self._draw_number != number:
            # A seeded draw has its number, to be resumed; a secret one the next: one that was interrupted is lost.
            claim = self.key.claim("lots", step=None if self.key.private else number)
            self._draw, self._draw_number = self.plan.lots.draw(Stream(claim)), number
        start = place * self._steps_per_unit
        return list(self._draw[start : start + self._steps_per_unit])

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a run cannot be copied: both copies would draw the same lots and noise; save its state_dict()")

    def _leave_to_parent(self) -> None:
        """In a forked child, whose key is another: what was drawn before is the parent's, the rest of an epoch too."""
        self._home = this_process()
        self._draw_number, self._draw = -1, []
        if self.key.private:
            self._unit = []


def _here() -> object:
    """The process and the thread that run this."""
    return this_process(), threading.get_ident()
