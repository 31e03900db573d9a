"""Normal numbers: the documented map, their distribution out to the tails, independence."""

import copy
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracles import box_muller
from scipy import stats

from hush.randomness import gaussian_samples as normals
from hush.randomness.chacha20 import chacha20_blocks
from hush.randomness.gaussian_samples import REFINEMENT_BLOCK, RUN, Normals, fill_normals
from hush.randomness.streams import Key

SUBKEY = bytes(range(32))


def drawn(count: int, nonce: int = 0, first: int = 0) -> normals.Floats:
    out = np.empty(count, np.float32)
    fill_normals(out, SUBKEY, nonce, first=first)
    return out


def assert_same_normals(got: normals.Floats, expected: list[float]) -> None:
    wrong = np.abs(got - np.array(expected)) / np.maximum(1.0, np.abs(expected))
    assert wrong.max() < 1e-6


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 32, 33, 1000, RUN + 5])
def test_numbers_follow_the_documented_map(count: int) -> None:
    blocks = -(-(count + 32) // 16)
    words = chacha20_blocks(SUBKEY, 9, 0, blocks).ravel().tolist()

    def refinement(place: int) -> int:
        return int(chacha20_blocks(SUBKEY, 9, REFINEMENT_BLOCK + place // 16, 1)[0, place % 16])

    assert_same_normals(drawn(count, nonce=9), box_muller.normals(count, words.__getitem__, refinement))


def test_small_words_are_refined(monkeypatch: pytest.MonkeyPatch) -> None:
    radii = [0, 1, 0xFFFFFFFF, 4095, 4096, 2**32 - 4096, 2**32 - 4097, 2**31, 2**31 - 1, 7, 0, 0xFFFFFFFF, 0, 1, 2, 3]
    angles = [(37 * i * 2**25 + 12345) % 2**32 for i in range(16)]
    words, further = [*radii, *angles], [0, 2**32 - 1, 0, *range(5, 2**32, 2**28)][:16]

    def keystream(out: memoryview, key: bytes, nonce: int, first_block: int) -> None:
        source = further if first_block >= REFINEMENT_BLOCK else words
        start = 16 * (first_block % REFINEMENT_BLOCK)
        data = np.array(source[start:], "<u4").tobytes()
        out[:] = data[: len(out)]

    monkeypatch.setattr(normals, "fill_keystream", keystream)
    expected = box_muller.normals(32, words.__getitem__, further.__getitem__)
    assert_same_normals(drawn(32), expected)
    assert math.hypot(expected[0], expected[16]) == pytest.approx(math.sqrt(128 * math.log(2)))  # the largest: 9.42


def test_the_refined_tail_has_the_right_distribution() -> None:
    # Given a word in [-4096, 4096), exp(-r^2 / 2) is uniform below 2^-19.
    words = Key.from_seed(1).stream("words").below(8192, 20_000) - 4096
    radii = [normals._tail_radius(int(word), SUBKEY, 3, place) for place, word in enumerate(words)]
    assert stats.kstest(np.exp(-np.square(radii) / 2) * 2**19, "uniform").pvalue > 1e-4
    innermost = [normals._tail_radius(word, SUBKEY, 4, place) for word in (0, -1) for place in range(10_000)]
    assert min(innermost) > 6.55
    assert stats.kstest(np.exp(-np.square(innermost) / 2) * 2**31, "uniform").pvalue > 1e-4


def test_tails_have_their_right_probability() -> None:
    count, rounds = 4_000_000, 12
    thresholds = np.array([1.0, 2.0, 3.0, 4.0, 4.5, 5.0, 5.5])
    beyond = np.zeros((2, len(thresholds)), np.int64)
    for nonce in range(rounds):
        numbers = drawn(count, nonce=nonce)
        beyond[0] += [(numbers > t).sum() for t in thresholds]
        beyond[1] += [(numbers < -t).sum() for t in thresholds]
    for side in beyond:
        for seen, probability in zip(side, stats.norm.sf(thresholds), strict=True):
            assert stats.binomtest(int(seen), count * rounds, probability).pvalue > 1e-4


def test_numbers_are_normal_and_a_wrong_scale_is_noticed() -> None:
    numbers = drawn(200_000).astype(np.float64)
    assert stats.kstest(numbers, "norm").pvalue > 1e-3
    assert stats.kstest(numbers * 1.05, "norm").pvalue < 1e-6
    assert stats.kstest(numbers * 0.95, "norm").pvalue < 1e-6


@pytest.mark.parametrize("lag", [1, 2, 15, 16, 17, 1000, RUN // 2, RUN])
def test_numbers_at_a_distance_are_independent(lag: int) -> None:
    numbers = drawn(2 * RUN + 100_000).astype(np.float64)
    left, right = numbers[:-lag], numbers[lag:]
    for change in (np.asarray, np.square, np.abs):
        correlation = np.corrcoef(change(left), change(right))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(len(left))


def test_a_draw_is_continued_run_by_run() -> None:
    whole = drawn(2 * RUN + 77)
    assert np.array_equal(drawn(RUN + 77, first=RUN), whole[RUN:])
    with pytest.raises(ValueError, match="multiples"):
        drawn(5, first=16)


def test_hazard_17_purposes_steps_and_ranks_give_different_numbers() -> None:
    key = Key.from_seed(0)
    draws = [
        Normals(key, purpose, rank=rank).draw(step, 1000).copy()
        for step in (0, 1, 2**33)
        for purpose in ("gradient", "count")
        for rank in (0, 1)
    ]
    correlations = np.corrcoef(np.stack(draws)) - np.eye(len(draws))
    assert np.abs(correlations).max() < 6 / math.sqrt(1000)


def test_hazard_22_the_noise_of_a_step_is_drawn_once() -> None:
    source = Normals(Key.from_os())
    source.draw(4, 10)
    for step in (4, 3, 0):
        with pytest.raises(RuntimeError, match="drawn once"):
            source.draw(step, 10)
    source.draw(5, 10)


def test_hazard_22_a_resumed_run_goes_on_alike_when_seeded_and_anew_when_not() -> None:
    whole = Normals(Key.from_seed(3))
    uninterrupted = [whole.draw(step, 100).copy() for step in range(4)]
    assert np.array_equal(Normals(Key.from_seed(3)).draw(3, 100), uninterrupted[3])
    assert not np.array_equal(Normals(Key.from_os()).draw(3, 100), Normals(Key.from_os()).draw(3, 100))


def test_two_that_share_a_key_never_draw_the_same() -> None:
    for key in (Key.from_os(), Key.from_seed(0)):
        one, other = Normals(key), Normals(key)
        first = one.draw(0, 100).copy()
        with pytest.raises(RuntimeError, match="drawn once"):
            other.draw(0, 100)
        assert not np.array_equal(other.draw(1, 100), first)
        with pytest.raises(RuntimeError, match="drawn once"):
            one.draw(1, 100)


def test_a_copy_is_refused() -> None:
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="never pickled or copied"):
            copied(Normals(Key.from_os()))


def test_threads_that_share_one_get_numbers_of_their_own() -> None:
    source, found, errors = Normals(Key.from_os()), [], []

    def work() -> None:
        try:
            for _ in range(40):
                numbers = source.on_cpu(source.begin(), 5_000)
                time.sleep(0)  # another thread draws meanwhile
                found.append(numbers.tobytes())
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors and len(set(found)) == 240


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("key", [Key.from_os(), Key.from_seed(0)])
def test_hazard_17_a_forked_child_draws_its_own(key: Key) -> None:
    source = Normals(key)
    source.draw(0, 1000)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, source.draw(1, 1000).tobytes())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        theirs = np.frombuffer(pipe.read(), np.float32)
    os.waitpid(child, 0)
    mine = source.draw(1, 1000)
    assert len(theirs) == 1000
    assert np.array_equal(theirs, mine) == (not key.private)
    assert abs(np.corrcoef(theirs, mine)[0, 1]) < 0.2 or not key.private


@pytest.mark.timing
def test_a_draw_costs_about_what_torch_randn_costs() -> None:
    count, source, steps = 795_010, Normals(Key.from_os()), iter(range(100))
    theirs = torch.empty(count)

    def seconds(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    pairs = [(seconds(lambda: source.draw(next(steps), count)), seconds(theirs.normal_)) for _ in range(15)]
    ratio = sorted(mine / other for mine, other in pairs)[7]
    assert ratio < 1.3  # 0.65 when it was written
