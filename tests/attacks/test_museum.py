"""Wrong programs and their honest twins: refused before a charge, or private with the words that are true."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import hush
from attacks.programs.wrong import PAIRS, honest
from hush.accounting import Gaussian
from hush.ledger import MemoryAccount

torch.manual_seed(0)
X, Y = torch.randn(60, 6), torch.randint(3, (60,))
BUDGET = hush.Budget(epsilon=3.0, delta=1e-4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def plan(**changes: Any) -> hush.Plan:
    settings = {"examples": 60, "lot_size": 12, "steps": 6, "clip": hush.FlatClip(1.0), "accountant": "renyi"}
    return hush.Plan.for_budget(BUDGET, **settings | changes)  # type: ignore[arg-type]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def fit(losses_of: Any = honest, model: nn.Module | None = None, data: Any = None, **changes: Any) -> hush.Result:
    model = network() if model is None else model
    run = changes.pop("run", hush.Run(progress=False))
    made = changes.pop("plan", None) or plan()
    return hush.fit(model, (X, Y) if data is None else data, losses_of, sgd(model), made, run=run, **changes)


# What a loss may do ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
def test_wrong_losses_are_refused_before_a_charge_and_their_twins_train(name: str) -> None:
    wrong, right = PAIRS[name]
    account = MemoryAccount(units=plan().units)
    with pytest.raises(hush.MixedExamples):
        hush.Private(network(), plan(), wrong, data=(X, Y), ledger=account)
    assert account.reserved == 0
    with hush.Private(network(), plan(), right, data=(X, Y)) as private:
        optimizer = sgd(private.model)
        for lot in private.lots():
            for batch in lot.batches(32):
                private.add(batch)
            private.step(optimizer)
    assert private.protects and private.notes == []


@pytest.mark.filterwarnings("ignore:where the examples lie", "ignore:no rule for parameters")
@pytest.mark.parametrize("name", PAIRS)
def test_the_neighbour_tool_measures_wrong_losses_above_the_bound_and_right_ones_below(name: str) -> None:
    wrong, right = PAIRS[name]
    far = torch.where(torch.arange(16)[:, None] % 2 == 0, X[:16], X[:16] * 3)
    below = hush.check(network(), right, far, Y[:16], neighbours=True)
    above = hush.check(network(), wrong, far, Y[:16], neighbours=True)
    assert below is not None and below <= 1 + 1e-4
    assert above is not None and above > (1 if name not in GENTLE else 0.2)


GENTLE = {
    "mixup", "copies", "standardising", "losses over their mean", "a temperature", "sorting", "attention",
    "a prototype", "contrast", "negatives", "a quantile", "a penalty", "class weights", "centring", "the lower half",
}  # fmt: skip
"""What mixes, but moves the sum of these few rows by less than the bound would allow."""


# The way from the record to the row --------------------------------------------------------------------------------


class Rows(Dataset[tuple[Tensor, int]]):
    def __init__(self, item: Callable[["Rows", int], tuple[Tensor, int]]) -> None:
        self.x, self.y, self.item = X, Y, item

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.item(self, i)


def alone(rows: Rows, i: int) -> tuple[Tensor, int]:
    return rows.x[i] + 0.1 * torch.randn(6), int(rows.y[i])


def with_another(rows: Rows, i: int) -> tuple[Tensor, int]:
    return 0.5 * (rows.x[i] + rows.x[random.randrange(len(rows))]), int(rows.y[i])


def minus_the_mean(rows: Rows, i: int) -> tuple[Tensor, int]:
    return rows.x[i] - rows.x.mean(0), int(rows.y[i])


def mean_of_neighbours(rows: Rows, i: int) -> tuple[Tensor, int]:
    return rows.x[max(0, i - 1) : i + 2].mean(0), int(rows.y[i])


def joined(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


def joined_and_centred(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    x, y = joined(items)
    return x - x.mean(0), y


def joined_and_mixed(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    x, y = joined(items)
    return 0.5 * (x + x.roll(1, 0)), y


def joined_and_scaled(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    x, y = joined(items)
    return x / x.abs().max(), y


def joined_and_cut(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """CutMix: a column of the next record."""
    x, y = joined(items)
    return torch.cat([x[:, :3], x.roll(1, 0)[:, 3:]], 1), y


@pytest.mark.parametrize("collate", [joined_and_centred, joined_and_mixed, joined_and_scaled, joined_and_cut])
def test_a_collate_that_mixes_is_refused(collate: Any) -> None:
    with pytest.raises(hush.MixedExamples, match="collate mixes examples"):
        fit(data=hush.Loader(Rows(alone), collate=collate))


@pytest.mark.parametrize("item", [with_another, minus_the_mean, mean_of_neighbours])
def test_an_item_that_reads_other_records_is_refused(item: Any) -> None:
    with pytest.raises(hush.MixedExamples, match="must read record i alone"):
        fit(data=hush.Loader(Rows(item), collate=joined))


def test_an_honest_collate_and_an_augmentation_of_each_item_train() -> None:
    assert fit(data=hush.Loader(Rows(alone), collate=joined)).ended == "finished"


# What a forward pass keeps ----------------------------------------------------------------------------------------


class Keeps(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.last, self.seen = network(), how, None, []
        self.register_buffer("bank", torch.zeros(6))
        self.amax = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "attribute":
            self.last = x.detach()
        elif self.how == "list":
            self.seen.append(x.detach())
        elif self.how == "number":
            self.amax = max(self.amax, float(x.max()))
        elif self.how == "buffer":
            self.bank += x.detach().mean(0)
        elif self.how == "buffer.data":
            self.bank.data.copy_(x.detach()[0])
        return self.inner(x)


class WithExtraState(nn.Module):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.inner, self.keeps = network(), keeps
        self.history = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps:
            self.history = torch.maximum(self.history, x.detach().abs().max()[None])
        return self.inner(x)

    def get_extra_state(self) -> dict[str, Tensor]:
        return {"amax": self.history}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        self.history = state["amax"]


@pytest.mark.parametrize("how", ["attribute", "list", "number", "buffer", "buffer.data"])
def test_what_a_forward_pass_keeps_is_refused(how: str) -> None:
    with pytest.raises((hush.NotSupported, ValueError), match=r"keeps something in|changed by the forward"):
        fit(model=Keeps(how))
    with pytest.raises(hush.NotSupported, match="keeps something in"):
        fit(model=WithExtraState(True))


def test_what_is_saved_is_parameters_and_buffers(tmp_path: Path) -> None:
    assert fit(model=Keeps("nothing")).statement.private
    fit(model=WithExtraState(False), run=hush.Run(tmp_path / "run", progress=False))
    saved = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    assert set(saved) == {name for name, _ in network().state_dict(prefix="inner.").items()}


def test_prototypes_that_are_filled_between_lots_are_refused() -> None:
    model = network()
    model.register_buffer("prototypes", torch.zeros(3, 6))
    private, optimizer = hush.Private(model, plan(), honest, data=(X, Y)), sgd(model)
    with pytest.raises(RuntimeError, match="'prototypes' of Sequential was changed during the run"):
        for lot in private.lots():
            for batch in lot.batches(32):
                private.add(batch)
            private.step(optimizer)
            model.prototypes[0] = X[0]


# What is done with a lot -------------------------------------------------------------------------------------------


def test_a_batch_that_is_dropped_because_of_what_is_in_it_is_refused() -> None:
    spoiled = X.clone()
    spoiled[7] = torch.nan
    private, optimizer = hush.Private(network(), plan(lot_size=60), honest), None
    optimizer = sgd(private.model)
    for lot in private.lots():
        for batch in lot.batches(20):
            if honest(private.model, spoiled[batch.index], Y[batch.index]).isnan().any():
                continue
            private.add(batch, spoiled[batch.index], Y[batch.index])
        with pytest.raises(RuntimeError, match="takes its other examples along"):
            private.step(optimizer)
        break


def test_a_record_that_is_not_finite_counts_as_zero_and_its_batch_is_kept() -> None:
    spoiled = X.clone()
    spoiled[7] = torch.nan
    result = fit(data=(spoiled, Y))
    assert result.ended == "finished" and all(p.isfinite().all() for p in result.model.parameters())


def test_a_batch_that_was_left_out_on_purpose_is_in_the_statement_for_good() -> None:
    private, optimizer = hush.Private(network(), plan(reserve=6), honest, data=(X, Y)), None
    optimizer = sgd(private.model)
    for lot in private.lots():
        for batch in lot.batches(32):
            private.skip(batch)
        private.step(optimizer)
        if lot.step == 2:
            break
    resumed = hush.Private.resume(private.state_dict(), private.model, honest, data=(X, Y))
    for said in (private, resumed):
        assert "left out by the user's own code" in " ".join(str(said.statement()).split())


# What was done before, and what is stated ----------------------------------------------------------------------------


def test_a_projection_must_be_in_the_plan_of_a_run_that_uses_it() -> None:
    found = hush.dp_pca(X, dimensions=4, noise_multiplier=0.5)
    model = nn.Sequential(found.layer(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="a DP-PCA that the plan does not contain"):
        fit(model=model)
    with pytest.raises(ValueError, match="a DP-PCA that the plan does not contain"):
        fit(model=nn.Linear(4, 3), data=(found(X), Y))
    wide = hush.dp_pca(X, dimensions=4, noise_multiplier=8.0)
    made = plan(preprocessing=wide.event)
    result = fit(model=nn.Sequential(wide.layer(), nn.Linear(4, 3)), plan=made)
    assert any("Gaussian noise, multiplier 8" in access.mechanism for access in result.statement.accesses)
    assert fit(model=nn.Linear(4, 3), data=(wide(X), Y), plan=made).statement.private


def test_a_seeded_projection_makes_a_run_not_private() -> None:
    from hush.randomness.streams import Key

    seeded = hush.dp_pca(X, dimensions=4, noise_multiplier=8.0, key=Key.from_seed(0))
    result = fit(model=nn.Sequential(seeded.layer(), nn.Linear(4, 3)), plan=plan(preprocessing=seeded.event))
    assert not result.statement.private and result.epsilon.upper == float("inf")
    assert "projection was made with noise from a fixed seed" in result.statement.headline


def test_a_preprocessing_that_was_dearer_than_declared_is_on_record(tmp_path: Path) -> None:
    look = hush.PrivatePreprocessing(name="a look", event=Gaussian(16.0), run=lambda: Gaussian(0.5))
    with hush.Ledger(tmp_path / "data.hush", create=True) as ledger:
        with pytest.raises(ValueError, match="its own cost is put on the ledger"):
            fit(plan=plan(preprocessing=look), run=hush.Run(ledger=ledger, progress=False))
        assert any("not as declared" in page.name for page in ledger.accounts())
        assert ledger.spent(delta=2e-4).upper > 5


def test_the_training_data_is_no_held_out_data() -> None:
    for settings in ({"public": True}, {"choose": "best"}, {"patience": 2}):
        with pytest.raises(ValueError, match="has records of the training data, which are protected"):
            fit(held_out=hush.HeldOut(data=(X[:20], Y[:20]), **settings))  # type: ignore[arg-type]
    with pytest.warns(hush.PrivacyWarning, match="has records of the training data"):
        result = fit(held_out=hush.HeldOut(data=(X[:20], Y[:20])))
    assert "has records of the training data" in " ".join(str(result.statement).split())
    other = hush.HeldOut(data=(X[:20] + 1, Y[:20]), public=True)
    assert "records of the training data" not in str(fit(held_out=other).statement)


def test_a_used_optimizer_and_a_released_model_are_refused_or_said() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    honest(model, X, Y).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(hush.NotSupported, match="with state from earlier steps"):
        hush.fit(model, (X, Y), honest, optimizer, plan(), run=hush.Run(progress=False))
    first = fit(model=model)
    second = fit(model=model)
    assert "earlier private run" not in str(first.statement)
    assert "earlier private run" in " ".join(str(second.statement).split())


def test_hazard_34_rows_that_overlap_or_are_equal_are_said() -> None:
    series = torch.randn(65).unfold(0, 6, 1)
    assert len(series) == 60
    words = " ".join(str(fit(data=(series, Y)).statement).split())
    assert "Rows of the data overlap in memory" in words
    repeated = X[:15].repeat(4, 1), Y[:15].repeat(4)
    words = " ".join(str(fit(data=repeated).statement).split())
    assert "Some rows of the data are equal (up to 4 times)" in words
    assert "equal" not in " ".join(fit().statement.facts["notes"])


def test_a_sentence_on_settings_removes_nothing_and_public_buffers_are_named() -> None:
    model = network()
    model.register_buffer("steps", torch.zeros(()))
    about = hush.About(settings_from="grid search of 500 runs on this data", public_buffers=("steps",))
    text = " ".join(str(fit(model=model, run=hush.Run(about=about, progress=False)).statement).split())
    assert "The choice of settings (stated: grid search of 500 runs on this data), if it looked at this data;" in text
    assert "What the forward pass writes into steps: declared to hold nothing of the data" in text
    assert "Everything that was computed from the records before training" in text


def test_a_seeded_run_has_infinite_epsilon_everywhere(tmp_path: Path) -> None:
    folder, ledger = tmp_path / "run", hush.Ledger(tmp_path / "data.hush", create=True)
    result = fit(run=hush.Run(folder, seed=3, ledger=ledger, progress=False))
    assert result.epsilon.upper == result.epsilon.lower == float("inf")
    report = json.loads((folder / "report.json").read_text())
    assert report["epsilon"] is None and report["private"] is False and report["headline"].startswith("NOT PRIVATE")
    assert all(entry["epsilon"] is None for entry in report["facts"]["history"])
    assert "seeded, NOT PRIVATE" in ledger.accounts()[0].name
    private = hush.Private(network(), plan(), honest, data=(X, Y), seed=3, ledger=ledger)
    assert private.spent(delta=1e-5).lower == float("inf") and not private.statement().private
    assert "seeded, NOT PRIVATE" in ledger.accounts()[1].name


def test_what_was_shown_once_is_said_for_good(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fit(run=hush.Run(folder, unsafe_diagnostics=True, progress=False))
    again = fit(run=hush.Run(folder, resume=True, progress=False))
    assert any("Unsafe diagnostics were shown" in line for line in again.statement.not_covered)
    with pytest.raises(ValueError, match="the saved run has about"):
        fit(run=hush.Run(folder, resume=True, progress=False, about=hush.About(settings_from="elsewhere")))
    with pytest.raises(ValueError, match="the saved run has held-out data"):
        fit(run=hush.Run(folder, resume=True, progress=False), held_out=hush.HeldOut(data=(X + 1, Y), public=True))


def test_a_dataset_is_not_resumed_with_other_records(tmp_path: Path) -> None:
    class Fixed(Rows):
        def __init__(self, x: Tensor) -> None:
            super().__init__(lambda rows, i: (rows.x[i], int(rows.y[i])))
            self.x = x

    class Stop(Exception):
        pass

    class Stopping(hush.Callback):
        def after_step(self, step: int, *, epoch_ended: bool) -> None:
            if step == 3:
                raise Stop

    run = hush.Run(tmp_path / "run", checkpoint_every=1, progress=False, callbacks=[Stopping()])
    made = plan(reserve=10)
    with pytest.raises(Stop):
        fit(data=Fixed(X), run=run, plan=made)
    resumed = hush.Run(tmp_path / "run", resume=True, checkpoint_every=1, progress=False, callbacks=[Stopping()])
    with pytest.raises(hush.LedgerError):
        fit(data=Fixed(1 - X), run=resumed, plan=made)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(hush.NotSupported, match="expected one process; came a world of 2"):
        fit()
