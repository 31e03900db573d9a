"""Checkpoints: whole or not at all, intact or refused, never a key."""

import io
import os
from collections import OrderedDict

import numpy as np
import pytest
import torch

from hush.accounting import Budget, Gaussian
from hush.ledger import Head, Ledger, LedgerRolledBack
from hush.ledger.checkpoints import Checkpoint, CheckpointError, exists, load, save

FACTS = {"step": 3, "plan": {"kind": "Gaussian", "noise_multiplier": 4.0}, "nothing": None}


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.GroupNorm(1, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        ],
        milestones=[2],
    )
    for _ in range(3):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def test_model_optimizer_and_scheduler_come_back_bit_for_bit(tmp_path):
    model, optimizer, scheduler = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    assert not exists(tmp_path / "run")
    save(tmp_path / "run", Checkpoint(state, FACTS, Head(7, "ab" * 32)))
    assert exists(tmp_path / "run")
    found = load(tmp_path / "run")
    assert found.facts == FACTS and found.seen == Head(7, "ab" * 32)
    again, other_optimizer, other_scheduler = trained()
    for parameter in again.parameters():
        torch.nn.init.zeros_(parameter)
    again.load_state_dict(found.state["model"])
    other_optimizer.load_state_dict(found.state["optimizer"])
    other_scheduler.load_state_dict(found.state["scheduler"])
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(optimizer.state[ours]["exp_avg_sq"], other_optimizer.state[theirs]["exp_avg_sq"])
    assert scheduler.get_last_lr() == other_scheduler.get_last_lr()


def test_hazard_23_files_load_with_weights_only_and_code_in_them_is_refused(tmp_path):
    save(tmp_path / "run", Checkpoint({"x": torch.ones(2)}, FACTS))
    (generation,) = (tmp_path / "run").iterdir()
    assert torch.equal(torch.load(generation / "state.pt", weights_only=True)["x"], torch.ones(2))

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    saved = io.BytesIO()
    torch.save({"x": Evil()}, saved)
    (generation / "state.pt").write_bytes(saved.getvalue())
    with pytest.raises(CheckpointError, match="changed or damaged"):
        load(tmp_path / "run")
    reseal(generation)
    with pytest.raises(CheckpointError, match="weights_only"):
        load(tmp_path / "run")
    assert not (tmp_path / "owned").exists()


def reseal(generation) -> None:
    """What somebody who knows the format can do: make the digests fit the changed state."""
    import json

    from hush.ledger import checkpoints

    facts = json.loads(json.loads((generation / "facts.json").read_text())["content"])
    facts["state"] = checkpoints._digest((generation / "state.pt").read_bytes())
    (generation / "facts.json").write_text(checkpoints._facts_text(facts))


def test_hazard_23_a_tampered_history_is_refused(tmp_path):
    """The account lives in the ledger; the checkpoint only says which head it has seen, and that must be there."""
    with Ledger(tmp_path / "l", create=True) as ledger:
        account = ledger.open_account("run", budget=Budget(epsilon=1.0, delta=1e-6), units=[(Gaussian(100.0), 50)])
        account.spend_up_to(20)
        save(tmp_path / "run", Checkpoint({}, {"account": account.to_dict()}, account.head()))
    seen = load(tmp_path / "run").seen
    Ledger(tmp_path / "l", seen=seen).close()
    for path in tmp_path.glob("l*"):
        path.unlink()
    with (
        Ledger(tmp_path / "l", create=True) as fresh,
        pytest.raises(LedgerRolledBack, match="a checkpoint or report has seen"),
    ):
        fresh.resume_account("run", seen=seen)
    text = (tmp_path / "run" / "generation-1" / "facts.json").read_text()
    (tmp_path / "run" / "generation-1" / "facts.json").write_text(text.replace('sequence\\": 3', 'sequence\\": 1'))
    assert text != (tmp_path / "run" / "generation-1" / "facts.json").read_text()
    with pytest.raises(CheckpointError, match="changed or damaged"):
        load(tmp_path / "run")


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (b"\0" * 32, "state.a"),
        (bytearray(32), "state.a"),
        ({"b": [1, object()]}, r"state.a.b\[1\]"),
        (np.arange(3), "state.a"),
        (lambda: 0, "state.a"),
        (torch.Generator(), "state.a"),
    ],
)
def test_what_would_not_load_again_or_could_be_a_key_is_refused_at_once(tmp_path, value, where):
    with pytest.raises(CheckpointError, match=f"tensors, numbers and text at {where}; came"):
        save(tmp_path / "run", Checkpoint({"a": value}, FACTS))
    assert not exists(tmp_path / "run")


def test_facts_that_are_no_json_are_refused(tmp_path):
    for wrong in ({"x": float("nan")}, {"x": torch.ones(1)}, {"x": b"key"}):
        with pytest.raises(CheckpointError, match="plain JSON values"):
            save(tmp_path / "run", Checkpoint({}, wrong))


def test_a_view_does_not_take_its_neighbours_along(tmp_path):
    """A row of the training data must not carry the whole of it into the file."""
    secret = torch.full((1000, 64), 7.0)
    save(tmp_path / "run", Checkpoint({"row": secret[3]}, FACTS))
    assert (tmp_path / "run" / "generation-1" / "state.pt").stat().st_size < 10_000
    assert torch.equal(load(tmp_path / "run").state["row"], secret[3])


def test_plain_values_come_back_as_they_were(tmp_path):
    state = {
        "numbers": [1, -2.5, True, None, float("inf")],
        "pair": (torch.tensor(3), "text"),
        "ordered": OrderedDict(a=1),
        "numpy": np.float64(0.25),
        "kinds": [torch.float32, torch.Size([2, 3])],
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    save(tmp_path / "run", Checkpoint(state, FACTS))
    found = load(tmp_path / "run").state
    assert found["numbers"] == state["numbers"] and found["pair"] == (torch.tensor(3), "text")
    assert found["ordered"] == {"a": 1} and found["numpy"] == 0.25 and found["kinds"] == state["kinds"]
    assert found["half"].dtype == torch.bfloat16


def test_the_newest_of_many_is_read_and_only_one_is_kept(tmp_path):
    for step in range(12):
        save(tmp_path / "run", Checkpoint({"x": torch.tensor(step)}, {"step": step}))
    assert load(tmp_path / "run").facts["step"] == 11
    assert [child.name for child in (tmp_path / "run").iterdir()] == ["generation-12"]


def test_leftovers_of_a_killed_process_do_no_harm(tmp_path):
    save(tmp_path / "run", Checkpoint({}, {"step": 1}))
    (tmp_path / "run" / ".hush-new-0123456789abcdef").mkdir()
    (tmp_path / "run" / ".hush-new-0123456789abcdef" / "state.pt").write_bytes(b"half")
    assert load(tmp_path / "run").facts["step"] == 1
    save(tmp_path / "run", Checkpoint({}, {"step": 2}))
    assert [child.name for child in (tmp_path / "run").iterdir()] == ["generation-2"]


def test_a_failed_save_keeps_the_checkpoint_before_it(tmp_path, monkeypatch):
    save(tmp_path / "run", Checkpoint({}, {"step": 1}))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="came No space left on device; make room"):
            save(tmp_path / "run", Checkpoint({}, {"step": 2}))
    assert load(tmp_path / "run").facts["step"] == 1
    assert [child.name for child in (tmp_path / "run").iterdir()] == ["generation-1"]


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="came none"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="came none"):
        load(tmp_path / "nowhere")
