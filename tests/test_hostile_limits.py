"""Too many connections, too few descriptors, too little memory, places that are taken, and a wall
clock that goes backwards: a node refuses, recovers, and depends on none of it.
"""

import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import raw
from builders import MIB, block, is_block
from raw import Line, Refused, Why
from raw_client import RawClient
from small_node import ANY, TOKEN, SmallNode, small_node
from told import wait_for

import kvstore

SOON_S = 2.0
KEYS = [raw.key("a"), raw.key("b")]


def raise_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"no more than {hard} descriptors may be open here")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def working(store: kvstore.Store) -> Iterator[list[float]]:
    """A good client that puts and gets all the time; how long each pair took, in seconds. It has
    its connections already.
    """
    assert store.put(["before"], [b"all"]).ok
    stop = threading.Event()
    took: list[float] = []
    wrong: list[object] = []

    def work() -> None:
        number = 0
        try:
            while not stop.is_set():
                number += 1
                began = time.monotonic()
                put = store.put([f"good{number}"], [block(number, 100_000)])
                got = bytearray(100_000)
                back = store.get([f"good{number}"], [got])
                if not (put.ok and back.ok and is_block(got, number)):
                    wrong.append((number, put, back, is_block(got, number)))
                took.append(time.monotonic() - began)
        except kvstore.KvstoreError as error:
            wrong.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield took
        more = len(took) + 20
        wait_for(lambda: len(took) > more or bool(wrong))
    finally:
        stop.set()
        thread.join()
    assert wrong == []
    print(f"{len(took)} puts and gets, the slowest {max(took):.3f} s")


# ---- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_thousand_connections_and_a_good_client(tmp_path: Path, kind: str) -> None:
    raise_limit(2000)
    hello = raw.frame("Hello", raw.encode("Hello", **raw.hello_fields()))
    with (
        small_node(tmp_path, hello_ns=60 * 10**9, limits={"RLIMIT_NOFILE": 2000}) as node,
        node.connect("shm" if kind == "unix" else "tcp") as good,
    ):
        address = node.unix if kind == "unix" else node.tcp
        with working(good):
            wait_for(lambda: node.usage()["commits"] > 100)
        memory, descriptors = node.rss_anon(), node.descriptors()
        with ExitStack() as stack, working(good) as took:
            lines = [stack.enter_context(Line(address)) for _ in range(1000)]
            half_open, active = lines[334:667], lines[667:]
            for number, line in enumerate(half_open):
                line.socket.sendall(hello[: number % len(hello)])
            for line in active:
                line.greet(TOKEN)
            for _ in range(3):
                for line in active:
                    line.send("Exists", keys=KEYS)
                for line in active:
                    assert line.receive("Held").held == [0, 0]
            assert node.ask("counts")["connections"] >= 1000
            assert node.ask("counts")["sessions"] >= 333
            assert max(took) < SOON_S
        wait_for(lambda: node.ask("counts")["connections"] <= 3)
        wait_for(lambda: node.descriptors() <= descriptors)
        assert node.rss_anon() <= memory + 4 * MIB  # as far as malloc gives it back
        assert node.ask("counts")["sessions"] == 1


def test_no_more_connections_than_there_may_be(tmp_path: Path) -> None:
    with small_node(tmp_path, connections_max=12) as node, node.connect("tcp") as good:
        with working(good), ExitStack() as stack:
            lines = [stack.enter_context(Line(node.tcp)) for _ in range(30)]
            wait_for(lambda: node.ask("counts")["refused"] >= 18)
            refused = sum(refuses_at_once(line) for line in lines)
            assert 18 <= refused <= 22  # the good client has a few
            with pytest.raises((kvstore.NodeRefused, kvstore.NodeUnavailable)):
                kvstore.connect(node.unix, ANY, token=TOKEN)
        wait_for(lambda: node.ask("counts")["connections"] <= 3)
        with kvstore.connect(node.unix, ANY, token=TOKEN) as late:
            assert late.exists(["x"]).tolist() == [False]
        assert any("12" in fields.get("why", "") for _, _, fields in node.ask("events"))


def refuses_at_once(line: Line) -> bool:
    """By a word of refusal before anything was said, or by the connection's end."""
    line.socket.settimeout(0.2)
    try:
        said = line.socket.recv(1 << 12)
        return not said or b"connections_max" in said
    except TimeoutError:
        return False
    except (BrokenPipeError, ConnectionResetError):
        return True


def test_no_more_connections_of_one_session_than_there_may_be(tmp_path: Path) -> None:
    with small_node(tmp_path) as node, raw.Client(node.tcp, TOKEN) as client:
        for _ in range(63):
            client.join()
        with Line(node.tcp) as line, pytest.raises(Refused) as refused:
            line.greet(TOKEN, data=True, session=client.welcome.session)
        assert refused.value.why is Why.TOO_MANY
        client.lines.pop().close()
        wait_for(lambda: node.ask("counts")["connections"] == 63)
        client.join()


def test_a_guessed_view_nobody_has_heard_of_is_given_back(tmp_path: Path) -> None:
    keys = [raw.key("a")]
    with small_node(tmp_path) as node, raw.Client(node.unix, TOKEN, shm=True) as client:
        client.put(keys, [b"first"])
        lines = [client.join(), client.join()]
        leased = [
            line.ask("Lookup", "Leased", keys=keys, skip=0, run=True, view=True) for line in lines
        ]
        assert [each.view for each in leased] == [True, True]
        assert node.usage()["view_bytes"] == 10
        assert lines[0].ask("Exists", "Held", keys=keys).held == [1]  # so it has heard
        for line in lines:
            line.close()
        wait_for(lambda: node.usage()["view_bytes"] == 5)
        last = client.join()
        held = [
            last.ask("Release", "Released", lease=each.lease, quiet=False).held for each in leased
        ]
        assert held == [True, False]
        node.assert_idle()


def test_a_flood_of_requests_does_not_keep_others_waiting(tmp_path: Path) -> None:
    """By a client that never waits for answers, and by requests that have none."""
    many = 20_000
    complain = raw.frame("Complain", raw.encode("Complain", lease=1, item=0)) * many
    exists = raw.frame("Exists", raw.encode("Exists", keys=KEYS)) * 1000
    with small_node(tmp_path, io_threads=1) as node, node.connect("tcp") as good:
        lines = [Line(node.tcp) for _ in range(3)]
        stop = threading.Event()

        def flood(line: Line, data: bytes) -> None:
            try:
                while not stop.is_set():
                    line.socket.sendall(data)
                    line.requests += 1
            except OSError:  # closed, or nobody reads what it is answered
                return

        for line in lines:
            line.greet(TOKEN)
            line.socket.settimeout(3)
        floods = [
            threading.Thread(target=flood, args=(line, data))
            for line, data in zip(lines, (complain, complain, exists), strict=True)
        ]
        with working(good) as took:
            for thread in floods:
                thread.start()
            wait_for(lambda: lines[0].requests > 10 and lines[1].requests > 10, 60)
        stop.set()
        for thread in floods:
            thread.join()
        assert max(took) < 1.0
        for line in lines:
            line.close()


def test_requests_behind_a_large_answer_are_answered(tmp_path: Path) -> None:
    """Sent together; the node takes turns between connections by bytes moved."""
    length = 8 * MIB
    with small_node(tmp_path) as node, raw.Client(node.unix, TOKEN) as client:
        client.put([raw.key("large")], [block(1, length).tobytes()])
        for _ in range(30):
            client.line.send("Get", keys=[raw.key("large")], room=[length])
            client.line.send("Exists", keys=KEYS)
            client.line.receive("Blocks")
            assert client.line.receive("Held").held == [0, 0]


# ---- descriptors ---------------------------------------------------------------------------------


def test_descriptors_that_are_out_are_no_end(tmp_path: Path) -> None:
    with small_node(tmp_path, limits={"RLIMIT_NOFILE": 48}) as node:
        with node.connect("tcp") as good, working(good):
            descriptors = node.descriptors()
            with ExitStack() as stack:
                lines = [stack.enter_context(Line(node.tcp)) for _ in range(60)]
                wait_for(lambda: node.ask("counts")["refused"] >= 60 - 48 + descriptors)
                at_once = sum(refuses_at_once(line) for line in lines)
                assert at_once >= 60 - 48 + descriptors
                assert node.descriptors() <= 48
            wait_for(lambda: node.descriptors() <= descriptors)
            with kvstore.connect(node.unix, ANY, token=TOKEN) as late:  # passes descriptors
                assert late.transport == "shm"
                assert late.put(["late"], [b"served"]).ok
        assert any("descriptors" in fields.get("why", "") for _, _, fields in node.ask("events"))


# ---- places --------------------------------------------------------------------------------------


def cannot_listen(folder: Path, **options: object) -> str:
    with SmallNode(folder, **options) as node:
        assert node.started["error"] == "CannotListen"
        return str(node.started["message"])


def test_places_that_are_taken_or_none(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with small_node(tmp_path / "first") as node:
        message = cannot_listen(tmp_path / "second", listen=[node.tcp])
        assert node.tcp in message
        assert "in use" in message
        assert "in use" in cannot_listen(tmp_path / "second", socket=node.unix)
        with node.connect("shm") as store:  # whose socket it still is
            assert store.put(["x"], [b"y"]).ok
    file = tmp_path / "a file"
    file.write_text("precious")
    assert "in use" in cannot_listen(tmp_path / "second", socket=str(file))
    assert file.read_text() == "precious"
    assert "No such file" in cannot_listen(tmp_path / "second", socket=str(tmp_path / "no" / "s"))
    assert "Cannot assign" in cannot_listen(tmp_path / "second", listen=["192.0.2.1:0"])


def test_what_a_killed_node_left_is_no_hindrance(tmp_path: Path) -> None:
    with SmallNode(tmp_path) as node:
        node.kill()
        assert Path(node.unix).is_socket()
        with node.reborn() as again, again.connect("shm") as store:
            assert store.put(["x"], [b"y"]).ok


# ---- memory --------------------------------------------------------------------------------------


def test_an_address_space_that_is_too_small_is_an_error_at_the_start(tmp_path: Path) -> None:
    with SmallNode(tmp_path, dram_bytes=1 << 36, limits={"RLIMIT_AS": 1 << 30}) as node:
        assert node.started["error"] == "NotEnoughMemory"


def test_requests_there_is_no_memory_for_end_their_connections_only(tmp_path: Path) -> None:
    body_bytes = 60 * MIB
    head = raw.HEADER.pack(raw.MAGIC, raw.type_of("Exists"), 0, body_bytes, 0, 0, 1, bytes(16))
    with small_node(tmp_path) as node, node.connect("tcp") as good, ExitStack() as stack:
        used = int(Path(f"/proc/{node.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(node.pid, resource.RLIMIT_AS, (used + 150 * MIB,) * 2)
        with working(good):
            lines = [stack.enter_context(Line(node.tcp)) for _ in range(6)]
            ended = 0
            for line in lines:
                line.greet(TOKEN)
                try:
                    line.socket.sendall(head)
                    for _ in range(body_bytes // MIB - 1):
                        line.socket.sendall(bytes(MIB))
                except (BrokenPipeError, ConnectionResetError):
                    ended += 1
            assert ended >= 3
            assert any(event == "out of memory" for _, event, _ in node.ask("events"))


def test_locked_memory_beyond_the_limit_is_an_error_at_the_start(tmp_path: Path) -> None:
    """For root the limit does not count: it gives up the capability first."""
    limits = {"RLIMIT_MEMLOCK": MIB}
    options = {"lock_memory": True, "limits": limits, "without_privileges": True}
    with SmallNode(tmp_path, **options) as node:
        assert node.started["error"] == "NotEnoughMemory"
        assert "lock" in node.started["message"]


CGROUPS = {
    "v1": ("4:memory:/a/b\n0::/\n", "memory/", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    "v2": ("0::/a/b\n", "", "memory.max", "memory.current"),
}


@pytest.mark.parametrize("kind", CGROUPS)
def test_a_pool_beyond_the_cgroup_is_an_error_at_the_start(tmp_path: Path, kind: str) -> None:
    """Of the group itself or one above; the rest of the machine has room."""
    own, root, limit, used = CGROUPS[kind]
    for limited in ("a", "a/b"):
        files = {f"{root}{limited}/{limit}": f"{256 * MIB}\n", f"{root}{limited}/{used}": "5\n"}
        with SmallNode(tmp_path, dram_bytes=300 * MIB, cgroup=[own, files]) as node:
            if node.started.get("error") == "OSError":
                pytest.skip(f"no mounts of one's own here: {node.started['message']}")
            assert node.started["error"] == "NotEnoughMemory"
            assert "cgroup" in node.started["message"]
    with (
        small_node(tmp_path, dram_bytes=16 * MIB, cgroup=[own, files]) as node,
        node.connect("tcp") as store,
    ):
        assert store.put(["fits"], [b"it"]).ok


# ---- the wall clock ------------------------------------------------------------------------------

SHIM = r"""
#define _GNU_SOURCE
#include <stdatomic.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static atomic_long calls;  // each finds the clock ten seconds further back

static long back(void) { return 10 * atomic_fetch_add(&calls, 1); }

int clock_gettime(clockid_t clock, struct timespec* out) {
  const int failed = (int)syscall(SYS_clock_gettime, clock, out);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) out->tv_sec -= back();
  return failed;
}

int gettimeofday(struct timeval* restrict out, void* restrict zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the wall clock runs backwards."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("shim")
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", source, "-o", library], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


def test_a_wall_clock_that_goes_backwards_changes_nothing(
    tmp_path: Path, shim: dict[str, str]
) -> None:
    deadlines = {"hello_ns": 5 * 10**8, "stall_ns": 5 * 10**8, "lease_ns": 3 * 10**8}
    with (
        small_node(tmp_path, environment=shim, grant_ns=3 * 10**8, **deadlines) as node,
        RawClient(node, "tcp", environment=shim) as client,
    ):
        before, after = node.ask("wall_clock"), node.ask("wall_clock")
        assert after < before - 5  # the shim is at work
        client.ask("connect")
        client.ask("begin", "begun", MIB)
        wait_for(lambda: node.usage()["stuck_bytes"] == MIB, SOON_S)  # overdue
        assert client.ask("finish", 5)
        assert client.ask("put_and_get", "x", 3)
        node.pause()
        began = time.monotonic()
        assert client.ask("get_in", "x", 0.5) == "TIMED_OUT"
        assert 0.4 < time.monotonic() - began < SOON_S
        node.resume()
        began = time.monotonic()
        with Line(node.tcp) as slow:
            assert slow.at_end()  # the hello's deadline
        assert 0.4 < time.monotonic() - began < 2 * SOON_S
        with raw.Client(node.tcp, TOKEN) as other:  # leases lapse, and puts wait for room
            client.ask("open_hit", "begun")
            whole = [raw.key("whole")], [node.options["dram_bytes"]]
            began = time.monotonic()
            assert other.reserve(*whole, wait_ns=20 * 10**9).statuses == [0]
            assert 0.1 < time.monotonic() - began < SOON_S
            began = time.monotonic()
            full = other.reserve([raw.key("more")], [MIB], wait_ns=5 * 10**8)
            assert full.statuses == [kvstore.Status.OUT_OF_SPACE]
            assert 0.4 < time.monotonic() - began < SOON_S
