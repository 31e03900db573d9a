"""Plans: found by a probe, kept for graphs that are equal in every respect, and never used for others."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from oracles import gradients as oracle
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from hush.clipping import FlatClip
from hush.gradients import plan
from hush.gradients.clipped import clipped_sum, squared_norms
from hush.gradients.layers import products

pytestmark = pytest.mark.usefixtures("fresh_plans")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def check(model: nn.Module, losses, *batch: Tensor) -> None:
    """Norms against the oracle, for whatever plan comes out of the cache."""
    exact = oracle.squared_norms(oracle.per_example_gradients(model, batch, losses))
    ours = squared_norms(losses(model, batch), dict(model.named_parameters()))
    for name, values in exact.items():
        torch.testing.assert_close(ours[name].double(), values, rtol=2e-5, atol=1e-9)


def plans() -> int:
    return sum(len(kept) for kept in plan._cache.values())


def plain(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0]).square().flatten(1).sum(1)


def squares(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    out = model(batch[0]).flatten(1)
    return (out.square() * torch.linspace(0.5, 2, out.shape[1], dtype=out.dtype)).sum(1) + out.sin().sum(1)


def test_a_plan_is_made_once() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    for _ in range(5):
        check(model, squares, torch.randn(6, 4))
    assert plans() == 1
    check(model, squares, torch.randn(7, 4))
    assert plans() == 2


def test_the_key_tells_shapes_apart() -> None:
    """[B, T] and [T, B] with the same nodes: a key of names alone would mix up examples."""
    model = nn.Linear(4, 3)

    def time_first(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return m(batch[0].transpose(0, 1).contiguous()).square().sum((0, 2))

    def batch_first(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return m(batch[0]).square().sum((1, 2))

    for length in (3, 5, 6):
        for losses in (time_first, batch_first):
            check(model, losses, torch.randn(5, length, 4))


def test_the_key_tells_arguments_apart() -> None:
    """Same nodes, same shapes, other start of a slice: which rows are whose is decided by a whole number."""
    model = nn.Linear(4, 4)
    data = torch.randn(3, 4)

    def rolled(shift: int):
        def losses(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
            out = m(batch[0]).square().sum(1)
            return torch.cat([out, out])[shift : shift + len(out)]

        return losses

    params = dict(model.named_parameters())
    expected = oracle.squared_norms(oracle.per_example_gradients(model, (data,), rolled(0)))["weight"]
    for shift in (0, 1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = squared_norms(rolled(shift)(model, (data,)), params)["weight"].double()
        torch.testing.assert_close(ours, expected.roll(-shift), rtol=1e-5, atol=1e-9)


def test_the_key_tells_dtypes_apart() -> None:
    model, data = nn.Linear(4, 3), torch.randn(5, 4)
    check(model, squares, data)
    check(model.double(), squares, data.double())
    assert plans() == 2


def test_permuted_examples_are_followed() -> None:
    """The same graph with another permutation inside: the index is part of what a plan stands for."""
    model, data = nn.Linear(4, 3), torch.randn(6, 4)
    params = dict(model.named_parameters())
    expected = oracle.squared_norms(oracle.per_example_gradients(model, (data,), plain))["weight"]
    for _ in range(4):
        order = torch.randperm(6)
        back = order.argsort()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = squared_norms(model(data[order])[back].square().sum(1), params)["weight"]
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-9)


def test_indices_along_other_dimensions_do_not_matter() -> None:
    """Picking a token or a class by data is common; it must not cost a probe at every step."""
    model = nn.Linear(4, 6)

    def losses(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        data, place, label = batch
        picked = m(data)[torch.arange(len(data)), place]
        return -F.log_softmax(picked, 1).gather(1, label[:, None])[:, 0]

    for _ in range(4):
        check(model, losses, torch.randn(5, 7, 4), torch.randint(0, 7, (5,)), torch.randint(0, 6, (5,)))
    assert plans() == 1


def test_selected_tokens_are_probed_each_time() -> None:
    """As many tokens in all, but other numbers for each example: equal graphs, different owners."""
    model = nn.Linear(4, 3)
    data = torch.randn(3, 4, 4)

    def losses(m: nn.Module, keep: Tensor) -> Tensor:
        rows = m(data[keep]).square().sum(1)
        owner = torch.arange(3)[:, None].expand(3, 4)[keep]
        return torch.zeros(3).index_add(0, owner, rows)

    for counts in ((4, 1, 2), (1, 2, 4), (2, 3, 2), (3, 3, 1)):
        keep = torch.arange(4)[None] < torch.tensor(counts)[:, None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = squared_norms(losses(model, keep), dict(model.named_parameters()))
        for example in range(3):
            loss = model(data[example][keep[example]]).square().sum()
            theirs = torch.autograd.grad(loss, model.weight)[0].square().sum()
            torch.testing.assert_close(ours["weight"][example], theirs, rtol=1e-5, atol=1e-9)


def test_packed_rows_of_equal_and_then_different_lengths() -> None:
    """The first batch looks like time-first rows; the next has as many rows in all, but other owners."""
    model, data = nn.Linear(4, 3), torch.randn(3, 5, 4)
    for lengths in ([3, 3, 3], [5, 3, 1], [4, 3, 2]):
        packed = pack_padded_sequence(data, torch.tensor(lengths), batch_first=True)
        rows = model(packed.data).square().sum(1)
        owner = torch.cat([torch.arange(size) for size in packed.batch_sizes.tolist()])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = squared_norms(torch.zeros(3).index_add(0, owner, rows), dict(model.named_parameters()))["weight"]
        for example, length in enumerate(lengths):
            loss = model(data[example, :length]).square().sum()
            theirs = torch.autograd.grad(loss, model.weight)[0].square().sum()
            torch.testing.assert_close(ours[example], theirs, rtol=1e-5, atol=1e-9)


def test_a_gradient_of_zero_is_not_taken_for_an_answer() -> None:
    """A loss that does not count yet: the first batch shows nothing, the second does."""
    model, data = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3)), torch.randn(5, 4)
    with pytest.warns(UserWarning, match="probed again"):
        clipped_sum(0.0 * squares(model, (data,)), dict(model.named_parameters()), FlatClip(1.0))
    assert plans() == 0
    check(model, lambda m, batch: 0.5 * squares(m, batch), data)
    assert plans() == 1


def test_an_adapter_that_starts_at_zero_is_probed_once() -> None:
    """The probe opens it: where its examples lie does not depend on its values."""
    down, up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
    nn.init.zeros_(up.weight)
    model = nn.Sequential(down, up)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(model, squares, torch.randn(5, 4))
        nn.init.normal_(up.weight)
        check(model, squares, torch.randn(5, 4))
    assert plans() == 1


def test_dropout_and_other_randomness_per_example() -> None:
    """The graph holds the masks that were drawn: the gradient is that of the very forward pass."""
    model = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.ReLU(), nn.Linear(20, 3))
    data, params = torch.randn(5, 6), dict(model.named_parameters())
    state = torch.get_rng_state()
    ours = squared_norms(squares(model, (data,)), params)
    torch.set_rng_state(state)
    losses = squares(model, (data,))
    for example in range(5):
        grads = torch.autograd.grad(losses[example], list(params.values()), retain_graph=True)
        for name, grad in zip(params, grads, strict=True):
            torch.testing.assert_close(ours[name][example], grad.square().sum(), rtol=1e-5, atol=1e-9)


def test_batches_of_one_and_none() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    check(model, squares, torch.randn(1, 4))
    empty = clipped_sum(torch.zeros(0), dict(model.named_parameters()), FlatClip(1.0))
    assert all(tensor.shape == model.get_parameter(name).shape for name, tensor in empty.tensors.items())
    assert empty.sensitivity >= 1.0


def test_a_batch_in_which_one_example_has_all_the_gradient() -> None:
    """Then even a weight's gradient belongs to one example: right for this batch, and not kept for others."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    data = torch.randn(4, 4)
    weight = torch.tensor([0.0, 1.0, 0.0, 0.0])

    def losses(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return squares(m, batch[:1]) * batch[1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(model, losses, data, weight)
    check(model, losses, data, torch.ones(4))


def test_losses_without_a_graph() -> None:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        losses = squares(model, (torch.randn(2, 4),))
    with pytest.raises(ValueError, match="do not depend on any parameter"):
        clipped_sum(losses, dict(model.named_parameters()), FlatClip(1.0))


def test_frequency_scaled_embeddings_are_refused() -> None:
    model = nn.Embedding(5, 3, scale_grad_by_freq=True)
    with pytest.raises(ValueError, match="scale_grad_by_freq=False"):
        clipped_sum(
            model(torch.randint(0, 5, (4, 6))).square().sum((1, 2)), dict(model.named_parameters()), FlatClip(1.0)
        )


def test_inputs_that_require_a_gradient_are_data() -> None:
    model = nn.Linear(4, 3)
    data = torch.randn(5, 4, requires_grad=True)
    ours = squared_norms(squares(model, (data,)), dict(model.named_parameters()))
    theirs = squared_norms(squares(model, (data.detach(),)), dict(model.named_parameters()))
    assert torch.equal(ours["weight"], theirs["weight"]) and data.grad is None


def test_embedding_norms_need_no_table_per_example() -> None:
    """A large vocabulary: batch times vocabulary would be 2 GB here."""
    table = nn.Embedding(500_000, 4)
    ours = squared_norms(
        table(torch.randint(0, 500_000, (256, 3))).square().sum((1, 2)), dict(table.named_parameters())
    )
    assert ours["weight"].shape == (256,)


def test_long_examples_take_no_square_of_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are too large to keep are taken for their norms, some examples at a time; and so are their sums."""
    monkeypatch.setattr(products, "_KEEP_BYTES", 4 * 2 * 3 * 5)
    model = nn.Linear(3, 5)
    data = torch.randn(7, 40, 3)
    check(model, squares, data)
    exact = oracle.clipped_sum(oracle.per_example_gradients(model, (data,), squares), 5.0)
    ours = clipped_sum(squares(model, (data,)), dict(model.named_parameters()), FlatClip(5.0))
    for name, tensor in exact.items():
        torch.testing.assert_close(ours.tensors[name].double(), tensor, rtol=1e-4, atol=1e-4)
