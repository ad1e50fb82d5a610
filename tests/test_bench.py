"""`kvstore bench transfer`: what it reports, that it notices wrong bytes, what it refuses."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_private

import kvstore
from kvstore import cli
from kvstore.errors import InvalidArgument, KvstoreError
from kvstore.sim import bench
from kvstore.sim.bench import BenchOptions, BenchReport, measure, process_cpu_s, stream_s
from kvstore.sim.processes import running_node

Run = Callable[..., subprocess.CompletedProcess[str]]
KIB = 1 << 10
SMALL = {"transport": "local", "block_bytes": 4 * KIB, "batch": 8, "total_bytes": 256 * KIB}


def small(**changes: Any) -> BenchReport:
    return measure(BenchOptions(**{**SMALL, "rounds": 2, **changes}))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, on 64 blocks of 4 KiB in calls of 8."""

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("COLUMNS", "80")
        sizes = ["--block-bytes", "4KiB", "--total", "256KiB", "--batch", "8", "--rounds", "2"]
        command = ["kvstore", "bench", "transfer", *sizes, *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(command, ended.value.code, *capsys.readouterr())

    return call


def test_report_counts_what_was_done():
    report = small()
    assert report.ok
    assert (report.blocks, report.rounds, report.threads) == (64, 2, 1)
    assert report.verified_bytes == 3 * 256 * KIB  # the round that is not counted is checked too
    assert [(each.transport, each.operation) for each in report.figures] == [
        ("local", "put"),
        ("local", "get"),
    ]
    for figures in report.figures:
        assert figures.call.count == 2 * 64 / 8
        assert 0 < figures.call.p50_us <= figures.call.p90_us <= figures.call.p99_us
        assert figures.gb_per_s > 0
        assert figures.base == "memcpy"
        assert figures.client_cpu_s_per_gb > 0
        assert figures.node_cpu_s_per_gb is None
    assert report.memcpy_gb_per_s > 0
    assert report.loopback_gb_per_s > 0


def test_threads_share_the_blocks():
    report = small(threads=3, operation="get")  # 22, 21 and 21 blocks: 3 calls each
    assert report.ok
    (figures,) = report.figures
    assert figures.operation == "get"
    assert figures.call.count == 2 * 9


def test_progress_is_told_after_each_round_of_each_transport():
    steps = []
    options = BenchOptions(**SMALL, rounds=3)
    measure(options, progress=lambda: steps.append(1))
    assert len(steps) == (3 + 1) * len(options.transports)


def test_a_rate_is_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch):
    """A put that takes 10 ms longer is slower by that, in its rate and in its calls."""
    put = kvstore.Store.put

    def slow(self: Any, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return put(self, *arguments, **options)

    monkeypatch.setattr(kvstore.Store, "put", slow)
    figures = small().figures[0]
    assert figures.call.p50_us > 10_000
    assert 0.1e-3 < figures.gb_per_s < 256 * KIB / 1e9 / (8 * 0.01)


# ---- every byte is checked -----------------------------------------------------------------------


def broken_get(monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    get = kvstore.Store.get

    def wrong(self: Any, keys: Any, out: Any, **options: Any) -> Any:
        before = out[-1].copy()
        result = get(self, keys, out, **options)
        damage(out[-1], before)
        return result

    monkeypatch.setattr(kvstore.Store, "get", wrong)


def flip(block: Any, before: Any) -> None:
    block[-1] ^= 1


def leave_as_it_was(block: Any, before: Any) -> None:
    np.copyto(block, before)


@pytest.mark.parametrize("damage", [flip, leave_as_it_was])
def test_wrong_bytes_are_counted(monkeypatch: pytest.MonkeyPatch, damage: Any):
    broken_get(monkeypatch, damage)
    report = small()
    assert not report.ok
    assert report.wrong_blocks == 3 * 8  # the last of each call
    assert report.as_dict()["ok"] is False


def test_wrong_bytes_exit_1(run: Run, monkeypatch: pytest.MonkeyPatch):
    broken_get(monkeypatch, flip)
    done = run("--transport", "local")
    assert done.returncode == 1
    assert "WRONG BYTES in 24 blocks" in done.stderr
    assert "local get" in done.stdout


def test_a_put_that_sends_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kvstore.Store, "remove", lambda _, keys: len(keys))
    with pytest.raises(KvstoreError, match="not transferred: PutResult\\(8 exists\\)"):
        small()


def test_an_error_in_a_thread_ends_them_all(monkeypatch: pytest.MonkeyPatch):
    put = kvstore.Store.put

    def failing(self: Any, keys: Any, *arguments: Any, **options: Any) -> Any:
        if len(keys) == 5:  # the last call of threads 1 to 3, which have 21 blocks
            raise KvstoreError("this one")
        return put(self, keys, *arguments, **options)

    monkeypatch.setattr(kvstore.Store, "put", failing)
    with pytest.raises(KvstoreError, match="this one"):
        small(threads=3)


# ---- over a node ---------------------------------------------------------------------------------


def test_all_transports_are_measured_and_the_node_is_stopped(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    pids = []
    cpu_s = bench.process_cpu_s
    monkeypatch.setattr(bench, "process_cpu_s", lambda pid: pids.append(pid) or cpu_s(pid))
    done = run("--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value["verified_bytes"] == 3 * 3 * 256 * KIB
    found = {(each["transport"], each["operation"]): each for each in value["figures"]}
    assert list(found) == [(way, op) for way in ("local", "shm", "tcp") for op in ("put", "get")]
    for (transport, _), figures in found.items():
        assert figures["base"] == ("loopback" if transport == "tcp" else "memcpy")
        if transport == "local":
            assert figures["node_cpu_s_per_gb"] is None
        else:
            assert figures["node_cpu_s_per_gb"] > 0
    (pid,) = set(pids)
    assert not Path(f"/proc/{pid}").exists()


def test_a_node_is_stopped_after_an_error(monkeypatch: pytest.MonkeyPatch):
    started = []

    def remember(folder: Path, *arguments: str) -> Any:
        started.append(folder)
        return running_node(folder, *arguments)

    monkeypatch.setattr(bench, "running_node", remember)
    monkeypatch.setattr(kvstore.Store, "remove", lambda _, keys: len(keys))
    with pytest.raises(KvstoreError, match="8 exists"):
        small(transport="shm")
    (folder,) = started
    assert not folder.exists()
    assert not [each for each in commands() if str(folder) in each]


def commands() -> list[str]:
    """Of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # ended meanwhile
            found.append(path.read_text(errors="replace"))
    return found


def test_a_node_that_runs_is_measured_and_left_as_it_was(run: Run, tmp_path: Path):
    with running_node(tmp_path, "--dram", "16MiB", "--socket", str(tmp_path / "sock")) as (node, _):
        secret = write_private(tmp_path / "secret", node.token.decode())
        with kvstore.connect(node.address, bench.spec_of(4 * KIB), token=secret) as store:
            store.put(["mine"], [bytes(4 * KIB)])
            for arguments, transport in (
                ((node.address, "--transport", "tcp"), "tcp"),
                ((node.address,), "shm"),  # what a client chooses on the same machine
                ((tmp_path / "sock", "--op", "get"), "shm"),
            ):
                done = run("--token-file", secret, "--json", "--connect", *arguments)
                assert done.returncode == 0, done.stderr
                figures = json.loads(done.stdout)["figures"]
                assert {each["transport"] for each in figures} == {transport}
                assert all(each["node_cpu_s_per_gb"] is None for each in figures)
            assert [each.text for each in store.list()] == ["mine"]

        done = run("--connect", node.address)  # without the secret
        assert done.returncode == 2
        assert "token" in done.stderr
        done = run("--connect", node.address, "--token-file", secret, "--total", "64MiB")
        assert done.returncode == 2
        assert "has the node room" in done.stderr


@pytest.mark.usefixtures("interruptible")
def test_interrupting_stops_the_node_and_exits_130():
    options = ("--transport", "tcp", "--rounds", "10000", "--total", "1MiB")
    with subprocess.Popen(
        [sys.executable, "-m", "kvstore", "bench", "transfer", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (child := children.read_text().strip()):
            assert process.poll() is None
            time.sleep(0.01)
        node = os.pidfd_open(int(child))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err
    ended = select.poll()
    ended.register(node, select.POLLIN)
    assert ended.poll(30_000)
    os.close(node)


def test_nobody_there_is_said(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    done = run("--connect", address)
    assert done.returncode == 2
    assert address in done.stderr
    assert "Traceback" not in done.stderr


# ---- the command ---------------------------------------------------------------------------------


def test_json_is_one_object(run: Run):
    done = run("--transport", "local", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "64 blocks of 4 KiB, 768 KiB of memory in all\n"
    value = json.loads(done.stdout)
    assert value["ok"] is True
    assert value["figures"][1]["operation"] == "get"
    assert set(value["figures"][0]["call"]) == {"count", "p50_us", "p90_us", "p99_us"}
    assert value["memcpy_gb_per_s"] > 0


def test_table_fits_80_columns_and_says_what_it_is_compared_with(run: Run):
    done = run("--transport", "local", "--threads", 2)
    assert done.returncode == 0, done.stderr
    for word in (
        "local put",
        "4 KiB",
        "2 threads",
        "GB/s",
        "ratio",
        "memcpy",
        "loopback",
        "768 KiB",
    ):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout + done.stderr


def test_help_teaches_by_example_in_80_columns(run: Run):
    done = run("--help")
    assert done.returncode == 0
    assert "kvstore bench transfer --transport shm" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--transport", "pigeon"], "transport='pigeon'; use local, shm, tcp, all"),
        (["--op", "take"], "operation='take'; use put, get, both"),
        (["--block-bytes", "4 kilos"], "is no size"),
        (["--block-bytes", "0"], "out of range"),
        (["--batch", "0"], "--batch"),
        (["--batch", "10000000"], "batch=10000000"),
        (["--threads", "100"], "use a larger total"),
        (["--threads", "1000"], "threads=1000"),
        (["--rounds", "0"], "--rounds"),
        (["--total", "1KiB"], "use a larger total"),
        (["--connect", "127.0.0.1:1", "--transport", "local"], "drop connect"),
        (["--token-file", "x"], "token_file"),
    ],
)
def test_bad_options_are_refused(run: Run, arguments: list[str], word: str):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert word in done.stderr


def test_too_much_memory_is_refused_with_what_to_do(run: Run):
    done = run("--transport", "local", "--block-bytes", "1GiB", "--total", "100TiB")
    assert done.returncode == 2
    assert "Try a smaller --total" in done.stderr


def test_options_are_checked_where_they_are_made():
    with pytest.raises(InvalidArgument, match="rounds=0"):
        BenchOptions(rounds=0)
    assert BenchOptions().transports == ("local", "shm", "tcp")
    assert BenchOptions(connect="127.0.0.1:7400").transports == ("auto",)


# ---- what it is compared with --------------------------------------------------------------------


def test_the_loopback_stream_arrives_whole():
    source = np.random.default_rng(1).integers(0, 256, (3, 700_001), np.uint8)
    target = np.zeros_like(source)
    assert stream_s(source, target) > 0
    assert np.array_equal(source, target)


def test_processor_time_of_another_process_is_its_own():
    code = "import time; end = time.process_time() + .3\nwhile time.process_time() < end: pass"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}\nprint(time.process_time(), flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        own = float(process.stdout.readline())
        assert own - 0.01 < process_cpu_s(process.pid) < own + 0.2
        process.stdin.write(b"\n")
    assert process_cpu_s(os.getpid()) == pytest.approx(time.process_time(), abs=0.05)


# ---- the benchmark of the repository -------------------------------------------------------------


@pytest.mark.long
def test_the_benchmark_of_a_node_runs_and_names_every_target():
    program = Path(__file__).parents[1] / "bench" / "wire.py"
    options = ("--gib", "0.0625", "--rounds", "1", "--keys", "8192", "--json")
    done = subprocess.run(
        [sys.executable, program, *options], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    names = [row["what"] for row in rows]
    assert len(names) == len(set(names)) == 17
    for row in rows:
        assert row["ratio"] > 0
        assert row["met"] is (
            row["ratio"] <= row["target"] if row["at_most"] else row["ratio"] >= row["target"]
        )
