"""Fingerprints and links: the ledger knows its data, and says nothing about it."""

import hashlib

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from hush.accounting import Budget, Gaussian
from hush.ledger import AccountRefused, BudgetExhausted, DataNotLinked, Ledger
from hush.ledger.fingerprint import fingerprint

PLAN = {"budget": Budget(epsilon=0.5, delta=1e-6), "units": [(Gaussian(100.0), 10)]}
X, Y = torch.arange(60.0).reshape(20, 3), torch.arange(20) % 4


def test_hazard_32_other_data_is_refused_until_it_is_linked(tmp_path):
    with Ledger(tmp_path / "l", create=True) as ledger:
        ledger.open_account("a", data=(X, Y), **PLAN)
        ledger.open_account("b", data=(X.clone(), Y.clone()), **PLAN)
        grown = (torch.cat([X, X[:1]]), torch.cat([Y, Y[:1]]))
        with pytest.raises(DataNotLinked, match=r"hush ledger link .*l (\d+) --reason WHY") as refusal:
            ledger.open_account("c", data=grown, **PLAN)
        assert [record.name for record in ledger.accounts()] == ["a", "b"]
        number = int(str(refusal.value).split(" --reason")[0].rsplit(" ", 1)[1])
        ledger.link(refusal=number, reason="one patient came")
        ledger.open_account("c", data=grown, **PLAN)
        ledger.open_account("d", data=(X, Y), **PLAN)
        with pytest.raises(DataNotLinked):
            ledger.open_account("e", data=(X + 1, Y), **PLAN)
        ledger.link(data=(X + 1, Y), reason="shifted")
        ledger.open_account("e", data=(X + 1, Y), **PLAN)
        assert ledger.spent(delta=1e-5).upper == 2.5, "linked data shares the account of the old"


def test_hazard_32_a_resumed_run_brings_the_same_data(tmp_path):
    with Ledger(tmp_path / "l", create=True) as ledger:
        ledger.open_account("a", data=(X, Y), **PLAN).take()
        with pytest.raises(DataNotLinked):
            ledger.resume_account("a", data=(X + 1, Y))
        assert ledger.resume_account("a", data=(X, Y)).taken >= 1


def test_linking_needs_the_number_of_a_refusal(tmp_path):
    with Ledger(tmp_path / "l", create=True) as ledger, pytest.raises(DataNotLinked, match=r"\(here: none\)"):
        ledger.link(refusal=4, reason="no")


@pytest.mark.parametrize(
    "other",
    [
        (X[:-1], Y[:-1]),
        (X.flip(0), Y),
        (X.double(), Y),
        (X.reshape(3, 20), Y),
        (torch.nextafter(X, torch.tensor(1e9)), Y),
        (X, Y.roll(1)),
        X,
        [X, Y, Y],
    ],
)
def test_any_difference_is_other_data(other):
    assert fingerprint(other, salt=b"s") != fingerprint((X, Y), salt=b"s")


def test_the_same_data_in_other_hands_is_the_same(tmp_path):
    expected = fingerprint((X, Y), salt=b"s")
    memory_map = np.memmap(tmp_path / "x", dtype=np.float32, mode="w+", shape=(20, 3))
    memory_map[:] = X.numpy()
    for same in ((X.numpy(), Y.numpy()), TensorDataset(X, Y), [X, Y], (memory_map, Y), (X.t().contiguous().t(), Y)):
        assert fingerprint(same, salt=b"s") == expected


def test_datasets_items_and_odd_types_are_read():
    class Pairs(Dataset):
        def __init__(self, last: int) -> None:
            self.last = last

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int):
            if index >= 3:
                raise AssertionError("read past the end")
            return {"x": X[index], "text": f"word {index}", "y": self.last if index == 2 else 0}

    assert fingerprint(Pairs(1), salt=b"s") == fingerprint(Pairs(1), salt=b"s") != fingerprint(Pairs(2), salt=b"s")
    for odd in (X.bfloat16(), X.half(), torch.zeros(0, 3), np.array(["a", "bc"]), torch.tensor(1.0), X > 3):
        assert len(fingerprint(odd, salt=b"s")) == 64
    assert fingerprint(X.bfloat16(), salt=b"s") != fingerprint(X.bfloat16().view(torch.int16), salt=b"s")
    with pytest.raises(TypeError, match="give the arrays behind it"):
        fingerprint(object(), salt=b"s")


def test_neighbouring_fields_do_not_run_together():
    assert fingerprint(["ab", "c"], salt=b"s") != fingerprint(["a", "bc"], salt=b"s")
    assert fingerprint([[1], [2]], salt=b"s") != fingerprint([[1, 2], []], salt=b"s")


def test_the_fingerprint_is_keyed_and_never_printed(tmp_path, capsys):
    """A plain hash would tell anybody who guesses the data that the guess is right."""
    from hush.commands.app import main

    marks = []
    for name in "ab":
        with Ledger(tmp_path / name, create=True) as ledger:
            ledger.open_account("run", data=X, **PLAN)
            marks.append(ledger.accounts()[0].data)
            with pytest.raises(DataNotLinked) as refusal:
                ledger.open_account("other", data=Y, **PLAN)
            said = str(refusal.value)
            balances = ledger._file.balances
            assert not any(mark in said for mark in (*balances.linked, *balances.refused.values()))
    assert marks[0] != marks[1], "two ledgers must not show that they hold the same data"
    assert hashlib.sha256(X.numpy().tobytes()).hexdigest() not in marks
    with pytest.raises(SystemExit):
        main(["ledger", "show", str(tmp_path / "a"), "--json"])
    assert marks[0] not in capsys.readouterr().out


def test_a_run_without_known_data_is_charged_all_the_same(tmp_path):
    with Ledger(tmp_path / "l", create=True) as ledger:
        ledger.open_account("a", data=X, **PLAN)
        ledger.open_account("b", **PLAN)
        assert [record.data is None for record in ledger.accounts()] == [False, True]
        assert ledger.spent(delta=1e-5).upper == 1.0


def test_a_refused_account_does_not_make_its_data_the_ledgers(tmp_path):
    with Ledger(tmp_path / "l", budget=Budget(epsilon=1.0, delta=1e-5)) as ledger:
        larger = PLAN | {"budget": Budget(epsilon=2.0, delta=1e-6)}
        with pytest.raises(BudgetExhausted):
            ledger.open_account("a", data=(X + 1, Y), **larger)
        with pytest.raises(AccountRefused):
            ledger.resume_account("nobody", data=(X + 1, Y))
        assert len(ledger.entries()) == 1, "nothing but its beginning"
        ledger.open_account("a", data=(X, Y), **PLAN)
        with pytest.raises(AccountRefused, match="already on record"):
            ledger.open_account("a", data=(X + 1, Y), **PLAN)
        assert [entry.fact["kind"] for entry in ledger.entries()] == ["created", "linked", "opened"]
