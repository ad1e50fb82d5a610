"""How fast blocks go into a store and out of it, over each transport, beside what this machine
gives to one thread's memcpy and to a TCP stream over loopback.

All of them take turns, one round of each after the other, so that a noisy neighbour hits all alike.
Every round puts other bytes, and every byte that comes back is checked.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore import _core
from kvstore.errors import InvalidArgument, KvstoreError
from kvstore.keys import Keys, keys_from_ids
from kvstore.sim.checkers import Uint8Array, check_payload, make_payload
from kvstore.sim.processes import running_node
from kvstore.sim.replay import Percentiles
from kvstore.spec import BlockSpec

TRANSPORTS: Final = ("local", "shm", "tcp")
OPERATIONS: Final = ("put", "get")
TIMEOUT_S: Final = 10.0  # of a call
STREAM_PIECE: Final = 4 << 20  # smaller ones cost half the speed: the threads share a lock
POISON: Final = 0xA5  # what a target holds before it is filled
REMOVE_KEYS: Final = 4096  # in one call

Order = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is measured. Raises InvalidArgument.

    transport: one of `TRANSPORTS`, or "all" of them; with `connect`, "all" is the one the client
        chooses for that address.
    operation: "put", "get", or "both". Both run always, as one needs the other.
    batch: blocks of one call. threads: callers at once, each with its share of the blocks.
    total_bytes: of all blocks. Source, target, and each pool of one's own have so many.
    rounds: counted ones; one that is not counted comes first.
    connect: address of a node that runs; None starts one where a transport needs it.
    token_file: its secret.
    """

    transport: str = "all"
    operation: str = "both"
    block_bytes: int = 1 << 20
    batch: int = 32
    threads: int = 1
    total_bytes: int = 256 << 20
    rounds: int = 5
    connect: str | None = None
    token_file: Path | None = None

    def __post_init__(self) -> None:
        for name, known in (("transport", TRANSPORTS), ("operation", OPERATIONS)):
            allowed = (*known, "all" if name == "transport" else "both")
            if getattr(self, name) not in allowed:
                raise InvalidArgument(f"{name}={getattr(self, name)!r}; use {', '.join(allowed)}")
        for name, most in (("batch", _core.BATCH_BLOCKS_MAX), ("threads", 256), ("rounds", 10_000)):
            if not 1 <= getattr(self, name) <= most:
                raise InvalidArgument(f"{name}={getattr(self, name)}; use 1 to {most:,}")
        if self.block_bytes < 1 or self.blocks < self.threads:
            raise InvalidArgument(
                f"a total of {self.total_bytes:,} bytes has no block of {self.block_bytes:,} for "
                f"each of {self.threads} threads; use a larger total"
            )
        if self.connect is not None and self.transport == "local":
            raise InvalidArgument("transport local is a store in this process; drop connect")
        if self.connect is None and self.token_file is not None:
            raise InvalidArgument("token_file is for the node of connect; give both")

    @property
    def blocks(self) -> int:
        """Blocks that go in and out in a round."""
        return self.total_bytes // self.block_bytes

    @property
    def transports(self) -> tuple[str, ...]:
        """To be measured; "auto" is whatever the client chooses."""
        if self.transport != "all":
            return (self.transport,)
        return TRANSPORTS if self.connect is None else ("auto",)

    @property
    def memory_bytes(self) -> int:
        """What it takes, about."""
        starts_node = self.connect is None and self.transport != "local"
        return self.total_bytes * (2 + ("local" in self.transports) + starts_node)


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """One transport, one operation. Medians over rounds, except the percentiles: of all calls."""

    transport: str
    operation: str
    gb_per_s: float
    base: str  # "memcpy" or "loopback": what it is compared with
    ratio: float  # to the base, of the same round
    call: Percentiles
    client_cpu_s_per_gb: float
    node_cpu_s_per_gb: float | None  # None: no node, or not one that was started here


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What a run found."""

    block_bytes: int
    batch: int
    threads: int
    blocks: int
    rounds: int
    cores: int | None
    checksum: str
    memcpy_gb_per_s: float  # one thread, the same blocks in the same order
    loopback_gb_per_s: float  # a bare TCP stream between two threads
    figures: tuple[TransferFigures, ...]
    verified_bytes: int
    wrong_blocks: int

    @property
    def ok(self) -> bool:
        """Every block came back as it was put."""
        return self.wrong_blocks == 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, `ok` included."""
        return {"ok": self.ok, **asdict(self)}


def process_cpu_s(pid: int) -> float:
    """Seconds of processor time of another process of this user, all its threads."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes it of a pid


@dataclass(slots=True)
class _Tally:
    """One transport, one operation."""

    round_s: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)
    client_cpu_s: list[float] = field(default_factory=list)
    node_cpu_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Route:
    """A store to measure, and what is known of it."""

    transport: str
    store: kvstore.Store
    node_pid: int | None
    tallies: dict[str, _Tally]

    @property
    def base(self) -> str:
        return "loopback" if self.transport == "tcp" else "memcpy"


def measure(
    options: BenchOptions,
    *,
    progress: Callable[[], None] | None = None,
) -> BenchReport:
    """Runs it. `progress` is called `rounds + 1` times for each of `options.transports`.

    Wrong bytes do not raise: see `BenchReport.ok`. Raises InvalidArgument, NotEnoughMemory,
    NodeUnavailable, NodeRefused, and KvstoreError where a block was not stored or not found.
    """
    spec = spec_of(options.block_bytes)
    with ExitStack() as stack:
        routes = _open_routes(options, spec, stack)
        bench = _Bench(options, spec)
        stack.callback(bench.remove_all, routes)
        for number in range(options.rounds + 1):
            bench.fill(number)
            bases = {"memcpy": bench.memcpy_s(), "loopback": stream_s(bench.source, bench.target)}
            for route in routes:
                bench.round(route, bases, counted=number > 0)
                if progress is not None:
                    progress()
            if number:
                for name, seconds in bases.items():
                    bench.bases[name].append(seconds)
    return bench.report(routes)


def spec_of(block_bytes: int) -> BlockSpec:
    """The namespace of every run: a node keeps as many as it is asked for, but not without end."""
    return BlockSpec(model="kvstore bench", block_bytes=block_bytes)


def _open_routes(options: BenchOptions, spec: BlockSpec, stack: ExitStack) -> list[_Route]:
    """Stores over each transport, on a node that is started here unless one was named."""
    dram = _pool_bytes(options.block_bytes, options.blocks)
    addresses = dict.fromkeys(options.transports, options.connect)
    token: Path | bytes | None = options.token_file
    pid: int | None = None
    if options.connect is None and options.transport != "local":
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-"))
        socket_path = str(Path(name, "node.sock"))
        memory = ("--dram", str(dram), "--reserve-blocks", "1", "--socket", socket_path)
        node, child = stack.enter_context(running_node(Path(name), *memory))
        addresses |= {"tcp": node.address, "shm": socket_path}
        token, pid = node.token, child.process.pid
    routes = []
    for transport in options.transports:
        if transport == "local":
            store = kvstore.open(spec, dram=dram, timeout_s=TIMEOUT_S, reserve_blocks=1)
        else:
            address = addresses[transport]
            assert address is not None
            store = kvstore.connect(
                address, spec, token=token, transport=transport, timeout_s=TIMEOUT_S
            )
        stack.enter_context(store)
        if not store.settle(TIMEOUT_S):
            raise KvstoreError(f"the memory was not there in {TIMEOUT_S:g} s")
        tallies = {operation: _Tally() for operation in OPERATIONS}
        node_pid = None if transport == "local" else pid
        routes.append(_Route(store.transport, store, node_pid, tallies))
    return routes


def _pool_bytes(block_bytes: int, blocks: int) -> int:
    """Room for all blocks and the reserve, in whole frames, with some to spare."""
    frames_each, tail_bytes = divmod(_core.slot_bytes(block_bytes), _core.FRAME_BYTES)
    frames = (blocks + 1) * frames_each
    if tail_bytes:
        frames += -(-(blocks + 1) // _core.slots_per_frame(tail_bytes))
    return (frames + 8) * _core.FRAME_BYTES


def stream_s(source: Uint8Array, target: Uint8Array) -> float:
    """Seconds to send `source` to `target` over TCP on loopback, from one thread to another."""
    try:
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            sender = socket.create_connection(listener.getsockname(), TIMEOUT_S)
            receiver, _ = listener.accept()
        with closing(sender), closing(receiver):
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            receiver.settimeout(TIMEOUT_S)
            return _stream_s(sender, source.reshape(-1).data, receiver, target.reshape(-1).data)
    except OSError as error:
        raise KvstoreError(f"no TCP stream over loopback to compare with: {error}") from None


def _stream_s(
    sender: socket.socket, data: memoryview, receiver: socket.socket, room: memoryview
) -> float:
    errors: list[OSError] = []

    def send() -> None:
        try:
            for first in range(0, len(data), STREAM_PIECE):
                sender.sendall(data[first : first + STREAM_PIECE])
        except OSError as error:  # raised again in the caller's thread
            errors.append(error)
            receiver.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=send)
    began = time.perf_counter()
    thread.start()
    done = 0
    try:
        while done < len(room):
            got = receiver.recv_into(room[done : done + STREAM_PIECE])
            if got == 0:
                raise ConnectionError("the other end closed")
            done += got
        return time.perf_counter() - began
    finally:
        if done < len(room):
            sender.shutdown(socket.SHUT_RDWR)  # ends the other thread
        thread.join()
        if errors:
            raise errors[0]


class _Bench:
    """The blocks, their memory, and what was counted."""

    def __init__(self, options: BenchOptions, spec: BlockSpec) -> None:
        self.options = options
        self.rng = np.random.default_rng(1)
        shape = (options.blocks, options.block_bytes)
        self.source: Uint8Array = np.ones(shape, np.uint8)
        self.target: Uint8Array = np.ones(shape, np.uint8)
        # Keys nobody else has, so that runs over one node do not meet.
        self.ids = np.arange(options.blocks, dtype=np.uint64) + np.uint64(secrets.randbits(62))
        self.keys = keys_from_ids(spec, self.ids)
        self.number = 0
        self.bases: dict[str, list[float]] = {"memcpy": [], "loopback": []}
        self.verified_blocks = 0
        self.wrong_blocks = 0
        self.stop = threading.Event()

    def fill(self, number: int) -> None:
        """Other bytes for another round."""
        self.number = number
        make_payload(self.ids, self.options.block_bytes, generation=number, out=self.source)

    def memcpy_s(self) -> float:
        """Seconds of one thread for all blocks, in a random order."""
        order = self.rng.permutation(self.options.blocks).tolist()
        targets, sources = list(self.target), list(self.source)
        began = time.perf_counter()
        for i in order:
            np.copyto(targets[i], sources[i])
        return time.perf_counter() - began

    def remove(self, store: kvstore.Store) -> None:
        """A block that is held would not be sent."""
        for first in range(0, len(self.keys), REMOVE_KEYS):
            store.remove(self.keys[first : first + REMOVE_KEYS])

    def remove_all(self, routes: list[_Route]) -> None:
        """Leaves nothing in a node that runs on."""
        if self.options.connect is not None:
            for route in routes:
                self.remove(route.store)

    def round(self, route: _Route, bases: dict[str, float], *, counted: bool) -> None:
        """All blocks in and out over one route, and a look at every byte."""
        store = route.store
        self.remove(store)
        self._time(route, "put", store.put, self.source, bases, counted)
        self.target.fill(POISON)
        self._time(route, "get", store.get, self.target, bases, counted)
        self.wrong_blocks += len(check_payload(self.target, self.ids, generation=self.number))
        self.verified_blocks += len(self.ids)

    def _time(
        self,
        route: _Route,
        operation: str,
        call: Callable[..., Any],
        blocks: Uint8Array,
        bases: dict[str, float],
        counted: bool,
    ) -> None:
        # A chain's blocks are for one caller; these go in any order, so puts say chain=False.
        options = {"chain": False} if operation == "put" else {}
        order = self.rng.permutation(self.options.blocks)
        work = [self._batches(order[i :: self.options.threads], blocks) for i in self._threads()]
        node_cpu = 0.0 if route.node_pid is None else process_cpu_s(route.node_pid)
        client_cpu = time.process_time()
        seconds, calls = self._run(work, lambda keys, out: call(keys, out, **options))
        client_cpu = time.process_time() - client_cpu
        if route.node_pid is not None:
            node_cpu = process_cpu_s(route.node_pid) - node_cpu
        if counted:
            tally = route.tallies[operation]
            tally.round_s.append(seconds)
            tally.ratios.append(bases[route.base] / seconds)
            tally.call_s += calls
            tally.client_cpu_s.append(client_cpu)
            tally.node_cpu_s.append(node_cpu)

    def _threads(self) -> range:
        return range(self.options.threads)

    def _batches(self, order: Order, blocks: Uint8Array) -> list[tuple[Keys, list[Uint8Array]]]:
        size = self.options.batch
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        return [(self.keys[batch], [blocks[i] for i in batch]) for batch in batches]

    def _run(
        self, work: list[list[tuple[Keys, list[Uint8Array]]]], call: Callable[..., Any]
    ) -> tuple[float, list[float]]:
        """Seconds from the first call to the end of the last, and those of each call."""
        times: list[list[float]] = [[] for _ in work]
        errors: list[BaseException] = []

        def run(place: int) -> None:
            try:
                for keys, blocks in work[place]:
                    if self.stop.is_set():
                        return
                    began = time.perf_counter()
                    result = call(keys, blocks)
                    times[place].append(time.perf_counter() - began)
                    if result.count(kvstore.Status.OK) != len(keys):
                        raise KvstoreError(
                            f"blocks were not transferred: {result}; has the node room for "
                            f"{self.options.total_bytes:,} bytes beside what others put?"
                        )
            except BaseException as error:  # raised again in the caller's thread
                errors.append(error)
                self.stop.set()

        threads = [threading.Thread(target=run, args=(place,)) for place in range(1, len(work))]
        began = time.perf_counter()
        try:
            for thread in threads:
                thread.start()
            run(0)
            for thread in threads:
                thread.join()
            seconds = time.perf_counter() - began
        finally:
            self.stop.set()  # after an interrupt
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            self.stop.clear()
        if errors:
            raise errors[0]
        return seconds, [each for place in times for each in place]

    # ---- what was found

    def report(self, routes: list[_Route]) -> BenchReport:
        options = self.options
        wanted = OPERATIONS if options.operation == "both" else (options.operation,)
        return BenchReport(
            block_bytes=options.block_bytes,
            batch=options.batch,
            threads=options.threads,
            blocks=options.blocks,
            rounds=options.rounds,
            cores=os.cpu_count(),
            checksum=_core.crc32c_path(),
            memcpy_gb_per_s=self._rate(self.bases["memcpy"]),
            loopback_gb_per_s=self._rate(self.bases["loopback"]),
            figures=tuple(self._figures(route, each) for route in routes for each in wanted),
            verified_bytes=self.verified_blocks * options.block_bytes,
            wrong_blocks=self.wrong_blocks,
        )

    def _gb(self) -> float:
        return self.options.blocks * self.options.block_bytes / 1e9

    def _rate(self, seconds: list[float]) -> float:
        return self._gb() / float(np.median(seconds))

    def _figures(self, route: _Route, operation: str) -> TransferFigures:
        tally = route.tallies[operation]
        p50, p90, p99 = (np.percentile(tally.call_s, (50, 90, 99)) * 1e6).tolist()
        node_cpu = float(np.median(tally.node_cpu_s)) / self._gb()
        return TransferFigures(
            transport=route.transport,
            operation=operation,
            gb_per_s=self._rate(tally.round_s),
            base=route.base,
            ratio=float(np.median(tally.ratios)),
            call=Percentiles(len(tally.call_s), p50, p90, p99),
            client_cpu_s_per_gb=float(np.median(tally.client_cpu_s)) / self._gb(),
            node_cpu_s_per_gb=None if route.node_pid is None else node_cpu,
        )
