"""A node that is reborn, and several clients of one: other connections, processes and forks."""

import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import ANY, MIB, block, blocks, in_a_forked_child, is_block, names, run_python
from nodes import CALL_TIMEOUT_S, NodeProcess, assert_node_idle, connected, in_time, until
from ways import REMOTE, Nodes, Way

import kvstore
from kvstore import Status

remote_ways = pytest.mark.parametrize("way", REMOTE, indirect=True)
transports = pytest.mark.parametrize("transport", REMOTE)

LOST = {Status.UNAVAILABLE, Status.TIMED_OUT, Status.OUTCOME_UNKNOWN}


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
        assert store.redeem(hits[1].ticket()) is None
        with pytest.raises(kvstore.ViewsRefused):
            hits[1].views()
        assert hits[0].close() is (transport == "shm")
        del hits
        assert store.get(fresh, list(got)).ok
        assert all(is_block(got[i], i, 1) for i in range(4))
        assert_node_idle(store)
        store.close()


@transports
def test_every_call_works_again_after_a_rebirth(transport: str, tmp_path: Path) -> None:
    with NodeProcess(tmp_path) as node:
        store = kvstore.connect(node.address, ANY, transport=transport)
        transfers = [store.put_async(["a"], [bytes(100_000)], timeout=5) for _ in range(3)]
        node.restart()
        for transfer in transfers:
            assert set(transfer.wait(20)) <= {Status.OK, Status.EXISTS, *LOST}
        until(lambda: store.match_prefix(["a"]).by_node != {})
        store.clear()
        given = blocks(range(3), 200_000, 1)
        assert store.put(names(3), given).ok
        got = np.zeros((3, 200_000), np.uint8)
        with store.match_prefix(names(3)) as hit:
            assert hit.read(list(got)).ok
            assert all(is_block(got[i], i, 1) for i in range(3))
            if transport == "shm":
                assert is_block(hit.views()[0][0], 0, 1)
            assert store.redeem(hit.ticket()).close()  # type: ignore[union-attr]
        assert store.list()[0].length == 200_000
        assert_node_idle(store)
        store.close()


def work(place: str, transport: str, worker: int, stop: threading.Event) -> int:
    """Puts, gets, reads and views until told to stop, whatever the node does; how often it hit."""
    size, hits = 150_000, 0
    got = np.zeros((2, size), np.uint8)
    store = kvstore.connect(place, ANY, transport=transport, timeout_s=0.5)
    for number in itertools.count():
        if stop.is_set():
            store.close()
            return hits
        keys = [f"{worker} {number % 20}", f"{(worker + 1) % 4} {number % 20}"]
        ids = [worker << 32 | number % 20, (worker + 1) % 4 << 32 | number % 20]
        put = store.put(keys[:1], blocks(ids[:1], size))
        assert set(put) <= {Status.OK, Status.EXISTS, Status.OUT_OF_SPACE, *LOST}
        if put[0] in LOST:
            stop.wait(0.02)  # the cores are for the node that starts
        result = store.get(keys, list(got))
        for i, status in enumerate(result):
            assert status in (Status.OK, Status.MISS, *LOST)
            assert status is not Status.OK or is_block(got[i], ids[i])
            hits += status is Status.OK
        try:
            with store.match_prefix(keys) as hit:
                if transport == "shm" and number % 2:
                    for i, extents in enumerate(hit.views()):
                        assert is_block(b"".join(extents), ids[i])
                else:
                    result = hit.read(list(got))
                    for i in range(result.blocks):
                        assert is_block(got[i], ids[i])
        except (kvstore.LeaseRevoked, kvstore.ViewsRefused, kvstore.NodeUnavailable):
            continue
    raise AssertionError


@transports
def test_a_node_killed_under_load_never_gives_wrong_bytes(transport: str, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    random_s = random.Random(seed)
    stop = threading.Event()
    with NodeProcess(tmp_path, view_fraction=1) as node, ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(work, node.address, transport, i, stop) for i in range(4)]
        try:
            for _ in range(2):
                time.sleep(0.3 + random_s.random() * 0.1)  # at any moment
                node.restart()
                with kvstore.connect(node.address, ANY, timeout_s=CALL_TIMEOUT_S) as store:
                    until(lambda s=store: s.usage().hits > 0)  # they are back
        finally:
            stop.set()
        assert all(worker.result(30) > 0 for worker in workers)
        with connected(node, ANY) as store:
            store.clear()


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
