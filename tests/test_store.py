"""put and get on one store: the bytes put are the bytes got, and every answer says what it is."""

import dataclasses
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from builders import (
    ANY,
    MIB,
    Bytes,
    block,
    blocks,
    is_block,
    names,
    opened,
    resident,
    run_python,
)

import kvstore
from kvstore import BlockSpec, Status

GEOMETRY: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 32}
TOKENS = list(range(100, 260))  # ten blocks of 16


def numbered(count: int, spec: BlockSpec, first: int = 0) -> Bytes:
    assert spec.block_bytes is not None
    return blocks(range(first, first + count), spec.block_bytes)


def typed(spec: BlockSpec) -> Bytes:
    """Three blocks of the spec's size, as bytes; such as bool can have."""
    got = numbered(3, spec)
    return got % 2 if spec.dtype == "bool" else got


# ---- dtypes, sizes, strides ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "uint8", "bool", "complex64", "int64"]
)
def test_every_dtype_round_trips_bit_for_bit(dtype: str) -> None:
    spec = BlockSpec("m", dtype=dtype, **GEOMETRY)
    with opened(spec) as store:
        keys = store.keys(TOKENS[:48])
        given = typed(spec).view(dtype)
        assert store.put(keys, given).ok
        got = np.zeros_like(given)
        assert store.get(keys, got).ok
        assert got.tobytes() == given.tobytes()  # NaNs too


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "bool"])
def test_every_tensor_dtype_round_trips_bit_for_bit(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    spec = BlockSpec("m", dtype=dtype, **GEOMETRY)
    with opened(spec) as store:
        keys = store.keys(TOKENS[:48])
        raw = typed(spec)
        given = torch.from_numpy(raw).view(getattr(torch, dtype))
        assert store.put(keys, given).ok
        got = torch.zeros_like(given)
        assert store.get(keys, got).ok
        assert got.view(torch.uint8).numpy().tobytes() == raw.tobytes()
        as_bytes = np.zeros_like(raw)  # a tensor put, an array got
        assert store.get(keys, as_bytes).ok
        assert np.array_equal(as_bytes, raw)


def test_odd_sizes_at_odd_addresses_round_trip() -> None:
    sizes = [1, 2, 63, 64, 65, 4095, 4096, 4097, MIB + 1, 2 * MIB - 1, 2 * MIB + 1]
    with opened(dram=16 * MIB) as store:
        for number, size in enumerate(sizes):
            for shift in (1, 3):
                memory = np.zeros(size + shift, np.uint8)
                memory[shift:] = block(number, size, shift)
                name = f"{size} at {shift}"
                assert store.put([name], [memory[shift:]]).ok
                room = np.full(size + 8, 0xAB, np.uint8)
                result = store.get([name], [room[shift : shift + size]])
                assert result.ok
                assert result.nbytes.tolist() == [size]
                assert is_block(room[shift : shift + size], number, shift)
                assert set(room[:shift]) | set(room[shift + size :]) == {0xAB}


@pytest.mark.long
@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 4097])
def test_blocks_beyond_4_gib_round_trip(size: int) -> None:
    memory = np.empty(size, np.uint8)
    with opened(dram=size + 2 * MIB, timeout_s=600) as store:
        for start in range(0, size, 64 * MIB):  # piece by piece: the machine has no room for two
            piece = memory[start : start + 64 * MIB]
            piece[:] = block(start, len(piece))
        assert store.put(["large"], [memory]).ok
        memory[:] = 0
        result = store.get(["large"], [memory])
        assert result.ok
        assert result.nbytes.tolist() == [size]
        assert store.list()[0].length == size
    for start in range(0, size, 64 * MIB):
        assert is_block(memory[start : start + 64 * MIB], start)


STRIDED: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda a: a.transpose(0, 2, 1),
    "every second": lambda a: a[:, :, ::2],
    "behind the first": lambda a: a[1:],
    "backwards": lambda a: a[::-1, :, ::-1],
}


@pytest.mark.parametrize("shape", STRIDED)
def test_strided_arrays_round_trip_by_their_logical_contents(shape: str) -> None:
    whole = np.arange(4 * 32 * 64, dtype=np.uint16).reshape(4, 32, 64)
    given = STRIDED[shape](whole)
    given.setflags(write=False)
    keys = names(len(given))
    with opened() as store:
        assert store.put(keys, given).ok
        straight = np.zeros(given.shape, given.dtype)
        assert store.get(keys, straight).ok
        assert np.array_equal(straight, given)

        around = np.full(whole.shape, 0xABCD, np.uint16)
        target = STRIDED[shape](around)
        assert store.get(keys, target).ok
        assert np.array_equal(target, given)
        target[:] = 0xABCD
        assert (around == 0xABCD).all()  # neighbours were not touched

        target.setflags(write=False)
        with pytest.raises(kvstore.InvalidArgument, match="read-only"):
            store.get(keys, target)


def test_blocks_of_pieces_and_pointers_round_trip() -> None:
    given = block(1, 300_001)
    pieces = [given[:7], (given[7:].ctypes.data, 200_000), b"", given[200_007:]]
    with opened() as store:
        assert store.put(["k"], [pieces]).ok
        got = np.zeros_like(given)
        third = len(got) // 3
        into = [got[:third], (got[third:].ctypes.data, third), got[2 * third :]]
        assert store.get(["k"], [into]).ok
        assert is_block(got, 1)


# ---- typed answers -------------------------------------------------------------------------------


def test_absent_and_failed_are_different_answers() -> None:
    with opened() as store:
        assert store.put(["held"], [block(0, 3 * MIB)]).ok
        for keys in (["absent"], ["held", "absent"], ["absent", "held", "absent"]):
            result = store.get(keys, [bytearray(3 * MIB) for _ in keys])
            want = [Status.OK if key == "held" else Status.MISS for key in keys]
            assert list(result) == want
            assert result.nbytes.tolist() == [3 * MIB if key == "held" else 0 for key in keys]
        late = bytearray(b"\xab" * 3 * MIB)
        failed = store.get(["held", "absent"], [late, bytearray(1)], timeout=1e-9)
        assert list(failed) == [Status.TIMED_OUT, Status.MISS]
        assert failed.nbytes.tolist() == [0, 0]
        assert late.count(0) == len(late)  # a failed item's memory is zeroed
        assert store.put(["held"], [b"other"])[0] is Status.EXISTS
        assert store.match_prefix(["absent"]).blocks == 0


def test_no_timeout_means_no_wait_but_the_copy_is_made() -> None:
    with opened(timeout_s=0) as store:
        for size in (1, 5 * MIB):
            got = np.zeros(size, np.uint8)
            assert store.put([f"{size}"], [block(0, size)]).ok
            assert store.get([f"{size}"], [got]).ok
            assert is_block(got, 0)
        assert store.pin(["1", f"{5 * MIB}"]) == 2
        assert store.put(["x"], [bytes(4 * MIB)])[0] is Status.OUT_OF_SPACE
        assert store.put_async(["x"], [bytes(4 * MIB)]).wait(5)[0] is Status.OUT_OF_SPACE


def test_get_marks_each_missing_item_and_never_says_ok() -> None:
    keys, gone = names(16), {3, 7, 8, 15}
    with opened() as store:
        assert store.put(keys, blocks(range(16), 1000)).ok
        assert store.match_prefix(keys).blocks == 16
        assert store.remove([keys[i] for i in gone]) == 4
        out = np.full((16, 1000), 0xAB, np.uint8)
        result = store.get(keys, list(out))
        assert not result.ok
        assert {i for i in range(16) if result[i] is Status.MISS} == gone
        assert result.count(Status.OK) == 12
        assert result.blocks == 3
        for i in range(16):
            assert (out[i] == 0xAB).all() if i in gone else is_block(out[i], i)


def test_hit_counters_equal_the_script() -> None:
    script = [10] * 37 + [3] * 20 + [0] * 43  # blocks held of each lookup's ten
    with opened() as store:
        chains = [names(10, f"{i}.") for i in range(100)]
        for keys, held in zip(chains, script, strict=True):
            assert store.put(keys[:held], [b"x"] * held).ok
        before = store.usage()
        assert (before.requested, before.hits) == (0, 0)
        for keys, held in zip(chains, script, strict=True):
            match = store.match_prefix(keys)
            with match as hit:
                assert hit.read([bytearray(1) for _ in keys]).blocks == held
        matched = store.usage()
        assert (matched.requested, matched.hits) == (1000, 37 * 10 + 20 * 3)
        for keys in chains:
            store.get(keys, [bytearray(1) for _ in keys])
        got = store.usage()
        assert (got.requested, got.hits) == (2000, 2 * (37 * 10 + 20 * 3))


def test_counters_stand_still_while_idle() -> None:
    with opened() as store:

        def counts() -> dict[str, int]:
            usage = store.usage()
            counters = "version requested hits commits evictions removals corrupt"
            return {name: getattr(usage, name) for name in counters.split()}

        last = counts()
        for number in range(40):
            store.put([f"{number}"], [bytes(MIB)])
            store.get([f"{number}", "absent"], [bytearray(MIB), bytearray(1)])
            if number % 10 == 9:
                store.remove([f"{number}"])
                store.clear()
            now = counts()
            assert all(now[name] >= last[name] for name in now)
            last = now
        assert all(count > 0 for name, count in last.items() if name != "corrupt")
        assert store.settle()
        idle = store.usage()
        for _ in range(10):
            time.sleep(0.005)
            usage = store.usage()
            assert dataclasses.replace(usage, scrubbed=idle.scrubbed) == idle


def test_misses_and_duplicates_print_nothing(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with opened() as store, caplog.at_level(logging.DEBUG):
        store.put(["held"], [b"x"])
        for i in range(1000):
            assert store.get([f"absent {i}"], [bytearray(1)])[0] is Status.MISS
            assert store.put(["held"], [b"x"])[0] is Status.EXISTS
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


# ---- many threads --------------------------------------------------------------------------------


def test_acknowledged_put_is_readable_by_every_thread() -> None:
    writers, count, size = 16, 500, 1000
    words = blocks(range(writers * count), size)
    with opened(dram=32 * MIB) as store, ThreadPoolExecutor(2 * writers) as pool:
        told: list[list[int]] = [[] for _ in range(writers)]
        heard = [threading.Semaphore(0) for _ in range(writers)]

        def write(writer: int) -> None:
            for number in range(writer * count, (writer + 1) * count):
                assert store.put([f"{number}"], words[number][None]).stored == 1
                told[writer].append(number)
                heard[writer].release()

        def read(writer: int) -> int:
            equal = 0
            for i in range(count):
                assert heard[writer].acquire(timeout=30)
                number = told[writer][i]
                got = np.zeros(size, np.uint8)
                equal += store.get([f"{number}"], [got]).ok and np.array_equal(got, words[number])
            return equal

        written = [pool.submit(write, writer) for writer in range(writers)]
        read_equal = [pool.submit(read, writer) for writer in range(writers)]
        for future in written:
            future.result()
        assert sum(future.result() for future in read_equal) == writers * count


def test_one_winner_when_many_writers_put_the_same_key() -> None:
    writers, count, size = 16, 100, 256
    with opened() as store, ThreadPoolExecutor(writers) as pool:
        for round_number in range(20):
            keys = names(count, f"{round_number}.")
            start = threading.Barrier(writers)

            def write(writer: int, keys: list[str] = keys, start: Any = start) -> Bytes:
                mine = blocks(range(count), size, writer)
                start.wait(10)
                return store.put(keys, mine).codes

            codes = np.stack(list(pool.map(write, range(writers))))
            assert ((codes == Status.OK).sum(axis=0) == 1).all()
            assert ((codes == Status.EXISTS).sum(axis=0) == writers - 1).all()
            got = np.zeros((count, size), np.uint8)
            assert store.get(keys, list(got)).ok
            for i, winner in enumerate((codes == Status.OK).argmax(axis=0)):
                assert is_block(got[i], i, int(winner))
            assert store.remove(keys) == count


def test_hits_after_clear_are_never_older_than_the_clear() -> None:
    writers, words = 8, 2048
    places = np.arange(words, dtype=np.uint64)
    until = time.monotonic() + 2
    completed = [1]  # version after the last clear that has returned
    chains = [[writer] * 16 for writer in range(writers)]
    with opened() as store, ThreadPoolExecutor(writers + 3) as pool:

        def stamp(version: int, writer: int) -> "np.typing.NDArray[np.uint64]":
            return np.uint64(version << 32 | writer << 16) + places

        def write(writer: int) -> int:
            stored = 0
            while time.monotonic() < until:
                keys = store.keys(chains[writer])
                try:
                    stored += store.put(keys, stamp(keys.version, writer)[None].view(np.uint8)).ok
                except kvstore.StaleKeys:
                    continue
            return stored

        def read(_: int) -> int:
            keys, hits = [store.keys(chain) for chain in chains], 0
            got = np.zeros(words, np.uint64)
            while time.monotonic() < until:
                for writer in range(writers):
                    oldest = completed[0]
                    if store.get(keys[writer], [got.view(np.uint8)]).ok:
                        version = int(got[0]) >> 32
                        assert version >= oldest
                        assert np.array_equal(got, stamp(version, writer))
                        hits += 1
            return hits

        def clear() -> int:
            while time.monotonic() < until:
                completed[0] = store.clear()
                time.sleep(0.005)
            return completed[0]

        cleared = pool.submit(clear)
        readers = [pool.submit(read, i) for i in range(2)]
        assert all(future.result() for future in [pool.submit(write, i) for i in range(writers)])
        assert sum(reader.result() for reader in readers) > 10
        assert cleared.result() > 5


def use_a_store(barrier: Any) -> None:
    """Five times: opens one, puts and gets a block, closes it, together with others."""
    for number in range(5):
        barrier.wait(60)
        began = time.monotonic()
        with kvstore.open(ANY, dram=4 * MIB) as store:
            got = np.zeros(MIB, np.uint8)
            assert store.put(["k"], [block(number, MIB)]).ok
            assert store.get(["k"], [got]).ok
            assert is_block(got, number)
        assert time.monotonic() - began < 10


def test_many_stores_open_at_once() -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use_a_store, [threading.Barrier(8)] * 8))
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    processes = [context.Process(target=use_a_store, args=(barrier,)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 8


# ---- memory and start ----------------------------------------------------------------------------


def test_memory_beside_the_payload_is_bounded() -> None:
    count, batch, size = 200_000, 20_000, 64
    random = np.random.default_rng(1)
    keys = random.integers(0, 256, (2 * count, 32), np.uint8)
    given = random.integers(0, 256, (batch, size), np.uint8)
    with opened(dram=32 * MIB) as store:

        def growth(first: int, end: int) -> int:
            before = resident()
            for start in range(first, end, batch):
                assert store.put(keys[start : start + batch], given).stored == batch
            now = resident()
            return sum(now[name] - before[name] for name in ("RssAnon", "RssShmem"))

        most = 200 * count + 0.002 * size * count
        assert growth(0, count) < most + 16 * MIB  # tables begin in huge pages
        assert growth(count, 2 * count) < most
        assert store.usage().blocks == 2 * count
        store.clear()
        assert growth(0, count) < 6 * MIB  # lists of what is vacant, once
        store.clear()
        assert growth(count, 2 * count) < MIB


def test_short_lived_buffers_leave_no_memory_behind() -> None:
    with opened() as store:
        assert store.put(["k"], [block(0, 16_000)]).ok
        before = resident()["RssAnon"]
        for _ in range(20_000):
            assert store.get(["k"], [bytearray(16_000)]).ok
        assert resident()["RssAnon"] - before < 64 * MIB


def test_open_builds_no_table_for_the_maximum() -> None:
    code = """
import time, kvstore
from builders import ANY, MIB, resident
before, began = resident()["RssAnon"], time.monotonic()
store = kvstore.open(ANY, dram="2GiB")
took = time.monotonic() - began
assert took < 0.5, took
assert store.usage().pool_bytes == 2048 * MIB
assert resident()["RssAnon"] - before < 64 * MIB
"""
    result = run_python(code)
    assert (result.returncode, result.stderr) == (0, "")


def test_open_returns_before_its_memory_is_populated() -> None:
    began = time.monotonic()
    with kvstore.open(ANY, dram="2GiB") as store:
        took = time.monotonic() - began
        assert store.put(["k"], [block(1, MIB)]).ok
        usage = store.usage()
        assert usage.populating
        assert usage.capacity_bytes < usage.pool_bytes
        got = np.zeros(MIB, np.uint8)
        assert store.get(["k"], [got]).ok
        assert is_block(got, 1)
    assert took < 0.5


def test_closing_the_last_store_gives_the_memory_back() -> None:
    before = resident()["RssShmem"]
    store = kvstore.open(ANY, dram=64 * MIB)
    assert store.settle()
    other = store.attach(BlockSpec("other", block_bytes=None))
    assert store.put(["k"], [b"x"]).ok
    match = store.match_prefix(["k"])
    with match as hit, store.writing(["w"], block_bytes=1) as writing:
        writing.part(0, [b"y"])
        transfer = store.get_async(["k"], [bytearray(1)])
        assert transfer.wait(10).ok
    store.close()
    assert resident()["RssShmem"] - before >= 64 * MIB
    other.close()
    assert resident()["RssShmem"] - before < 8 * MIB  # though all these names live
    assert writing.result is not None
    assert [hit.held, writing.result.ok, match.blocks] == [True, True, 1]
