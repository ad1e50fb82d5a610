"""The command as a user runs it: its own process, no terminal, 80 columns."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import write_private

from kvstore import cli
from kvstore.sim.checkers import check_payload
from kvstore.sim.processes import running_node
from kvstore.sim.workload import make_trace, read_trace, write_trace

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = [sys.executable, "-m", "kvstore"]


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "KVSTORE_TRACES"}
    return {**kept, "COLUMNS": "80", **changes}


def run_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, which saves half a second a call."""

    def call(*arguments: object, traces: object = None) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.delenv("KVSTORE_TRACES", raising=False)
        if traces is not None:
            monkeypatch.setenv("KVSTORE_TRACES", str(traces))
        command = ["kvstore", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(command, ended.value.code, *capsys.readouterr())

    return call


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl.gz"
    write_trace(path, make_trace(1, 60))
    return path


# ---- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["kvstore demo", "kvstore trace make my.jsonl.gz", "replay"]),
        (["demo"], ["kvstore demo --seed 7", "--block-bytes"]),
        (["replay"], ["kvstore replay my.jsonl.gz --clients 4", "KVSTORE_TRACES", "--json"]),
        (["node"], ["kvstore node --dram 4GiB", "umask 077", "KVSTORE_DRAM", "--stop-on-eof"]),
        (["trace"], ["make", "stat"]),
        (["trace", "make"], ["kvstore trace make my.jsonl.gz", "--seed"]),
        (["trace", "stat"], ["kvstore trace stat my.jsonl.gz"]),
    ],
)
def test_help_teaches_by_example_in_80_columns(
    run: Run, arguments: list[str], words: list[str]
) -> None:
    done = run(*arguments, "--help")
    assert done.returncode == 0
    for word in words:
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_replay_says_first_how_much_memory_it_takes(run: Run, trace: Path) -> None:
    done = run("replay", trace, "--block-bytes", "64KiB", "--capacity-blocks", 64, "--json")
    assert done.returncode == 0, done.stderr
    assert "60 requests; blocks of 64 KiB, a pool of " in done.stderr.splitlines()[0]
    assert done.stderr.splitlines()[0].endswith(" MiB")


def test_version_is_the_packages() -> None:
    done = run_process("--version")
    code = "import kvstore; print('kvstore', kvstore.__version__)"
    version = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, version.stdout, "")


# ---- the main job --------------------------------------------------------------------------------


def test_demo_ends_with_a_table_and_what_to_try_next() -> None:
    done = run_process("demo", "--requests", 60, "--block-bytes", "4KiB", "--capacity-blocks", 100)
    assert done.returncode == 0, done.stderr
    for word in ("unlimited", "100 blocks", "block hit ratio", "GB/s", "p50 / p90 / p99", "wrong"):
        assert word in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Try next: kvstore ")
    assert max(map(len, done.stdout.splitlines())) <= 80
    # Without a terminal there are no colours and no bars.
    assert "\x1b" not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_demo_as_json_prints_one_object(run: Run) -> None:
    done = run("demo", "--requests", 60, "--block-bytes", 512, "--capacity-blocks", 80, "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    unlimited, bounded = value["replays"]
    assert value["trace"]["requests"] == unlimited["requests"] == 60
    assert unlimited["evictions"] == 0
    assert bounded["evictions"] > 0
    assert bounded["blocks_left"] == 80
    assert unlimited["ok"] is bounded["ok"] is True


def test_several_clients_are_processes_over_a_node(run: Run) -> None:
    small = ["--requests", 40, "--block-bytes", 512, "--capacity-blocks", 80, "--clients", 2]
    done = run("demo", *small, "--json")
    assert done.returncode == 0, done.stderr
    unlimited, bounded = json.loads(done.stdout)["replays"]
    assert unlimited["clients"] == bounded["clients"] == 2
    assert unlimited["transport"] == bounded["transport"] == "shm"
    assert bounded["blocks_left"] == 80
    assert unlimited["ok"] is bounded["ok"] is True


def test_a_running_node_is_replayed_through(run: Run, trace: Path, tmp_path: Path) -> None:
    with running_node(tmp_path, "--dram", "64MiB") as (node, _):
        there = ["--connect", node.address, "--token-file"]
        right = write_private(tmp_path / "right", node.token.decode())
        done = run("replay", trace, *there, right, "--block-bytes", 512, "--json")
        assert done.returncode == 0, done.stderr
        assert f"the node at {node.address}" in done.stderr
        assert json.loads(done.stdout)["ok"] is True
        done = run("demo", "--requests", 40, *there, right, "--block-bytes", 512)
        assert done.returncode == 0, done.stderr
        assert node.address in done.stdout
        wrong = write_private(tmp_path / "wrong", "other")
        assert_refused(run("replay", trace, *there, wrong), "token")
        assert_refused(run("replay", trace, *there, right, "--capacity-blocks", 9), "capacity")
    assert_refused(run("replay", trace, *there, right), node.address)
    assert_refused(run("replay", trace, "--token-file", right), "--connect")


def test_made_traces_replay(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl.gz"
    made = run("trace", "make", path, "--seed", 5, "--requests", 40, "--tool-share", 0.5)
    assert made.returncode == 0, made.stderr
    assert len(list(read_trace(path))) == 40
    assert_refused(run("trace", "make", path), "exists", "--force")
    assert run("trace", "make", path, "--requests", 30, "--force").returncode == 0

    done = run("replay", path, "--block-bytes", 100, "--clients", 2, "--speed", 1000)
    assert done.returncode == 0, done.stderr
    for word in ("made.jsonl.gz", "2 clients", "spread evenly"):
        assert word in done.stdout
    counted = json.loads(run("trace", "stat", path, "--json").stdout)
    replayed = json.loads(run("replay", path, "--block-bytes", "1KiB", "--json").stdout)
    assert counted["requests"] == replayed["requests"] == 30
    assert replayed["block_hit_ratio"] == pytest.approx(counted["hit_ratio_max"])
    assert "distinct" in run("trace", "stat", path).stdout


def test_traces_are_found_in_the_folder_of_the_option_or_the_environment(
    run: Run, trace: Path
) -> None:
    options = ["--block-bytes", 64, "--json"]
    folder = str(trace.parent)
    for done in (
        run("replay", *options, traces=folder),
        run("replay", trace.name, *options, traces=folder),
        run("replay", "--trace", folder, *options),
        run("replay", "--trace", trace, *options, traces="/nowhere"),
    ):
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["trace"] == str(trace)
    write_trace(trace.parent / "another.jsonl", make_trace(2, 5))
    done = run("replay", *options, traces=folder)
    assert json.loads(done.stdout)["trace"].endswith("another.jsonl")
    assert "holds 2 traces" in done.stderr


# ---- what goes wrong -----------------------------------------------------------------------------


def test_missing_and_broken_traces_are_one_clear_line(
    run: Run, tmp_path: Path, trace: Path
) -> None:
    assert_refused(run("replay"), "which trace?", "kvstore trace make")
    assert_refused(run("replay", "absent.jsonl"), "absent.jsonl: no such file", "--trace")
    in_folder = run("replay", "absent.jsonl", "--trace", tmp_path)
    assert_refused(in_folder, f"no such file here or in {tmp_path}")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"timestamp": 0}\n')
    assert_refused(run("replay", broken), f"error: {broken}:1: input_length is missing")
    trace.write_bytes(trace.read_bytes()[:-20])
    assert_refused(run("trace", "stat", trace), "truncated")
    for command in (["replay"], ["trace", "stat"]):
        assert_refused(run(*command, tmp_path), f"{tmp_path} is a folder", f"--trace {tmp_path}")
    (tmp_path / "empty").mkdir()
    assert_refused(run("replay", "--trace", tmp_path / "empty"), "no .jsonl")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--block-bytes", "a lot"], "a lot"),
        (["--block-bytes", "4 kilos"], "is no size"),
        (["--block-bytes", "0"], "out of range"),
        (["--capacity-blocks", "-1"], "--capacity-blocks"),
        (["--clients", "0"], "--clients"),
        (["--clients", "1000"], "clients must be within"),
        (["--speed", "fast"], "--speed"),
        (["--speed", "nan"], "speed"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_flags_are_refused(run: Run, trace: Path, arguments: list[str], word: str) -> None:
    assert_refused(run("replay", trace, *arguments), word)


def test_too_much_memory_is_refused_with_what_to_do(run: Run, trace: Path) -> None:
    done = run("replay", trace, "--block-bytes", "1GiB", "--capacity-blocks", 1_000_000)
    assert_refused(done, "memory", "--block-bytes")


def test_wrong_bytes_exit_1_and_are_named(
    run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt(got: Any, ids: Any, *, generation: int) -> Any:
        got[-1, 9] ^= 1  # as if the store had returned it so
        return check_payload(got, ids, generation=generation)

    monkeypatch.setattr("kvstore.sim.client.check_payload", corrupt)
    for command in (("replay", trace), ("demo", "--requests", 60)):
        done = run(*command, "--block-bytes", 64)
        assert done.returncode == 1
        assert "WRONG BYTES: request " in done.stderr
        assert "offset 9: expected " in done.stderr
        assert "bytes wrong" in done.stdout
    done = run("replay", trace, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("clients", [1, 3])
def test_interrupting_ends_clean_with_130(tmp_path: Path, clients: int) -> None:
    path = tmp_path / "slow.jsonl"
    write_trace(path, make_trace(0, 200))  # 50 s of trace time
    arguments = ["replay", str(path), "--speed", "1", "--clients", str(clients)]
    with subprocess.Popen(
        [*COMMAND, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        assert "200 requests" in process.stderr.readline()  # from here on it replays
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        rest = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert "interrupted" in rest
    assert "Traceback" not in rest
