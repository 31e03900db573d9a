"""A thousand damaged files: each is refused with a message, or its balance is right."""

import random
import shutil
from pathlib import Path

import pytest
import torch

from hush.accounting import Budget, Gaussian
from hush.ledger import Ledger, LedgerError, checkpoints

PLAN = {"budget": Budget(epsilon=0.5, delta=1e-7), "units": [(Gaussian(100.0), 100)]}


def mutated(content: bytes, chance: random.Random) -> bytes:
    """One of the ways in which files break."""
    data = bytearray(content)
    at = chance.randrange(len(data))
    length = chance.choice([1, 1, 2, 16, 512, 4096])
    match chance.randrange(8):
        case 0:
            data[at] ^= 1 << chance.randrange(8)
        case 1:
            data[at : at + length] = chance.randbytes(min(length, len(data) - at))
        case 2:
            del data[at:]
        case 3:
            data[at : at + length] = bytes(min(length, len(data) - at))
        case 4:
            del data[at : at + length]
        case 5:
            data += chance.randbytes(length)
        case 6:
            other = chance.randrange(len(data))
            data[at : at + length] = data[other : other + length]
        case 7:
            digits = [i for i, byte in enumerate(data) if 48 <= byte < 58]
            data[chance.choice(digits)] = chance.choice(b"0123456789")
    return bytes(data)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A ledger at rest (`rest`), and one as a killed process leaves it, with a journal (`killed`)."""
    folder = tmp_path_factory.mktemp("sound")
    with Ledger(folder / "l", budget=Budget(epsilon=3.0, delta=1e-5)) as ledger:
        for name in ("a", "b", "c"):
            account = ledger.open_account(name, **PLAN)
            account.reserve(60)
            account.settle(60)
        account.close()
        shutil.copytree(folder, folder.with_name("killed"))
        truth = ledger.pages()
    shutil.copytree(folder, folder.with_name("rest"))
    assert (folder.with_name("killed") / "l-wal").stat().st_size > 10_000
    assert [page.spent for page in truth] == [60, 60, 60]
    return folder.parent


@pytest.mark.parametrize(
    ("state", "victim", "count", "least_refused"),
    [("rest", "l", 500, 0.3), ("killed", "l-wal", 250, 0.5), ("killed", "l", 100, 0.0), ("rest", "l-head", 100, 0.5)],
)
def test_a_damaged_ledger_is_refused_or_right(sound, tmp_path, state, victim, count, least_refused):
    chance = random.Random(f"{state} {victim}")
    content = (sound / state / victim).read_bytes()
    refused = 0
    for _ in range(count):
        damaged = mutated(content, chance)
        if damaged == content:
            continue
        shutil.copytree(sound / state, tmp_path / "l")
        (tmp_path / "l" / victim).write_bytes(damaged)
        try:
            with Ledger(tmp_path / "l" / "l") as ledger:
                assert [(page.name, page.spent, page.closed) for page in ledger.pages()] == [
                    ("a", 60, False),
                    ("b", 60, False),
                    ("c", 60, True),
                ]
                assert ledger.remaining() == Budget(epsilon=1.5, delta=9.7e-6)
                ledger.resume_account("a").reserve(61)
        except LedgerError as error:
            assert str(error).startswith("expected ")
            refused += 1
        shutil.rmtree(tmp_path / "l")
    assert refused >= least_refused * count, "the mutations hardly touched anything"


def test_a_damaged_checkpoint_is_refused(tmp_path):
    chance = random.Random(11)
    state = {"model": {"weight": torch.arange(200.0)}, "optimizer": {"step": 7}}
    checkpoints.save(tmp_path / "run", checkpoints.Checkpoint(state, {"step": 7}))
    for name in ("state.pt", "facts.json"):
        path = tmp_path / "run" / "generation-1" / name
        content = path.read_bytes()
        for _ in range(150):
            damaged = mutated(content, chance)
            if damaged == content:
                continue
            path.write_bytes(damaged)
            with pytest.raises(checkpoints.CheckpointError, match=r"expected .*; came .*; "):
                checkpoints.load(tmp_path / "run")
        path.write_bytes(content)
    assert torch.equal(checkpoints.load(tmp_path / "run").state["model"]["weight"], torch.arange(200.0))
