"""A node and clients in processes of their own: a replay as a machine sees it, sockets and all.

Who owns what: the parent starts all and ends all on every way out. Each child holds the end of a
pipe on its stdin and ends when the pipe does, so none outlives a parent that was killed. Client
processes are told their work, and tell their figures, in JSON lines (`client`).
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Final

import kvstore
from kvstore import errors
from kvstore.errors import InvalidArgument, KvstoreError
from kvstore.sim.client import CALL_TIMEOUT_S, Tally, Task, Work, settle
from kvstore.sim.replay import ReplayOptions, ReplayReport, make_report, plan, pool_size
from kvstore.sim.workload import Request, summarize

START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 10.0

# A child finds modules where its parent does, whatever folder it is started in.
_BOOT: Final = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node is, and the secret it wants."""

    address: str
    token: bytes


class Child:
    """A Python process running one of our modules, and the lines it writes to stdout."""

    def __init__(self, name: str, folder: Path, module: str, *arguments: str) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        self._rest = b""
        ours = [name for name in os.environ if name.startswith("KVSTORE_")]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={name: value for name, value in os.environ.items() if name not in ours},
                start_new_session=True,  # an interrupt is the parent's; it ends its children
            )

    def fileno(self) -> int:
        """Of what it writes."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def write(self, lines: Sequence[Any]) -> None:
        """Values to its stdin, one a line."""
        assert self.process.stdin is not None
        try:
            for line in lines:
                self.process.stdin.write(json.dumps(line).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.ended() from None

    def lines(self) -> list[bytes]:
        """Whole lines there are now; waits for at least some bytes. Raises if it has ended."""
        got = os.read(self.fileno(), 1 << 20)
        if not got:
            raise self.ended()
        *lines, self._rest = (self._rest + got).split(b"\n")
        return lines

    def ended(self) -> KvstoreError:
        """What to raise when it has ended and should not have."""
        self.stop()
        code = self.process.returncode
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        said = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        return KvstoreError(": ".join([f"the {self.name} ended early ({how})", *said]))

    def stop(self) -> None:
        """Ends it, kindly at first."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead, and something was not written yet
            self.process.stdin.close()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def running(name: str, folder: Path, module: str, *arguments: str) -> Iterator[Child]:
    """A child that is stopped in the end, and its pipes closed."""
    child = Child(name, folder, module, *arguments)
    with child.process:
        try:
            yield child
        finally:
            child.stop()


@contextmanager
def running_node(folder: Path, *arguments: str) -> Iterator[tuple[NodeAddress, Child]]:
    """A `kvstore node` on a free port of loopback with a secret of its own."""
    token = secrets.token_hex(32)
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(token)
    told = ("--listen", "127.0.0.1:0", "--token-file", str(token_file), "--stop-on-eof")
    with running("node", folder, "kvstore", "node", *told, *arguments) as child:
        with selectors.DefaultSelector() as selector:
            selector.register(child, selectors.EVENT_READ)
            lines: list[bytes] = []
            while not lines:
                if not selector.select(START_TIMEOUT_S):
                    raise KvstoreError(f"the node did not start in {START_TIMEOUT_S:g} s")
                lines = child.lines()
        token_file.unlink()
        yield NodeAddress(lines[0].decode(), token.encode()), child


def replay_by_processes(
    requests: Sequence[Request],
    options: ReplayOptions,
    *,
    progress: Callable[[], None] | None = None,
    node: NodeAddress | None = None,
) -> ReplayReport:
    """Replays a trace by `options.clients` processes over a node, a new one or that of `node`.

    `progress` is called after each request. Wrong bytes do not raise: see `ReplayReport.ok`.
    Raises InvalidArgument, whatever a client's store raises, and KvstoreError if a process ends
    early. On a node that ran before, evictions of others are counted, too.
    """
    if node is not None and options.capacity_blocks:
        raise InvalidArgument("a node that runs has the memory it has; leave the capacity out")
    summary = summarize(requests)
    work, dealt = plan(requests, options, summary, salt=secrets.token_bytes(16))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-replay-")))
        children: list[Child] = []
        address = node
        if address is None:
            size = pool_size(options, summary)
            memory = ("--dram", str(size.dram_bytes), "--reserve-blocks", str(size.reserve_blocks))
            address, child = stack.enter_context(running_node(folder, *memory))
            children.append(child)
        store = stack.enter_context(
            kvstore.connect(
                address.address, work.spec, token=address.token or None, timeout_s=CALL_TIMEOUT_S
            )
        )
        if node is not None:
            stack.callback(store.clear)  # what was put is of no use to anybody
        evictions_before = store.usage().evictions
        clients = [
            stack.enter_context(running(f"client {number}", folder, "kvstore.sim.client"))
            for number in range(len(dealt))
        ]
        run = _Run(clients, [*children, *clients], progress or (lambda: None))
        run.start(address, work, dealt)
        tallies, transports = run.collect()
        wall_s = time.perf_counter() - run.start_s
        settle(store)
        if node is None:
            store.audit()
        usage = store.usage()
    return make_report(
        options,
        summary,
        tallies,
        transport=", ".join(sorted(transports)),
        evictions=usage.evictions - evictions_before,
        orphaned=None,
        blocks_left=usage.blocks,
        wall_s=wall_s,
    )


class _Run:
    """The clients at work. `watched`: whose early end ends all."""

    def __init__(
        self, clients: list[Child], watched: list[Child], progress: Callable[[], None]
    ) -> None:
        self.clients = clients
        self.watched = watched
        self.progress = progress
        self.start_s = 0.0

    def start(self, address: NodeAddress, work: Work, dealt: list[list[Task]]) -> None:
        """Hands out the work. No client writes before it has read it all."""
        setup = {"address": address.address, "token": address.token.hex(), "work": asdict(work)}
        for client, tasks in zip(self.clients, dealt, strict=True):
            client.write([setup, *map(astuple, tasks), None])

    def collect(self) -> tuple[list[Tally], set[str]]:
        """Says go when all are ready; everybody's figures, and how they reached the node."""
        ready: dict[Child, str] = {}
        tallies: dict[Child, Tally] = {}
        for client, message in self._messages(tallies):
            if "done" in message:
                self.progress()
            elif "tally" in message:
                tallies[client] = Tally.from_dict(message["tally"])
            elif "ready" in message:
                ready[client] = message["ready"]
                if len(ready) == len(self.clients):
                    self.start_s = time.perf_counter()
                    for each in self.clients:
                        each.write([{"go": True}])
            else:
                raise _error_of(client, message["error"])
        return [tallies[client] for client in self.clients], set(ready.values())

    def _messages(self, finished: dict[Child, Tally]) -> Iterator[tuple[Child, dict[str, Any]]]:
        with selectors.DefaultSelector() as selector:
            for child in self.watched:
                selector.register(child, selectors.EVENT_READ, child)
            while len(finished) < len(self.clients):
                for key, _ in selector.select():
                    child = key.data
                    for line in child.lines():
                        yield child, json.loads(line)
                    if child in finished:
                        selector.unregister(child)


def _error_of(client: Child, error: dict[str, str]) -> KvstoreError:
    """The store's error in a client, as one of the same kind here."""
    kind = getattr(errors, error["kind"], KvstoreError)
    assert issubclass(kind, KvstoreError)
    return kind(f"{client.name}: {error['message']}")
