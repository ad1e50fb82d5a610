"""Nodes in processes of their own, stores connected to them, and a relay that does harm in between.

A `NodeProcess` never outlives its test: it stops with the pipe this process holds, and is killed by
its pid where the test ends without stopping it.
"""

import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import kvstore

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 10.0  # a call of a test on a busy machine
SHORT_S = 0.2  # the timeout of a call that will not be answered
GRACE_S = 1.0  # beyond a call's own timeout
MIB = 1 << 20


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Waits for what nobody announces: another process's state."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def in_time(call: Callable[[], Any], timeout_s: float = SHORT_S) -> Any:
    """Its result; it took no longer than its timeout and a second."""
    began = time.monotonic()
    try:
        return call()
    finally:
        took = time.monotonic() - began
        assert took < timeout_s + GRACE_S, f"took {took:.2f} s"


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class NodeProcess:
    """A `kvstore node` on loopback and on a unix socket in `folder`; its log is a file there.

    `options` are flags of the command, as in lease_s=0.1; `environment` is added to this one's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dram: int | str = 8 * MIB,
        listen: Sequence[str] = ("127.0.0.1:0",),
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._arguments = ["--dram", str(dram), "--stop-on-eof"]
        for name, value in options.items():
            self._arguments += [f"--{name.replace('_', '-')}", str(value)]
        ours = {name: value for name, value in os.environ.items() if "KVSTORE_" not in name}
        found = str(Path(kvstore.__file__).parents[1])  # the package this process has
        self._environment = {**ours, "PYTHONPATH": found, **(environment or {})}
        number = len(list(folder.glob("node-*.log")))
        self.path = str(folder / f"node-{number}.sock")
        self._log = folder / f"node-{number}.log"
        self.addresses = list(listen)
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Starts it; at the address it had, if it ran before."""
        listen = [word for address in self.addresses for word in ("--listen", address)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvstore", "node", *self._arguments),
                    *(*listen, "--socket", self.path),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
            )
        self._end = weakref.finalize(self, _kill, self.process.pid)
        try:
            self.addresses = self._read_addresses(len(self.addresses))
        except BaseException:
            self.kill()
            raise

    def _read_addresses(self, count: int) -> list[str]:
        assert self.process.stdout is not None
        said = b""
        deadline = time.monotonic() + START_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while said.count(b"\n") < count:
                ready = selector.select(deadline - time.monotonic())
                got = os.read(self.process.stdout.fileno(), 4096) if ready else b""
                assert got, f"the node did not start: {self.log()}"
                said += got
        return said.decode().split()[:count]  # without the unix socket, which comes last

    @property
    def address(self) -> str:
        """Its first."""
        return self.addresses[0]

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        """All it has written to stderr."""
        return self._log.read_text(errors="replace")

    def stop(self) -> int:
        """By SIGTERM; its exit code."""
        self.resume()
        self.process.terminate()
        return self._wait()

    def kill(self) -> None:
        """By SIGKILL."""
        self.process.kill()
        self._wait()

    def _wait(self) -> int:
        code = self.process.wait(STOP_TIMEOUT_S)
        self._end.detach()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        return code

    def running(self) -> bool:
        return self.process.poll() is None

    def pause(self) -> None:
        """By SIGSTOP; it has stopped when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def resume(self) -> None:
        if self.running():
            os.kill(self.pid, signal.SIGCONT)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def restart(self) -> None:
        """Killed and started again at its address: the same place, another life."""
        if self.running():
            self.kill()
        self.start()

    def __enter__(self) -> "NodeProcess":  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.running():
            self.resume()
            if kind is None:
                code = self.stop()
                assert code == 0, f"the node ended with {code}: {self.log()}"
            else:
                self.kill()
        if kind is not None:
            print(f"---- log of the node at {self.address}\n{self.log()}")


def held(usage: kvstore.Usage) -> dict[str, int]:
    """What a node keeps for somebody who is at it."""
    kept = ("leased_blocks", "granted_blocks", "view_bytes", "stuck_bytes")
    return {name: getattr(usage, name) for name in kept if getattr(usage, name)}


def assert_node_idle(store: kvstore.Store, timeout_s: float = 10.0) -> None:
    """Nothing is held at the node, soon, and its accounts agree: a client's last word may be on
    its way.
    """
    deadline = time.monotonic() + timeout_s
    while left := held(store.usage()):
        assert time.monotonic() < deadline, f"the node still holds {left}"
        time.sleep(0.002)
    store.audit()


@contextmanager
def connected(
    node: NodeProcess,
    spec: kvstore.BlockSpec,
    *,
    transport: str = "tcp",
    address: str | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
    **options: Any,
) -> Iterator[kvstore.Store]:
    """A store of that node. At the end of the test the node keeps nothing of it, neither before nor
    after it is closed, and its accounts agree.
    """
    place = address or node.address
    with kvstore.connect(place, spec, transport=transport, timeout_s=timeout_s, **options) as store:
        yield store
        assert_node_idle(store)
    with kvstore.connect(node.address, spec, transport="tcp", timeout_s=CALL_TIMEOUT_S) as other:
        assert_node_idle(other)
