"""A replay by several processes over a node: right bytes, one report, nobody left behind."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import write_private

import kvstore
from kvstore.errors import InvalidArgument, KvstoreError
from kvstore.sim import client
from kvstore.sim.client import Mismatch, Tally
from kvstore.sim.processes import NodeAddress, replay_by_processes, running_node
from kvstore.sim.replay import ReplayOptions, ReplayReport, make_report, plan, replay
from kvstore.sim.workload import make_trace, read_trace, summarize, write_trace

TRACE = make_trace(11, 200)
SUMMARY = summarize(TRACE)


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def wait_for(happened: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    before = children(os.getpid())
    yield
    assert children(os.getpid()) == before


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeAddress]:
    with running_node(tmp_path, "--dram", "64MiB") as (address, _):
        yield address


# ---- figures -------------------------------------------------------------------------------------


def test_two_clients_read_only_what_was_put() -> None:
    calls: list[None] = []
    options = ReplayOptions(block_bytes=4096, clients=2)
    report = replay_by_processes(TRACE, options, progress=lambda: calls.append(None))
    assert report.ok
    assert len(calls) == len(TRACE)
    assert report.unstored_blocks == {}
    assert report.verified_bytes == report.hit_blocks * 4096
    assert report.written_bytes == SUMMARY.distinct_blocks * 4096  # a key is stored once
    assert report.blocks_left == SUMMARY.distinct_blocks
    assert report.match.count == report.put.count == len(TRACE)
    assert report.transport == "shm"
    alone = replay(TRACE, dataclasses.replace(options, clients=1))
    assert report.block_hit_ratio == pytest.approx(alone.block_hit_ratio, abs=0.05)


def test_eviction_stops_at_the_capacity() -> None:
    options = ReplayOptions(block_bytes=4096, clients=2, capacity_blocks=200)
    report = replay_by_processes(TRACE, options)
    assert report.ok
    assert report.blocks_left == 200
    assert report.evictions > 0
    alone = replay(TRACE, dataclasses.replace(options, clients=1))
    assert report.block_hit_ratio == pytest.approx(alone.block_hit_ratio, abs=0.1)


@pytest.mark.trace
@pytest.mark.parametrize(("capacity", "alone"), [(0, 0.3664), (10_000, 0.2116)])
def test_four_clients_hit_a_recorded_trace_as_one_does(
    trace_dir: Path, capacity: int, alone: float
) -> None:
    """`alone`: of one client, which `test_replay` checks. No byte is wrong, whoever put it."""
    rows = list(read_trace(trace_dir / "conversation_trace.jsonl.gz"))
    options = ReplayOptions(block_bytes=4096, clients=4, capacity_blocks=capacity)
    report = replay_by_processes(rows, options)
    assert (report.ok, report.wrong_bytes, report.requests) == (True, 0, len(rows))
    assert report.transport == "shm"
    assert abs(report.block_hit_ratio - alone) <= 0.01


def test_speed_paces_all_clients() -> None:
    rows = [dataclasses.replace(TRACE[index], timestamp_ms=index * 100) for index in range(6)]
    report = replay_by_processes(rows, ReplayOptions(block_bytes=64, clients=2, speed=2.0))
    assert 0.25 <= report.wall_s < 5.0
    assert report.late_ms_max is not None


def test_a_running_node_is_used_and_left_as_it_was(node: NodeAddress) -> None:
    options = ReplayOptions(block_bytes=1024, clients=2)
    inner: list[ReplayReport] = []

    def another() -> None:
        """In the same namespace it would read the first one's bytes."""
        if not inner:
            other = dataclasses.replace(options, generation=1)
            inner.append(replay_by_processes(TRACE[:50], other, node=node))

    report = replay_by_processes(TRACE, options, node=node, progress=another)
    assert report.ok
    assert inner[0].ok
    assert report.blocks_left == SUMMARY.distinct_blocks
    spec = kvstore.BlockSpec("any", block_bytes=None)
    with kvstore.connect(node.address, spec, token=node.token) as store:
        assert store.usage().slots == 0
    with pytest.raises(InvalidArgument, match="capacity"):
        replay_by_processes(TRACE, dataclasses.replace(options, capacity_blocks=5), node=node)


def test_figures_of_all_clients_are_one() -> None:
    def tally(first: int) -> Tally:
        made = Tally(hit_blocks=3, hit_tokens=9, written_blocks=2, wrong_bytes=8, late_s=first)
        made.match_s, made.get_s, made.put_s = [first, 1.0], [0.5], [0.25, 0.25]
        made.unread["corrupt"] += 1
        made.unstored["out_of_space"] += first
        made.mismatches = [Mismatch(first + i, 0, 7, 1, "00", "ff", 1) for i in range(0, 16, 2)]
        return made

    options = ReplayOptions(block_bytes=10**9, clients=2, speed=1.0)
    figures = {"evictions": 4, "orphaned": None, "blocks_left": 5, "wall_s": 1.0}
    report = make_report(options, SUMMARY, [tally(1), tally(2)], transport="tcp", **figures)
    assert not report.ok
    assert (report.hit_blocks, report.hit_tokens, report.wrong_bytes) == (6, 18, 16)
    assert report.unread_blocks == {"corrupt": 2}
    assert report.unstored_blocks == {"out_of_space": 3}
    assert (report.match.count, report.match.p50_us) == (4, 1e6)
    assert (report.read_gb_per_s, report.write_gb_per_s) == (12.0, 8.0)
    assert report.late_ms_max == 2000.0
    assert [each.request for each in report.mismatches] == list(range(1, 11))


# ---- a client's side -----------------------------------------------------------------------------


class Wrong:
    """A store that returns one wrong byte in each read."""

    transport = "shm"

    def __init__(self, spec: kvstore.BlockSpec) -> None:
        self.store = kvstore.open(spec, dram="64MiB")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *raised: object) -> None:
        self.store.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def match_prefix(self, keys: Any) -> Any:
        return WrongMatch(self.store.match_prefix(keys))


class WrongMatch:
    def __init__(self, match: Any) -> None:
        self.match = match
        self.blocks = match.blocks

    def __enter__(self) -> Any:
        self.hit = self.match.__enter__()
        self.blocks = self.hit.blocks
        return self

    def __exit__(self, *raised: object) -> None:
        self.match.__exit__(*raised)

    def read(self, out: Any) -> Any:
        result = self.hit.read(out)
        out[0, 0] ^= 1
        return result


def serve(monkeypatch: pytest.MonkeyPatch, connect: Any, lines: list[Any]) -> list[dict[str, Any]]:
    monkeypatch.setattr(kvstore, "connect", connect)
    monkeypatch.setattr(client, "_end_with_stdin", lambda: None)
    answers: list[dict[str, Any]] = []
    source = io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    client.serve(source, lambda value: answers.append(json.loads(json.dumps(value))))
    return answers


def lines_for(options: ReplayOptions) -> list[Any]:
    work, (tasks,) = plan(TRACE, options, SUMMARY)
    setup = {"address": "there", "token": "", "work": dataclasses.asdict(work)}
    return [setup, *map(dataclasses.astuple, tasks), None, {"go": True}]


def test_a_client_tells_of_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(address: str, spec: kvstore.BlockSpec, **_: Any) -> AbstractContextManager[Any]:
        assert address == "there"
        return Wrong(spec)

    answers = serve(monkeypatch, connect, lines_for(ReplayOptions(block_bytes=64)))
    assert answers[0] == {"ready": "shm"}
    assert answers[1:-1] == [{"done": index} for index in range(len(TRACE))]
    tally = Tally.from_dict(answers[-1]["tally"])
    assert tally.wrong_bytes == len(tally.get_s) > 10
    assert len(tally.mismatches) == 10
    assert isinstance(tally.mismatches[0], Mismatch)
    assert tally.as_dict() == answers[-1]["tally"]


def test_a_clients_error_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any, **__: Any) -> Any:
        raise kvstore.NodeRefused("wrong token")

    lines = lines_for(ReplayOptions())
    expected = {"error": {"kind": "NodeRefused", "message": "wrong token"}}
    assert serve(monkeypatch, connect, lines) == [expected]
    assert serve(monkeypatch, connect, []) == []


def test_a_node_that_is_gone_ends_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(Wrong):
        def put(self, _: Any, blocks: Any, **__: Any) -> Any:
            code = bytes([kvstore.Status.UNAVAILABLE])
            return kvstore.PutResult(code * len(blocks), parent_held=False, message="lost")

    lines = lines_for(ReplayOptions(block_bytes=64))
    answers = serve(monkeypatch, lambda _, spec, **__: Gone(spec), lines)
    assert answers[-1] == {"error": {"kind": "NodeUnavailable", "message": "request 0: lost"}}


# ---- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("victim", "name"), [("sim.client", "client"), ("kvstore node", "node")])
def test_a_process_that_is_killed_ends_the_replay(victim: str, name: str) -> None:
    calls = 0

    def kill() -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            pids = [pid for pid in children(os.getpid()) if victim in command_of(pid)]
            os.kill(pids[0], signal.SIGKILL)

    expected = f"the {name}.* ended early \\(SIGKILL\\)"
    if name == "node":  # a client may see it first
        expected += "|client .*: request"
    with pytest.raises(KvstoreError, match=expected):
        replay_by_processes(TRACE, ReplayOptions(clients=2), progress=kill)
    assert 5 <= calls < len(TRACE)


def test_a_clients_error_is_raised_as_its_own(node: NodeAddress) -> None:
    with pytest.raises(kvstore.NodeRefused):
        replay_by_processes(TRACE, ReplayOptions(), node=NodeAddress(node.address, b"other"))


def test_a_node_that_does_not_start_says_why() -> None:
    huge = ReplayOptions(block_bytes=1 << 30, capacity_blocks=1_000_000, clients=2)
    with pytest.raises(KvstoreError, match=r"the node ended early .*not enough memory"):
        replay_by_processes(TRACE, huge)


@contextmanager
def command(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A replay by two clients, each of which waits for hours after its first request at most."""
    path = folder / "slow.jsonl"
    times_ms = [0, 0, *([10**7] * (len(TRACE) - 2))]
    rows = zip(TRACE, times_ms, strict=True)
    write_trace(path, [dataclasses.replace(row, timestamp_ms=time_ms) for row, time_ms in rows])
    asked = ["replay", str(path), "--speed", "1", "--clients", "2", *arguments]
    with subprocess.Popen(
        [sys.executable, "-m", "kvstore", *asked],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},  # a killed one leaves its folder
    ) as process:
        wait_for(lambda: len(children(process.pid)) == (2 if arguments else 3))
        yield process
        process.kill()


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_killed_client_ends_the_command_with_2(tmp_path: Path) -> None:
    with command(tmp_path) as process:
        pids = children(process.pid)
        os.kill(next(pid for pid in pids if "sim.client" in command_of(pid)), signal.SIGKILL)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "error: the client" in stderr.splitlines()[-1]
    assert "SIGKILL" in stderr
    assert "Traceback" not in stderr
    assert gone(pids)


def test_no_child_outlives_a_killed_parent(tmp_path: Path) -> None:
    with command(tmp_path) as process:
        pids = children(process.pid)
        process.kill()
        wait_for(lambda: gone(pids))


def test_a_client_at_work_does_not_outlive_a_killed_parent(
    tmp_path: Path, node: NodeAddress
) -> None:
    token_file = write_private(tmp_path / "secret", node.token.decode())
    spec = kvstore.BlockSpec("any", block_bytes=None)
    there = ("--connect", node.address, "--token-file", str(token_file))
    with (
        kvstore.connect(node.address, spec, token=node.token) as store,
        command(tmp_path, *there) as process,
    ):
        pids = children(process.pid)
        wait_for(lambda: store.usage().commits > 0)
        process.kill()
        wait_for(lambda: gone(pids))


def test_children_find_the_package_where_the_parent_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvstore").mkdir()
    (tmp_path / "kvstore" / "__init__.py").write_text("raise ImportError('a source tree')")
    monkeypatch.chdir(tmp_path)
    assert replay_by_processes(TRACE[:4], ReplayOptions(block_bytes=64, clients=2)).ok
