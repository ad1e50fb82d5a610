"""A node in another process beside bare sockets and memcpy: `python bench/wire.py [--json]`.

Starts `kvstore node`, connects over shared memory and over TCP, and prints each figure as a ratio
to a base of the same run. What is compared takes turns, 64 MiB of one and of the other, so that a
noisy neighbour hits both: medians over rounds. Source and target have 1 GiB each (--gib), blocks
are taken in random order, all payloads are compared after each round. The bases are one thread's
memcpy (as in limits.py) and bare sockets between two processes (probe.cc; built with $CXX or g++).
"cold": the first pass after the node was started, and after the client connected; the caller's own
memory was touched before. CPU seconds are those of both processes, for 10^9 bytes.
Missing a target is a figure like any other: the exit code is 0 unless something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from limits import Copies, memcpy_blocks, slices
from probe import Order, Probe

import kvstore
from kvstore import _core
from kvstore.sim.bench import process_cpu_s
from kvstore.sim.processes import NodeAddress, running_node

MIB = 1 << 20
TRANSPORTS = ("shm", "tcp")
MATCH_REQUEST, MATCH_REPLY = 256 * 32 + 70, 56  # bytes of a match of 256 keys, about
VIEW_BYTES = 300  # of a lookup and of its reply, about


@dataclass
class Row:
    """One figure with its target."""

    what: str
    base: str
    ratio: float  # to the base: of rates, so that 1 is as fast; of times where `at_most`
    target: float | None  # none: for the reader to compare
    at_most: bool
    measured: str
    base_measured: str
    cpu: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached."""
        if self.target is None:
            return None
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target

    def line(self) -> str:
        """As a line of the table."""
        target = "" if self.target is None else f"{'<=' if self.at_most else '>='} {self.target:g}x"
        verdict = {None: "", True: "met", False: "NOT MET"}[self.met]
        measured = f"{self.measured} / {self.base_measured}"
        return (
            f"{self.what:<32} {self.ratio:6.2f}x {target:>9}  {verdict:<8}"
            f"{measured:<24} {self.base:<18} {self.cpu}"
        )


class Node:
    """A `kvstore node` process; `connect` to it."""

    def __init__(self, address: NodeAddress, socket: str, pid: int) -> None:
        self.address = address
        self.socket = socket
        self.pid = pid

    def connect(self, spec: kvstore.BlockSpec, transport: str) -> kvstore.Store:
        """A store over one transport, once the node's memory is there."""
        store = kvstore.connect(
            self.socket if transport == "shm" else self.address.address,
            spec,
            token=self.address.token,
            transport=transport,
            timeout_s=60,
        )
        if store.transport != transport:
            raise SystemExit(f"asked for {transport}, got {store.transport}")
        store.settle(120)
        return store

    def cpu_s(self) -> float:
        """Processor time of the node so far."""
        return process_cpu_s(self.pid)


@contextmanager
def node_of(folder: Path, dram: int) -> Iterator[Node]:
    socket = str(folder / "node.sock")
    memory = ("--dram", str(dram), "--reserve-blocks", "1", "--socket", socket)
    with running_node(folder, *memory) as (address, child):
        yield Node(address, socket, child.process.pid)


@dataclass
class Spent:
    """Seconds of one kind in one round: on the clock, and of processors."""

    wall: float = 0.0
    client_cpu: float = 0.0
    node_cpu: float = 0.0

    def add(self, call: Callable[[], float], node_cpu: Callable[[], float]) -> None:
        """`call` returns how long it took."""
        client, node = time.process_time(), node_cpu()
        self.wall += call()
        self.client_cpu += time.process_time() - client
        self.node_cpu += node_cpu() - node


Round = dict[str, Spent]


class Transfers:
    """put and get of one block size over each transport, memcpy and bare sockets beside."""

    def __init__(self, folder: Path, probe: Probe, size: int, batch: int, total: int) -> None:
        self.folder = folder
        self.probe = probe
        self.copies = Copies(size, batch, 0, total)
        self.size = size
        self.batch = batch
        self.total = total

    def node(self) -> AbstractContextManager[Node]:
        """A new one with room for all blocks."""
        return node_of(self.folder, self.total + 64 * MIB)

    def remove_all(self, store: kvstore.Store) -> None:
        """Blocks that are held would not be sent again."""
        keys = self.copies.keys
        for first in range(0, len(keys), 4096):
            store.remove(keys[first : first + 4096])

    def check(self) -> None:
        """All of it came back; and the next round begins with a target that shows a missing get."""
        if not np.array_equal(self.copies.source, self.copies.target):
            raise SystemExit("payloads differ")
        self.copies.target.fill(0)

    def base(self, transport: str, order: Order, to: Order) -> dict[str, float]:
        """Seconds of the bases for the same blocks, in the same order."""
        if transport == "shm":
            copied, source = self.copies.copied, self.copies.source
            return {"memcpy": memcpy_blocks(copied, source, to.tolist(), order.tolist())}
        return {
            kind: self.probe.stream(kind, self.size, self.batch, order, to)
            for kind in ("acked", "free")
        }

    def round(self, transport: str, store: kvstore.Store, node: Node) -> Round:
        """All blocks once each by every kind, in turn slice by slice."""
        copies = self.copies
        self.remove_all(store)
        spent: Round = {kind: Spent() for kind in ("memcpy", "acked", "free", "put", "get")}
        for part in slices(copies.rng.permutation(copies.count), copies.per_slice):
            for kind, seconds in self.base(transport, part, copies.rng.permutation(part)).items():
                spent[kind].wall += seconds
            puts = copies.batches(part, copies.source)
            gets = copies.batches(copies.rng.permutation(part), copies.target)
            spent["put"].add(lambda puts=puts: copies.put_batches(store, puts), node.cpu_s)
            spent["get"].add(lambda gets=gets: copies.get_batches(store, gets), node.cpu_s)
        self.check()
        return spent

    def rounds(self, transport: str, count: int) -> list[Round]:
        """Several of them."""
        with self.node() as node, node.connect(self.copies.spec, transport) as store:
            self.round(transport, store, node)  # not counted
            return [self.round(transport, store, node) for _ in range(count)]

    def rows(self, transport: str, count: int, put: float, get: float) -> list[Row]:
        """The warm figures with their targets."""
        rounds = self.rounds(transport, count)
        base = "memcpy" if transport == "shm" else "acked"
        name = "memcpy, 1 thread" if transport == "shm" else "bare stream, acked"
        title = f"{transport} {size_name(self.size)} x {self.batch}"

        def median(number: Callable[[Round], float]) -> float:
            return float(np.median([number(each) for each in rounds]))

        def rate(kind: str) -> str:
            return f"{self.total / 1e9 / median(lambda each: each[kind].wall):.2f}"

        rows = []
        for kind, target in (("put", put), ("get", get)):
            client = median(lambda each, kind=kind: each[kind].client_cpu) * 1e9 / self.total
            node = median(lambda each, kind=kind: each[kind].node_cpu) * 1e9 / self.total
            ratio = median(lambda each, kind=kind: each[base].wall / each[kind].wall)
            free = f"; without acks {rate('free')} GB/s" if transport == "tcp" else ""
            cpu = f"cpu s/GB: client {client:.2f}, node {node:.2f}{free}"
            measured = f"{rate(kind)} GB/s"
            row = Row(f"{title} {kind}", name, ratio, target, False, measured, rate(base), cpu)
            rows.append(row)
        return rows

    def cold_round(self, transport: str) -> dict[str, float]:
        """Seconds of the first pass of each, and of the one after it."""
        copies = self.copies
        order = copies.rng.permutation(copies.count)
        seconds = {}
        with self.node() as node, node.connect(copies.spec, transport) as store:
            seconds["put cold"] = copies.put(store, order)
            with node.connect(copies.spec, transport) as other:
                seconds["get cold"] = copies.get(other, order, copies.target)
                self.check()
                self.remove_all(store)
                seconds["put"] = copies.put(store, order)
                seconds["get"] = copies.get(other, order, copies.target)
            self.check()
        return seconds

    def cold_rows(self, transport: str, count: int) -> list[Row]:
        """First passes with their targets."""
        rounds = [self.cold_round(transport) for _ in range(count)]

        def rate(kind: str) -> str:
            return f"{self.total / 1e9 / float(np.median([each[kind] for each in rounds])):.2f}"

        title = f"{transport} {size_name(self.size)} x {self.batch}"
        return [
            Row(
                f"{title} {kind}, cold",
                "the pass after it",
                float(np.median([each[kind] / each[f"{kind} cold"] for each in rounds])),
                0.5,
                False,
                f"{rate(f'{kind} cold')} GB/s",
                rate(kind),
            )
            for kind in ("put", "get")
        ]


def size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"


def time_calls(call: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def pin(pid: int, core: int) -> None:
    """All threads of a process onto one core."""
    for task in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(task), {core})


def rows_beside_trips(
    what: str,
    call: Callable[[], object],
    bare: Callable[[int], object],
    probe: Probe,
    node: Node,
    base: str,
    target: float,
    rounds: int,
) -> Iterator[Row]:
    """p50 of a call as a multiple of a bare round trip's; they take turns, 500 of each.

    Left alone, the scheduler puts a bare pair now onto one core and now onto two, where it takes
    ten times as long; so both pairs are pinned the same way: first client and node on a core each,
    which is what the target is for, then both on one.
    """
    everywhere = os.sched_getaffinity(0)
    cores = sorted(everywhere)
    layouts = [("one core", cores[0], cores[0], None)]
    if len(cores) > 1:
        layouts.insert(0, ("a core each", cores[0], cores[1], target))
    server, driver = probe.processes
    for layout, clients, servers, wanted in layouts:
        for pid, core in (
            (os.getpid(), clients),
            (driver.pid, clients),
            (server.pid, servers),
            (node.pid, servers),
        ):
            pin(pid, core)
        yield beside_trips(f"{what}, {layout}", call, bare, base, wanted, rounds)
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), everywhere)


def beside_trips(
    what: str,
    call: Callable[[], object],
    bare: Callable[[int], object],
    base: str,
    target: float | None,
    rounds: int,
) -> Row:
    """One row of those."""
    time_calls(call, 500)
    calls: list[float] = []
    trips: list[float] = []
    for _ in range(4 * rounds):
        calls += time_calls(call, 500)
        trips += bare(500)
    p50, p99 = (np.percentile(calls, (50, 99)) * 1e6).tolist()
    bare_p50, bare_p99 = (np.percentile(trips, (50, 99)) * 1e6).tolist()
    return Row(
        what,
        base,
        p50 / bare_p50,
        target,
        True,
        f"{p50:.1f} us",
        f"{bare_p50:.1f}",
        f"p99: {p99:.0f} us / {bare_p99:.0f}",
    )


def view_rows(folder: Path, probe: Probe, rounds: int) -> Iterator[Row]:
    """A zero-copy view of one block of 16 MiB, opened and closed."""
    spec = kvstore.BlockSpec(model="bench", block_bytes=16 * MIB)
    with node_of(folder, 128 * MIB) as node, node.connect(spec, "shm") as store:
        keys = store.keys(range(spec.block_tokens))
        payload = np.random.default_rng(3).integers(0, 256, 16 * MIB, np.uint8)
        if not store.put(keys, [payload]).ok:
            raise SystemExit("put failed")
        match = store.match_prefix(keys)
        with match as hit:
            (view,) = hit.views()[0]
            if not np.array_equal(np.frombuffer(view, np.uint8), payload):
                raise SystemExit("payloads differ")
            del view

        def opened_and_closed() -> None:
            with match as hit:
                hit.views()

        def bare(count: int) -> list[float]:
            return probe.trips("unix", VIEW_BYTES, VIEW_BYTES, count).tolist()

        yield from rows_beside_trips(
            "shm view of 16 MiB",
            opened_and_closed,
            bare,
            probe,
            node,
            "bare unix trip",
            3.0,
            rounds,
        )


def match_rows(folder: Path, probe: Probe, rounds: int, blocks: int) -> Iterator[Row]:
    """match_prefix of 256 of a million resident keys."""
    spec = kvstore.BlockSpec(model="bench", block_bytes=64)
    with node_of(folder, blocks * 64 + 64 * MIB) as node:
        with node.connect(spec, "shm") as store:
            payload = np.ones((8192, 64), np.uint8)
            chains = []
            for first in range(0, blocks, 8192):
                tokens = np.arange(first * 16, (first + 8192) * 16, dtype=np.uint32)
                chains.append(store.keys(tokens))
                if not store.put(chains[-1], payload, chain=False).ok:
                    raise SystemExit("put failed")
            resident = store.usage().blocks
        wanted = [chain[i : i + 256] for chain in chains for i in range(0, 8192, 256)]
        np.random.default_rng(2).shuffle(wanted)
        for transport, socket in (("shm", "unix"), ("tcp", "tcp")):
            with node.connect(spec, transport) as store:
                turn = iter(wanted * 100)

                def match(store: kvstore.Store = store, turn: Iterator[kvstore.Keys] = turn):
                    if store.match_prefix(next(turn)).blocks != 256:
                        raise SystemExit("a block is missing")

                def bare(count: int, socket: str = socket) -> list[float]:
                    return probe.trips(socket, MATCH_REQUEST, MATCH_REPLY, count).tolist()

                what = f"{transport} match of 256"
                base = f"bare {socket} trip"
                for row in rows_beside_trips(what, match, bare, probe, node, base, 2.5, rounds):
                    row.cpu += f"; {resident:,} keys held"
                    yield row


def measure(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    total = int(options.gib * 1024) * MIB
    shapes = (  # size, batch, targets of put and get by transport
        (MIB, 32, {"shm": (0.75, 0.85), "tcp": (0.75, 0.75)}),
        (64 << 10, 64, {"shm": (0.7, 0.7), "tcp": (0.5, 0.5)}),
        (4 << 10, 128, {"tcp": (0.4, 0.4)}),
    )
    with Probe(folder, total) as probe:
        for size, batch, targets in shapes:
            transfers = Transfers(folder, probe, size, batch, total)
            for transport in TRANSPORTS:
                if transport in targets:
                    yield from transfers.rows(transport, options.rounds, *targets[transport])
                if size == MIB:
                    yield from transfers.cold_rows(transport, options.rounds)
            del transfers
        yield from view_rows(folder, probe, options.rounds)
        yield from match_rows(folder, probe, options.rounds, options.keys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each (default 5)")
    parser.add_argument("--gib", type=float, default=1.0, help="size of source and target")
    parser.add_argument("--keys", type=int, default=1_000_000, help="resident keys of the matches")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args()
    rows = []
    if not options.json:
        print(
            f"{os.cpu_count()} cores, checksum by {_core.crc32c_path()}, {options.gib:g} GiB each"
        )
        print(f"{'':32} {'ratio':>7} {'target':>9}  {'':8}{'measured / base':<24} base")
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(options, Path(folder)):
            rows.append(row)
            if not options.json:
                print(row.line(), flush=True)
    judged = [row.met for row in rows if row.met is not None]
    if options.json:
        report = {
            "cores": os.cpu_count(),
            "checksum": _core.crc32c_path(),
            "gib": options.gib,
            "rounds": options.rounds,
            "rows": [{**asdict(row), "met": row.met} for row in rows],
        }
        print(json.dumps(report, indent=2))
    else:
        print(f"{sum(judged)} of {len(judged)} targets met")


if __name__ == "__main__":
    main()
