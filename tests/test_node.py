"""A node in a process of its own: where it listens, what it says, how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from builders import run_python, write_private

import kvstore
from kvstore.errors import CannotListen, InvalidArgument
from kvstore.node import Log, _make_free, _own_folder

ANY = kvstore.BlockSpec("any", block_bytes=None)


# ---- the unix socket's place ---------------------------------------------------------------------


@contextmanager
def bound(path: Path, listening: bool) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        if listening:
            server.listen()
        yield


def test_only_a_socket_nobody_listens_on_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    _make_free(path)
    with bound(path, listening=True), pytest.raises(CannotListen, match="in use"):
        _make_free(path)
    assert path.exists()
    _make_free(path)
    assert not path.exists()
    for make in (path.touch, path.mkdir):
        make()
        with pytest.raises(CannotListen, match="is no socket"):
            _make_free(path)
        path.rmdir() if path.is_dir() else path.unlink()


def test_sockets_stand_in_a_folder_of_the_user_alone(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    folder = _own_folder(environment)
    assert folder == tmp_path / "kvstore"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert _own_folder(environment) == folder
    folder.chmod(0o750)
    with pytest.raises(CannotListen, match=r"this user alone.*--no-socket"):
        _own_folder(environment)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(CannotListen, match="this user alone"):
        _own_folder(environment)
    absent = {"XDG_RUNTIME_DIR": str(tmp_path / "absent")}
    assert _own_folder(absent) == _own_folder({}) == Path(f"/tmp/kvstore-{os.getuid()}")


# ---- the log -------------------------------------------------------------------------------------


def test_a_log_line_is_logfmt_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"peer": "127.0.0.1:9", "why": 'no "token"\n', "none": ""}
    Log(sys.stderr, "text").write("info", "session opened", fields)
    Log(sys.stderr, "text").write("warning", "refused", {"n": 1})
    Log(sys.stderr, "json").write("error", "refused", fields)
    first, second, third = capsys.readouterr().err.splitlines()
    expected = r'peer=127.0.0.1:9 why="no \"token\"\n" none=""'
    assert first == f"kvstore node: session opened {expected}"
    assert second == "kvstore node: warning: refused n=1"
    got = json.loads(third)
    assert list(got)[:3] == ["seconds", "level", "event"]
    assert 0 <= got.pop("seconds") < 60
    assert got == {**fields, "level": "error", "event": "refused"}


# ---- its process ---------------------------------------------------------------------------------

COMMAND = [sys.executable, "-m", "kvstore", "node"]


class NodeProcess:
    """A running `kvstore node`, its unix socket in `folder`."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        environment = {name: os.environ[name] for name in os.environ if "KVSTORE" not in name}
        self.process = subprocess.Popen(
            [*COMMAND, "--dram", "8MiB", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "XDG_RUNTIME_DIR": str(folder)},
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def end(self, *signals: signal.Signals) -> tuple[int, list[str]]:
        """Sends signals; the exit code and the log."""
        for number in signals:
            self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=30)
        return self.process.returncode, stderr.splitlines()


@contextmanager
def node(folder: Path, *arguments: object) -> Iterator[NodeProcess]:
    started = NodeProcess(folder, *arguments)
    with started.process:
        try:
            yield started
        finally:
            if started.process.poll() is None:
                started.process.kill()


FREE = ("--listen", "127.0.0.1:0")


def refused(folder: Path, *arguments: object) -> str:
    """What a node says that does not start."""
    with node(folder, *arguments) as started:
        code, lines = started.end()
    assert (started.address, code, len(lines)) == ("", 2, 1)
    return lines[0]


def test_a_node_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    with node(tmp_path, *FREE, "--listen", "localhost:0") as started:
        with kvstore.connect(started.address, ANY) as store:
            assert store.put(["a"], [b"bytes"]).ok
        (path,) = (tmp_path / "kvstore").glob("*.sock")
        assert path.name == f"pid-{started.process.pid}.sock"
        with kvstore.connect(str(path), ANY, transport="shm") as store:
            assert store.exists(["a"]).all()
        code, lines = started.end(signal.SIGTERM)
    assert code == 0
    assert lines[0].startswith(f"kvstore node: listening address={started.address},")
    for word in (f"socket={path}", "dram=8MiB", "token=no", f"pid={started.process.pid}"):
        assert word in lines[0]
    assert any("stopping reason=SIGTERM" in line for line in lines)
    assert "stopped in_time=yes" in lines[-1]
    assert not path.exists()


def test_an_interrupt_and_the_end_of_stdin_stop_it_too(tmp_path: Path) -> None:
    with node(tmp_path, *FREE) as started:
        code, lines = started.end(signal.SIGINT)
    assert code == 0
    assert any("stopping reason=SIGINT" in line for line in lines)
    with node(tmp_path, *FREE, "--stop-on-eof", "--log-format", "json") as started:
        code, lines = started.end()  # closes its stdin
    assert code == 0
    events = [json.loads(line) for line in lines]
    assert events[0]["event"] == "listening"
    assert events[0]["address"] == started.address
    assert {"event": "stopping", "reason": "end of stdin"}.items() <= events[-2].items()


def test_a_token_is_proved_by_both(tmp_path: Path) -> None:
    token = write_private(tmp_path / "token", "secret\n")
    with node(tmp_path, *FREE, "--token-file", token) as started:
        for wrong in (None, "other"):
            with pytest.raises(kvstore.NodeRefused):
                kvstore.connect(started.address, ANY, token=wrong)
        for right in ("secret", b"secret", token):
            with kvstore.connect(started.address, ANY, token=right) as store:
                assert store.attach(ANY).list() == []


def test_no_start_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with node(tmp_path, *FREE, "--socket", tmp_path / "s") as first:
        taken = refused(tmp_path, "--listen", first.address)
        assert first.address in taken
        assert "give another by --listen" in taken
        assert "stop it, or name another path" in refused(
            tmp_path, *FREE, "--socket", tmp_path / "s"
        )
    assert "no token" in refused(tmp_path, "--listen", "0.0.0.0:0")
    assert "not enough memory" in refused(tmp_path, *FREE, "--dram", "900TiB")
    assert "numa_node=60000" in refused(tmp_path, *FREE, "--numa-node", 60_000)
    assert "one of them" in refused(tmp_path, "--socket", "x", "--no-socket")
    assert "no/folder" in refused(tmp_path, *FREE, "--socket", tmp_path / "no/folder/s")
    assert "unknown option 'a'" in refused(
        tmp_path, "--config", write_private(tmp_path / "c.toml", "[node]\na = 1\n")
    )


def test_sockets_of_nodes_that_died_are_removed(tmp_path: Path) -> None:
    with node(tmp_path, *FREE) as killed:
        killed.process.kill()
    (stale,) = (tmp_path / "kvstore").glob("*.sock")
    with node(tmp_path, *FREE) as first:
        assert not stale.exists()
        with node(tmp_path, *FREE) as second:
            assert len(list((tmp_path / "kvstore").glob("*.sock"))) == 2  # living ones stay
            second.end(signal.SIGTERM)
        code, lines = first.end(signal.SIGTERM)
    assert code == 0
    assert any(str(stale) in line and "removed" in line for line in lines)


def test_a_node_without_a_port_or_without_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with node(tmp_path, "--listen", "", "--socket", path) as started:
        assert started.address == str(path)
        with kvstore.connect(started.address, ANY) as store:
            assert store.transport == "shm"
    for none in (["--no-socket"], ["--socket", ""]):
        with node(tmp_path / "absent", *FREE, *none) as started:
            with kvstore.connect(started.address, ANY) as store:
                assert store.transport == "tcp"
            code, lines = started.end(signal.SIGTERM)
        assert code == 0
        assert "socket=none" in lines[0]


SLOW_TO_STOP = """
import os, sys, threading, time
from kvstore import _core, node
from kvstore.node_options import NodeOptions

class Server:
    def __init__(self, *_, **__):
        self.events = os.eventfd(0)
        self.addresses = lambda: ["there:1"]
        self.epoch = lambda: 7
        self.counts = dict
    def event_fd(self):
        return self.events
    def take_events(self):
        return []
    def stop(self, timeout_ns):
        print("stopping", timeout_ns, flush=True)
        time.sleep(60)

_core.Server = Server
options = NodeOptions(dram="2MiB", socket="", stop_s=2)
node.run_node(options, environment={}, out=sys.stdout, err=sys.stderr)
"""


def test_a_second_signal_ends_it_at_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_STOP],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there:1\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping 2000000000\n"
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert stderr.splitlines()[-1] == 'kvstore node: warning: ended at once reason="second signal"'


def test_a_stop_that_fails_is_no_success() -> None:
    code = SLOW_TO_STOP.replace("time.sleep(60)", "raise OSError('lost')")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there:1\n"
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "OSError: lost" in stderr


# ---- connect -------------------------------------------------------------------------------------


def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    for address in ("127.0.0.1:1", str(tmp_path / "no.sock")):
        with pytest.raises(kvstore.NodeUnavailable):
            kvstore.connect(address, ANY, timeout_s=0.2)


def test_a_connected_store_says_where_it_is(tmp_path: Path) -> None:
    with node(tmp_path, *FREE) as started:
        store = kvstore.connect(started.address, ANY, transport="tcp")
        assert repr(store) == f"Store('any', '{started.address}', tcp, open)"
        store.put(["a", "b"], [b"1", b"2"])
        assert store.match_prefix(["a", "b", "c"]).by_node == {started.address: 2}
        other = store.attach(kvstore.BlockSpec("other", block_bytes=None))
        assert other.match_prefix(["a"]).by_node == {started.address: 0}
        assert other.transport == "tcp"
        assert store.usage().blocks == 2
        assert store.usage().commits == other.usage().commits == 2
        with pytest.raises(InvalidArgument, match="log"):
            store.evicted()
        started.end(signal.SIGTERM)
        assert store.match_prefix(["a"], skip_blocks=0).by_node == {}
        assert store.match_prefix(["a"]).blocks == 0
        store.close()
        other.close()
        assert repr(store).endswith("closed)")
    with kvstore.open(ANY, dram="2MiB") as embedded:
        assert embedded.transport == "local"
        assert embedded.match_prefix(["a"]).by_node == {"local": 0}


def test_importing_the_store_does_not_import_the_nodes_shell() -> None:
    code = (
        "import sys, kvstore; print([m for m in ('kvstore.node', 'tomllib') if m in sys.modules])"
    )
    assert run_python(code).stdout == "[]\n"
