"""What is held, by every way to a store: room, leases, views, tickets, and calls in the background.

`tests/test_transport.py` says what the ways are.
"""

import asyncio
import mmap
import os
import re
import select
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from builders import ANY, MIB, block, blocks, fill, is_block, names, run_python
from nodes import until
from ways import PLAIN, REMOTE, WAYS, Way

import kvstore
from kvstore import Status

every_way = pytest.mark.parametrize("way", WAYS, indirect=True)
plain_ways = pytest.mark.parametrize("way", PLAIN, indirect=True)
remote_ways = pytest.mark.parametrize("way", REMOTE, indirect=True)
tcp_ways = pytest.mark.parametrize("way", ["tcp", "tcp unix"], indirect=True)
memory_ways = pytest.mark.parametrize("way", ["local", "shm"], indirect=True)

OTHER = kvstore.BlockSpec("other", block_bytes=None)


# ---- room ----------------------------------------------------------------------------------------


@every_way
def test_a_full_pool_says_so_and_keeps_the_leading_run(way: Way) -> None:
    with way.opened() as store:
        held = fill(store)
        assert store.pin(held[:3]) == 3
        with store.match_prefix(held[3:6]):
            for timeout in (0, 0.1):
                keys = names(4, f"{timeout}.")
                began = time.monotonic()
                result = store.put(keys, blocks(range(4), MIB), timeout=timeout)
                took = time.monotonic() - began
                assert list(result) == [Status.OK] * 2 + [Status.OUT_OF_SPACE] * 2
                assert not result.ok
                numbers = r"needs 1048576 bytes, .* MiB of 8 MiB free .*3 blocks pinned, 3 leased"
                assert re.search(numbers, result.message)
                assert timeout <= took < timeout + 1.5
                assert store.exists(keys).tolist() == [True] * 2 + [False] * 2
                assert store.match_prefix(keys).blocks == 2
            apart = store.put(
                names(3, "apart"), [bytes(n * MIB) for n in (1, 4, 1)], chain=False, timeout=0
            )
            assert list(apart) == [Status.OK, Status.OUT_OF_SPACE, Status.OK]
        assert store.exists(held).tolist() == [True] * 6 + [False] * 2
        assert store.unpin(held) == 3
        assert store.put(names(8), blocks(range(8), MIB)).ok


@every_way
def test_a_small_block_finds_no_room_either(way: Way) -> None:
    with way.opened() as store:
        held = fill(store)
        assert store.pin(held) == 8
        for timeout in (0, 0.05):
            result = store.put(["x"], [b"small"], timeout=timeout)
            assert list(result) == [Status.OUT_OF_SPACE]
            assert "pool full" in result.message
        assert store.put(held[:1], [b"held already"])[0] is Status.EXISTS
        store.unpin(held)


@every_way
@pytest.mark.parametrize("size", [100, MIB])
def test_a_put_that_waits_for_room_goes_on_when_there_is_some(way: Way, size: int) -> None:
    with way.opened() as store, ThreadPoolExecutor(1) as pool:
        hit = store.match_prefix(fill(store)).__enter__()
        waiting = pool.submit(store.put, ["x"], [block(1, size)], timeout=30)
        transfer = store.put_async(["y"], [block(2, size)], timeout=30)
        with pytest.raises(TimeoutError):
            transfer.wait(0.1)
        assert not waiting.done()
        assert hit.close()
        assert waiting.result(10).stored == transfer.wait(10).stored == 1
        got = np.zeros((2, size), np.uint8)
        assert store.get(["x", "y"], list(got)).ok
        assert is_block(got[0], 1)
        assert is_block(got[1], 2)


@every_way
def test_a_writing_that_waits_for_room_goes_on_when_there_is_some(way: Way) -> None:
    with way.opened() as store, ThreadPoolExecutor(1) as pool:
        with store.match_prefix(fill(store)):
            waiting = pool.submit(store.writing, ["x"], block_bytes=MIB, timeout=30)
            with pytest.raises(TimeoutError):
                store.put_async(["y"], [bytes(MIB)], timeout=30).wait(0.1)
            assert not waiting.done()
        with waiting.result(10) as writing:
            writing.part(0, [block(1, MIB)])
        assert writing.result.stored == 1
        assert store.wait(["x", "y"], 10)


@plain_ways
def test_views_and_pins_are_not_waited_for(way: Way) -> None:
    with way.opened(view_fraction=1) as store:
        held = fill(store)
        assert store.pin(held) == 8
        began = time.monotonic()
        assert store.put(["x"], [bytes(MIB)], timeout=20)[0] is Status.OUT_OF_SPACE
        assert time.monotonic() - began < 5
        store.unpin(held)


# ---- leases --------------------------------------------------------------------------------------


@every_way
def test_a_lapsed_lease_is_revoked_only_when_its_memory_is_needed(way: Way) -> None:
    with way.opened(lease_s=0.05) as store:
        held = fill(store)
        got = np.full((8, MIB), 0xAB, np.uint8)
        with store.match_prefix(held) as hit:
            time.sleep(0.1)  # until it has lapsed
            assert hit.read(list(got)).ok  # nobody needed it
            assert is_block(got[7], 7)
            ticket = hit.ticket()
            got[:] = 0xAB
            assert store.put(["new"], [block(1, MIB, 1)], timeout=10).ok
            for _ in range(2):
                with pytest.raises(kvstore.LeaseRevoked, match="match again"):
                    hit.read(list(got))
            assert store.redeem(ticket) is None
            for i, each in enumerate(got):  # what is there still may have been read, or nothing
                assert set(np.unique(each)) <= {0, 0xAB} or is_block(each, i)
        assert hit.held is False
        with store.match_prefix(held) as again:
            assert again.blocks >= 6
        assert again.held


@every_way
def test_memory_under_a_lease_is_not_reused(way: Way) -> None:
    with way.opened() as store:
        held = fill(store)
        with store.match_prefix(held[:4]) as hit:
            assert store.remove(held[:2]) == 2
            for number in range(8):
                assert store.put([f"new {number}"], [block(number, MIB, 1)]).ok
            got = np.zeros((4, MIB), np.uint8)
            assert hit.read(list(got)).ok
            assert all(is_block(got[i], i) for i in range(4))
            store.clear()
            got[:] = 0
            assert hit.read(list(got)).ok
            assert all(is_block(got[i], i) for i in range(4))
        assert hit.held
        until(lambda: store.usage().slots == 0)


@every_way
def test_a_dropped_hit_holds_nothing(way: Way) -> None:
    with way.opened() as store:
        assert store.put(names(8), blocks(range(8), 100)).ok
        for _ in range(20):
            match = store.match_prefix(names(8))
            hit = match.__enter__()
            assert hit.blocks == 8
            del match, hit
        until(lambda: store.usage().leased_blocks == 0)


def corrupt(pid: int, payload: bytes, offset: int) -> None:
    """Changes one bit of a block in a node's memory, as failing memory would."""
    changed = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since: the folder's own, in this process
            target = os.readlink(entry)
        if "kvstore-data" in target:
            with entry.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                at = memory.find(payload[:64])
                if at >= 0:
                    memory[at + offset] ^= 1
                    changed += 1
    assert changed == 1


@every_way
@pytest.mark.parametrize("how", ["get", "read", "verify"])
def test_a_corrupt_block_is_found_and_dropped(way: Way, how: str) -> None:
    size = 2 * MIB - 100
    with way.opened() as store:
        before = store.usage().corrupt
        assert store.put(names(3), blocks(range(3), size)).ok
        with store.match_prefix(names(3)) as hit:
            assert hit.verify() == [Status.OK] * 3
            corrupt(way.pid, block(1, size).tobytes(), MIB + 7)
            got = np.full((3, size), 0xAB, np.uint8)
            if how == "verify":
                assert hit.verify() == [Status.OK, Status.CORRUPT, Status.OK]
            else:
                result = store.get(names(3), list(got)) if how == "get" else hit.read(list(got))
                found = Status.CORRUPT
                if how == "get" and result[1] is Status.MISS:  # the scrubber was quicker
                    found = Status.MISS
                    got[1] = 0
                assert list(result) == [Status.OK, found, Status.OK]
                assert result.nbytes.tolist() == [size, 0, size]
                assert is_block(got[0], 0)
                assert not got[1].any()
                assert is_block(got[2], 2)
        until(lambda: store.exists(names(3)).tolist() == [True, False, True])
        assert store.usage().corrupt == before + 1


# ---- views ---------------------------------------------------------------------------------------


@memory_ways
def test_views_are_the_nodes_memory_read_only(way: Way) -> None:
    sizes = [1, MIB + 1, 3 * MIB]
    with way.opened(view_fraction=1) as store:
        assert store.put(names(3), [block(i, size) for i, size in enumerate(sizes)]).ok
        with store.match_prefix(names(3)) as hit:
            views = hit.views()
            for i, extents in enumerate(views):
                assert sum(view.nbytes for view in extents) == sizes[i]
                assert is_block(b"".join(extents), i)
                for view in extents:
                    assert view.readonly
                    with pytest.raises(TypeError):
                        view[0] = 0
                    array = np.frombuffer(view, np.uint8)
                    with pytest.raises(ValueError, match="WRITEABLE"):
                        array.setflags(write=True)
            assert store.usage().view_bytes == sum(sizes)
            got = [np.zeros(size, np.uint8) for size in sizes]
            assert hit.read(got).ok
            assert all(is_block(each, i) for i, each in enumerate(got))
            del array, view, extents, views
        until(lambda: store.usage().view_bytes == 0)


@memory_ways
def test_leaving_while_an_array_is_alive_raises_buffer_error(way: Way) -> None:
    with way.opened() as store:
        assert store.put(names(3), blocks(range(3), 1000)).ok
        with (
            pytest.raises(BufferError, match="1 views are still used"),
            store.match_prefix(names(3)) as hit,
        ):
            array = np.frombuffer(hit.views()[1][0], np.uint8)
        assert store.usage().view_bytes == 3000
        assert store.remove(names(3)) == 3
        assert store.put(names(3), blocks(range(3), 1000, 1)).ok
        assert is_block(array, 1)  # its memory was not reused
        assert store.usage().slots == 6
        del array
        until(lambda: store.usage().slots == 3)
        with pytest.raises(kvstore.StoreClosed):
            hit.views()


@memory_ways
def test_views_beyond_their_share_are_refused_and_read_works(way: Way) -> None:
    with way.opened() as store:
        held = fill(store)
        assert store.usage().view_bytes_max == 2 * MIB
        with store.match_prefix(held[:2]) as two, store.match_prefix(held[2:3]) as one:
            assert len(two.views()) == len(two.views()) == 2  # again costs nothing
            with pytest.raises(kvstore.ViewsRefused, match=rf"{2 * MIB}.*read\(\)"):
                one.views()
            got = np.zeros(MIB, np.uint8)
            assert one.read([got]).ok
            assert is_block(got, 2)
        with store.match_prefix(held[2:3]) as one:
            assert is_block(b"".join(one.views()[0]), 2)


@tcp_ways
def test_without_shared_memory_views_are_refused_and_read_works(way: Way) -> None:
    with way.opened() as store:
        assert store.put(["k"], [block(1, 100_000)]).ok
        with store.match_prefix(["k"]) as hit:
            with pytest.raises(kvstore.ViewsRefused, match=r"read\(\)"):
                hit.views()
            got = np.zeros(100_000, np.uint8)
            assert hit.read([got]).ok
            assert is_block(got, 1)
        assert store.usage().view_bytes == 0


@memory_ways
def test_views_never_lapse(way: Way) -> None:
    with way.opened(lease_s=0.01, view_fraction=1) as store:
        held = fill(store)
        with store.match_prefix(held[:4]) as hit:
            views = hit.views()
            for number in range(12):  # room for four at a time
                assert store.put([f"new {number}"], [block(number, MIB, 1)], timeout=5).ok
            assert all(is_block(b"".join(views[i]), i) for i in range(4))
            assert store.exists(held[:4]).all()
            store.clear()
            assert all(is_block(b"".join(views[i]), i) for i in range(4))
            del views
        assert hit.held


@memory_ways
def test_views_survive_their_store(way: Way) -> None:
    with way.opened(view_fraction=1) as store:
        closing = store.attach(ANY)
        assert closing.put(["k"], [block(1, MIB)]).ok
        hit = closing.match_prefix(["k"]).__enter__()
        array = np.frombuffer(hit.views()[0][0], np.uint8)
        closing.close()
        with pytest.raises(BufferError):
            hit.close()
        for number in range(20):  # nobody reuses it
            assert store.put([f"{number}"], [block(number, MIB, 2)]).ok
        assert is_block(array, 1)
        assert store.usage().view_bytes == MIB
        del array, hit
        until(lambda: store.usage().view_bytes == 0)


# ---- tickets -------------------------------------------------------------------------------------


@every_way
def test_a_ticket_leases_the_same_blocks_for_another_store(way: Way) -> None:
    with way.opened() as store, store.attach(ANY) as worker, store.attach(OTHER) as other:
        assert store.put(names(3), blocks(range(3), 5000)).ok
        with store.match_prefix(names(3), skip_blocks=1) as hit:
            ticket = hit.ticket()
            assert (len(ticket), hit.ticket()) == (16, ticket)
            assert other.redeem(ticket) is None  # another namespace's
            assert worker.redeem(bytes(16)) is None
            assert worker.redeem(ticket[:-1] + bytes([ticket[-1] ^ 1])) is None
            redeemed = worker.redeem(ticket)
            assert store.usage().leased_blocks == 4
        assert store.remove(names(3)) == 3
        until(lambda: store.usage().leased_blocks == 2)  # each side releases its own
        with redeemed as mine:
            got = np.zeros((2, 5000), np.uint8)
            assert mine.read(list(got)).ok
            assert is_block(got[0], 1)
            assert is_block(got[1], 2)
        assert store.redeem(ticket) is None
        until(lambda: store.usage().slots == 0)


@remote_ways
def test_a_ticket_is_redeemed_by_another_process(way: Way) -> None:
    with way.opened() as store:
        assert store.put(names(3), blocks(range(3), 70_000)).ok
        with store.match_prefix(names(3)) as hit:
            assert store.remove(names(3)) == 3
            code = f"""
import kvstore, numpy as np
from builders import ANY, is_block
with kvstore.connect({store._place!r}, ANY, transport={way.name!r}, timeout_s=10) as store:
    with store.redeem(bytes.fromhex({hit.ticket().hex()!r})) as hit:
        got = np.zeros((3, 70_000), np.uint8)
        assert hit.read(list(got)).ok
        print(all(is_block(got[i], i) for i in range(3)), store.usage().leased_blocks)
"""
            result = run_python(code)
            assert (result.stdout, result.stderr) == ("True 6\n", "")
            until(lambda: store.usage().leased_blocks == 3)
            got = np.zeros((3, 70_000), np.uint8)
            assert hit.read(list(got)).ok
            assert is_block(got[2], 2)
        assert hit.held


# ---- in the background ---------------------------------------------------------------------------


@every_way
def test_transfers_end_and_are_drained(way: Way) -> None:
    poller = select.poll()
    with way.opened() as store:
        poller.register(store.event_fd(), select.POLLIN)
        assert poller.poll(0) == []
        put = store.put_async(names(4), blocks(range(4), 100_000))
        assert put.wait(10).stored == 4
        assert store.match_async(names(5)).wait(10).blocks == 4
        got = np.zeros((4, 100_000), np.uint8)
        pending = {store.get_async([f"b{i}"], [got[i]]).id: i for i in range(4)}
        while pending:
            assert poller.poll(10_000)
            for transfer in store.drain():
                assert transfer.done()
                assert transfer.wait(0).ok
                number = pending.pop(transfer.id)
                assert is_block(got[number], number)
        assert (poller.poll(0), store.drain()) == ([], [])


@every_way
def test_transfers_are_awaited(way: Way) -> None:
    async def use(store: kvstore.Store) -> None:
        assert (await store.put_async(names(20), blocks(range(20), 50_000))).stored == 20
        assert (await store.match_async(names(21))).blocks == 20
        got = np.zeros((20, 50_000), np.uint8)
        gets = [store.get_async([name], [out]) for name, out in zip(names(20), got, strict=True)]
        assert all(result.ok for result in await asyncio.gather(*gets))
        assert all(is_block(got[i], i) for i in range(20))
        with pytest.raises(kvstore.InvalidArgument, match="50000"):
            await store.get_async(["b0"], [bytearray(9)])

    with way.opened() as store:
        asyncio.run(use(store))
        assert store.drain() == []


@every_way
@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_put_that_waits_for_room_ends_when_told_to(way: Way, end: str) -> None:
    with (
        way.opened() as store,
        store.match_prefix(fill(store)),
        store.attach(OTHER) as ending,
        ThreadPoolExecutor(1) as pool,
    ):
        transfer = ending.put_async(["x"], [bytes(MIB)], timeout=30)
        small = ending.put_async(["y"], [b"small"], timeout=30)
        called = pool.submit(ending.put, ["z"], [bytes(MIB)], timeout=30 if end == "close" else 0)
        with pytest.raises(TimeoutError):
            transfer.wait(0.1)
        began = time.monotonic()
        if end == "cancel":
            transfer.cancel()
            small.cancel()
        else:
            ending.close()
        assert list(transfer.wait(10)) == list(small.wait(10)) == [Status.CANCELLED]
        expected = Status.CANCELLED if end == "close" else Status.OUT_OF_SPACE
        assert list(called.result(10)) == [expected]
        assert time.monotonic() - began < 3
        assert store.usage().granted_blocks == 0


@every_way
def test_cancelling_and_closing_at_any_moment_leaves_nothing_behind(way: Way) -> None:
    random = np.random.default_rng(3)
    size, count = 100_000, 4
    source = blocks(range(100, 104), size)
    seen: set[Status] = set()
    with way.opened() as store:
        assert store.put(names(count), blocks(range(count), size)).ok
        assert store.pin(names(count)) == count
        got = np.zeros((count, size), np.uint8)
        for number in range(60):
            got[:] = 0xAB
            reading = store.get_async(names(count), list(got), timeout=10)
            writing = store.put_async(names(4, f"{number}."), source, timeout=10)
            cancelled_at = time.perf_counter() + random.random() * 2e-3
            while time.perf_counter() < cancelled_at:
                pass
            reading.cancel()
            writing.cancel()
            seen.update(writing.wait(10))
            for i, status in enumerate(reading.wait(10)):
                seen.add(status)
                if status is Status.OK:
                    assert is_block(got[i], i)
                else:
                    assert status is Status.CANCELLED
                    assert got[i].max() == got[i].min()  # zeroed, or never touched
                    assert got[i, 0] in (0, 0xAB)
        assert seen <= {Status.OK, Status.CANCELLED, Status.OUTCOME_UNKNOWN}
        for _ in range(5):
            closing = store.attach(ANY)
            transfers = [closing.get_async(names(count), list(np.zeros_like(got)))]
            transfers += [closing.put_async(names(4, "c"), source) for _ in range(3)]
            time.sleep(random.random() * 0.004)
            closing.close()
            assert all(transfer.done() for transfer in transfers)
        until(lambda: store.usage().leased_blocks == store.usage().granted_blocks == 0)
        store.unpin(names(count))
