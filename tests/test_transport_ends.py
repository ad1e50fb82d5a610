"""How calls end that a node cannot answer: frozen, killed, reborn, or left by a closed store.

Every call ends within its timeout and a second, with a typed outcome; what was lost is a miss; and
what a client held at a node that died never turns into other bytes.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import ANY, MIB, block, blocks, fill, in_a_forked_child, is_block, names, run_python
from nodes import CALL_TIMEOUT_S, NodeProcess, assert_node_idle, connected, until
from relay import Relay
from ways import PLAIN, REMOTE, Nodes, Way

import kvstore
from kvstore import Status

plain_ways = pytest.mark.parametrize("way", PLAIN, indirect=True)
remote_ways = pytest.mark.parametrize("way", REMOTE, indirect=True)
transports = pytest.mark.parametrize("transport", REMOTE)

TIMEOUT_S = 0.3
GRACE_S = 1.0
LOST = {Status.UNAVAILABLE, Status.TIMED_OUT, Status.OUTCOME_UNKNOWN}
OTHER = kvstore.BlockSpec("other", block_bytes=None)


def in_time(call: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    """Its result; it took no longer than its timeout and a second."""
    began = time.monotonic()
    try:
        return call()
    finally:
        took = time.monotonic() - began
        assert took < timeout_s + GRACE_S, f"took {took:.2f} s"


def unavailable(call: Callable[[], Any]) -> None:
    def refused() -> None:
        with pytest.raises(kvstore.NodeUnavailable):
            call()

    in_time(refused)


def assert_calls_fail(store: kvstore.Store, held: list[str], size: int) -> None:
    """Of a node that does not answer: each call ends in time, and says that it was not asked."""
    got = np.full((2, size), 0xAB, np.uint8)
    for big in (100, 200_000):
        put = in_time(lambda n=big: store.put(["new"], [bytes(n)], timeout=TIMEOUT_S))
        assert put[0] in LOST
        assert not put.ok
    result = in_time(lambda: store.get(held, list(got), timeout=TIMEOUT_S))
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
    unavailable(lambda: store.settle(TIMEOUT_S))
    unavailable(lambda: store.redeem(b"ticket of 16 byt"))
    unavailable(lambda: store.wait(held, TIMEOUT_S))
    transfers = [
        store.put_async(["new"], [bytes(200_000)], timeout=TIMEOUT_S),
        store.get_async(held, list(got), timeout=TIMEOUT_S),
    ]
    for transfer in transfers:
        assert set(in_time(lambda t=transfer: t.wait(10))) <= LOST
    assert in_time(lambda: store.match_async(held).wait(10)).by_node == {}
    assert set(in_time(lambda: asyncio.run(awaited(store)))) <= LOST


async def awaited(store: kvstore.Store) -> kvstore.PutResult:
    return await store.put_async(["new"], [b"x"], timeout=TIMEOUT_S)


# ---- frozen --------------------------------------------------------------------------------------


@remote_ways
def test_calls_to_a_frozen_node_end_in_time(way: Way, nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    size = 70_000
    with way.connect(node, timeout_s=TIMEOUT_S) as store:
        until(lambda: store.settle(1))
        assert store.put(names(2), blocks(range(2), size)).ok
        with store.match_prefix(names(2)) as hit:
            writing = store.writing(["w"], block_bytes=size)
            with node.paused():
                assert_calls_fail(store, names(2), size)
                got = np.full((2, size), 0xAB, np.uint8)
                try:  # over shared memory nobody is asked
                    assert in_time(lambda: hit.read(list(got))).ok
                except kvstore.LeaseRevoked:
                    assert way.name == "tcp"
                else:
                    assert all(is_block(got[i], i) for i in range(2))
                if way.name == "shm":
                    in_time(lambda: writing.part(0, [block(1, size)]))
                    assert in_time(writing.commit)[0] in LOST
                else:
                    with pytest.raises((TimeoutError, kvstore.NodeUnavailable)):
                        in_time(lambda: writing.part(0, [block(1, size)]))
            until(lambda: store.match_prefix(names(2)).blocks == 2)  # back, and nothing lost
        got = np.zeros((2, size), np.uint8)
        assert store.get(names(2), list(got), timeout=10).ok
        assert all(is_block(got[i], i) for i in range(2))
        assert store.put(["after"], [b"x"], timeout=10).ok
        assert_node_idle(store)
        store.clear()


@remote_ways
@pytest.mark.parametrize("call", ["list", "audit", "clear", "verify"])
def test_long_calls_to_a_frozen_node_end_in_time(way: Way, nodes: Nodes, call: str) -> None:
    node = nodes.take(dram=8 * MIB)
    with way.connect(node, timeout_s=TIMEOUT_S) as store:
        assert store.put(["a"], [b"x"], timeout=10).ok
        with store.match_prefix(["a"]) as hit:
            assert hit.verify() == [Status.OK]
            with node.paused():
                called = hit.verify if call == "verify" else getattr(store, call)
                unavailable(called)
        until(lambda: store.match_prefix(["a"]).by_node != {})
        store.clear()
        assert_node_idle(store)


@remote_ways
def test_connecting_to_and_closing_at_a_frozen_node_ends_in_time(way: Way, nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    transport = "shm" if way.shares_memory else "tcp"

    def connect() -> None:
        with pytest.raises(kvstore.NodeUnavailable, match=r"no answer in time|timed out"):
            kvstore.connect(node.address, ANY, transport=transport, timeout_s=TIMEOUT_S)

    store = kvstore.connect(node.address, ANY, transport=transport, timeout_s=TIMEOUT_S)
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
        connected(node, ANY, address=relay.address, timeout_s=TIMEOUT_S) as store,
    ):
        assert store.put(["a"], [block(1, 1000)]).ok
        relay.drop("down")
        for size in (1000, 200_000):
            result = in_time(lambda n=size: store.put([f"{n}"], [block(2, n)], timeout=TIMEOUT_S))
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

            def use(call: Callable[[], Any], started: Any = started) -> int:
                started.wait(10)
                calls = 0
                with pytest.raises(kvstore.StoreClosed):
                    while True:
                        call()
                        calls += 1
                return calls

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
        store = kvstore.connect(node.address, ANY, transport=transport, timeout_s=TIMEOUT_S)
        assert store.put(names(2), blocks(range(2), 1000), timeout=10).ok
        node.kill()
        assert_calls_fail(store, names(2), 1000)
        with pytest.raises(kvstore.NodeUnavailable):
            kvstore.connect(node.address, ANY, timeout_s=TIMEOUT_S)
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


# ---- reborn --------------------------------------------------------------------------------------


@transports
def test_a_node_reborn_at_its_address_is_empty_and_serves(transport: str, tmp_path: Path) -> None:
    size = 100_000
    with NodeProcess(tmp_path) as node:
        store = kvstore.connect(node.address, ANY, transport=transport)
        store.clear()
        old = store.keys(range(64))
        assert old.version == 2
        assert store.put(old, blocks(range(4), size)).ok
        hits = [store.match_prefix(old).__enter__() for _ in range(2)]
        match = store.match_prefix(old)
        ticket = hits[0].ticket()
        node.restart()
        got = np.full((4, size), 0xAB, np.uint8)
        first = in_time(lambda: store.get(old, list(got), timeout=1), 1)
        assert set(first) <= {Status.MISS, *LOST}
        assert set(np.unique(got)) <= {0, 0xAB}
        until(lambda: store.match_prefix(old).by_node != {})
        with match as stale_hit:
            assert stale_hit.blocks == 0
        fresh = store.keys(range(64))
        assert fresh.version == 1
        with pytest.raises(kvstore.StaleKeys):
            store.put(old, blocks(range(4), size))
        assert store.redeem(ticket) is None
        assert store.put(fresh, blocks(range(4), size, 1)).stored == 4
        try:
            assert hits[0].read(list(got)).ok
            assert transport == "shm"  # the dead node's memory is mapped still
            assert all(is_block(got[i], i) for i in range(4))
        except kvstore.LeaseRevoked:
            assert transport == "tcp"
        for call in (hits[1].views, hits[1].ticket):
            with pytest.raises((kvstore.LeaseRevoked, kvstore.ViewsRefused)):
                call()
        assert hits[0].close() is False
        del hits
        assert store.get(fresh, list(got)).ok
        assert all(is_block(got[i], i, 1) for i in range(4))
        assert_node_idle(store)
        store.close()


@transports
def test_every_call_works_again_after_a_rebirth(transport: str, tmp_path: Path) -> None:
    with NodeProcess(tmp_path) as node:
        store = kvstore.connect(node.address, ANY, transport=transport)
        for generation in range(3):
            transfers = [store.put_async(["a"], [bytes(100_000)], timeout=5) for _ in range(3)]
            node.restart()
            for transfer in transfers:
                assert set(transfer.wait(20)) <= {Status.OK, Status.EXISTS, *LOST}
            until(lambda: store.match_prefix(["a"]).by_node != {})
            store.clear()
            given = blocks(range(3), 200_000, generation)
            assert store.put(names(3), given).ok
            got = np.zeros((3, 200_000), np.uint8)
            with store.match_prefix(names(3)) as hit:
                assert hit.read(list(got)).ok
                assert all(is_block(got[i], i, generation) for i in range(3))
                if transport == "shm":
                    assert is_block(hit.views()[0][0], 0, generation)
                assert store.redeem(hit.ticket()).close()  # type: ignore[union-attr]
            assert store.list()[0].length == 200_000
            assert_node_idle(store)
        store.close()


# ---- several clients -----------------------------------------------------------------------------


@pytest.mark.parametrize("one", REMOTE)
@pytest.mark.parametrize("two", REMOTE)
def test_two_clients_at_once_see_each_others_blocks(one: str, two: str, nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    size = 100_000
    with (
        connected(node, ANY, transport=one) as first,
        connected(node, ANY, transport=two) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        for putting, getting in ((first, second), (second, first)):
            keys = putting.keys(range(64))
            assert putting.put(keys, blocks(range(4), size)).ok
            assert getting.match_prefix(keys).blocks == 4
            got = np.zeros((4, size), np.uint8)
            with getting.match_prefix(keys) as hit:
                assert putting.remove(keys) == 4
                assert putting.put(keys, blocks(range(4), size, 1)).ok
                assert hit.read(list(got)).ok
                assert all(is_block(got[i], i) for i in range(4))
            assert getting.get(keys, list(got)).ok
            assert all(is_block(got[i], i, 1) for i in range(4))
            putting.clear()
            with pytest.raises(kvstore.StaleKeys):
                getting.put(keys, blocks(range(4), size))
            assert getting.put(getting.keys(range(64)), blocks(range(4), size)).ok
            getting.clear()
        racing = [pool.submit(s.put, names(50), blocks(range(50), 5000)) for s in (first, second)]
        assert sum(put.result(10).stored for put in racing) == 50
        first.clear()


@pytest.mark.parametrize("way", [*REMOTE, "tcp unix"], indirect=True)
def test_a_forked_child_is_refused_and_its_parent_goes_on(way: Way) -> None:
    size = 100_000
    with way.opened(view_fraction=1) as store:
        assert store.put(names(4), blocks(range(4), size)).ok
        hit = store.match_prefix(names(4)).__enter__()
        view = np.frombuffer(hit.views()[0][0], np.uint8) if way.shares_memory else None
        writing = store.writing(["w"], block_bytes=size)
        transfer = store.get_async(names(1), [bytearray(size)])
        room = np.zeros((4, size), np.uint8)
        calls: list[Callable[[], Any]] = [
            *(lambda: store.put(["new"], [b"x"]), lambda: store.get(names(4), room)),
            *(lambda: store.match_prefix(names(4)), lambda: store.exists(names(4))),
            *(store.usage, store.clear, store.list, store.audit, store.drain),
            *(lambda: hit.read(room), hit.verify, hit.ticket, writing.commit, hit.close),
            lambda: store.put_async(["new"], [b"x"]),
        ]

        def use_everything() -> None:
            for call in calls:
                with pytest.raises(kvstore.ForkedStore):
                    call()
            store.close()
            assert not room.any()
            if way.name == "tcp":  # one of its own works
                with kvstore.connect(store._place, ANY, transport="tcp", timeout_s=10) as own:
                    assert own.match_prefix(names(4)).blocks == 4

        for _ in range(2):
            assert in_a_forked_child(use_everything) == 0
            got = np.zeros((4, size), np.uint8)
            assert store.get(names(4), list(got)).ok
            assert all(is_block(got[i], i) for i in range(4))
        assert transfer.wait(10).ok
        assert hit.read(list(got)).ok
        assert view is None or is_block(view, 0)
        del view
        assert hit.close()
        writing.part(0, [block(5, size)])
        assert writing.commit().stored == 1


@remote_ways
def test_exit_with_everything_open_is_clean(way: Way, nodes: Nodes) -> None:
    node = nodes.take(dram=64 * MIB)
    code = f"""
import kvstore, numpy as np
from builders import ANY, MIB, blocks, names
store = kvstore.connect({node.address!r}, ANY, transport={way.name!r}, timeout_s=10)
assert store.put(names(4), blocks(range(4), MIB)).ok
hit = store.match_prefix(names(4)).__enter__()
views = hit.views() if store.transport == "shm" else None
writing = store.writing(["w"], block_bytes=MIB)
transfers = [store.put_async([f"{{i}}"], [bytes(8 * MIB)], timeout=30) for i in range(16)]
"""
    result = run_python(code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    with kvstore.connect(node.address, ANY, timeout_s=CALL_TIMEOUT_S) as store:
        assert_node_idle(store)
        store.clear()
        assert store.usage().slots == 0
    assert OTHER.namespace_id != ANY.namespace_id
