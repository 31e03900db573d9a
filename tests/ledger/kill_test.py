"""Kill a training run at random moments, again and again, and hold the ledger against what was released.

    python tests/ledger/kill_test.py --kills 200 [--training]

With --training a small network is trained by hush.Private. Without it the run is as light as it can be while it does
everything a run does with its ledger: it makes the file, opens accounts, takes units, releases (one line appended to a
file, which survives SIGKILL), settles, writes checkpoints, resumes, closes.

After every kill: no account has released more than is on record for it, the cap holds, the checkpoint loads or does
not exist yet, and the ledger holds the head that the checkpoint has seen.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from hush.accounting import Budget, Gaussian, epsilon
from hush.clipping.clips import FlatClip
from hush.gradients.functional import per_example
from hush.ledger import BudgetExhausted, Ledger, checkpoints
from hush.plan import Plan
from hush.private import Private
from hush.sampling.lots import PoissonLots

CAP = Budget(epsilon=3.0, delta=1e-5)
SLICE = Budget(epsilon=1.0, delta=1e-6)
ACCOUNTS = 3  # that is how many slices the cap holds
UNIT = Gaussian(100.0)
UNITS = 120
CAP_REACHED = 7


def train(folder: Path) -> None:
    """Go on from wherever the last process died, until the cap allows no further account."""
    seen, step = None, 0
    if checkpoints.exists(folder / "checkpoint"):
        last = checkpoints.load(folder / "checkpoint")
        seen, step = last.seen, last.facts["step"]
    with Ledger(folder / "data.hush", budget=CAP, seen=seen) as ledger:
        released = os.open(folder / "released", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        while True:
            unfinished = [record.name for record in ledger.accounts() if not record.closed]
            if unfinished:
                account = ledger.resume_account(unfinished[0], seen=seen)
            else:
                name = f"run{len(ledger.accounts())}"
                account = ledger.open_account(name, budget=SLICE, units=[(UNIT, UNITS)])
            try:
                while True:
                    account.take()
                    os.write(released, account.name.encode() + b"\n")  # the release, after the charge
                    step += 1
                    if step % 10 == 0:
                        account.settle()
                        state = {"weight": torch.full((100,), float(step))}
                        facts = {"step": step, "account": account.to_dict()}
                        checkpoints.save(folder / "checkpoint", checkpoints.Checkpoint(state, facts, account.head()))
            except BudgetExhausted:
                account.close()


def train_a_network(folder: Path) -> None:
    """The same with lots, gradients, noise and an optimizer: each noisy step is a release."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 8, generator=generator), torch.randint(0, 3, (200,), generator=generator)
    losses_of = per_example(torch.nn.functional.cross_entropy)
    lots = PoissonLots(examples=200, lot_size=20)
    plan = Plan(lots=lots, steps=UNITS, clip=FlatClip(1.0), noise_multiplier=20.0)
    last = checkpoints.load(folder / "checkpoint") if checkpoints.exists(folder / "checkpoint") else None
    released = os.open(folder / "released", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with Ledger(folder / "data.hush", budget=CAP, seen=last.seen if last else None) as ledger:
        while True:
            unfinished = [record.name for record in ledger.accounts() if not record.closed]
            if unfinished:
                account = ledger.resume_account(unfinished[0])
            else:
                name = f"run{len(ledger.accounts())}"
                account = ledger.open_account(
                    name, budget=SLICE, units=plan.units, upfront=plan.preprocessing, data=(x, y)
                )
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if last is not None and last.facts["account"]["name"] == account.name:
                model.load_state_dict(last.state["model"])
                optimizer.load_state_dict(last.state["optimizer"])
                private = Private.resume(last.facts["private"], model, losses_of, data=(x, y), ledger=account)
            else:
                private = Private(model, plan, losses_of, data=(x, y), ledger=account)
            total = last.facts["step"] if last else 0
            try:
                for lot in private.lots():
                    for batch in lot.batches(16):
                        private.add(batch)
                    private.step(optimizer)
                    os.write(released, account.name.encode() + b"\n")
                    total += 1
                    if total % 10 == 0:
                        state = {
                            "model": model.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "weight": torch.full((100,), float(total)),
                        }
                        facts = {"step": total, "private": private.state_dict(), "account": account.to_dict()}
                        last = checkpoints.Checkpoint(state, facts, account.head())
                        checkpoints.save(folder / "checkpoint", last)
            except BudgetExhausted:
                pass  # steps were lost in a crash: this run ends short
            private.close()


def child(folder: Path, run: Callable[[Path], None]) -> None:
    code = 1
    try:
        run(folder)
    except BudgetExhausted:  # a new account was refused: the cap
        code = CAP_REACHED
    except BaseException as error:
        print(f"the run failed: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def check(folder: Path) -> int:
    """Hold the books against the release file; returns the number of units released."""
    released = Counter((folder / "released").read_text().split()) if (folder / "released").exists() else Counter()
    last = checkpoints.load(folder / "checkpoint") if checkpoints.exists(folder / "checkpoint") else None
    if not (folder / "data.hush").exists():
        assert not released and last is None, "something was released without a ledger"
        return 0
    with Ledger(folder / "data.hush", seen=last.seen if last else None) as ledger:
        accounts = {record.name: record for record in ledger.accounts()}
        assert released.keys() <= accounts.keys(), "an account that released something is not on record"
        for name, units in released.items():
            assert units <= accounts[name].spent, (
                f"{name} released {units} units, the ledger states {accounts[name].spent}"
            )
        assert len(accounts) <= ACCOUNTS, "the cap was passed"
    if last is not None:
        step = last.facts["step"]
        assert torch.equal(last.state["weight"], torch.full((100,), float(step))), "a mixed checkpoint"
        assert step <= released.total(), "a checkpoint of steps that were not made"
    return released.total()


def wait_a_while(ground: Path, chance: random.Random) -> None:
    """Half of the kills come at a random time, which finds starts and openings; half after some releases."""
    released = ground / "released"

    def size() -> int:
        return released.stat().st_size if released.exists() else 0

    more = (
        5 * chance.randrange(1, 60) if chance.random() < 0.5 else None
    )  # a release is five bytes, "run0" and a line end
    until = time.monotonic() + (chance.uniform(0, 0.08) if more is None else 3.0)
    begun = size()
    while time.monotonic() < until and (more is None or size() < begun + more):
        time.sleep(0.0005)


def kill_often(kills: int, *, seed: int, folder: Path, run: Callable[[Path], None] = train) -> dict[str, int]:
    """Start and kill until `kills` processes died by SIGKILL; a used-up ledger is followed by a fresh one."""
    chance = random.Random(seed)
    counts = {"kills": 0, "ledgers": 0, "released": 0}
    while counts["kills"] < kills:
        ground = folder / str(counts["ledgers"])
        ground.mkdir()
        counts["ledgers"] += 1
        while True:
            process = os.fork()
            if process == 0:
                child(ground, run)
            wait_a_while(ground, chance)
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
            total = check(ground)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == CAP_REACHED, "a run ended with an error"
                break
            counts["kills"] += 1
            if counts["kills"] == kills:
                break
        counts["released"] += total
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--training", action="store_true", help="train a small network with hush.Private")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Loaded and remembered once, so that the children are killed in their own work.
    epsilon(UNIT * UNITS, delta=SLICE.delta)
    if options.training:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with tempfile.TemporaryDirectory() as folder:
        run = train_a_network if options.training else train
        counts = kill_often(options.kills, seed=options.seed, folder=Path(folder), run=run)
    print(" ".join(f"{name}={count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
