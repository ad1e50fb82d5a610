"""Transfers: they always end, own their memory until then, and can be awaited, drained or dropped.

`stalled` keeps every worker waiting for room, so that what is submitted then is open for sure.
"""

import asyncio
import gc
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from builders import (
    ANY,
    MIB,
    assert_idle,
    block,
    blocks,
    fill,
    is_block,
    names,
    opened,
    run_python,
)

import kvstore
from kvstore import Status


@contextmanager
def stalled(store: kvstore.Store) -> Iterator[list[str]]:
    """Blocks 0, 1, ... under lease fill the pool, and put_async calls wait for room until the end.

    Afterwards the waiting puts evict all that is not pinned.
    """
    held = fill(store)
    with store.match_prefix(held) as hit:
        assert hit.blocks == len(held)
        waiting = [store.put_async([f"w{i}"], [bytes(MIB)], timeout=60) for i in range(4)]
        yield held
    for transfer in waiting:
        assert transfer.wait(30).ok


def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- memory lent to a transfer -------------------------------------------------------------------


def test_get_into_a_buffer_of_an_open_transfer_is_refused() -> None:
    arena = np.zeros(3 * MIB, np.uint8)
    with opened() as store:
        with stalled(store) as held:
            assert store.pin(held[:2]) == 2
            transfer = store.get_async(held[:1], [arena[:MIB]])
            overlapping = [arena[MIB - 1 : 2 * MIB - 1]]
            with pytest.raises(kvstore.BufferBusy):
                store.get(held[1:2], overlapping)
            with pytest.raises(kvstore.BufferBusy):
                store.get_async(held[1:2], overlapping)
            with store.match_prefix(held[1:2]) as hit, pytest.raises(kvstore.BufferBusy):
                hit.read(overlapping)
            assert store.get(held[1:2], [arena[MIB : 2 * MIB]]).ok  # right beside it
            assert not transfer.done()
        assert transfer.wait(10).ok
        assert is_block(arena[:MIB], 0)
        assert is_block(arena[MIB : 2 * MIB], 1)
        assert store.get(held[1:2], overlapping).ok
        store.unpin(held[:2])


def test_put_from_a_buffer_being_filled_is_refused() -> None:
    arena = np.zeros(MIB, np.uint8)
    with opened() as store:
        with stalled(store) as held:
            assert store.pin(held[:1]) == 1
            transfer = store.get_async(held[:1], [arena])
            with pytest.raises(kvstore.BufferBusy):
                store.put(["copy"], [arena[:100]], timeout=0.1)
            with pytest.raises(kvstore.BufferBusy):
                store.put_async(["copy"], [arena[-1:]])
        assert transfer.wait(10).ok
        assert store.put(["copy"], [arena]).ok
        got = np.zeros(MIB, np.uint8)
        assert store.get(["copy"], [got]).ok
        assert is_block(got, 0)
        store.unpin(held[:1])


def test_get_into_the_source_of_an_open_put_is_refused() -> None:
    source = block(7, MIB)
    with opened() as store:
        with stalled(store) as held:
            transfer = store.put_async(["new"], [source], timeout=30)
            again = store.put_async(["newer"], [source], timeout=30)  # two readers are fine
            with pytest.raises(kvstore.BufferBusy):
                store.get(held[:1], [source])
        assert transfer.wait(10).ok
        assert again.wait(10).ok
        assert store.get(["new"], [source]).ok
        assert is_block(source, 7)


def test_buffer_is_owned_until_done() -> None:
    assert "until the transfer is done" in (kvstore.Store.put_async.__doc__ or "")
    with opened(dram=64 * MIB) as store:
        source = block(1, 4 * MIB)
        assert store.put_async(["after"], [source]).wait(10).ok
        source[:] = 0
        got = np.zeros((2, 4 * MIB), np.uint8)
        assert store.get(["after"], [got[0]]).ok
        assert is_block(got[0], 1)
        for round_number in range(10):
            source = block(2, 4 * MIB)
            key = [f"during {round_number}"]
            transfer = store.put_async(key, [source], timeout=10)
            while not transfer.done():
                source[::4096] += 1
            assert transfer.wait().ok
            for reading in got:  # whatever was stored, it proves itself
                assert store.get(key, [reading]).ok
            assert np.array_equal(got[0], got[1])


def test_dropping_transfer_and_buffer_at_once_is_safe() -> None:
    with opened() as store:
        assert store.put(names(4), blocks(range(4), 100_000)).ok
        for _ in range(2000):
            store.get_async(names(4), [bytearray(100_000) for _ in range(4)])
        until(lambda: store.usage().leased_blocks == 0)
        seen = 0
        while seen < 2000:
            seen += len(store.drain())
        gc.collect()


def test_blocks_of_an_open_transfer_are_not_evicted() -> None:
    num_ok, count = 0, 8
    stop = threading.Event()
    with opened(dram=16 * MIB) as store, ThreadPoolExecutor(1) as pool:

        def fill_up() -> int:
            number = 0
            while not stop.is_set():
                store.put([f"other {number}"], [bytes(MIB)])
                number += 1
            return number

        filling = pool.submit(fill_up)
        for round_number in range(40):
            chain = names(count, f"{round_number}.")
            assert store.put(chain, blocks(range(count), MIB, round_number)).ok
            got = np.zeros((count, MIB), np.uint8)
            result = store.get_async(chain, list(got), timeout=10).wait(20)
            for i in range(count):
                assert result[i] in (Status.OK, Status.MISS)
                assert result[i] is Status.MISS or is_block(got[i], i, round_number)
                num_ok += result[i] is Status.OK
        stop.set()
        assert filling.result() > 0
        assert num_ok > 10
        assert store.usage().evictions > 100


# ---- ending --------------------------------------------------------------------------------------


def test_cancelling_at_any_moment_leaves_no_lease_behind() -> None:
    random = np.random.default_rng(3)
    size, count = 100_000, 4
    seen: set[Status] = set()
    got = np.zeros((count, size), np.uint8)
    with opened() as store:
        assert store.put(names(count), blocks(range(count), size)).ok
        source = blocks(range(100, 104), size)
        for number in range(2000):
            got[:] = 0xAB
            transfer: Any = store.get_async(names(count), list(got))
            if number % 2:
                first, transfer = transfer, store.put_async(names(4, f"{number}."), source)
            cancelled_at = time.perf_counter() + random.random() * 3e-4
            while time.perf_counter() < cancelled_at:
                pass
            transfer.cancel()
            result = transfer.wait(10)
            seen.update(result)
            if number % 2:
                result = first.wait(10)
            for i, status in enumerate(result):
                if status is Status.OK and i % 3 == number % 3:
                    assert is_block(got[i], i)
                elif status is Status.CANCELLED:
                    assert got[i].max() == got[i].min()  # zeroed, or never touched
                    assert got[i, 0] in (0, 0xAB)
        assert store.drain() == []
        usage = store.usage()
        assert (usage.leased_blocks, usage.granted_blocks) == (0, 0)
    assert {Status.OK, Status.CANCELLED} <= seen


def test_close_at_any_moment_ends_every_transfer() -> None:
    random = np.random.default_rng(4)
    source = blocks(range(4), 300_000)
    for _ in range(20):
        store = kvstore.open(ANY, dram=8 * MIB)
        other = store.attach(kvstore.BlockSpec("other", block_bytes=None))
        store.put(names(4), source)
        got = np.zeros((10, 4, 300_000), np.uint8)
        transfers: list[Any] = [store.get_async(names(4), list(out)) for out in got]
        transfers += [store.put_async(names(4, f"{i}."), source) for i in range(10)]
        time.sleep(random.random() * 0.004)
        store.close()
        assert all(transfer.done() for transfer in transfers)
        allowed = {Status.OK, Status.MISS, Status.CANCELLED, Status.OUT_OF_SPACE}
        assert all(set(transfer.wait(1)) <= allowed for transfer in transfers)
        assert_idle(other)
        other.close()


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_put_that_waits_for_room_ends_when_told_to(end: str) -> None:
    other = kvstore.BlockSpec("other", block_bytes=None)
    with opened() as store, store.match_prefix(fill(store)), store.attach(other) as ending:
        transfer = ending.put_async(["x"], [bytes(MIB)], timeout=30)
        time.sleep(0.05)
        assert not transfer.done()
        began = time.monotonic()
        if end == "cancel":
            transfer.cancel()
        else:
            ending.close()
        assert list(transfer.wait(10)) == [Status.CANCELLED]
        assert time.monotonic() - began < 3


def test_finished_transfers_nobody_polled_hold_no_room() -> None:
    with opened() as store:
        count = store.usage().capacity_bytes // (64 << 10)
        for number in range(2 * count):
            store.put_async([f"{number}"], [bytes(64 << 10)], timeout=30)
        began = time.monotonic()
        usage = store.usage()
        assert usage.capacity_bytes == 8 * MIB
        assert store.put(["one more"], [block(1, MIB)], timeout=30).ok
        assert time.monotonic() - began < 5
        until(lambda: store.usage().commits == 2 * count + 1)
        assert store.usage().granted_blocks == 0
        assert store.usage().evictions > 0


def test_interpreter_exit_with_transfers_in_flight_is_clean() -> None:
    code = """
import kvstore
from builders import ANY, MIB
store = kvstore.open(ANY, dram=64 * MIB)
block = bytes(8 * MIB)
transfers = [store.put_async([f"{i}"], [block], timeout=30) for i in range(64)]
views = store.match_prefix(["0"]).__enter__().views()
"""
    began = time.monotonic()
    result = run_python(code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert time.monotonic() - began < 10


def test_wait_keeps_its_answer() -> None:
    with opened() as store:
        with stalled(store) as held:
            late = store.put_async(["late"], [bytes(MIB)], timeout=60)
            with pytest.raises(TimeoutError):
                late.wait(0.01)
            with pytest.raises(TimeoutError):
                late.wait(0)
        assert late.wait() is late.wait(0)
        assert late.wait().ok
        small = store.get_async(["late"], [bytearray(10)])
        for _ in range(2):  # the error too
            with pytest.raises(kvstore.InvalidArgument, match=r"10 bytes.*1048576"):
                small.wait(10)
        with ThreadPoolExecutor(8) as pool:
            transfer = store.get_async(["late"], [bytearray(MIB)], timeout=10)
            results = list(pool.map(lambda _: transfer.wait(10), range(8)))
        assert all(result is results[0] for result in results)
        assert store.drain() == []
        assert held[0]


def test_python_runs_while_native_calls_wait() -> None:
    def rate(seconds: float) -> float:
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            count += 1
        return count / seconds

    with opened(dram=4 * MIB) as store, ThreadPoolExecutor(4) as pool:
        free = waiting = 0.0
        for number in range(8):  # in turns: the machine may be busy with other things
            free += rate(0.1)
            with store.match_prefix(fill(store, 2 * MIB, f"{number}.")):
                transfer = store.put_async(["x"], [bytes(MIB)], timeout=30)
                calls = [
                    pool.submit(store.wait, ["y"], 30),
                    pool.submit(store.wait, ["x", "y"], 30),
                    pool.submit(transfer.wait, 30),
                    pool.submit(store.put, ["y"], [bytes(MIB)], timeout=30),
                ]
                waiting += rate(0.1)
                assert not any(call.done() for call in calls)
            waited_y, waited_both, put_x, put_y = (call.result() for call in calls)
            assert waited_y
            assert waited_both
            assert put_x.ok
            assert put_y.ok
            store.remove(["x", "y"])
        assert waiting >= 0.5 * free


# ---- drain and event_fd --------------------------------------------------------------------------


def test_event_fd_tells_of_what_drain_returns() -> None:
    poller = select.poll()
    with opened() as store:
        assert store.put(["k"], [block(1, 1000)]).ok
        poller.register(store.event_fd(), select.POLLIN)
        assert poller.poll(0) == []
        got = np.zeros((3, 1000), np.uint8)
        pending = {store.get_async(["k"], [out]).id: out for out in got}
        assert len(pending) == 3
        while pending:
            assert poller.poll(10_000)
            for transfer in store.drain():
                assert transfer.done()
                assert transfer.wait(0).ok
                assert is_block(pending.pop(transfer.id), 1)
        assert (poller.poll(0), store.drain()) == ([], [])
        matched = store.match_async(["k", "absent"])
        assert matched.done()
        assert poller.poll(0)
        assert store.drain() == [matched]
        assert matched.wait().blocks == 1


def test_drain_loses_nothing_another_thread_submits() -> None:
    stop = threading.Event()
    interval = sys.getswitchinterval()
    with opened() as store, ThreadPoolExecutor(1) as pool:

        def drain() -> list[int]:
            seen: list[int] = []
            while not stop.is_set():
                seen += [transfer.id for transfer in store.drain()]
            return seen

        try:
            sys.setswitchinterval(1e-6)
            draining = pool.submit(drain)
            submitted = [store.match_async(["k"]).id for _ in range(5000)]
        finally:
            sys.setswitchinterval(interval)
            stop.set()
        drained = draining.result() + [transfer.id for transfer in store.drain()]
        assert sorted(drained) == submitted == list(range(1, 5001))


def test_uncollected_transfers_are_bounded() -> None:
    key = np.zeros((1, 32), np.uint8)
    with opened() as store:
        for _ in range(65536):
            store.match_async(key)
        with pytest.raises(kvstore.KvstoreError, match="drain"):
            store.match_async(key)
        assert len(store.drain()) == 65536
        assert store.match_async(key).wait(1).blocks == 0


# ---- asyncio -------------------------------------------------------------------------------------


def test_transfers_can_be_awaited() -> None:
    async def use(store: kvstore.Store) -> None:
        assert (await store.put_async(names(20), blocks(range(20), 100_000))).stored == 20
        assert (await store.match_async(names(21))).blocks == 20
        got = np.zeros((20, 100_000), np.uint8)
        gets = [store.get_async([name], [out]) for name, out in zip(names(20), got, strict=True)]
        results = await asyncio.gather(*gets)
        assert all(result.ok for result in results)
        assert all(is_block(got[i], i) for i in range(20))
        with pytest.raises(kvstore.InvalidArgument, match="100000"):
            await store.get_async(["b0"], [bytearray(9)])

    with opened() as store:
        asyncio.run(use(store))
        assert store.drain() == []


def test_many_tasks_may_await_one_transfer() -> None:
    async def use(store: kvstore.Store) -> None:
        async def one() -> kvstore.PutResult:
            return await transfer

        with stalled(store):
            transfer = store.put_async(["x"], [bytes(MIB)], timeout=60)
            tasks = [asyncio.create_task(one()) for _ in range(5)]
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in tasks)
        results = await asyncio.wait_for(asyncio.gather(*tasks), 20)
        assert results[0].ok
        assert all(result is results[0] for result in results)

    with opened() as store:
        asyncio.run(use(store))


def test_a_cancelled_task_cancels_its_transfer() -> None:
    async def use(store: kvstore.Store) -> None:
        async def one() -> None:
            await transfer

        with stalled(store):
            transfer = store.put_async(["x"], [bytes(MIB)], timeout=60)
            task = asyncio.create_task(one())
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert list(await asyncio.wait_for(transfer_again(transfer), 20)) == [Status.CANCELLED]

    async def transfer_again(transfer: Any) -> kvstore.PutResult:
        return await transfer

    with opened() as store:
        asyncio.run(use(store))
        assert not store.exists(["x"]).any()


def test_closing_wakes_the_task_that_awaits() -> None:
    async def use(store: kvstore.Store) -> kvstore.PutResult:
        async def one() -> kvstore.PutResult:
            return await store.put_async(["x"], [bytes(MIB)], timeout=30)

        task = asyncio.create_task(one())
        await asyncio.sleep(0.02)
        await asyncio.get_running_loop().run_in_executor(None, store.close)
        return await asyncio.wait_for(task, 20)

    other = kvstore.BlockSpec("other", block_bytes=None)
    with opened() as store, store.match_prefix(fill(store)), store.attach(other) as closing:
        assert list(asyncio.run(use(closing))) == [Status.CANCELLED]


def test_loops_of_several_threads_share_a_store() -> None:
    async def use(store: kvstore.Store, number: int) -> int:
        equal = 0
        for i in range(150):
            key, got = [f"{number}.{i}"], np.zeros(50_000, np.uint8)
            assert (await store.put_async(key, [block(i, 50_000, number)], timeout=10)).ok
            equal += (await store.get_async(key, [got], timeout=10)).ok and is_block(got, i, number)
        return equal

    with opened(dram=64 * MIB) as store, ThreadPoolExecutor(3) as pool:
        loops = [pool.submit(asyncio.run, use(store, number)) for number in range(3)]
        assert [loop.result(60) for loop in loops] == [150] * 3


def test_a_loop_that_ended_early_is_forgotten() -> None:
    async def leave(store: kvstore.Store) -> None:
        transfer = store.put_async(["x"], [bytes(MIB)], timeout=60)
        left = asyncio.ensure_future(wrapped(transfer))
        await asyncio.sleep(0.02)
        assert not left.done()

    async def wrapped(transfer: Any) -> None:
        await transfer

    async def use(store: kvstore.Store) -> kvstore.PutResult:
        return await store.put_async(["y"], [bytes(MIB)], timeout=60)

    with opened() as store:
        with stalled(store):
            asyncio.run(leave(store))
        assert asyncio.run(use(store)).ok
