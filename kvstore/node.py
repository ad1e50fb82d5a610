"""A node in a process of its own, from listening to stopped.

    options ──> Node, Server ──> listening ──> signal or end of stdin ──> stopping ──> stopped

The core's threads serve; this one only waits in `poll`: for events to log, signals, and the end of
stdin where it is asked for. The caller hands in environment and streams.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import select
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

from kvstore import _core
from kvstore.config import parse_token, split_address
from kvstore.errors import CannotListen
from kvstore.node_options import NodeOptions, check_reach, numa_cpus

LOCK_TIMEOUT_S: Final = 5.0
SOCKET_TIMEOUT_S: Final = 1.0
EXIT_STOPPED: Final = 0
EXIT_CUT_SHORT: Final = 1
STDIN: Final = 0


class Log:
    """Writes one line an event: text for people (logfmt), or JSON with seconds since the start."""

    def __init__(self, stream: TextIO, form: str) -> None:
        self._stream = stream
        self._as_json = form == "json"
        self._start_s = time.monotonic()

    def write(self, level: str, event: str, fields: Mapping[str, object]) -> None:
        """`fields` follow the event, in their order."""
        if self._as_json:
            seconds = round(time.monotonic() - self._start_s, 3)
            head = {"seconds": seconds, "level": level, "event": event}
            line = json.dumps({**head, **fields, **head})  # in this order, by these names
        else:
            pairs = "".join(f" {name}={_logfmt(str(value))}" for name, value in fields.items())
            mark = "" if level == "info" else f"{level}: "
            line = f"kvstore node: {mark}{event}{pairs}"
        try:
            print(line, file=self._stream, flush=True)
        except OSError:  # who read the log is gone: no reason to stop serving, nowhere to say so
            return


def _logfmt(text: str) -> str:
    return text if re.fullmatch(r"[^\s\"=\\]+", text) and text.isprintable() else json.dumps(text)


def run_node(
    options: NodeOptions,
    *,
    environment: Mapping[str, str],
    out: TextIO,
    err: TextIO,
    until_eof: bool = False,
) -> int:
    """Serves until SIGTERM or SIGINT, or the end of stdin (`until_eof`); the exit code.

    `out` gets the addresses, one a line, once they are listened on. A second signal ends the
    process at once. Raises InvalidArgument, CannotListen and NotEnoughMemory before it listens.
    """
    log = Log(err, options.log_format)
    check_reach(options)
    token = parse_token(None if options.token_file is None else Path(options.token_file))
    if options.numa_node is not None:
        os.sched_setaffinity(0, numa_cpus(options.numa_node))  # threads started from here on
    with _signals() as signals:
        server, path = _listen(options, token, environment, log)
        addresses = server.addresses()[: len(options.listen)]  # the socket comes last
        fields = {
            "address": ",".join(addresses) or "none",
            "socket": path or "none",
            "dram": options.dram,
            "token": "yes" if token else "no",
            "epoch": f"{server.epoch():016x}",
            "pid": os.getpid(),
        }
        log.write("info", "listening", fields)
        print(*(addresses or [path]), sep="\n", file=out, flush=True)
        reason = _serve(server, log, signals, until_eof)
        log.write("info", "stopping", {"reason": reason, "within_s": options.stop_s})
        in_time = _stop(server, log, signals, options.stop_s, path)
        level = "info" if in_time else "warning"
        log.write(level, "stopped", {"in_time": "yes" if in_time else "no", **server.counts()})
    return EXIT_STOPPED


def _listen(
    options: NodeOptions, token: bytes, environment: Mapping[str, str], log: Log
) -> tuple[_core.Server, str]:
    memory = options.store_options()
    node = _core.Node(
        dram_bytes=memory.dram_bytes,
        lock_memory=options.lock_memory,
        reserve_blocks=options.reserve_blocks,
        view_fraction=options.view_fraction,
        lease_ns=int(options.lease_s * 1e9),
        copy_threads=options.copy_threads,
        log_evictions=False,
    )
    with _socket_path(options, environment, log) as path:
        try:
            server = _core.Server(
                node,
                listen=list(options.listen),
                socket=path,
                token=token,
                io_threads=options.io_threads,
                connections_max=options.connections_max,
            )
        except CannotListen as error:
            raise CannotListen(
                f"{error}; stop who has it, or give another by --listen or --socket"
            ) from None
    return server, path


# ---- serving and stopping ------------------------------------------------------------------------


@contextmanager
def _signals() -> Iterator[int]:
    """A descriptor that has a byte for each SIGTERM and SIGINT."""
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


def _serve(server: _core.Server, log: Log, signals: int, until_eof: bool) -> str:
    """Logs events until it is told to stop; by what."""
    poller = select.poll()
    for descriptor in (server.event_fd(), signals, *([STDIN] if until_eof else [])):
        poller.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        _log_events(server, log)
        if signals in ready:
            return signal.Signals(os.read(signals, 1)[0]).name
        if STDIN in ready and not os.read(STDIN, 4096):
            return "end of stdin"


def _stop(server: _core.Server, log: Log, signals: int, stop_s: float, path: str) -> bool:
    """Ends the requests under way; whether all ended in time. A second signal ends the process."""
    done = os.eventfd(0, os.EFD_CLOEXEC)
    outcome: list[bool | BaseException] = []

    def stop() -> None:
        try:
            outcome.append(server.stop(int(stop_s * 1e9)))
        except BaseException as error:  # raised again by the caller
            outcome.append(error)
        os.eventfd_write(done, 1)

    poller = select.poll()
    for descriptor in (done, signals, server.event_fd()):
        poller.register(descriptor, select.POLLIN)
    threading.Thread(target=stop, daemon=True).start()
    ready: set[int] = set()
    while done not in ready:
        ready = {descriptor for descriptor, _ in poller.poll()}
        _log_events(server, log)
        if signals in ready:
            log.write("warning", "ended at once", {"reason": "second signal"})
            if path:
                Path(path).unlink(missing_ok=True)
            os._exit(EXIT_CUT_SHORT)
    os.close(done)
    _log_events(server, log)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _log_events(server: _core.Server, log: Log) -> None:
    for level, event, fields in server.take_events():
        log.write(level, event, fields)


# ---- the unix socket -----------------------------------------------------------------------------


@contextmanager
def _socket_path(options: NodeOptions, environment: Mapping[str, str], log: Log) -> Iterator[str]:
    """The path to listen on, free of what nobody listens on any more; empty for none."""
    if options.socket is not None:
        path = Path(options.socket).absolute()
        if options.socket:
            _make_free(path)
        yield str(path) if options.socket else ""
        return
    folder = _own_folder(environment)
    with _locked(folder):  # who is about to listen there looks like one that died
        for path in folder.glob("*.sock"):
            if _is_stale(path):
                path.unlink(missing_ok=True)
                log.write("info", "removed a socket nobody listens on", {"socket": path})
        port = split_address(options.listen[0], "listen")[1] if options.listen else 0
        path = folder / (f"{port}.sock" if port else f"pid-{os.getpid()}.sock")
        _make_free(path)
        yield str(path)


def _own_folder(environment: Mapping[str, str]) -> Path:
    runtime = Path(environment.get("XDG_RUNTIME_DIR", ""))
    in_runtime = runtime.is_absolute() and runtime.is_dir()
    folder = runtime / "kvstore" if in_runtime else Path(f"/tmp/kvstore-{os.getuid()}")
    remedy = "give --socket PATH, or --no-socket"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise CannotListen(f"no folder {folder} for sockets: {error.strerror}; {remedy}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise CannotListen(f"{folder} is not a folder of this user alone; remove it, or {remedy}")
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno != errno.EWOULDBLOCK or time.monotonic() > deadline:
                    raise CannotListen(
                        f"{folder} is locked by another node that is starting; give --socket PATH"
                    ) from None
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _make_free(path: Path) -> None:
    """Removes a socket nobody listens on. Raises CannotListen if anything else is there."""
    try:
        mode = path.lstat().st_mode
    except OSError:  # nothing there, or listening will say why not
        return
    if not stat.S_ISSOCK(mode):
        raise CannotListen(f"{path} exists and is no socket; remove it, or name another path")
    if not _is_stale(path):
        raise CannotListen(f"{path} is in use by another node; stop it, or name another path")
    path.unlink(missing_ok=True)


def _is_stale(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(SOCKET_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # gone, not ours to judge, or too busy to answer
            return False
    return False
