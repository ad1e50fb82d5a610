"""How calls end that a node cannot answer: frozen, killed, reborn, or left by a closed store.

Every call ends within its timeout and a second, with a typed outcome; what was lost is a miss; and
what a client held at a node that died never turns into other bytes.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import ANY, MIB, block, blocks, fill, is_block, names
from nodes import SHORT_S, NodeProcess, assert_node_idle, connected, in_time, until
from relay import Relay
from ways import PLAIN, REMOTE, Nodes, Way

import kvstore
from kvstore import Status

plain_ways = pytest.mark.parametrize("way", PLAIN, indirect=True)
remote_ways = pytest.mark.parametrize("way", REMOTE, indirect=True)
transports = pytest.mark.parametrize("transport", REMOTE)

LONG_S = 10.0  # of what may walk through the whole table, whatever the timeout
LOST = {Status.UNAVAILABLE, Status.TIMED_OUT, Status.OUTCOME_UNKNOWN}
OTHER = kvstore.BlockSpec("other", block_bytes=None)


def unavailable(call: Callable[[], Any], timeout_s: float = SHORT_S) -> None:
    def refused() -> None:
        with pytest.raises(kvstore.NodeUnavailable):
            call()

    in_time(refused, timeout_s)


def assert_calls_fail(store: kvstore.Store, held: list[str], size: int) -> None:
    """Of a node that does not answer: each call ends in time, and says that it was not asked."""
    got = np.full((2, size), 0xAB, np.uint8)
    for big in (100, 200_000):
        put = in_time(lambda n=big: store.put(["new"], [bytes(n)], timeout=SHORT_S))
        assert put[0] in LOST
        assert not put.ok
    result = in_time(lambda: store.get(held, list(got), timeout=SHORT_S))
    assert set(result) <= LOST
    assert not result.nbytes.any()
    assert set(np.unique(got)) <= {0, 0xAB}
    match = in_time(lambda: store.match_prefix(held))
    assert (match.blocks, match.by_node) == (0, {})
    with match as hit:
        assert hit.blocks == 0
    calls: list[Callable[[list[str]], Any]] = [store.exists, store.remove, store.touch, store.pin]
    for call in [*calls, store.unpin]:
        unavailable(lambda c=call: c(held))
    unavailable(store.usage)
    unavailable(lambda: store.settle(SHORT_S))
    unavailable(lambda: store.redeem(b"ticket of 16 byt"))
    unavailable(lambda: store.wait(held, SHORT_S))
    transfers = [
        store.put_async(["new"], [bytes(200_000)], timeout=SHORT_S),
        store.get_async(held, list(got), timeout=SHORT_S),
    ]
    for transfer in transfers:
        assert set(in_time(lambda t=transfer: t.wait(10))) <= LOST
    assert in_time(lambda: store.match_async(held).wait(10)).by_node == {}
    assert set(in_time(lambda: asyncio.run(awaited(store)))) <= LOST


async def awaited(store: kvstore.Store) -> kvstore.PutResult:
    return await store.put_async(["new"], [b"x"], timeout=SHORT_S)


# ---- frozen --------------------------------------------------------------------------------------


@remote_ways
def test_calls_to_a_frozen_node_end_in_time(way: Way, nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    size = 70_000
    with way.connect(node, timeout_s=SHORT_S) as store:
        until(lambda: store.settle(1))
        assert store.put(names(2), blocks(range(2), size)).ok
        with store.match_prefix(names(2)) as hit:
            writing = store.writing(["w"], block_bytes=size)
            with node.paused():
                assert_calls_fail(store, names(2), size)
                got = np.full((2, size), 0xAB, np.uint8)
                read = in_time(lambda: hit.read(list(got)))
                if way.name == "shm":  # nobody is asked
                    assert read.ok
                    assert all(is_block(got[i], i) for i in range(2))
                    in_time(lambda: writing.part(0, [block(1, size)]))
                    assert in_time(writing.commit)[0] in LOST
                else:
                    assert set(read) <= LOST
                    assert set(np.unique(got)) <= {0, 0xAB}
                    with pytest.raises((TimeoutError, kvstore.NodeUnavailable)):
                        in_time(lambda: writing.part(0, [block(1, size)]))
            until(lambda: store.match_prefix(names(2)).blocks == 2)  # back, and nothing lost
        got = np.zeros((2, size), np.uint8)
        assert store.get(names(2), list(got), timeout=10).ok
        assert all(is_block(got[i], i) for i in range(2))
        assert store.put(["after"], [b"x"], timeout=10).ok
        assert_node_idle(store)
        store.clear()


def test_calls_that_walk_through_the_table_have_ten_seconds(nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    with ExitStack() as stack:
        calls: list[Callable[[], Any]] = []
        hits = []
        for transport in REMOTE:
            store = stack.enter_context(
                connected(node, ANY, transport=transport, timeout_s=SHORT_S)
            )
            assert store.put(["a"], [b"x"], timeout=10).ok
            hits.append(hit := store.match_prefix(["a"]).__enter__())
            calls += [store.list, store.audit, store.clear, hit.verify]
        with node.paused(), ThreadPoolExecutor(len(calls)) as pool:  # all at once: it takes a while
            list(pool.map(lambda call: unavailable(call, LONG_S), calls))
        until(lambda: store.match_prefix(["a"]).by_node != {})
        store.clear()
        for hit in hits:
            hit.close()


@remote_ways
def test_connecting_to_and_closing_at_a_frozen_node_ends_in_time(way: Way, nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    transport = "shm" if way.shares_memory else "tcp"

    def connect() -> None:
        with pytest.raises(kvstore.NodeUnavailable, match=r"no answer in time|timed out"):
            kvstore.connect(node.address, ANY, transport=transport, timeout_s=SHORT_S)

    store = kvstore.connect(node.address, ANY, transport=transport, timeout_s=SHORT_S)
    hit = store.match_prefix(["a"]).__enter__()
    writing = store.writing(["w"], block_bytes=MIB, timeout=10)
    with node.paused():
        in_time(connect)
        waiting = store.put_async(["x"], [bytes(MIB)], timeout=60)
        in_time(store.close)
        assert waiting.done()
        assert set(waiting.wait(0)) <= {*LOST, Status.CANCELLED}
    del hit, writing
    with way.connect(node) as other:
        assert_node_idle(other)
        other.clear()


@pytest.mark.parametrize("way", ["tcp"], indirect=True)
def test_answers_that_are_lost_leave_the_outcome_unknown_in_time(way: Way, nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    with (
        Relay(node.address) as relay,
        connected(node, ANY, address=relay.address, timeout_s=SHORT_S) as store,
    ):
        assert store.put(["a"], [block(1, 1000)]).ok
        relay.drop("down")
        for size in (1000, 200_000):
            result = in_time(lambda n=size: store.put([f"{n}"], [block(2, n)], timeout=SHORT_S))
            assert result[0] in LOST
        assert in_time(lambda: store.match_prefix(["a"])).by_node == {}
        unavailable(store.usage)
        relay.drop()
        until(lambda: store.match_prefix(["a"]).blocks == 1)
        got = np.zeros(200_000, np.uint8)
        for size in (1000, 200_000):  # all of it, or nothing
            status = store.get([f"{size}"], [got[:size]], timeout=10)[0]
            assert status is Status.MISS or (status is Status.OK and is_block(got[:size], 2))
        store.clear()


# ---- closed --------------------------------------------------------------------------------------


@plain_ways
def test_closing_while_calls_are_under_way_ends_them_all(way: Way) -> None:
    size = 200_000
    given = blocks(range(4), size)
    with way.opened() as store:
        assert store.put(names(4), given).ok
        for round_number in range(4):
            closing = store.attach(ANY)
            started = threading.Barrier(7)

            def use(call: Callable[[], Any], started: Any = started) -> None:
                started.wait(10)
                try:
                    while True:
                        call()
                except kvstore.StoreClosed:
                    return

            def get(closing: Any = closing) -> None:
                got = np.zeros((4, size), np.uint8)
                result = closing.get(names(4), list(got))
                for i, status in enumerate(result):
                    assert status in (Status.OK, Status.CANCELLED)
                    assert status is Status.CANCELLED or is_block(got[i], i)

            def read(closing: Any = closing) -> None:
                with closing.match_prefix(names(4)) as hit:
                    hit.verify()

            def put(closing: Any = closing, r: int = round_number) -> None:
                closing.put(names(4, f"{r} {time.monotonic_ns()}"), given, timeout=0.1)

            calls = [get, read, put, closing.usage, lambda c=closing: c.exists(names(4))]
            with ThreadPoolExecutor(6) as pool:
                using = [pool.submit(use, call) for call in [*calls, get]]
                started.wait(10)
                time.sleep(0.005 * round_number)  # at any moment
                began = time.monotonic()
                closing.close()
                assert time.monotonic() - began < 5
                for each in using:
                    each.result(10)
            store.touch(names(4))
        until(lambda: store.usage().leased_blocks == store.usage().granted_blocks == 0)


# ---- killed --------------------------------------------------------------------------------------


@transports
def test_a_node_killed_while_idle_is_unavailable_in_time(transport: str, tmp_path: Path) -> None:
    with NodeProcess(tmp_path) as node:
        store = kvstore.connect(node.address, ANY, transport=transport, timeout_s=SHORT_S)
        assert store.put(names(2), blocks(range(2), 1000), timeout=10).ok
        node.kill()
        assert_calls_fail(store, names(2), 1000)
        with pytest.raises(kvstore.NodeUnavailable):
            kvstore.connect(node.address, ANY, timeout_s=SHORT_S)
        in_time(store.close)


def killed_within(node: NodeProcess, relay: Relay, call: Callable[[], Any], after: int) -> Any:
    """What a call ends with whose node dies once `after` bytes have passed."""
    with ThreadPoolExecutor(1) as pool:
        passed = relay.total
        calling = pool.submit(call)
        relay.wait(lambda r: r.total >= passed + after)
        relay.freeze()
        assert not calling.done()
        node.kill()
        relay.cut()  # with all that was on its way
        relay.thaw()
        return calling.result(10)


def test_a_node_killed_in_the_middle_of_a_put_or_get_over_tcp(tmp_path: Path) -> None:
    size = 2 * MIB
    with (
        NodeProcess(tmp_path, dram=16 * MIB) as node,
        Relay(node.address, rate=20e6) as relay,
        kvstore.connect(relay.address, ANY, transport="tcp", connections=1) as store,
    ):
        put = killed_within(
            node, relay, lambda: store.put(names(4), blocks(range(4), size), timeout=10), size
        )
        assert set(put) <= LOST
        assert put.message
        node.start()
        got = np.full((4, size), 0xAB, np.uint8)
        until(lambda: store.match_prefix(names(4)).by_node != {})
        assert store.get(names(4), list(got)).count(Status.MISS) == 4
        assert store.put(names(4), blocks(range(4), size), timeout=10).ok
        result = killed_within(
            node, relay, lambda: store.get(names(4), list(got), timeout=10), 2 * size + 100_000
        )
        assert set(result) <= {*LOST, Status.OK}
        assert result[3] in LOST
        for i, status in enumerate(result):
            if status is Status.OK:
                assert is_block(got[i], i)
            else:
                assert result.nbytes[i] == 0
                assert set(np.unique(got[i])) <= {0, 0xAB}


@transports
def test_a_node_killed_while_a_put_waits_for_room(transport: str, tmp_path: Path) -> None:
    with NodeProcess(tmp_path) as node, ThreadPoolExecutor(1) as pool:
        store = kvstore.connect(node.address, ANY, transport=transport)
        until(store.settle)
        hit = store.match_prefix(fill(store)).__enter__()
        waiting = pool.submit(store.put, ["x"], [bytes(MIB)], timeout=30)
        transfer = store.put_async(["y"], [b"small"], timeout=30)
        with pytest.raises(TimeoutError):
            transfer.wait(0.1)
        node.kill()
        assert set(in_time(lambda: waiting.result(30), 1)) <= LOST
        assert set(in_time(lambda: transfer.wait(30), 1)) <= LOST
        del hit
        store.close()


@transports
def test_a_node_killed_while_a_put_in_parts_is_open(transport: str, tmp_path: Path) -> None:
    size = 3 * MIB
    data = block(1, size)
    with NodeProcess(tmp_path) as node:
        store = kvstore.connect(node.address, ANY, transport=transport)
        writing = store.writing(["k"], block_bytes=size)
        late = store.writing(["l"], block_bytes=MIB)
        writing.part(0, [data[:MIB]])
        late.part(0, [data[:MIB]])
        node.restart()
        try:
            for part in (1, 2):
                in_time(lambda p=part: writing.part(p, [data[p * MIB : (p + 1) * MIB]]), 1)
            assert set(in_time(writing.commit, 1)) <= LOST
        except kvstore.NodeUnavailable:
            assert writing.result is None
        assert set(in_time(late.commit, 1)) <= LOST
        until(lambda: store.match_prefix(["k"]).by_node != {})
        assert not store.exists(["k", "l"]).any()
        with store.writing(["k"], block_bytes=size) as writing:
            for part in range(3):
                writing.part(part, [data[part * MIB : (part + 1) * MIB]])
        assert writing.result is not None
        assert writing.result.stored == 1
        assert_node_idle(store)
        store.close()


def test_views_stay_readable_when_their_node_is_killed(tmp_path: Path) -> None:
    with NodeProcess(tmp_path, view_fraction=1) as node:
        store = kvstore.connect(node.address, ANY, transport="shm")
        assert store.put(names(3), blocks(range(3), MIB)).ok
        with store.match_prefix(names(3)) as hit:
            views = hit.views()
            node.kill()
            assert all(is_block(views[i][0], i) for i in range(3))
            node.start()
            until(lambda: store.match_prefix(names(3)).by_node != {})
            assert store.put(names(3), blocks(range(3), MIB, 1)).ok
            assert all(is_block(views[i][0], i) for i in range(3))
            del views
        array = np.frombuffer(store.match_prefix(names(3)).__enter__().views()[1][0], np.uint8)
        node.kill()
        store.close()
        assert is_block(array, 1, 1)
        del array
