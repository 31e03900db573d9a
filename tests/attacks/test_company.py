"""Programs whose rows depend on the company they are in: how many there are, what is drawn, how long the others are."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

import hush
from hush.ledger import MemoryAccount

torch.manual_seed(0)
X, Y = torch.randn(60, 6), torch.randint(3, (60,))
TEXTS = [torch.randint(1, 9, (3 + i % 5,)) for i in range(60)]


def plan() -> hush.Plan:
    lots = hush.PoissonLots(examples=60, lot_size=12)
    return hush.Plan(lots=lots, steps=4, clip=hush.FlatClip(1.0), noise_multiplier=1.0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def honest(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def train(losses_of: Any = honest, data: Any = (X, Y), model: nn.Module | None = None) -> None:
    with hush.Private(model or network(), plan(), losses_of, data=data) as private:
        optimizer = torch.optim.SGD(private.model.parameters(), lr=0.1)
        for lot in private.lots():
            for batch in lot.batches(8):
                private.add(batch)
            private.step(optimizer)


def refuse(match: str, losses_of: Any = honest, data: Any = (X, Y), model: nn.Module | None = None) -> None:
    account = MemoryAccount(units=plan().units)
    with pytest.raises((hush.MixedExamples, ValueError), match=match):
        hush.Private(model or network(), plan(), losses_of, data=data, ledger=account)
    assert account.reserved == 0


# Random numbers ----------------------------------------------------------------------------------------------------


def cutmix(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if np.random.rand(1) < 0.5:  # noqa: NPY002  the first number of seed 0 is 0.549
        x = torch.cat([x[:, :3], x.roll(1, 0)[:, 3:]], 1)
    return honest(model, x, y)


def centred_at_times(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, x - x.mean(0) if random.random() < 0.5 else x, y)


def centred_at_other_times(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, x - x.mean(0) if torch.rand(()) > 0.6 else x, y)


def mirrored_at_times(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, -x if np.random.rand() < 0.5 else x, y)  # noqa: NPY002


def with_noise_of_its_own(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, F.dropout(x) + torch.randn_like(x), y)


@pytest.mark.parametrize("wrong", [cutmix, centred_at_times, centred_at_other_times])
def test_mixing_with_a_probability_is_refused_before_a_charge(wrong: Any) -> None:
    refuse("under some random numbers", wrong)


@pytest.mark.parametrize("right", [mirrored_at_times, with_noise_of_its_own])
def test_random_numbers_that_do_not_mix_train(right: Any) -> None:
    train(right)


def joined(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


def joined_and_mixed_at_times(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = joined(items)
    return (0.5 * (x + x.roll(1, 0)) if np.random.rand() < 0.3 else x), y  # noqa: NPY002


def test_a_collate_that_mixes_with_a_probability_is_refused() -> None:
    refuse("collate mixes", data=hush.Loader(Rows(alone), collate=joined_and_mixed_at_times))
    train(data=hush.Loader(Rows(alone), collate=joined))


# How many rows there are -------------------------------------------------------------------------------------------


def nothing_from_small_batches(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return honest(model, x, y) * (len(x) >= 4)


@pytest.mark.parametrize(
    "wrong",
    [
        nothing_from_small_batches,
        lambda model, x, y: honest(model, x, y) / len(x),
        lambda model, x, y: F.dropout(honest(model, x, y), 0.5, model.training) * (8 / x.shape[0]),
        lambda model, x, y: honest(model, x, y) * (10 if len(x) == 1 else 1),
    ],
)
def test_a_loss_that_knows_how_many_rows_there_are_is_refused(wrong: Any) -> None:
    refuse("number of rows", wrong)


def test_a_forward_pass_that_fails_on_one_row_is_refused_before_a_charge() -> None:
    refuse("fails on a batch of 1 of", lambda model, x, y: model(x)[:, :1].squeeze().square())


def test_a_threshold_beyond_the_drawn_rows_is_found_on_a_real_batch() -> None:
    def wrong(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return honest(model, x, y) * (1 if len(x) < 50 else 2)

    lots = hush.PoissonLots(examples=60, lot_size=60)
    private = hush.Private(
        network(), hush.Plan(lots=lots, steps=4, clip=hush.FlatClip(1.0), noise_multiplier=1.0), wrong, data=(X, Y)
    )
    with pytest.raises(hush.MixedExamples, match="number of rows"):
        for batch in next(private.lots()).batches(64):
            private.add(batch)


# The longest of the others -----------------------------------------------------------------------------------------


class Texts(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, i: int) -> Tensor:
        return TEXTS[i]


def padded(items: list[Tensor]) -> Tensor:
    return pad_sequence(items, batch_first=True)


def padded_to_ten(items: list[Tensor]) -> Tensor:
    return torch.stack([F.pad(item, (0, 10 - len(item))) for item in items])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x))


def tokens(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction="none", ignore_index=0)


def mean_over_the_padded_length(model: nn.Module, x: Tensor) -> Tensor:
    return tokens(model, x)  # [B, T], which is averaged over T


def last_position(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[:, -1].square().sum(1)


def mean_over_its_own_length(model: nn.Module, x: Tensor) -> Tensor:
    return tokens(model, x).sum(1) / (x[:, 1:] != 0).sum(1)


@pytest.mark.parametrize("wrong", [mean_over_the_padded_length, last_position])
def test_a_loss_that_the_longest_record_decides_is_refused_before_a_charge(wrong: Any) -> None:
    refuse("padded to", wrong, hush.Loader(Texts(), collate=padded), Words())


def test_lengths_of_ones_own_and_one_length_for_all_train() -> None:
    train(mean_over_its_own_length, hush.Loader(Texts(), collate=padded), Words())
    train(mean_over_the_padded_length, hush.Loader(Texts(), collate=padded_to_ten), Words())


# On the way backwards ----------------------------------------------------------------------------------------------


class Hooked(nn.Module):
    def __init__(self, hook: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.out, self.hook = nn.Linear(6, 8), nn.Linear(8, 1), hook

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).tanh()
        if h.requires_grad:
            h.register_hook(self.hook)
        return self.out(h)[:, 0]


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square()


@pytest.mark.parametrize(
    "hook",
    [
        lambda g: g * min(1.0, 50 / float(g.norm() + 1e-9)),
        lambda g: g if g.isfinite().all() else torch.zeros_like(g),
    ],
)
def test_a_hook_that_clips_the_gradient_of_the_batch_is_refused(hook: Any) -> None:
    refuse("other|spoils", squares, (X, Y.float()), Hooked(hook))


def test_a_hook_that_scales_by_a_constant_trains() -> None:
    train(squares, (X, Y.float()), Hooked(lambda g: 0.5 * g))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:no rule for parameters")
def test_an_infinite_record_does_not_take_the_others_of_a_function_of_ones_own_along() -> None:
    train(honest, model=Own())
    model, infinite = Own(), X[:16].clone()
    infinite[15] = torch.inf
    sums = [
        hush.Gradients(honest, model).clipped_sum((x, Y[:16]), hush.FlatClip(1.0)).tensors["weight"]
        for x in (X[:16], infinite)
    ]
    assert (sums[0] - sums[1]).norm() <= 1 + 1e-4


# Data sets that hold others ----------------------------------------------------------------------------------------

Item = tuple[Tensor, Tensor]


class Rows(Dataset[Item]):
    def __init__(self, item: Callable[["Rows", int], Item], inner: Any = None) -> None:
        self.inner = TensorDataset(X, Y) if inner is None else inner
        self.item = item

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, i: int) -> Item:
        return self.item(self, i)


def alone(rows: Rows, i: int) -> Item:
    x, y = rows.inner[i]
    return x + 0.1 * torch.randn(6), y


def with_another(rows: Rows, i: int) -> Item:
    return 0.5 * (rows.inner[i][0] + rows.inner[random.randrange(len(rows))][0]), rows.inner[i][1]


def with_another_at_times(rows: Rows, i: int) -> Item:
    return with_another(rows, i) if random.random() < 0.3 else alone(rows, i)


@pytest.mark.parametrize("item", [with_another, with_another_at_times])
def test_a_wrapper_whose_items_read_two_records_is_refused(item: Any) -> None:
    rows = Rows(item)
    for data in (rows, Subset(rows, list(range(60))), random_split(rows, [60, 0])[0], Rows(alone, rows)):
        refuse("must read record i alone", data=data)


def test_wrappers_whose_items_read_one_record_train() -> None:
    for data in (Rows(alone), Subset(Rows(alone), list(range(59, -1, -1))), Rows(alone, Rows(alone))):
        train(data=data)


def test_held_out_data_that_is_the_training_set_made_twice_may_not_choose() -> None:
    model = network()
    budget = hush.Budget(epsilon=3.0, delta=1e-4)
    made = hush.Plan.for_budget(budget, examples=60, lot_size=12, steps=4, clip=hush.FlatClip(1.0), accountant="renyi")

    def run(held_out: Any) -> hush.Result:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own = hush.HeldOut(data=held_out, public=True, choose="best")
        return hush.fit(model, Plain(X), honest, optimizer, made, held_out=own, run=hush.Run(progress=False))

    with pytest.raises(ValueError, match="has records of the training data"):
        run(Plain(X))
    assert run(Plain(-X)).ended == "finished"


class Plain(Dataset[Item]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Item:
        return self.x[i], Y[i]
