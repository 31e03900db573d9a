"""Lots have exactly the law that their event claims, and their batches hand out every example once."""

import time
from collections import Counter
from fractions import Fraction
from itertools import combinations, permutations, product
from math import comb, factorial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hush.accounting.events import Allocated, Gaussian, PoissonSampled, Shuffled
from hush.randomness.streams import Key
from hush.sampling.draws import _binomial_table, permutation, subsets
from hush.sampling.lot import Lot
from hush.sampling.lots import AllocatedLots, Lots, PoissonLots, ShuffledLots, from_dict


def draws(lots: Lots, count: int, seed: int = 0) -> list[list[np.ndarray]]:
    """The lots of `count` units, unit by unit."""
    key, steps, units = Key.from_seed(seed), lots.steps_per_unit, []
    for number in range(-(-count // lots.units_per_draw)):
        drawn = list(lots.draw(key.stream("lots", step=number)))
        assert len(drawn) == steps * lots.units_per_draw
        units += [drawn[start : start + steps] for start in range(0, len(drawn), steps)]
    return units[:count]


def fits(observed: Counter, expected: dict, count: int) -> bool:
    """Chi-square at one in a million: seeded, so it fails only for a wrong law."""
    assert set(observed) <= set(expected)
    keys = sorted(expected)
    result = stats.chisquare([observed[key] for key in keys], [count * expected[key] for key in keys])
    return result.pvalue > 1e-6


# Poisson ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("examples", "size"), [(5, 1), (5, 2), (6, 4), (4, 4)])
def test_poisson_lots_have_the_law_of_independent_coins(examples: int, size: int) -> None:
    count, rate = 20_000, size / examples
    seen = Counter(tuple(lot.tolist()) for (lot,) in draws(PoissonLots(examples=examples, lot_size=size), count))
    law = {
        tuple(i for i, coin in enumerate(coins) if coin): rate ** sum(coins) * (1 - rate) ** (examples - sum(coins))
        for coins in product((0, 1), repeat=examples)
    }
    law = {lot: p for lot, p in law.items() if p}
    if len(law) == 1:
        assert set(seen) == set(law)
    else:
        assert fits(seen, law, count)
        twisted = {lot: p * (1.1 if 0 in lot else 0.9) for lot, p in law.items()}
        twisted = {lot: p / sum(twisted.values()) for lot, p in twisted.items()}
        assert not fits(seen, twisted, count), "the test must notice one example that is drawn too often"


@pytest.mark.parametrize(("examples", "size"), [(10, 3), (60, 1), (60, 30), (93, 92), (300, 17)])
def test_binomial_sizes_are_exact_to_thirty_digits(examples: int, size: int) -> None:
    first, cumulative = _binomial_table(examples, size)
    rate, distance, before = Fraction(size, examples), Fraction(0), 0
    probabilities = {}
    for k, edge in enumerate([*cumulative, 1 << 128]):
        probabilities[first + k] = Fraction(edge - before, 1 << 128)
        before = edge
    for k in range(examples + 1):
        exact = comb(examples, k) * rate**k * (1 - rate) ** (examples - k)
        distance += abs(exact - probabilities.pop(k, 0)) / 2
    assert not probabilities
    assert distance < Fraction(1, 10**30)


def test_binomial_sizes_at_large_numbers_follow_scipy() -> None:
    first, cumulative = _binomial_table(10**9, 1000)
    for k in (900, 1000, 1100):
        assert cumulative[k - first] / 2**128 == pytest.approx(stats.binom.cdf(k, 10**9, 1e-6), rel=1e-9)


@pytest.mark.timing
def test_a_billion_examples_take_milliseconds() -> None:
    lots, key = PoissonLots(examples=10**9, lot_size=1000), Key.from_seed(0)
    lots.draw(key.stream("first"))
    times = []
    for step in range(20):
        stream = key.stream("lots", step=step)
        start = time.perf_counter()
        drawn = lots.draw(stream)
        times.append(time.perf_counter() - start)
        for lot in drawn:
            assert 700 < len(lot) < 1300 and len(np.unique(lot)) == len(lot) and lot[0] >= 0 and lot[-1] < 10**9
    assert len(drawn) == 65 and sorted(times)[10] < 0.02, "65 lots at once, well below a millisecond each"


def test_a_draw_is_bounded_in_memory_and_number() -> None:
    for size, together in ((1, 128), (6, 128), (600, 109), (1000, 65), (1 << 16, 1), (10**6, 1)):
        assert PoissonLots(examples=10**6, lot_size=size).units_per_draw == together


def test_rate_is_never_rounded_down() -> None:
    for examples in range(1, 400):
        for size in {1, examples // 3 or 1, examples}:
            lots = PoissonLots(examples=examples, lot_size=size)
            assert (
                Fraction(size, examples) <= Fraction(lots.rate) <= Fraction(size, examples) * (1 + Fraction(1, 2**50))
            )


def test_subset_of_more_than_half_is_uniform_too() -> None:
    count = 6_000
    seen = Counter(tuple(part.tolist()) for part in subsets(Key.from_seed(3).stream("s"), 4, [3] * count))
    assert fits(seen, {(0, 1, 2): 1 / 4, (0, 1, 3): 1 / 4, (0, 2, 3): 1 / 4, (1, 2, 3): 1 / 4}, count)


def test_subsets_that_are_drawn_together_are_uniform_and_independent() -> None:
    """All pairs of a 2-subset and a 3-subset of five, with subsets of other sizes between them."""
    count, key = 20_000, Key.from_seed(4)
    sizes = [2, 0, 5, 3, 1, 4] * 1_000
    seen: Counter = Counter()
    for number in range(count // 1_000):
        parts = [tuple(part.tolist()) for part in subsets(key.stream("s", step=number), 5, sizes)]
        assert [len(part) for part in parts] == sizes and all(part == tuple(sorted(set(part))) for part in parts)
        assert all(0 <= i < 5 for part in parts for i in part)
        seen.update(zip(parts[0::6], parts[3::6], strict=True))
    pairs = dict.fromkeys(product(combinations(range(5), 2), combinations(range(5), 3)), 1 / 100)
    assert fits(seen, pairs, count)
    twisted = {pair: p * (1.2 if set(pair[0]) <= set(pair[1]) else 1) for pair, p in pairs.items()}
    twisted = {pair: p / sum(twisted.values()) for pair, p in twisted.items()}
    assert not fits(seen, twisted, count), "the test must notice subsets that know of each other"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.lists(st.integers(0, 60), max_size=12), st.integers(0, 2**32))
def test_every_subset_has_its_size_and_no_repetition(examples: int, wanted: list[int], seed: int) -> None:
    sizes = [min(size, examples) for size in wanted]
    parts = subsets(Key.from_seed(seed).stream("s"), examples, sizes)
    assert [len(part) for part in parts] == sizes
    for part in parts:
        assert part.tolist() == sorted(set(part.tolist())) and set(part.tolist()) <= set(range(examples))


# Allocated and shuffled ------------------------------------------------------------------------------------------


def test_allocated_lots_have_the_law_of_balls_into_bins() -> None:
    lots, count = AllocatedLots(examples=4, steps_per_epoch=3), 16_000
    seen: Counter = Counter()
    for epoch in draws(lots, count):
        assert len(epoch) == 3 and sorted(np.concatenate(epoch)) == [0, 1, 2, 3]
        place = {int(i): step for step, lot in enumerate(epoch) for i in lot}
        seen[tuple(place[i] for i in range(4))] += 1
    assert fits(seen, dict.fromkeys(product(range(3), repeat=4), 3.0 ** (-4)), count)


def test_shuffled_lots_are_uniform_permutations_cut_into_lots() -> None:
    lots, count = ShuffledLots(examples=4, lot_size=3), 6_000
    seen: Counter = Counter()
    for epoch in draws(lots, count):
        assert [len(lot) for lot in epoch] == [3, 1]
        seen[tuple(np.concatenate(epoch).tolist())] += 1
    assert fits(seen, {order: 1 / factorial(4) for order in permutations(range(4))}, count)


def test_equal_keys_are_drawn_again() -> None:
    class Ties:
        calls = 0

        def uint64(self, count: int) -> np.ndarray:
            self.calls += 1
            return np.array([5, 5, 1] if self.calls == 1 else [3, 2, 1], np.uint64)

    stream = Ties()
    assert permutation(stream, 3).tolist() == [2, 1, 0] and stream.calls == 2  # type: ignore[arg-type]


def test_draws_repeat_for_a_seed_and_differ_between_units() -> None:
    for lots in (
        PoissonLots(examples=100, lot_size=30),
        AllocatedLots(examples=100, lot_size=30),
        ShuffledLots(examples=100, lot_size=30),
    ):
        one, two = draws(lots, 2, seed=5), draws(lots, 2, seed=5)
        assert all(np.array_equal(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))
        assert not np.array_equal(one[0][0], one[1][0])


# Events ----------------------------------------------------------------------------------------------------------


def test_hazard_03_each_way_of_drawing_has_its_own_event() -> None:
    assert PoissonLots(examples=1000, lot_size=10).units(50, 2.0) == ((PoissonSampled(0.01, Gaussian(2.0)), 50),)
    assert AllocatedLots(examples=1000, lot_size=10).units(250, 2.0) == ((Allocated(100, Gaussian(2.0)), 3),)
    assert ShuffledLots(examples=1000, lot_size=10).units(250, 2.0) == ((Shuffled(100, Gaussian(2.0)), 3),)


def test_units_with_a_schedule_keep_their_order_and_take_the_smallest_noise_of_an_epoch() -> None:
    g = {s: PoissonSampled(0.1, Gaussian(s)) for s in (1.0, 2.0)}
    assert PoissonLots(examples=10, lot_size=1).units(5, (1.0, 1.0, 2.0, 1.0, 1.0)) == (
        (g[1.0], 2),
        (g[2.0], 1),
        (g[1.0], 2),
    )
    assert ShuffledLots(examples=10, lot_size=5).units(4, (3.0, 2.0, 4.0, 5.0)) == (
        (Shuffled(2, Gaussian(2.0)), 1),
        (Shuffled(2, Gaussian(4.0)), 1),
    )
    assert PoissonLots(examples=10, lot_size=1).units(0, 1.0) == ()


def test_hazard_18_steps_are_whole_numbers_for_every_dataset_size() -> None:
    for n in range(1, 10_001):
        size = 1 + (n - 1) // 93
        lots = (
            PoissonLots(examples=n, lot_size=size),
            AllocatedLots(examples=n, lot_size=size),
            ShuffledLots(examples=n, lot_size=size),
        )
        for one in lots:
            assert one.steps_per_epoch == (n + size - 1) // size
        assert PoissonLots(examples=n, lot_size=1).steps_per_epoch == n
        planned = 3 * n
        assert sum(count for _, count in lots[0].units(planned, 1.0)) == planned
        for epochs in lots[1:]:
            charged = sum(count for _, count in epochs.units(planned, 1.0)) * epochs.steps_per_unit
            assert planned <= charged < planned + epochs.steps_per_unit


@pytest.mark.parametrize("examples", [1, 7, 93, 100])
def test_hazard_18_drawn_units_have_the_planned_number_of_lots(examples: int) -> None:
    for size in range(1, examples + 1, 3):
        for lots in (
            PoissonLots(examples=examples, lot_size=size),
            AllocatedLots(examples=examples, lot_size=size),
            ShuffledLots(examples=examples, lot_size=size),
        ):
            assert all(len(unit) == lots.steps_per_unit for unit in draws(lots, 2))


def test_lots_as_json_values() -> None:
    for lots in (
        PoissonLots(examples=10, lot_size=3),
        AllocatedLots(examples=10, lot_size=3),
        AllocatedLots(examples=10, steps_per_epoch=7),
        ShuffledLots(examples=10, lot_size=3),
    ):
        assert from_dict(lots.to_dict()) == lots
    with pytest.raises(ValueError, match="expected one of PoissonLots, AllocatedLots, ShuffledLots; got 'Weighted'"):
        from_dict({"kind": "Weighted"})


@pytest.mark.parametrize("make", [PoissonLots, AllocatedLots, ShuffledLots])
def test_sizes_that_make_no_sense_are_refused(make: type[Lots]) -> None:
    for examples, size in ((0, 1), (10, 11), (10, 2.5), (True, 1), (10, -1)):
        with pytest.raises(ValueError, match="must be"):
            make(examples=examples, lot_size=size)
    with pytest.raises(ValueError, match="one of the two"):
        AllocatedLots(examples=100, lot_size=10, steps_per_epoch=3)


# Batches of a lot ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 50), st.integers(1, 20))
def test_batches_hand_out_every_example_once(count: int, size: int) -> None:
    indices = np.arange(100, 100 + count)
    plain = list(Lot(0, indices).batches(size))
    assert (
        torch.cat([torch.empty(0, dtype=torch.int64), *(batch.index for batch in plain)]).tolist() == indices.tolist()
    )
    assert all(1 <= len(batch) <= size for batch in plain)
    full = list(Lot(0, indices).batches(size, pad=True))
    assert len(full) == -(-count // size), "a large lot spills, it is never cut off"
    assert all(batch.index.shape == batch.mask.shape == (size,) for batch in full)
    kept = [i for batch in full for i in batch.index[batch.mask].tolist()]
    assert all(set(batch.index.tolist()) <= set(indices.tolist()) for batch in full), "padding repeats real rows"
    assert kept == indices.tolist()


def test_few_shapes_occur_however_large_the_lots_are() -> None:
    shapes = {len(batch) for count in range(700) for batch in Lot(0, np.arange(count)).batches(256)}
    assert len(shapes) <= 2 * 16 and max(shapes) == 256
    assert max(len(list(Lot(0, np.arange(count)).batches(256))) for count in range(257)) == 2


def test_hazard_19_a_lot_is_handed_out_once() -> None:
    lot = Lot(7, np.arange(5))
    first, *others = lot.batches(2)
    lot.take(first)
    with pytest.raises(RuntimeError, match="no unused ticket of lot 7"):
        lot.take(first)
    with pytest.raises(RuntimeError, match="lot 7 has batches that were not added"):
        lot.must_be_used_up()
    lot.give_back(first)
    for batch in (first, *others):
        lot.take(batch)
    lot.must_be_used_up()
    for foreign in Lot(7, np.arange(5)).batches(2):
        with pytest.raises(RuntimeError, match="no unused ticket"):
            lot.take(foreign)
    with pytest.raises(RuntimeError, match="lot 8 has batches"):
        Lot(8, np.arange(5)).must_be_used_up()
    Lot(8, np.arange(0)).must_be_used_up()
    with pytest.raises(RuntimeError, match="lot 7 were already handed out"):
        lot.batches(2)
    with pytest.raises(ValueError, match=">= 1, got 0"):
        Lot(0, np.arange(5)).batches(0)
