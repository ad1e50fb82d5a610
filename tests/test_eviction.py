"""Room: what goes and what stays, when a put waits and when it is refused; memory is exact.

`fill` leaves room for nothing; blocks of 1 MiB in a pool of 8 MiB need no background reserve.
"""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders import MIB, block, blocks, fill, is_block, names, opened, resident

import kvstore
from kvstore import Status

KIB64 = 64 << 10


def put_one(store: kvstore.Store, name: str, size: int = MIB, timeout: float = 10) -> Status:
    return store.put([name], [bytes(size)], timeout=timeout)[0]


# ---- who goes first ------------------------------------------------------------------------------


def test_the_least_recently_used_goes_and_asking_is_no_use() -> None:
    with opened(log_evictions=True) as store:
        for name in names(8):
            assert put_one(store, name) is Status.OK
        assert store.get(["b0"], [bytearray(MIB)]).ok
        assert store.touch(["b1"]) == 1
        with store.match_prefix(["b2"]):
            pass
        assert store.put(["b3"], [bytes(MIB)])[0] is Status.EXISTS
        assert store.exists(["b4"]).all()  # neither of these is a use
        assert store.match_prefix(["b5"]).blocks == 1
        for number in range(4):
            assert put_one(store, f"new {number}") is Status.OK
        held = store.exists(names(8)).tolist()
        assert held == [True] * 4 + [False] * 4
        order = [kvstore.keys.text_key(store.spec, name) for name in ("b4", "b5", "b6", "b7")]
        assert list(store.evicted()) == order
        assert len(store.evicted()) == 0


def test_prefix_outlives_its_suffix() -> None:
    with opened() as store:
        keys = store.keys(range(160))
        half = MIB // 2
        assert store.put(keys, blocks(range(10), half)).ok
        for _ in range(50):  # as an engine does that has the first five itself
            with store.match_prefix(keys, skip_blocks=5) as hit:
                assert hit.blocks == 5
        lengths = set()
        for number in range(40):
            assert put_one(store, f"other {number}", half) is Status.OK
            held = store.exists(keys).tolist()
            assert held == sorted(held, reverse=True), "a block is gone and a later one is held"
            lengths.add(sum(held))
        assert 0 in lengths  # it went little by little, the last one first
        assert len(lengths) > 4


def test_reads_evict_nothing() -> None:
    with opened(dram=64 * MIB) as store, ThreadPoolExecutor(16) as pool:
        keys = names(14)
        assert store.put(keys, blocks(range(14), 4 * MIB), timeout=10).ok
        assert store.settle()
        before = store.usage()
        until = time.monotonic() + 1

        def read(number: int) -> int:
            got, count = np.zeros(4 * MIB, np.uint8), 0
            while count == 0 or time.monotonic() < until:
                assert store.get([keys[number % 14]], [got], timeout=30).ok
                count += 1
            assert is_block(got, number % 14)
            return count

        assert sum(pool.map(read, range(16))) > 16
        after = store.usage()
        assert after.evictions == before.evictions
        assert after.free_bytes == before.free_bytes


# ---- admission -----------------------------------------------------------------------------------


def test_batch_beyond_the_pool_is_admitted_as_a_leading_run() -> None:
    with opened() as store:
        pinned = names(68, "pinned")
        assert store.put(pinned, blocks(range(68), KIB64), chain=False).ok
        assert store.pin(pinned) == 68
        keys = store.keys(range(1600))
        result = store.put(keys, blocks(range(100), KIB64))
        assert list(result) == [Status.OK] * 60 + [Status.OUT_OF_SPACE] * 40
        assert store.unpin(pinned) == 68
        assert store.put(keys, blocks(range(100), KIB64)).ok
        assert store.settle()
        got = np.zeros((100, KIB64), np.uint8)
        with store.match_prefix(keys) as hit:
            assert hit.read(list(got)).blocks == 100
        assert all(is_block(got[i], i) for i in range(100))


@pytest.mark.parametrize("chain", [True, False])
def test_a_batch_never_evicts_itself(chain: bool) -> None:
    with opened() as store:
        fill(store)
        result = store.put(names(12), blocks(range(12), MIB), chain=chain)
        assert list(result) == [Status.OK] * 8 + [Status.OUT_OF_SPACE] * 4
        assert store.exists(names(12)).tolist() == [True] * 8 + [False] * 4


def test_independent_blocks_are_admitted_one_by_one() -> None:
    with opened() as store:
        assert store.put(["pinned"], [bytes(5 * MIB)]).ok
        assert store.pin(["pinned"]) == 1
        sizes = [MIB, 4 * MIB, MIB]
        mixed = [bytes(size) for size in sizes]
        chained = store.put(names(3, "chained"), mixed, timeout=0.01)
        assert list(chained) == [Status.OK, Status.OUT_OF_SPACE, Status.OUT_OF_SPACE]
        store.remove(names(1, "chained"))
        apart = store.put(names(3, "apart"), mixed, timeout=0.01, chain=False)
        assert list(apart) == [Status.OK, Status.OUT_OF_SPACE, Status.OK]
        store.unpin(["pinned"])


def test_full_pool_message_names_needed_free_and_held() -> None:
    with opened(view_fraction=1) as store:
        held = fill(store)
        assert store.pin(held[:3]) == 3
        with store.match_prefix(held[3:5]) as leased, store.match_prefix(held[5:]) as viewed:
            assert leased.blocks == 2
            viewed.views()
            result = store.put(["x"], [bytes(MIB)], timeout=0.01)
            numbers = r"needs 1048576 bytes, 0 MiB of 8 MiB free .*3 blocks pinned, 5 leased, 3 MiB"
            assert re.search(numbers, result.message)
            assert result.message in repr(result)
        assert store.put(["x"], [bytes(MIB)]).message == ""
        store.unpin(held[:3])


def test_pinned_pool_refuses_fast_and_recovers(capfd: pytest.CaptureFixture[str]) -> None:
    with opened() as store:
        held = fill(store)
        assert store.pin(held) == 8
        began = time.monotonic()
        for number in range(1000):
            assert put_one(store, f"{number}", timeout=0) is Status.OUT_OF_SPACE
        assert time.monotonic() - began < 2
        assert capfd.readouterr() == ("", "")
        assert store.exists(held).all()
        assert store.unpin(held) == 8
        assert put_one(store, "after") is Status.OK


@pytest.mark.parametrize("how", ["leases", "views", "pins"])
def test_put_into_a_held_pool_ends_at_its_deadline(how: str) -> None:
    with opened(view_fraction=1) as store:
        held = fill(store)
        hits = [store.match_prefix([name]).__enter__() for name in held]
        if how == "views":
            assert all(len(hit.views()) == 1 for hit in hits)
        if how == "pins":
            assert store.pin(held) == 8
            assert all(hit.close() for hit in hits)
        began = time.monotonic()
        assert put_one(store, "x", timeout=0.3) is Status.OUT_OF_SPACE
        took = time.monotonic() - began
        # Leases end by themselves, so they are waited for; views and pins need not ever.
        assert 0.3 <= took < 2 if how == "leases" else took < 0.3
        assert store.unpin(held[:1]) == (how == "pins")
        hits[0].close()
        assert put_one(store, "x", timeout=0.3) is Status.OK
        assert store.exists(held).tolist() == [False] + [True] * 7
        store.unpin(held)
        for hit in hits:
            hit.close()


def test_a_waiting_put_goes_on_when_a_lease_ends() -> None:
    with opened() as store, ThreadPoolExecutor(1) as pool:
        held = fill(store)
        with store.match_prefix(held):
            waiting = pool.submit(put_one, store, "x", MIB, 30)
            time.sleep(0.1)
            assert not waiting.done()
        assert waiting.result(5) is Status.OK


def test_a_waiting_put_goes_on_when_a_put_in_parts_ends() -> None:
    with opened() as store, ThreadPoolExecutor(1) as pool:
        writing = store.writing(names(4), block_bytes=2 * MIB)
        waiting = pool.submit(put_one, store, "x", MIB, 30)
        time.sleep(0.1)
        assert not waiting.done()
        writing.abort()
        assert waiting.result(5) is Status.OK


@pytest.mark.parametrize("call", ["put", "put_async"])
def test_a_wait_that_ends_at_its_deadline_keeps_the_leading_run(call: str) -> None:
    with opened() as store:
        with store.match_prefix(fill(store)[:4]):
            result: kvstore.PutResult
            if call == "put":
                result = store.put(names(6), blocks(range(6), MIB), timeout=0.1)
            else:
                result = store.put_async(names(6), blocks(range(6), MIB), timeout=0.1).wait(10)
            assert list(result) == [Status.OK] * 4 + [Status.OUT_OF_SPACE] * 2
        got = np.zeros((4, MIB), np.uint8)
        assert store.get(names(4), got).ok
        assert all(is_block(got[i], i) for i in range(4))


def test_lapsed_leases_make_room_while_a_put_waits() -> None:
    with opened(lease_s=0.2) as store:
        held, began = fill(store), time.monotonic()
        with store.match_prefix(held) as hit:
            assert put_one(store, "x", timeout=20) is Status.OK
            assert 0.2 <= time.monotonic() - began < 5
        assert hit.held is False


# ---- leases and time -----------------------------------------------------------------------------


def test_stale_handle_is_refused_every_time() -> None:
    with opened(lease_s=0.001) as store:
        got = np.full((8, MIB), 0xAB, np.uint8)
        for number in range(100):
            held = fill(store, prefix=f"{number}.")
            with store.match_prefix(held) as hit:
                time.sleep(0.002)
                assert store.put([f"{number}"], [block(99, MIB)], timeout=10).ok
                with pytest.raises(kvstore.LeaseRevoked, match="match again"):
                    hit.read(list(got))
            assert hit.held is False
            assert (got[0] == 0xAB).all()


def test_read_under_a_lapsed_lease_is_exact_or_refused() -> None:
    random = np.random.default_rng(5)
    outcomes = {"exact": 0, "refused": 0}
    with opened(lease_s=0.003) as store, ThreadPoolExecutor(1) as pool:

        def fill_three_times(round_number: int) -> None:
            for number in range(24):
                store.put([f"over {round_number} {number}"], [bytes(MIB)], timeout=10)

        for round_number in range(40):
            held = names(8, f"{round_number}.")
            given = blocks(range(8), MIB, round_number)
            assert store.put(held, given, chain=False, timeout=10).ok
            got = np.full((8, MIB), 0xAB, np.uint8)
            with store.match_prefix(held) as hit:
                filling = pool.submit(fill_three_times, round_number)
                if round_number % 2:
                    filling.result()
                elif round_number % 4:  # while the leases lapse
                    time.sleep(random.random() * 0.006)
                try:
                    result = hit.read(list(got))
                except kvstore.LeaseRevoked:
                    outcomes["refused"] += 1
                    assert set(np.unique(got)) <= {0, 0xAB}
                else:
                    outcomes["exact"] += 1
                    for i in range(hit.blocks):
                        assert result[i] is Status.OK
                        assert is_block(got[i], i, round_number)
            filling.result()
    assert min(outcomes.values()) > 0


def test_dropped_matches_hold_nothing() -> None:
    with opened() as store:
        for number in range(1000):
            keys = names(8, f"{number}.")
            assert store.put(keys, [b"%d" % number] * 8).ok
            match = store.match_prefix(keys)
            assert match.blocks == 8
            if number % 2:
                with match as hit:
                    assert hit.blocks == 8
            elif number % 4:
                match.__enter__()  # and never left: dropped with its hit
            del match
        assert store.usage().leased_blocks == 0
        fill(store)


# ---- shapes --------------------------------------------------------------------------------------


def test_one_block_of_most_of_the_pool_fits() -> None:
    with opened(dram=64 * MIB) as store:
        got = np.zeros(50 * MIB, np.uint8)
        assert store.put(["large"], [block(1, 50 * MIB)], timeout=10).ok
        assert store.get(["large"], [got], timeout=10).ok
        assert is_block(got, 1)


def test_small_blocks_removed_make_room_for_a_huge_one() -> None:
    with opened(dram=16 * MIB) as store:
        keys = np.random.default_rng(1).integers(0, 256, (4000, 32), np.uint8)
        assert store.put(keys, np.zeros((4000, 4096), np.uint8), chain=False).ok
        assert store.settle()
        held = store.usage().blocks
        assert held > 3500
        assert store.remove(keys) == held
        huge = 16 * MIB * 9 // 10
        assert store.put(["huge"], [block(1, huge)]).ok
        got = np.zeros(huge, np.uint8)
        assert store.get(["huge"], [got]).ok
        assert is_block(got, 1)


def test_holes_between_small_blocks_serve_a_large_one() -> None:
    with opened() as store:
        keys = names(128)
        assert store.put(keys, np.zeros((128, KIB64), np.uint8), chain=False).ok
        assert store.settle()
        store.remove(keys[::2])
        usage = store.usage()
        assert usage.free_bytes >= 4 * MIB
        assert usage.largest_free_bytes < 2 * MIB  # nowhere a whole frame
        assert store.put(["large"], [block(1, 4 * MIB)]).ok
        got = np.zeros(4 * MIB, np.uint8)
        assert store.get(["large"], [got]).ok
        assert is_block(got, 1)


def churn(puts: int, seed: int, audit_every: int) -> None:
    """Log-uniform sizes from 1 B to 8 MiB into 256 MiB; a block is a slice of words somewhere."""
    random = np.random.default_rng(seed)
    largest = 8 * MIB
    words = block(seed, 3 * largest)
    sizes = np.exp(random.random(puts) * np.log(largest + 1)).astype(np.int64)
    places = random.integers(0, 2 * largest, puts)
    got = np.empty(largest, np.uint8)
    read = 0
    with opened(dram=256 * MIB) as store:
        for number, (size, place) in enumerate(zip(sizes.tolist(), places.tolist(), strict=True)):
            result = store.put([f"{number}"], [words[place : place + size]], timeout=30)
            assert result[0] is Status.OK, result
            if number % 16 == 0:
                other = int(random.integers(max(0, number - 1000), number + 1))
                target = got[: sizes[other]]
                if store.get([f"{other}"], [target], timeout=30).ok:
                    expected = words[places[other] : places[other] + sizes[other]]
                    assert np.array_equal(target, expected)
                    read += 1
            if number % audit_every == audit_every - 1:
                assert store.settle()
                store.audit()
        assert read > puts // 64
        assert store.usage().evictions > puts // 2


def test_mixed_size_churn_never_fails_while_frames_suffice() -> None:
    churn(50_000, seed=1, audit_every=5_000)


@pytest.mark.long
def test_mixed_size_churn_for_long() -> None:
    churn(1_000_000, seed=2, audit_every=50_000)


# ---- many threads, and limits --------------------------------------------------------------------


def test_many_writers_beyond_the_pool_all_succeed() -> None:
    size = 256 << 10
    with opened(dram=16 * MIB) as store, ThreadPoolExecutor(32) as pool:

        def write(writer: int) -> bool:
            given = block(writer, size)
            results = [
                store.put([f"{writer}.{number}"], [given], timeout=30) for number in range(20)
            ]
            return all(result.stored == 1 for result in results)

        assert all(pool.map(write, range(32)))
        assert store.usage().commits == 640


def test_exists_never_promises_an_empty_block() -> None:
    size = 100_000
    with opened() as store, ThreadPoolExecutor(1) as pool:

        def write() -> None:
            for number in range(240):  # three times the pool
                assert store.put([f"b{number}"], [block(number, size)], timeout=10).ok

        writing, found, checks = pool.submit(write), 0, 0
        while not writing.done() or checks < 2:
            checks += writing.done()
            for number in np.flatnonzero(store.exists(names(240))).tolist():
                got = np.zeros(size, np.uint8)
                result = store.get([f"b{number}"], [got], timeout=10)
                if result.ok:
                    assert result.nbytes.tolist() == [size]
                    assert is_block(got, number)
                    found += 1
                else:
                    assert result[0] is Status.MISS
                    assert not store.exists([f"b{number}"]).any()
        writing.result()
        assert found > 50


def test_resident_memory_stays_at_the_pool_under_load() -> None:
    before = resident()
    with opened(dram=32 * MIB) as store, ThreadPoolExecutor(16) as pool:
        start, until = resident(), time.monotonic() + 2.5
        headers = 4 * MIB  # of the slots, and what other tests' pools still hold

        def write(writer: int) -> int:
            number, given = 0, np.zeros(3 * MIB // (writer + 1), np.uint8)
            while time.monotonic() < until:
                assert store.put([f"{writer}.{number}"], [given], timeout=30).ok
                number += 1
            return number

        writers = [pool.submit(write, writer) for writer in range(16)]
        while time.monotonic() < until:
            now = resident()
            assert now["RssShmem"] - before["RssShmem"] <= 32 * MIB + headers
            assert now["RssAnon"] - start["RssAnon"] < 64 * MIB
            time.sleep(0.02)
        assert sum(writer.result() for writer in writers) > 200


def test_every_limit_option_limits() -> None:
    with opened(dram=4 * MIB) as store:
        for number in range(40):
            assert put_one(store, f"{number}", 300_000) is Status.OK
            usage = store.usage()
            assert usage.taken_bytes <= usage.capacity_bytes == 4 * MIB
    with opened(view_fraction=0.125) as store:
        held = fill(store)
        hits = [store.match_prefix([name]).__enter__() for name in held[:2]]
        hits[0].views()
        with pytest.raises(kvstore.ViewsRefused):
            hits[1].views()
        assert store.usage().view_bytes == MIB
        for hit in hits:
            hit.close()
    with opened(reserve_blocks=32) as store:
        for number in range(300):
            assert put_one(store, f"{number}", KIB64) is Status.OK
        assert store.settle()
        usage = store.usage()
        assert usage.blocks <= 128 - 32
        assert usage.free_bytes >= 32 * KIB64


@pytest.mark.long
def test_exists_stays_fast_during_an_eviction_storm() -> None:
    keys = np.random.default_rng(1).integers(0, 256, (20_000, 32), np.uint8)
    stop = threading.Event()
    with opened(dram=64 * MIB) as store, ThreadPoolExecutor(2) as pool:
        assert store.put(keys, np.zeros((20_000, 1024), np.uint8), chain=False).ok

        def storm(writer: int) -> None:
            number = 0
            while not stop.is_set():
                store.put([f"{writer}.{number}"], [bytes(MIB)], timeout=10)
                number += 1

        def p99() -> float:
            times = []
            for _ in range(100):
                began = time.perf_counter()
                store.exists(keys)
                times.append(time.perf_counter() - began)
            return float(np.quantile(times, 0.99))

        calm, stormy = [], []
        for _ in range(5):
            calm.append(p99())
            stop.clear()
            writers = [pool.submit(storm, writer) for writer in range(2)]
            time.sleep(0.2)
            stormy.append(p99())
            stop.set()
            for writer in writers:
                writer.result()
        assert store.usage().evictions > 0
        assert np.median(stormy) <= 5 * np.median(calm)
