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
    folder = tmp_path_factory.mktemp("sound") / "at"
    folder.mkdir()
    with Ledger(folder / "l", budget=Budget(epsilon=3.0, delta=1e-5)) as ledger:
        for name in ("a", "b", "c"):
            account = ledger.open_account(name, **PLAN)
            account.spend_up_to(60)
            account.settle()
        account.close()
        assert [record.spent for record in ledger.accounts()] == [60, 60, 60]
    return folder


@pytest.mark.parametrize(("victim", "count", "least_refused"), [("l", 850, 0.6), ("l-head", 150, 0.3)])
def test_a_damaged_ledger_is_refused_or_right(sound, tmp_path, victim, count, least_refused):
    chance = random.Random(victim)
    content = (sound / victim).read_bytes()
    refused = 0
    for _ in range(count):
        damaged = mutated(content, chance)
        if damaged == content:
            continue
        shutil.copytree(sound, tmp_path / "l")
        (tmp_path / "l" / victim).write_bytes(damaged)
        if victim == "l":
            (tmp_path / "l" / "l-head").unlink()  # the file itself has to notice
        try:
            with Ledger(tmp_path / "l" / "l") as ledger:
                assert [(record.name, record.spent, record.closed) for record in ledger.accounts()] == [
                    ("a", 60, False),
                    ("b", 60, False),
                    ("c", 60, True),
                ]
                assert ledger.remaining() == Budget(epsilon=1.5, delta=9.7e-6)
                assert ledger.resume_account("a").take() == 60
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
