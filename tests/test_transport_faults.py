"""Stores that stumble at each step, and connections that break, stall or lie at each byte.

Whatever happens on the way, a status says so, a read never gives wrong bytes, and a moment later
the node keeps nothing of it. Seeds and places are in the output of a test that fails.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import ANY, MIB, Bytes, block, blocks, is_block, names
from nodes import SHORT_S, NodeProcess, assert_node_idle, connected, in_time, until
from relay import Direction, Relay
from ways import GET_STEPS, PLAIN, PUT_STEPS, SEED, Nodes, Stepped, Way

import kvstore
from kvstore import Status

plain_ways = pytest.mark.parametrize("way", PLAIN, indirect=True)

LOST = {Status.UNAVAILABLE, Status.TIMED_OUT, Status.OUTCOME_UNKNOWN}
COUNT = 3


class CancelledError(Exception):
    """Raised in the middle of a call, as an interrupt would be."""


# ---- step by step --------------------------------------------------------------------------------


def stumbling(fault: str, at: str) -> Callable[[str], int | None]:
    def step(name: str) -> int | None:
        if name != at:
            return None
        if fault == "cancel":
            raise CancelledError
        if fault == "time out":
            return 1
        time.sleep(0.02)  # the delay is the fault
        return None

    return step


@plain_ways
@pytest.mark.parametrize("fault", ["delay", "cancel", "time out"])
@pytest.mark.parametrize("at", PUT_STEPS)
@pytest.mark.parametrize("size", [1000, MIB])
def test_a_put_that_stumbles_stores_all_or_nothing(
    way: Way, fault: str, at: str, size: int
) -> None:
    given = blocks(range(COUNT), size)
    with way.opened() as store:
        stepped = Stepped(store, stumbling(fault, at))
        if fault == "cancel":
            with pytest.raises(CancelledError):
                stepped.put(names(COUNT), given)
        else:
            result = stepped.put(names(COUNT), given)
            late = fault == "time out" and at != "commit"
            assert set(result) <= ({Status.OK, Status.TIMED_OUT} if late else {Status.OK})
        until(lambda: store.usage().granted_blocks == 0)
        held = store.exists(names(COUNT)).tolist()
        if fault == "cancel":
            assert held == [False] * COUNT
        else:
            assert held == [status is Status.OK for status in result]
        assert store.usage().slots == sum(held)
        assert store.put(names(COUNT), given).ok
        got = np.zeros_like(given)
        assert store.get(names(COUNT), list(got)).ok
        assert np.array_equal(got, given)


@plain_ways
@pytest.mark.parametrize("fault", ["delay", "cancel", "time out"])
@pytest.mark.parametrize("at", GET_STEPS)
@pytest.mark.parametrize("size", [1000, MIB])
def test_a_get_that_stumbles_reads_right_bytes_or_none(
    way: Way, fault: str, at: str, size: int
) -> None:
    given = blocks(range(COUNT), size)
    with way.opened() as store:
        assert store.put(names(COUNT), given).ok
        stepped = Stepped(store, stumbling(fault, at))
        got = np.full_like(given, 0xAB)
        statuses: list[Status] = []
        if fault == "cancel":
            with pytest.raises(CancelledError):
                stepped.get(names(COUNT), list(got))
        else:
            statuses = list(stepped.get(names(COUNT), list(got)))
            late = fault == "time out" and at == "read"
            assert set(statuses) <= ({Status.OK, Status.TIMED_OUT} if late else {Status.OK})
        for i, status in enumerate(statuses):
            if status is Status.OK:
                assert is_block(got[i], i)
            else:
                assert set(np.unique(got[i])) <= {0, 0xAB}
        until(lambda: store.usage().leased_blocks == 0)
        assert store.remove(names(COUNT)) == COUNT
        assert store.usage().slots == 0


# ---- cut at each byte ----------------------------------------------------------------------------


def put(store: kvstore.Store, given: Bytes) -> list[Status]:
    return list(store.put(names(COUNT), list(given)))


def put_in_parts(store: kvstore.Store, given: Bytes) -> list[Status]:
    try:
        with store.writing(names(COUNT), block_bytes=given.shape[1]) as writing:
            writing.part(0, given)
    except kvstore.NodeUnavailable:
        return [Status.UNAVAILABLE] * COUNT
    except TimeoutError:
        return [Status.TIMED_OUT] * COUNT
    assert writing.result is not None
    return list(writing.result)


def get(store: kvstore.Store, got: Bytes) -> list[Status]:
    return list(store.get(names(COUNT), list(got)))


def read(store: kvstore.Store, got: Bytes) -> list[Status]:
    try:
        with store.match_prefix(names(COUNT)) as hit:
            statuses = list(hit.read(list(got)))
    except kvstore.LeaseRevoked:
        return [Status.UNAVAILABLE] * COUNT
    return [Status.UNAVAILABLE if status is Status.MISS else status for status in statuses]


@contextmanager
def relayed(node: NodeProcess, **options: Any) -> Iterator[tuple[Relay, kvstore.Store]]:
    """A store whose connections all go through a relay. At the end the node is idle and empty."""
    with Relay(node.address) as relay:
        with kvstore.connect(
            relay.address, ANY, transport="tcp", connections=1, **options
        ) as store:
            yield relay, store
        relay.never_cut()
    with connected(node, ANY) as other:
        assert_node_idle(other)
        other.clear()
        assert other.usage().slots == 0


def passing(relay: Relay, call: Callable[[], Any]) -> dict[Direction, int]:
    """How many bytes a call sends each way."""
    before = relay.so_far()
    call()
    after = relay.so_far()
    return {"up": after["up"] - before["up"], "down": after["down"] - before["down"]}


def places(total: int, count: int) -> list[int]:
    """Byte counts over a whole exchange: the first, the last, one past it, and some in between."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    random_place = random.Random(seed)
    edges = {1, 2, 47, 48, 49, total // 2, total - 49, total - 48, total - 1, total, total + 1}
    return sorted(edges | {random_place.randrange(1, total) for _ in range(count)})


@pytest.mark.parametrize("size", [3000, 60_000], ids=["one message", "reserved first"])
@pytest.mark.parametrize("call", [put, put_in_parts])
def test_a_put_cut_at_any_byte_stores_all_or_nothing_of_a_block(
    nodes: Nodes, size: int, call: Callable[[kvstore.Store, Bytes], list[Status]]
) -> None:
    node = nodes.take(dram=8 * MIB)
    given = blocks(range(COUNT), size)
    seen: set[Status] = set()
    with relayed(node, timeout_s=5) as (relay, store), connected(node, ANY) as other:
        store.usage()  # a connection is there
        total = sum(passing(relay, lambda: call(store, given)).values())
        assert other.exists(names(COUNT)).all()
        assert total > given.nbytes
        for place in places(total, 100):
            other.clear()
            assert store.match_prefix(names(COUNT)).blocks == 0  # connected again
            cuts = relay.cuts
            relay.cut_after(place)
            statuses = call(store, given)
            relay.never_cut()
            print(f"cut after {place} of {total} bytes: {statuses}")
            seen.update(statuses)
            assert set(statuses) <= {Status.OK, *LOST}
            assert relay.cuts > cuts or statuses == [Status.OK] * COUNT
            until(lambda: other.usage().granted_blocks == 0)
            held = other.exists(names(COUNT)).tolist()
            got = np.zeros_like(given)
            for i, status in enumerate(other.get(names(COUNT), list(got))):
                assert status is (Status.OK if held[i] else Status.MISS)
                assert not held[i] or is_block(got[i], i)
                assert held[i] or statuses[i] is not Status.OK
                assert not held[i] or statuses[i] in (Status.OK, Status.OUTCOME_UNKNOWN)
            assert other.usage().slots == sum(held)
    assert {Status.OK, Status.OUTCOME_UNKNOWN} <= seen


@pytest.mark.parametrize("size", [3000, 60_000])
@pytest.mark.parametrize("call", [get, read])
def test_a_get_cut_at_any_byte_gives_right_bytes_or_none(
    nodes: Nodes, size: int, call: Callable[[kvstore.Store, Bytes], list[Status]]
) -> None:
    node = nodes.take(dram=8 * MIB)
    seen: set[Status] = set()
    with relayed(node, timeout_s=5) as (relay, store), connected(node, ANY) as other:
        assert other.put(names(COUNT), blocks(range(COUNT), size)).ok
        store.usage()
        got = np.full((COUNT, size), 0xAB, np.uint8)
        total = sum(passing(relay, lambda: call(store, got)).values())
        assert np.array_equal(got, blocks(range(COUNT), size))
        for place in places(total, 100):
            assert store.match_prefix(names(COUNT)).blocks == COUNT
            got[:] = 0xAB
            relay.cut_after(place)
            statuses = call(store, got)
            relay.never_cut()
            print(f"cut after {place} of {total} bytes: {statuses}")
            seen.update(statuses)
            assert set(statuses) <= {Status.OK, *LOST}
            for i, status in enumerate(statuses):
                if status is Status.OK:
                    assert is_block(got[i], i)
                else:
                    assert set(np.unique(got[i])) <= {0, 0xAB}
            until(lambda: other.usage().leased_blocks == 0)
        assert other.usage().slots == COUNT
    assert {Status.OK, Status.UNAVAILABLE} <= seen


def test_connecting_cut_at_any_byte_is_refused_in_time(nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    with Relay(node.address) as relay:
        kvstore.connect(relay.address, ANY, transport="tcp").close()
        total = sum(relay.so_far().values())
        for place in places(total, 20):
            relay.cut_after(place)
            try:
                store = in_time(
                    lambda: kvstore.connect(relay.address, ANY, transport="tcp", timeout_s=SHORT_S)
                )
            except kvstore.NodeUnavailable:
                relay.never_cut()
                continue
            relay.never_cut()
            assert place > total // 2
            until(lambda s=store: s.match_prefix(["a"]).by_node != {})
            store.close()
    with connected(node, ANY) as store:
        assert_node_idle(store)


# ---- bytes that change ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3000, 60_000], ids=["one message", "reserved first"])
def test_a_byte_changed_on_the_way_never_becomes_wrong_bytes(nodes: Nodes, size: int) -> None:
    node = nodes.take(dram=8 * MIB)
    given = blocks(range(COUNT), size)
    seen: set[tuple[str, Status]] = set()
    with (
        connected(node, ANY) as other,
        relayed(node, timeout_s=1) as (relay, store),
    ):  # in this order:
        # what a put under a changed name has reserved, ends with its connection
        store.usage()
        got = np.zeros_like(given)
        of_put = passing(relay, lambda: put(store, given))
        of_get = passing(relay, lambda: get(store, got))
        exchanges: list[tuple[str, Direction, int]] = [
            *(("put", "up", of_put["up"]), ("put", "down", of_put["down"])),
            *(("get", "up", of_get["up"]), ("get", "down", of_get["down"])),
        ]
        for call, direction, total in exchanges:
            for place in places(total, 30):
                other.clear()
                until(lambda: store.match_prefix(names(COUNT)).by_node != {}, 20)
                if call == "get":
                    assert other.put(names(COUNT), given).ok
                got[:] = 0xAB
                relay.flip(direction, place - 1)
                try:
                    statuses = put(store, given) if call == "put" else get(store, got)
                except (kvstore.KvstoreError, ValueError) as error:
                    print(f"{call} {direction} {place} of {total}: {error!r}")
                    continue
                print(f"{call} {direction} {place} of {total}: {statuses}")
                seen.update((call, status) for status in statuses)
                for i, status in enumerate(statuses):
                    assert call == "put" or status is not Status.OK or is_block(got[i], i)
                got[:] = 0
                for i, status in enumerate(other.get(names(COUNT), list(got))):
                    assert status in (Status.OK, Status.MISS)
                    assert status is Status.MISS or is_block(got[i], i)
        until(lambda: store.match_prefix(["a"]).by_node != {}, 20)
        assert other.usage().corrupt == 0  # the node's own bytes were good all the time
    assert {("put", Status.CORRUPT), ("get", Status.CORRUPT)} <= seen


# ---- slow ----------------------------------------------------------------------------------------


def test_a_slow_connection_ends_at_the_deadline(nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    given = block(1, 2 * MIB)
    with relayed(node) as (relay, store), connected(node, ANY) as other:
        assert other.put(["held"], [given]).ok
        store.usage()
        relay.rate = 1e6
        ended: dict[str, Status] = {}
        got = np.full_like(given, 0xAB)
        result = in_time(lambda: store.get(["held"], [got], timeout=SHORT_S))
        assert list(result) == [Status.TIMED_OUT]
        assert set(np.unique(got)) <= {0}
        for end in ("deadline", "cancel"):
            until(lambda: store.match_prefix(["held"]).blocks == 1, 20)  # it still answers
            timeout = SHORT_S if end == "deadline" else 30
            transfer = store.put_async([end], [given], timeout=timeout)
            with pytest.raises(TimeoutError):
                transfer.wait(0.1)
            if end == "cancel":
                transfer.cancel()
            ended[end] = in_time(lambda t=transfer: t.wait(10))[0]
        # All of it may have been sent, if not received, by then.
        assert ended["deadline"] in (Status.TIMED_OUT, Status.OUTCOME_UNKNOWN)
        assert ended["cancel"] in (Status.CANCELLED, Status.OUTCOME_UNKNOWN)
        relay.rate = None
        until(lambda: other.usage().granted_blocks == other.usage().leased_blocks == 0)
        for end, status in ended.items():
            if other.exists([end]).any():
                assert status is Status.OUTCOME_UNKNOWN
                assert other.get([end], [got]).ok
                assert is_block(got, 1)
        assert store.get(["held"], [got], timeout=10).ok
        assert is_block(got, 1)


def test_a_delayed_connection_serves_and_ends_in_order(nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    with (
        Relay(node.address, delay_s=0.02, pieces=random.Random(SEED)) as relay,
        connected(node, ANY, address=relay.address) as store,
    ):
        transfers = [store.put_async([f"{i}"], [block(i, 5000)]) for i in range(20)]
        assert all(transfer.wait(10).ok for transfer in transfers)
        got = np.zeros((20, 5000), np.uint8)
        with store.match_prefix([f"{i}" for i in range(20)]) as hit:
            assert hit.read(list(got)).ok
        assert all(is_block(got[i], i) for i in range(20))
        store.clear()


# ---- one very large block ------------------------------------------------------------------------

GIB = 1 << 30


def available_bytes() -> int:
    meminfo = Path("/proc/meminfo").read_text().split()
    return int(meminfo[meminfo.index("MemAvailable:") + 1]) << 10


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_block_of_5_gib_round_trips(transport: str, tmp_path: Path) -> None:
    size = 5 * GIB + 4097
    if available_bytes() < 12 * GIB:
        pytest.skip(f"needs 12 GiB of memory, {available_bytes() / GIB:.1f} are available")
    memory = np.empty(size, np.uint8)
    for start in range(0, size, 64 * MIB):  # piece by piece: the machine has no room for two
        piece = memory[start : start + 64 * MIB]
        piece[:] = block(start, len(piece))
    with (
        NodeProcess(tmp_path, dram=size + 2 * MIB) as node,
        kvstore.connect(node.address, ANY, transport=transport, timeout_s=600) as store,
    ):
        assert store.settle(600)
        assert store.put(["large"], [memory]).stored == 1
        memory[:] = 0
        result = store.get(["large"], [memory])
        assert result.ok
        assert result.nbytes.tolist() == [size]
        assert store.list()[0].length == size
        assert_node_idle(store)
    for start in range(0, size, 64 * MIB):
        assert is_block(memory[start : start + 64 * MIB], start)
