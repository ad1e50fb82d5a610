"""Processes that die or stop at any step: nothing is left of the dead, nothing taken from the
stopped.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import raw
from builders import MIB, block, blocks, is_block, names
from raw_client import RawClient
from small_node import ANY, TOKEN, SmallNode, small_node
from told import wait_for

import kvstore
from kvstore.types import Status

OK = int(Status.OK)
LENGTH = 3 * MIB + 5
POOL = 12 * MIB  # of tests that fill it
LARGE = 8 * MIB  # more than what sockets hold on the way
TRANSPORTS = ["tcp", "shm"]
GONE = ("Ended", "BrokenPipeError", "ConnectionResetError")


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallNode]:
    with small_node(tmp_path_factory.mktemp("node"), dram_bytes=48 * MIB) as started:
        yield started


@pytest.fixture
def node(one_node: SmallNode) -> Iterator[SmallNode]:
    """The same for all, without blocks."""
    yield one_node
    with raw.Client(one_node.tcp, TOKEN) as client:
        client.line.ask("Clear", "Cleared")
    one_node.assert_idle()


@contextmanager
def others_work(node: SmallNode, prefix: str) -> Iterator[None]:
    """Clients of both kinds put and get before, around and after."""
    stores = [node.connect("tcp"), node.connect("shm")]

    def put_and_get(name: str) -> None:
        for number, store in enumerate(stores):
            assert store.put([f"{name}{number}"], block(number, MIB)[None]).ok
            got = bytearray(MIB)
            assert store.get([f"{name}{1 - number}" if number else f"{name}0"], [got]).ok
            assert is_block(got, 0)

    put_and_get(f"{prefix} before")
    yield
    put_and_get(f"{prefix} after")
    for store in stores:
        store.close()


# ---- killed at each step -------------------------------------------------------------------------

Steps = list[tuple[Any, ...]]
PUT: Steps = [
    ("hello",),
    ("reserve", [1, 2], LENGTH),
    ("write_half",),
    ("write_rest",),
    ("commit_half",),
]
GET: dict[str, Steps] = {
    "tcp": [("hello",), ("lookup", [7]), ("get_begin", [7], LARGE), ("get_rest",)],
    "shm": [("hello",), ("lookup", [7]), ("read_begin",), ("view",)],
}


def after(steps: Steps, last: str) -> Steps:
    return steps[: [step[0] for step in steps].index(last) + 1]


@pytest.mark.parametrize("last", [step[0] for step in PUT])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left_of_a_put_whose_client_is_killed(
    node: SmallNode, transport: str, last: str
) -> None:
    commits = node.usage()["commits"]
    with others_work(node, f"{transport} {last}"), RawClient(node, transport) as client:
        for step in after(PUT, last):
            client.ask(*step)
        granted = node.usage()["granted_blocks"]
        assert granted == 2 if 1 <= len(after(PUT, last)) - 1 <= 3 else granted in (0, 2)
        client.kill()
        node.assert_idle()
    with raw.Client(node.tcp, TOKEN) as reader:
        held = reader.lookup([raw.key(1), raw.key(2)])
        # Sent is not served: a commit may be read before the death is seen, or not at all.
        assert len(held.blocks) in ([0, 2] if last == "commit_half" else [0])
        for item in range(len(held.blocks)):
            assert is_block(reader.read(held, item), item + 1)
        reader.line.ask("Apply", "Applied", operation=0, keys=[raw.key(1), raw.key(2)])
    assert node.usage()["commits"] == commits + 4 + len(held.blocks)


@pytest.mark.parametrize(
    ("transport", "last"), [(way, step[0]) for way in TRANSPORTS for step in GET[way]]
)
def test_nothing_is_left_of_a_get_whose_client_is_killed(
    node: SmallNode, transport: str, last: str
) -> None:
    with raw.Client(node.tcp, TOKEN) as writer:
        writer.put([raw.key(7)], [block(7, LARGE).tobytes()])
    with others_work(node, f"{transport} {last}"), RawClient(node, transport) as client:
        for step in after(GET[transport], last):
            client.ask(*step)
        usage = node.usage()
        in_the_middle = 1 if last == "get_begin" else 0  # the node's own lease, while it sends
        expected = 0 if last == "hello" else 1 + in_the_middle
        assert usage["leased_blocks"] == expected
        assert usage["view_bytes"] == (LARGE if last == "view" else 0)
        client.kill()
        node.assert_idle()


def test_nothing_is_left_of_a_client_killed_while_it_waits_for_room(node: SmallNode) -> None:
    with raw.Client(node.unix, TOKEN, shm=True) as holder:
        everything = [raw.key(f"room{i}") for i in range(24)]
        granted = holder.reserve(everything, [2 * MIB] * 24)
        assert OK in granted.statuses
        with RawClient(node, "tcp") as client:
            client.ask("hello")
            requests = node.ask("counts")["requests"]
            client.tell("reserve", [3], 2 * MIB, 600 * 10**9)
            wait_for(lambda: node.ask("counts")["requests"] > requests)
            connections = node.ask("counts")["connections"]
            client.kill()
            wait_for(lambda: node.ask("counts")["connections"] == connections - 1)
    node.assert_idle()


# ---- stopped at each step ------------------------------------------------------------------------


def fill_often(node: SmallNode, transport: str, length: int = MIB) -> None:
    """Twice the pool by another client; what it gets back is what it put."""
    count = 2 * node.options["dram_bytes"] // length
    with node.connect(transport) as store:
        hits = 0
        for number in range(count):
            assert store.put([f"fill{number}"], block(number, length)[None], timeout=20).ok
            got = bytearray(length)
            if store.get([f"fill{number // 2}"], [got]).ok:
                hits += 1
                assert is_block(got, number // 2)
        assert hits > 0
        assert store.usage().evictions > 0


@pytest.mark.parametrize("last", ["reserve", "write_half", "write_rest"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_grant_of_a_stopped_client_is_its_own(
    tmp_path: Path, transport: str, last: str
) -> None:
    with (
        small_node(tmp_path, dram_bytes=POOL, grant_ns=10**8) as node,
        RawClient(node, transport) as client,
    ):
        for step in after(PUT, last):
            client.ask(*step)
        client.pause()
        wait_for(lambda: node.usage()["stuck_bytes"] == 2 * LENGTH)  # overdue, and counted
        fill_often(node, transport)
        assert node.usage()["granted_blocks"] == 2
        client.resume()
        for step in PUT[len(after(PUT, last)) :]:
            client.ask(*step)
        assert client.ask("commit_rest") == [OK, OK]
        assert node.usage()["stuck_bytes"] == 0
        with raw.Client(node.tcp, TOKEN) as reader:
            held = reader.lookup([raw.key(1), raw.key(2)])
            assert [is_block(reader.read(held, item), item + 1) for item in (0, 1)] == [True, True]


def test_the_view_of_a_stopped_client_is_its_own(tmp_path: Path) -> None:
    with (
        small_node(tmp_path, dram_bytes=POOL, lease_ns=10**8) as node,
        RawClient(node, "shm") as client,
    ):
        for step in [*PUT, ("commit_rest",), ("lookup", [1, 2]), ("view",)]:
            client.ask(*step)
        client.pause()
        fill_often(node, "shm")
        client.resume()
        assert client.ask("intact")
        assert client.ask("unmoved")
        assert client.ask("release")
        node.assert_idle()


def test_the_copying_lease_of_a_stopped_client_lapses_and_it_sees_that(tmp_path: Path) -> None:
    with (
        small_node(tmp_path, dram_bytes=POOL, lease_ns=10**8) as node,
        RawClient(node, "shm") as client,
    ):
        for step in [*PUT, ("commit_rest",), ("lookup", [1, 2]), ("read_begin",)]:
            client.ask(*step)
        client.pause()
        with raw.Client(node.tcp, TOKEN) as other:  # who needs all of the memory
            whole = [raw.key("whole")], [node.options["dram_bytes"]]
            assert other.reserve(*whole, wait_ns=20 * 10**9).statuses == [OK]
        client.resume()
        assert not client.ask("unmoved")
        assert not client.ask("release")
        node.assert_idle()


def test_a_writer_that_stops_loses_its_connection_and_what_had_not_come(tmp_path: Path) -> None:
    with small_node(tmp_path, stall_ns=3 * 10**8) as node, RawClient(node, "tcp") as client:
        for step in [PUT[0], ("join",), *PUT[1:3]]:
            client.ask(*step)
        client.pause()
        wait_for(lambda: node.ask("counts")["stalled"] == 1, 3)
        client.resume()
        assert client.ask_in_vain("write_rest") in (
            "Ended",
            "BrokenPipeError",
            "ConnectionResetError",
        )
        client.ask("use_control")
        client.ask("commit_half")
        assert client.ask("commit_rest")[1] in (Status.CORRUPT, Status.CANCELLED)
        node.assert_idle()
        with raw.Client(node.tcp, TOKEN) as reader:
            assert len(reader.lookup([raw.key(2)]).blocks) == 0
            held = reader.lookup([raw.key(1)])  # all of it had come
            assert all(is_block(reader.read(held), 1) for _ in held.blocks)


def test_a_reader_that_stops_frees_what_it_was_sent(tmp_path: Path) -> None:
    with small_node(tmp_path, stall_ns=3 * 10**8) as node, RawClient(node, "tcp") as client:
        with raw.Client(node.tcp, TOKEN) as writer:
            writer.put([raw.key(7)], [block(7, LARGE).tobytes()])
        client.ask("hello")
        client.ask("join")
        client.ask("get_begin", [7], LARGE)
        assert node.usage()["leased_blocks"] == 1
        client.pause()
        node.assert_idle(timeout_s=3)
        assert node.ask("counts")["stalled"] == 1
        client.resume()
        assert client.ask_in_vain("get_rest") == "Ended"


def test_overdue_grants_are_bounded_per_session(tmp_path: Path) -> None:
    with (
        small_node(tmp_path, grant_ns=10**8) as node,
        raw.Client(node.unix, TOKEN, shm=True) as sloth,
        raw.Client(node.tcp, TOKEN) as other,
    ):
        bound = node.options["dram_bytes"] // 4
        reserved = sloth.reserve([raw.key("much")], [bound + 1])
        assert reserved.statuses == [OK]
        wait_for(lambda: node.usage()["stuck_bytes"] == bound + 1)
        refused = sloth.reserve([raw.key("more")], [64])
        assert refused.statuses == [Status.OUT_OF_SPACE]
        assert other.put([raw.key("others")], [b"are served"]).statuses == [OK]
        sloth.copy(reserved.slots[0], bytes(bound + 1))
        assert sloth.commit(reserved, [bytes(bound + 1)]).statuses == [OK]
        assert sloth.put([raw.key("more")], [b"room again"]).statuses == [OK]


# ---- a forked child outlives its parent ----------------------------------------------------------


@contextmanager
def forked(client: RawClient) -> Iterator[None]:
    """A child of the client that holds copies of all its descriptors; the client is dead then."""
    pid = client.ask("fork")
    try:
        client.kill()
        os.kill(pid, 0)
        yield
        os.kill(pid, 0)  # it has been there all the time
    finally:
        os.kill(pid, signal.SIGKILL)


def test_the_dead_parents_memory_ends_though_its_child_holds_the_sockets(node: SmallNode) -> None:
    with RawClient(node, "shm") as client:
        for step in [*PUT, ("commit_rest",), ("lookup", [1, 2]), ("view",)]:
            client.ask(*step)
        client.ask("reserve", [3], LENGTH)
        usage = node.usage()
        assert (usage["view_bytes"], usage["granted_blocks"]) == (2 * LENGTH, 1)
        with forked(client):
            node.assert_idle()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_store_of_a_dead_parent_ends_though_its_child_lives(
    node: SmallNode, transport: str
) -> None:
    with node.connect(transport) as store:
        assert store.put(["parents"], block(1, MIB)[None]).ok
    with RawClient(node, transport) as client:
        client.ask("connect")
        client.ask("begin", f"begun {transport}", LENGTH)
        assert client.ask("open_hit", "parents") == 1
        if transport == "shm":
            client.ask("open_views")
        usage = node.usage()
        assert (usage["leased_blocks"], usage["granted_blocks"]) == (1, 1)
        with forked(client):
            node.assert_idle()


# ---- the control connection is lost --------------------------------------------------------------


def test_memory_outlives_the_control_connection_and_is_taken_over(node: SmallNode) -> None:
    with RawClient(node, "shm") as client, RawClient(node, "shm", "stranger") as stranger:
        for step in [*PUT, ("commit_rest",), ("lookup", [1, 2]), ("view",)]:
            client.ask(*step)
        client.ask("reserve", [3], LENGTH)
        client.ask("write_half")
        session = client.ask("session")
        with raw.Client(node.tcp, TOKEN) as watcher:
            client.ask("lose_control")
            wait_for(lambda: node.ask("counts")["connections"] == 1)
            assert watcher.usage()["granted_blocks"] == 1
            assert not stranger.ask("hello", session)
            assert stranger.ask("session") != session
            stranger.kill()
            wait_for(lambda: node.ask("counts")["sessions"] == 2)
            usage = watcher.usage()
            assert (usage["view_bytes"], usage["granted_blocks"]) == (2 * LENGTH, 1)
        assert client.ask("take_over")
        assert client.ask("session") == session
        assert client.ask("unmoved")
        assert client.ask("intact", [1, 2])
        assert client.ask("release")
        client.ask("write_rest")
        client.ask("commit_half")
        assert client.ask("commit_rest") == [OK]
        node.assert_idle()


def test_copying_leases_end_with_the_control_connection(node: SmallNode) -> None:
    with raw.Client(node.unix, TOKEN, shm=True) as client:
        client.put([raw.key("a"), raw.key("b")], [b"first", b"second"])
        kept = client.lookup([raw.key("a")])
        assert client.line.ask("MakeView", "ViewMade", lease=kept.lease).made
        client.lookup([raw.key("b")])
        assert node.usage()["leased_blocks"] == 2
        client.control.socket.close()
        wait_for(lambda: node.usage()["leased_blocks"] == 1)
        assert client.peek(kept.blocks[0]) == b"first"
        back = raw.Line(node.unix)
        assert back.greet(TOKEN, wants_memory=True, session=client.welcome.session).taken_over
        assert back.ask("Release", "Released", lease=kept.lease, quiet=False).held
        back.close()
    node.assert_idle()


def test_a_session_over_tcp_ends_with_its_control_connection(node: SmallNode) -> None:
    with raw.Client(node.tcp, TOKEN) as client:
        client.put([raw.key("tcp")], [b"bytes"])
        data = client.join()
        client.lookup([raw.key("tcp")])
        client.reserve([raw.key("never")], [LENGTH])
        client.control.socket.close()
        assert data.at_end()
        node.assert_idle()
        with raw.Line(node.tcp) as late, pytest.raises(raw.Refused) as refused:
            late.greet(TOKEN, data=True, session=client.welcome.session)
        assert refused.value.why is raw.Why.SESSION


def test_what_is_granted_while_the_control_connection_ends_is_kept(node: SmallNode) -> None:
    """If a reservation beside the session's end is answered, its memory is the client's."""
    answered = 0
    for attempt in range(100):
        with raw.Client(node.unix, TOKEN, shm=True) as client:
            data = client.join()
            key = raw.key(f"beside {attempt}")
            data.send("Reserve", **raw.reserve_fields([key], [64], attempt=raw.new_id()))
            client.control.socket.shutdown(2)
            try:
                granted = data.receive("Granted")
            except (raw.Ended, raw.Refused):
                continue
            if granted.statuses != [OK]:
                continue
            answered += 1
            wait_for(lambda: node.ask("counts")["connections"] <= 1)
            slot = granted.slots[0]
            assert client.generation(slot.slot) == slot.generation, attempt
            assert node.usage()["granted_blocks"] >= 1
    print(f"{answered} of 100 were answered")


# ---- the node dies or stops ----------------------------------------------------------------------


def silent(store: kvstore.Store) -> None:
    """Every kind of call of a store whose node is not there."""
    got = bytearray(10)
    assert store.match_prefix(["x"]).by_node == {}
    assert store.get(["x"], [got])[0] is Status.UNAVAILABLE
    assert store.put(["x"], [b"0123456789"])[0] is Status.UNAVAILABLE
    for call in (store.list, store.usage, store.audit, lambda: store.exists(["x"])):
        with pytest.raises(kvstore.NodeUnavailable):
            call()


def works(store: kvstore.Store) -> bool:
    return store.put(names(2, "again"), blocks([8, 9], 1000), chain=False).ok


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_node_killed_at_each_step_and_reborn(tmp_path: Path, transport: str) -> None:
    with SmallNode(tmp_path) as node, node.connect(transport, timeout_s=1.0) as store:
        assert store.put(["old"], block(5, LENGTH)[None]).ok
        match = store.match_prefix(["old"])
        hit = match.__enter__()
        views = hit.views() if transport == "shm" else []
        writing = store.writing(["begun"], block_bytes=LENGTH)
        writing.__enter__()
        pending = store.put_async(["later"], [block(6, LENGTH)])
        node.kill()
        silent(store)
        pending.wait(10)
        assert all(is_block(view, 5) for pieces in views for view in pieces)
        with node.reborn() as again:
            assert again.started["epoch"] != node.started["epoch"]
            wait_for(lambda: works(store), 10)
            assert store.exists(["old", "begun"]).tolist() == [False, False]
            assert all(is_block(view, 5) for pieces in views for view in pieces)
            del views
            with pytest.raises((TimeoutError, kvstore.NodeUnavailable)):
                writing.part(0, block(4, MIB)[None])
            read = bytearray(LENGTH)
            if transport == "shm":  # what it maps is the dead node's memory: nobody reuses it
                assert hit.read([read]).ok
                assert is_block(read, 5)
            else:
                with pytest.raises(kvstore.LeaseRevoked):
                    hit.read([read])
            match.__exit__(None, None, None)
            got = bytearray(1000)
            assert store.get(["again0"], [got]).ok
            assert is_block(got, 8)
            store.close()
            again.assert_idle()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_node_stopped_at_each_step_goes_on_where_it_was(tmp_path: Path, transport: str) -> None:
    with small_node(tmp_path) as node, node.connect(transport, timeout_s=0.3) as store:
        assert store.put(["old"], block(5, LENGTH)[None]).ok
        with store.match_prefix(["old"]) as hit:
            writing = store.writing(["begun"], block_bytes=MIB)
            with writing:
                node.pause()
                got = bytearray(10)
                slow = (Status.TIMED_OUT, Status.UNAVAILABLE)
                assert store.get(["x"], [got])[0] in slow
                assert store.put(["x"], [b"0123456789"])[0] in (
                    *slow,
                    Status.OUTCOME_UNKNOWN,
                )
                assert store.match_prefix(["x"]).by_node == {}
                node.resume()
                wait_for(lambda: works(store), 10)
                writing.part(0, block(4, MIB)[None])
            read = bytearray(LENGTH)
            assert hit.read([read]).ok
            assert is_block(read, 5)
        back = bytearray(MIB)
        assert store.get(["begun"], [back]).ok
        assert is_block(back, 4)
        node.assert_idle()


def test_the_specs_agree() -> None:
    assert raw.ANY == ANY
