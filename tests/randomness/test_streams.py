"""Keystreams: the RFC's vectors, domain separation, forks, and exact uniformity."""

import copy
import itertools
import os
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hush.randomness import chacha20, streams
from hush.randomness.streams import Key, Stream

PATHS = [chacha20._fill_numpy, chacha20._fill_openssl]


def keystream(fill: Callable[..., None], key: bytes, nonce: int, first_block: int, size: int) -> bytes:
    out = bytearray(size)
    fill(memoryview(out), key, nonce, first_block)
    return bytes(out)


# RFC 8439, appendix A.1: key, counter, the last 64 bits of the nonce (its first 32 are zero in all five), keystream
RFC_BLOCKS = [
    (bytes(32), 0, bytes(8), "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
     "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"),
    (bytes(32), 1, bytes(8), "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
     "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"),
    (bytes(31) + b"\x01", 1, bytes(8), "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
     "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"),
    (b"\x00\xff" + bytes(30), 2, bytes(8), "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
     "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096"),
    (bytes(32), 0, bytes(7) + b"\x02", "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
     "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d"),
]  # fmt: skip


@pytest.mark.parametrize("fill", PATHS)
@pytest.mark.parametrize("key, counter, nonce, expected", RFC_BLOCKS)
def test_block_function_gives_the_vectors_of_rfc_8439(
    fill: Callable[..., None], key: bytes, counter: int, nonce: bytes, expected: str
) -> None:
    assert keystream(fill, key, int.from_bytes(nonce, "little"), counter, 64).hex() == expected


@pytest.mark.parametrize("fill", PATHS)
def test_rfc_8439_section_2_3_2(fill: Callable[..., None]) -> None:
    # Nonce 000000090000004a00000000 and counter 1: in our layout the RFC's first nonce word is the counter's high half.
    got = keystream(fill, bytes(range(32)), 0x4A000000, (0x09000000 << 32) + 1, 64)
    assert got.hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


@settings(deadline=None, max_examples=40)
@given(
    key=st.binary(min_size=32, max_size=32),
    nonce=st.integers(0, 2**64 - 1),
    block=st.one_of(st.integers(0, 2**63), st.integers(2**32 - 4, 2**32 + 4)),
    size=st.integers(0, 700),
)
def test_openssl_and_numpy_agree_bit_for_bit(key: bytes, nonce: int, block: int, size: int) -> None:
    assert keystream(chacha20._fill_openssl, key, nonce, block, size) == keystream(
        chacha20._fill_numpy, key, nonce, block, size
    )


def test_long_fills_agree_and_chunks_join() -> None:
    size = 600_001
    whole = keystream(chacha20._fill_openssl, bytes(32), 5, 0, size)
    assert whole == keystream(chacha20._fill_numpy, bytes(32), 5, 0, size)
    assert whole[64 * 3000 :] == keystream(chacha20._fill_numpy, bytes(32), 5, 3000, size - 64 * 3000)


def test_without_cryptography_the_stream_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Key.from_seed(1).stream("x").bytes(1000)
    monkeypatch.setattr(chacha20, "_openssl_cipher", lambda: None)
    assert Key.from_seed(1).stream("x").bytes(1000) == fast


def test_a_cryptography_without_chacha20_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An OpenSSL that is restricted to FIPS algorithms."""
    exceptions = pytest.importorskip("cryptography.exceptions")
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")

    def refuse(*_: object, **__: object) -> None:
        raise exceptions.UnsupportedAlgorithm("ChaCha20")

    monkeypatch.setattr(ciphers, "Cipher", refuse)
    assert chacha20._openssl_cipher.__wrapped__() is None


@pytest.mark.parametrize("sizes", [[1] * 200, [63, 2, 64, 0, 71], [200], [65, 135]])
def test_a_stream_does_not_depend_on_how_it_is_cut(sizes: list[int]) -> None:
    stream = Key.from_seed(2).stream("cut")
    assert b"".join(stream.bytes(n) for n in sizes) == Key.from_seed(2).stream("cut").bytes(200)


def test_hazard_17_no_two_streams_coincide() -> None:
    key = Key.from_seed(0)
    purposes = ["noise", "noise1", "lots", "", "noise\x00", "nois", "é", "child/noise"]
    domains = itertools.product(purposes, [0, 1, 256, 2**40], [0, 1, 256, 2**32])
    claims = [key.claim(p, step=s, rank=r) for p, s, r in domains]
    seen = [(claim.subkey(t), claim.step) for claim in claims for t in (0, 1, 256, 2**63)]
    assert len(set(seen)) == len(seen)
    secrets = [k.stream("x").bytes(16) for k in (key, key.child("noise"), key.child("noise"), key.child("nois"))]
    assert len(set(secrets)) == 4
    assert len({Key.from_os().stream("noise").bytes(16) for _ in range(100)}) == 100
    assert len({Key.from_seed(seed).stream("noise").bytes(16) for seed in (0, 1, -1, 2**70)}) == 4


def test_seeded_streams_repeat_and_say_so() -> None:
    assert Key.from_seed(7).stream("noise", step=3).bytes(32) == Key.from_seed(7).stream("noise", step=3).bytes(32)
    assert not Key.from_seed(7).private
    assert Key.from_os().private


def test_the_secret_is_not_shown_pickled_or_copied() -> None:
    key = Key(bytes(range(32)), private=True)
    for text in (repr(key), str(key), f"{key.stream('a')!r}", repr(key.claim("b"))):
        assert bytes(range(32)).hex() not in text
        assert "\\x01" not in text
    things = [key, key.stream("c"), key.claim("d"), Key.from_seed(1), Key.from_seed(1).stream("noise")]
    for thing in [*things, key.child("y")]:
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(thing)
        with pytest.raises(TypeError, match="never pickled"):
            copy.copy(thing)
        with pytest.raises(TypeError, match="never pickled"):
            copy.deepcopy(thing)


def in_forked_child(work: Callable[[], bytes]) -> bytes:
    """What work() returns in a child made by fork."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except RuntimeError as error:
            answer = str(error).encode()
        os.write(writing, answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@forks
def test_hazard_17_a_forked_child_never_shares_a_stream() -> None:
    key = Key.from_os()
    children = [in_forked_child(lambda: key.stream("noise", step=1).bytes(32)) for _ in range(2)]
    nested = in_forked_child(lambda: in_forked_child(lambda: key.stream("noise", step=1).bytes(32)))
    drawn = [*children, nested, key.stream("noise", step=1).bytes(32)]
    assert [len(d) for d in drawn] == [32] * 4
    assert len(set(drawn)) == 4


@forks
def test_hazard_17_a_forked_child_never_shares_a_stream_after_the_child_has_used_the_key() -> None:
    key = Key.from_os()

    def grandchild_and_child() -> bytes:
        mine = key.stream("noise").bytes(16)
        return mine + in_forked_child(lambda: key.stream("noise").bytes(16))

    both = in_forked_child(grandchild_and_child)
    assert len({both[:16], both[16:], key.stream("noise").bytes(16)}) == 3


@pytest.mark.parametrize("key", [Key.from_os(), Key.from_seed(0)], ids=["private", "seeded"])
def test_hazard_38_a_step_is_claimed_once(key: Key) -> None:
    key.claim("noise", step=4)
    for step in (4, 3, 0):
        with pytest.raises(RuntimeError, match="drawn once"):
            key.claim("noise", step=step)
        with pytest.raises(RuntimeError, match="drawn once"):
            key.stream("noise", step=step)
    assert key.claim("noise").step == 5 and key.claim("noise").step == 6
    assert key.claim("noise", rank=1).step == 0 and key.claim("other").step == 0


class Slow(dict[tuple[str, int], int]):
    """Lets other threads run between the look at a claim and the note of it."""

    def get(self, *place: object) -> int:  # type: ignore[override]
        found: int = super().get(*place)  # type: ignore[call-overload]
        time.sleep(0.001)
        return found


def test_threads_claim_different_steps() -> None:
    key = Key.from_os()
    key._claimed = Slow()
    with ThreadPoolExecutor(8) as pool:
        steps = [one.result().step for one in [pool.submit(key.claim, "noise") for _ in range(64)]]
    assert sorted(steps) == list(range(64))


def same_memory_twice(work: Callable[[], bytes], patch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    """What work() returns in two processes of one memory that cannot know it: a snapshot that is restored twice."""
    patch.setattr(streams, "this_process", lambda: (0, None))
    return in_forked_child(work), in_forked_child(work)


@forks
def test_hazard_38_a_restored_snapshot_draws_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "this_process", lambda: (0, None))
    key = Key.from_os()
    child = key.child("sanitizer")
    for work in (lambda: key.stream("noise").bytes(32), lambda: child.claim("noise").subkey()):
        one, two = same_memory_twice(work, monkeypatch)
        assert len(one) == 32 and one != two
    monkeypatch.setattr(os, "urandom", bytes)  # an operating system in the snapshot, which repeats itself
    one, two = same_memory_twice(lambda: key.stream("noise").bytes(32), monkeypatch)
    assert one != two, "the clock goes on"
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    one, two = same_memory_twice(lambda: key.stream("noise").bytes(32), monkeypatch)
    assert one == two, "the test can fail"


@forks
def test_a_claim_of_before_the_fork_is_refused_in_the_child() -> None:
    claim, seeded = Key.from_os().claim("noise"), Key.from_seed(0).claim("noise")
    assert b"before the fork" in in_forked_child(claim.subkey)
    assert len(claim.subkey()) == 32 and in_forked_child(seeded.subkey) == seeded.subkey()


@forks
def test_a_fork_while_another_thread_claims_does_not_hang() -> None:
    key = Key.from_os()
    with key._lock:
        assert len(in_forked_child(lambda: key.stream("noise").bytes(16))) == 16


@forks
def test_a_begun_stream_refuses_in_a_forked_child_and_goes_on_in_the_parent() -> None:
    stream = Key.from_os().stream("lots")
    stream.bytes(10)
    assert b"before the fork" in in_forked_child(lambda: stream.bytes(10))
    assert len(stream.bytes(10)) == 10


@forks
def test_seeded_streams_survive_a_fork_unchanged() -> None:
    key = Key.from_seed(4)
    stream = key.stream("lots")
    assert in_forked_child(lambda: key.stream("noise").bytes(8)) == key.stream("noise").bytes(8)
    assert in_forked_child(lambda: stream.bytes(8)) == stream.bytes(8)


def test_a_fork_by_foreign_code_is_noticed_by_the_process_number(monkeypatch: pytest.MonkeyPatch) -> None:
    key = Key.from_os()
    stream, before = key.stream("noise"), key.stream("lots").bytes(16)
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    with pytest.raises(RuntimeError, match="before the fork"):
        stream.bytes(1)
    assert key.stream("lots").bytes(16) != before


@pytest.mark.parametrize("bound", [1, 2, 3, 10, 600, 60_000])
def test_below_is_uniform(bound: int) -> None:
    numbers = Key.from_seed(bound).stream("below").below(bound, 120_000)
    assert numbers.dtype == np.int64 and numbers.min() >= 0 and numbers.max() < bound
    cells = min(bound, 600)
    if cells > 1:
        assert stats.chisquare(np.bincount(numbers * cells // bound, minlength=cells)).pvalue > 1e-4


def test_below_draws_from_large_ranges_too() -> None:
    for bound in (2**24, 2**24 + 1, 2**32 + 5, 2**63):
        numbers = Key.from_seed(0).stream("below").below(bound, 2_000)
        assert 0 <= numbers.min() < 0.01 * bound and 0.99 * bound < numbers.max() < bound


def test_below_rejects_what_would_be_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    # With bound 3 * 2^61 a plain remainder would favour the numbers below 2^62.
    bound = 3 << 61
    numbers = Key.from_seed(0).stream("below").below(bound, 60_000)
    thirds = np.bincount(numbers // (1 << 61), minlength=3)
    assert stats.chisquare(thirds).pvalue > 1e-4
    words = iter([np.array([2**64 - 1, 5], np.uint64), np.array([2**64 - 2], np.uint64), np.array([7], np.uint64)])
    monkeypatch.setattr(Stream, "uint64", lambda self, count: next(words))
    assert Key.from_seed(0).stream("below").below(10**18, 2).tolist() == [7, 5]
    # 2^32 = 286 * 15,000,000 + 4,967,296: below 2^24 words of 32 bits do, and the last 4,967,296 are drawn again.
    edge = 286 * 15_000_000
    short = iter([np.array([edge - 1, edge, 5], np.uint32), np.array([2**32 - 1], np.uint32), np.array([8], np.uint32)])
    monkeypatch.setattr(Stream, "uint32", lambda self, count: next(short))
    assert Key.from_seed(0).stream("below").below(15_000_000, 3).tolist() == [15_000_000 - 1, 8, 5]


def test_uniform_is_uniform_and_never_reaches_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Key.from_seed(3).stream("uniform").uniform(100_000)
    assert stats.kstest(numbers, "uniform").pvalue > 1e-4
    monkeypatch.setattr(Stream, "uint64", lambda self, count: np.array([0, 2**64 - 1], np.uint64))
    low, high = Key.from_seed(3).stream("uniform").uniform(2)
    assert low > 0 and high < 1 and low == 1 - high


def test_words_are_the_bytes_little_endian() -> None:
    data = Key.from_seed(5).stream("words").bytes(64)
    assert Key.from_seed(5).stream("words").uint32(16).tolist() == np.frombuffer(data, "<u4").tolist()
    assert Key.from_seed(5).stream("words").uint64(8).tolist() == np.frombuffer(data, "<u8").tolist()
    assert Key.from_seed(5).stream("words").uint32(0).tolist() == []


def test_misuse_is_refused() -> None:
    key = Key.from_seed(0)
    with pytest.raises(ValueError, match="step must be"):
        key.stream("noise", step=-1)
    with pytest.raises(ValueError, match="rank must be"):
        key.stream("noise", rank=2**64)
    with pytest.raises(TypeError):
        key.stream("noise", step=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bound must lie"):
        key.stream("x").below(0, 1)
    with pytest.raises(TypeError, match="a seed is an int"):
        Key.from_seed("7")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="32 bytes"):
        Key(b"short", private=True)
    with pytest.raises(ValueError, match="nonce and block"):
        chacha20.fill_keystream(memoryview(bytearray(128)), bytes(32), 0, 2**64 - 1)
