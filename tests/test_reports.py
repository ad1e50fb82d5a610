"""Failures that users of other stores have met, as they would happen to a node and its clients.

docs/field-reports.md says which; most are tested where they belong, and these are the rest.
"""

import os
import pickle
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import raw
from builders import ANY, MIB, block, blocks, is_block, names, run_python
from nodes import CALL_TIMEOUT_S, GRACE_S, SHORT_S, NodeProcess, connected, in_time, until
from relay import Relay
from small_node import TOKEN, small_node
from ways import REMOTE, SEED, Nodes, Way, has_ipv6

import kvstore
from kvstore import Status

transports = pytest.mark.parametrize("transport", REMOTE)
remote_ways = pytest.mark.parametrize("way", REMOTE, indirect=True)

LOST = {Status.UNAVAILABLE, Status.TIMED_OUT, Status.OUTCOME_UNKNOWN}

# ---- wrong or stale bytes ------------------------------------------------------------------------


def test_memory_under_a_slow_read_is_not_reused(nodes: Nodes) -> None:
    """The link stands still until the lease has lapsed and the pool was filled three times."""
    size = 24 * MIB  # more than what sockets hold on the way
    node = nodes.take(dram=48 * MIB, lease_s=0.05)
    with (
        Relay(node.address) as relay,
        connected(node, ANY) as other,
        connected(node, ANY, address=relay.address) as store,
        ThreadPoolExecutor(1) as pool,
    ):
        assert other.settle(60)
        assert store.put(["slow"], [block(1, size)]).ok
        got = np.full(size, 0xAB, np.uint8)
        before = relay.total
        getting = pool.submit(store.get, ["slow"], [got], timeout=20)
        relay.wait(lambda r: r.total > before + MIB)
        relay.freeze()
        for number in range(3 * 48):
            assert other.put([f"fill{number}"], [block(number + 2, MIB)]).ok
        assert other.usage().evictions > 0
        assert other.usage().leased_blocks == 1
        assert not getting.done()
        relay.thaw()
        assert getting.result(20).ok
        assert is_block(got, 1)
        store.clear()


def stamp(version: int, writer: int) -> "np.typing.NDArray[np.uint64]":
    return np.uint64(version << 32 | writer << 16) + np.arange(2048, dtype=np.uint64)


def test_no_hit_is_older_than_a_clear_by_another_client(nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    done = threading.Event()
    cleared = [0]  # the version after the last clear that has returned
    hits = [0]  # of that version or a later one

    def write(store: kvstore.Store, writer: int) -> None:
        while not done.is_set():
            keys = store.keys([writer] * 16)
            with suppress(kvstore.StaleKeys):
                store.put(keys, stamp(keys.version, writer)[None].view(np.uint8))

    def read(store: kvstore.Store) -> None:
        got = np.zeros(2048, np.uint64)
        keys = [store.keys([writer] * 16) for writer in range(2)]
        while not done.is_set():
            for writer in range(2):
                oldest = cleared[0]
                if store.get(keys[writer], [got.view(np.uint8)]).ok:
                    version = int(got[0]) >> 32
                    assert version >= oldest
                    assert np.array_equal(got, stamp(version, writer))
                    hits[0] += 1

    with ExitStack() as stack:
        stores = [stack.enter_context(connected(node, ANY, transport=t)) for t in REMOTE * 2]
        pool = stack.enter_context(ThreadPoolExecutor(4))
        working = [pool.submit(write, stores[i], i) for i in range(2)]
        working += [pool.submit(read, store) for store in stores[2:]]
        try:
            with connected(node, ANY) as store:
                for _ in range(20):
                    cleared[0] = store.clear()
                    seen = hits[0]
                    until(lambda n=seen: hits[0] > n or any(each.done() for each in working))
        finally:
            done.set()
        for each in working:
            each.result(10)
        stores[0].clear()


# ---- waits ---------------------------------------------------------------------------------------


@remote_ways
def test_python_runs_while_calls_wait_for_a_frozen_node(way: Way, nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    with way.connect(node) as store, ThreadPoolExecutor(4) as pool, node.paused():
        got = [bytearray(9) for _ in range(4)]
        waiting = [pool.submit(store.get, ["a"], [each], timeout=1.0) for each in got]
        turns, end = 0, time.monotonic() + 0.3
        while time.monotonic() < end:
            turns += 1
        assert turns > 10_000
        assert not any(call.done() for call in waiting)
        assert all(set(call.result(10)) <= LOST for call in waiting)


def test_both_ends_may_stop_at_once(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    for _ in range(2):
        node = NodeProcess(tmp_path)
        stores = [kvstore.connect(node.address, ANY, transport=each) for each in REMOTE * 2]
        hits = [store.match_prefix(["a"]).__enter__() for store in stores]
        for number, store in enumerate(stores):
            store.put_async([f"{number}"], [block(number, 2 * MIB)], timeout=30)
        barrier = threading.Barrier(len(stores) + 1)

        def close(store: kvstore.Store, late_s: float, barrier: Any = barrier) -> None:
            barrier.wait(10)
            time.sleep(late_s)  # at any moment
            in_time(store.close, 1)

        with ThreadPoolExecutor(len(stores)) as pool:
            late = [chance.uniform(0, 0.02) for _ in stores]
            closing = [pool.submit(close, *each) for each in zip(stores, late, strict=True)]
            barrier.wait(10)
            code = in_time(node.stop, 5)
            for each in closing:
                each.result(10)
        assert code == 0, node.log()
        del hits


def test_a_node_that_is_gone_costs_its_callers_nothing(tmp_path: Path) -> None:
    with NodeProcess(tmp_path) as node:
        stores = [kvstore.connect(node.address, ANY, transport=each) for each in REMOTE]
        node.kill()
        for store in stores:
            store.match_prefix(["a"])
            took = []
            for _ in range(200):
                began = time.monotonic()
                assert store.match_prefix(["a"]).by_node == {}
                assert store.get(["a"], [bytearray(9)])[0] is Status.UNAVAILABLE
                took.append(time.monotonic() - began)
            assert sorted(took)[190] < 0.05, f"the slowest {max(took):.3f} s"
        node.start()
        for number, store in enumerate(stores):
            until(lambda s=store, n=number: s.put([f"{n}"], [b"x"]).ok, 2 + GRACE_S)
            store.close()


def test_a_node_that_hangs_costs_its_first_callers_their_timeout(tmp_path: Path) -> None:
    with NodeProcess(tmp_path) as node:
        stores = [
            kvstore.connect(node.address, ANY, transport=each, timeout_s=SHORT_S) for each in REMOTE
        ]
        for number, store in enumerate(stores):
            assert store.put([f"{number}"], [b"x"]).ok
        with node.paused():
            for store in stores:
                in_time(lambda s=store: s.get(["0"], [bytearray(1)]))  # it finds out
                time.sleep(0.1)
                took = []
                for _ in range(200):
                    began = time.monotonic()
                    assert store.get(["0"], [bytearray(1)])[0] is Status.UNAVAILABLE
                    assert store.match_prefix(["0"]).by_node == {}
                    took.append(time.monotonic() - began)
                assert sorted(took)[190] < 0.05, f"the slowest {max(took):.3f} s"
            with pytest.raises(kvstore.NodeUnavailable, match="no answer in time"):
                stores[0].usage()
        for store in stores:
            until(lambda s=store: s.put(["back"], [b"x"]).ok, 2 + GRACE_S)
            store.close()


def test_a_short_deadline_does_not_make_a_node_look_hung(tmp_path: Path) -> None:
    with NodeProcess(tmp_path, dram=64 * MIB) as node:
        for transport in REMOTE:
            with kvstore.connect(node.address, ANY, transport=transport, timeout_s=10) as store:
                assert store.put(["big"], [bytes(32 * MIB)]).ok
                stop = threading.Event()

                def hurry(store: kvstore.Store = store, stop: threading.Event = stop) -> int:
                    late, out = 0, bytearray(32 * MIB)
                    while not stop.is_set():
                        late += store.get(["big"], [out], timeout=0.001)[0] is Status.TIMED_OUT
                    return late

                with ThreadPoolExecutor(1) as pool:
                    hurrying = pool.submit(hurry)
                    for number in range(100):
                        assert store.put([f"{number}"], [b"x"]).ok
                        assert store.get([f"{number}"], [bytearray(1)]).ok
                    stop.set()
                    assert hurrying.result(10) > 0
                store.clear()


# ---- connections ---------------------------------------------------------------------------------

WITHOUT_NAMES = """
import ctypes, os, socket, sys, tempfile
from pathlib import Path
folder = Path(tempfile.mkdtemp())
libc = ctypes.CDLL(None, use_errno=True)
(folder / "empty").touch()
(folder / "switch").write_text("hosts: files")
NEWNS, BIND, REC, PRIVATE = 0x20000, 4096, 16384, 1 << 18
def mount(source, place, flags):
    return libc.mount(os.fsencode(source), place, None, flags, None) == 0
ok = libc.unshare(NEWNS) == 0 and mount("none", b"/", REC | PRIVATE)
for name, place in (("empty", b"/etc/hosts"), ("switch", b"/etc/nsswitch.conf"),
                    ("empty", b"/etc/resolv.conf")):
    ok = ok and (not os.path.exists(place) or mount(folder / name, place, BIND))
if not ok:
    print("not permitted")
    sys.exit()
try:
    socket.getaddrinfo("localhost", 1)
    print("names are found")
    sys.exit()
except socket.gaierror:
    pass
import kvstore
from builders import ANY
from nodes import NodeProcess
listen = ["127.0.0.1:0"] + (["[::1]:0"] if sys.argv[1:] else [])
with NodeProcess(folder, listen=listen) as node:
    for number, address in enumerate(node.addresses):
        with kvstore.connect(address, ANY, transport="tcp", timeout_s=10) as store:
            assert store.put([str(number)], [b"x"]).ok
    try:
        kvstore.connect(node.address.replace("127.0.0.1", "localhost"), ANY, timeout_s=10)
    except kvstore.NodeUnavailable as error:
        print("served", error)
"""


def test_numeric_addresses_need_no_names() -> None:
    arguments = "import sys; sys.argv[1:] = ['v6']\n" if has_ipv6() else ""
    done = run_python(arguments + WITHOUT_NAMES)
    if done.stdout in ("not permitted\n", "names are found\n"):
        pytest.skip(f"the machine's names cannot be taken away here: {done.stdout.strip()}")
    assert done.stdout.startswith("served localhost"), done.stderr


def test_transfers_share_a_few_connections(nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    threads, rounds = 4, 100
    with (
        Relay(node.address) as relay,
        connected(node, ANY, address=relay.address) as store,
        ThreadPoolExecutor(threads) as pool,
    ):

        def work(number: int) -> bool:
            got = bytearray(1000)
            put = store.put([f"{number}"], [block(number, 1000)])
            return put.ok and store.get([f"{number}"], [got]).ok and is_block(got, number)

        assert all(pool.map(work, range(threads * rounds)))
        assert relay.connections <= 1 + threads
        store.clear()


@remote_ways
def test_a_peer_may_be_left_and_met_again_at_once(way: Way, nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    for number in range(50):
        with way.connect(node) as store:
            expected = Status.EXISTS if number else Status.OK
            assert store.put(["met"], [block(7, 70_000)])[0] is expected
            got = bytearray(70_000)
            assert store.get(["met"], [got]).ok
            assert is_block(got, 7)
    with way.connect(node) as store:
        store.clear()


def test_a_node_that_starts_late_is_met(tmp_path: Path) -> None:
    with NodeProcess(tmp_path) as node:
        node.kill()
        for place in (node.address, node.path):
            with pytest.raises(kvstore.NodeUnavailable):
                in_time(lambda p=place: kvstore.connect(p, ANY, timeout_s=SHORT_S))
        node.start()
        for transport in REMOTE:
            with connected(node, ANY, transport=transport) as store:
                assert store.put([transport], [b"x"]).ok


LEAVING = """
import os, sys, kvstore
from builders import ANY, block
for number in range(20):
    pid = os.fork()
    if pid == 0:
        store = kvstore.connect(sys.argv[1], ANY, transport=sys.argv[2], timeout_s=10)
        size = 1000 if number % 2 else 200_000
        os._exit(0 if store.put([f"left {number}"], [block(number, size)]).ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.mark.parametrize("transport", ["shm", "tcp", "relay"])
def test_what_was_acknowledged_outlives_its_writers_exit(transport: str, nodes: Nodes) -> None:
    node = nodes.take(dram=8 * MIB)
    with Relay(node.address, delay_s=0.005) as relay, connected(node, ANY) as store:
        address = relay.address if transport == "relay" else node.address
        way = "shm" if transport == "shm" else "tcp"
        done = run_python(f"import sys; sys.argv[1:] = {[address, way]}\n" + LEAVING)
        assert done.returncode == 0, done.stderr
        for number in range(20):
            got = np.zeros(1000 if number % 2 else 200_000, np.uint8)
            assert store.get([f"left {number}"], [got]).ok
            assert is_block(got, number)
        store.clear()


def listening(pid: int) -> list[str]:
    """Where that process listens by TCP, as the kernel writes it."""
    folder = Path(f"/proc/{pid}")
    own = {os.readlink(each) for each in (folder / "fd").iterdir()}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        if (folder / "net" / name).exists()
        for line in (folder / "net" / name).read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]


def test_a_node_listens_where_it_says_and_nowhere_else(tmp_path: Path) -> None:
    with NodeProcess(tmp_path, listen=["127.0.0.2:0"]) as node:
        host, _, port = node.address.partition(":")
        assert host == "127.0.0.2"
        number = int.from_bytes(socket.inet_aton(host), "little")
        assert listening(node.pid) == [f"{number:08X}:{int(port):04X}"]
        with connected(node, ANY) as store:
            assert store.put(["a"], [b"x"]).ok
            assert list(store.match_prefix(["a"]).by_node) == [node.address]


# ---- bytes that would run ------------------------------------------------------------------------


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_sent_to_a_node_is_not_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    data = pickle.dumps(Touches(marker))
    pickle.loads(data)
    marker.unlink()  # so it does what it should
    with small_node(tmp_path) as node:
        for address in (node.tcp, node.unix):
            for sent in (data, raw.frame("Hello", data)):
                with raw.Line(address) as line:
                    line.socket.sendall(sent)
                    line.socket.shutdown(socket.SHUT_WR)
                    with suppress(ConnectionResetError):
                        while line.socket.recv(4096):
                            pass
            for name in raw.tables()[0]:
                with raw.Line(address) as line:
                    line.greet(TOKEN)
                    line.socket.sendall(raw.frame(name, data))
                    line.socket.shutdown(socket.SHUT_WR)
                    with suppress(ConnectionResetError):
                        while line.socket.recv(4096):
                            pass
        with node.connect("tcp") as store:
            assert store.put([data[:64]], [data]).ok
            got = bytearray(len(data))
            assert store.get([data[:64]], [got]).ok
            assert got == data
        node.assert_idle()
    assert not marker.exists()


# ---- requests of a batch -------------------------------------------------------------------------


@transports
def test_a_batch_is_a_few_requests(transport: str, tmp_path: Path) -> None:
    count, size = 10_000, 1000
    with small_node(tmp_path, dram_bytes=64 * MIB) as node, node.connect(transport) as store:
        given, got = blocks(range(count), size), np.zeros((count, size), np.uint8)

        def requests(call: Any) -> int:
            before = node.ask("counts")["requests"]
            assert call()
            return int(node.ask("counts")["requests"]) - before

        keys = names(count)
        assert store.settle(60)
        put = requests(lambda: store.put(keys, given, timeout=CALL_TIMEOUT_S).ok)
        get = requests(lambda: store.get(keys, list(got), timeout=CALL_TIMEOUT_S).ok)
        print(f"{put} requests to put, {get} to get")
        assert np.array_equal(got, given)
        assert max(put, get) < 30
        assert requests(lambda: store.exists(keys * 2).all()) == 1
        assert requests(lambda: store.match_prefix(keys[:1000]).blocks == 1000) == 1
        one_by_one = requests(lambda: all(store.exists([key]).all() for key in keys[:100]))
        assert one_by_one == 100
