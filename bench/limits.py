"""The embedded store beside what the hardware allows: `python bench/limits.py [--json]`.

Every figure is a ratio of two things measured alternately, a slice of each at a time, so that a
noisy neighbour hits both: medians over rounds. Source and target have 1 GiB each (--gib), blocks
are taken in random order, all payloads are compared at the end. memcpy is the C library's, one
thread, called once a block over the same blocks in the same order (through ctypes: about 0.3 us a
call). "warm": all memory was touched before. "cold": a new store, and targets whose pages are new
to the process (for get and for the memcpy beside it; a store touches its own memory in advance).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore import _core
from kvstore.keys import make_keys

Blocks = npt.NDArray[np.uint8]
Batches = list[tuple[kvstore.Keys, list[Blocks]]]
MIB = 1 << 20
SLICE_BYTES = 64 * MIB  # of one kind, before the other has its turn


def memcpy_blocks(target: Blocks, source: Blocks, to: list[int], order: list[int]) -> float:
    """Seconds one thread needs to copy source[order[i]] to target[to[i]]."""
    size = source.shape[1]
    targets = [target.ctypes.data + i * size for i in to]
    sources = [source.ctypes.data + i * size for i in order]
    copy = ctypes.memmove
    began = time.perf_counter()
    for a, b in zip(targets, sources, strict=True):
        copy(a, b, size)
    return time.perf_counter() - began


def slices(order: npt.NDArray[np.int64], per_slice: int) -> Iterator[npt.NDArray[np.int64]]:
    for start in range(0, len(order), per_slice):
        yield order[start : start + per_slice]


class Copies:
    """put and get of one block size against memcpy."""

    def __init__(self, block_bytes: int, batch: int, threads: int, total: int) -> None:
        self.batch = batch
        self.count = total // block_bytes
        self.per_slice = SLICE_BYTES // block_bytes
        self.spec = kvstore.BlockSpec(model="bench", block_bytes=block_bytes)
        self.threads = threads
        rng = np.random.default_rng(1)
        self.rng = rng
        self.source = rng.integers(0, 256, total, np.uint8).reshape(self.count, block_bytes)
        self.target = np.ones_like(self.source)
        self.copied = np.ones_like(self.source)
        tokens = np.arange(self.count * self.spec.block_tokens, dtype=np.uint32)
        self.keys = make_keys(self.spec, tokens)

    def open(self) -> kvstore.Store:
        """A store whose memory is there, and holds nothing yet."""
        store = kvstore.open(
            self.spec,
            dram=self.source.nbytes + 64 * MIB,
            copy_threads=self.threads,
            timeout_s=60,
            reserve_blocks=1,
        )
        store.settle(120)
        return store

    def batches(self, order: npt.NDArray[np.int64], blocks: Blocks) -> Batches:
        """The calls that put, or get, these blocks of `blocks`."""
        batches = [order[i : i + self.batch] for i in range(0, len(order), self.batch)]
        return [(kvstore.Keys(self.keys.array[b]), [blocks[i] for i in b]) for b in batches]

    def put(self, store: kvstore.Store, order: npt.NDArray[np.int64]) -> float:
        """Seconds to put these blocks."""
        return self.put_batches(store, self.batches(order, self.source))

    def put_batches(self, store: kvstore.Store, batches: Batches) -> float:
        """The same, prepared."""
        began = time.perf_counter()
        for keys, blocks in batches:
            result = store.put(keys, blocks, chain=False)
            if not result.ok:
                raise SystemExit(f"put failed: {result}")
        return time.perf_counter() - began

    def get(self, store: kvstore.Store, order: npt.NDArray[np.int64], target: Blocks) -> float:
        """Seconds to get these blocks into their places in `target`."""
        return self.get_batches(store, self.batches(order, target))

    def get_batches(self, store: kvstore.Store, batches: Batches) -> float:
        """The same, prepared."""
        began = time.perf_counter()
        for keys, blocks in batches:
            result = store.get(keys, blocks)
            if not result.ok:
                raise SystemExit(f"get failed: {result}")
        return time.perf_counter() - began

    def warm_round(self, store: kvstore.Store) -> dict[str, float]:
        """Seconds for all blocks by memcpy, put and get, in turn slice by slice."""
        store.remove(self.keys)
        seconds = {"memcpy": 0.0, "put": 0.0, "get": 0.0}
        order = self.rng.permutation(self.count)
        for part in slices(order, self.per_slice):
            to = self.rng.permutation(part)
            seconds["memcpy"] += memcpy_blocks(self.copied, self.source, to.tolist(), part.tolist())
            seconds["put"] += self.put(store, part)
            seconds["get"] += self.get(store, self.rng.permutation(part), self.target)
        return seconds

    def cold_round(self) -> dict[str, float]:
        """As before, with a new store and with targets whose pages are new to the process; put is
        compared with a memcpy to touched memory, since a store's memory is touched before."""
        seconds = {"memcpy": 0.0, "memcpy_cold": 0.0, "put": 0.0, "get": 0.0}
        order = self.rng.permutation(self.count)
        targets = [np.empty_like(self.source) for _ in range(2)]
        with self.open() as store:
            for number, part in enumerate(slices(order, self.per_slice)):
                to = self.rng.permutation(part)
                # Who goes first changes, so that neither always meets the fresher memory.
                turns = [
                    lambda part=part, to=to: ("memcpy_cold", self._copy(targets[0], to, part)),
                    lambda to=to: ("get", self.get(store, to, targets[1])),
                ]
                seconds["memcpy"] += self._copy(self.copied, to, part)
                seconds["put"] += self.put(store, part)
                for turn in turns if number % 2 == 0 else turns[::-1]:
                    kind, taken = turn()
                    seconds[kind] += taken
            if not np.array_equal(self.source, targets[1]):
                raise SystemExit("payloads differ")
            store.audit()
        return seconds

    def _copy(
        self, target: Blocks, to: npt.NDArray[np.int64], order: npt.NDArray[np.int64]
    ) -> float:
        return memcpy_blocks(target, self.source, to.tolist(), order.tolist())

    def run(self, rounds: int) -> dict[str, float]:
        """Ratios to memcpy: medians over the rounds."""
        cold = [self.cold_round() for _ in range(rounds)]
        with self.open() as store:
            self.warm_round(store)  # not counted
            warm = [self.warm_round(store) for _ in range(rounds)]
            if not np.array_equal(self.source, self.target):
                raise SystemExit("payloads differ")
            store.audit()

        def ratio(seconds: list[dict[str, float]], kind: str, base: str = "memcpy") -> float:
            return float(np.median([r[base] / r[kind] for r in seconds]))

        total = self.source.nbytes / 1e9
        return {
            "memcpy_gb_s": total / float(np.median([r["memcpy"] for r in warm])),
            "put_gb_s": total / float(np.median([r["put"] for r in warm])),
            "get_gb_s": total / float(np.median([r["get"] for r in warm])),
            "put_warm": ratio(warm, "put"),
            "get_warm": ratio(warm, "get"),
            "put_cold": ratio(cold, "put"),
            "get_cold": ratio(cold, "get", "memcpy_cold"),
        }


def percentiles(call: Callable[[], object], count: int) -> dict[str, float]:
    """p50 and p99 of a call, in microseconds."""
    times = np.empty(count)
    for i in range(count):
        began = time.perf_counter()
        call()
        times[i] = time.perf_counter() - began
    return {
        "p50": float(np.percentile(times, 50) * 1e6),
        "p99": float(np.percentile(times, 99) * 1e6),
    }


def view_times() -> dict[str, float]:
    """Opening and closing a zero-copy view of one block of 16 MiB."""
    spec = kvstore.BlockSpec(model="bench", block_bytes=16 * MIB)
    with kvstore.open(spec, dram=128 * MIB) as store:
        keys = store.keys(range(spec.block_tokens))
        store.put(keys, [np.ones(16 * MIB, np.uint8)])
        match = store.match_prefix(keys)

        def view() -> None:
            with match as hit:
                hit.views()

        return percentiles(view, 20_000)


def match_times(blocks: int = 1_000_000) -> dict[str, dict[str, float]]:
    """match_prefix of 256 keys among many, alone and beside a busy Python thread."""
    spec = kvstore.BlockSpec(model="bench", block_bytes=64)
    with kvstore.open(spec, dram=blocks * 64 + 64 * MIB, timeout_s=60) as store:
        store.settle(60)
        payload = np.ones((8192, 64), np.uint8)
        chains = []
        for first in range(0, blocks, 8192):
            tokens = np.arange(first * 16, (first + 8192) * 16, dtype=np.uint32)
            chains.append(store.keys(tokens))
            store.put(chains[-1], payload, chain=False)
        wanted = [chain[i : i + 256] for chain in chains for i in range(0, 8192, 256)]
        np.random.default_rng(2).shuffle(wanted)
        turn = iter(wanted * 100)

        def match() -> None:
            if store.match_prefix(next(turn)).blocks != 256:
                raise SystemExit("a block is missing")

        alone = percentiles(match, 20_000)

        def submit_and_drain() -> None:
            transfer = store.match_async(next(turn))
            while transfer not in store.drain():
                pass

        stop = threading.Event()

        def spin() -> None:
            count = 0
            while not stop.is_set():
                count += 1

        busy = threading.Thread(target=spin)
        busy.start()
        beside = percentiles(submit_and_drain, 20_000)
        stop.set()
        busy.join()
    return {"alone": alone, "beside_a_busy_thread": beside}


MEMORY_PROGRAM = """
import sys, numpy as np, kvstore
count, size = int(sys.argv[1]), int(sys.argv[2])
def anonymous():
    text = open("/proc/self/status").read()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024
def shared():
    text = open("/proc/self/status").read()
    return int(text.split("RssShmem:")[1].split()[0]) * 1024
spec = kvstore.BlockSpec(model="bench", block_bytes=size)
store = kvstore.open(spec, dram=count * size + (8 << 20), timeout_s=60)
store.settle(60)
payload = np.ones((4096, size), np.uint8)
store.put(store.keys(range(16)), payload[:1])
before = anonymous() + shared()
for first in range(0, count, 4096):
    keys = store.keys(np.arange((first + 1) * 16, (first + 4097) * 16, dtype=np.uint32))
    assert store.put(keys, payload, chain=False).ok
del keys
print((anonymous() + shared() - before) / count)
"""


def memory_beside_payload(count: int, size: int) -> float:
    """Bytes a block of private and header memory, in a fresh process (the pool is populated)."""
    command = [sys.executable, "-c", MEMORY_PROGRAM, str(count), str(size)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def open_seconds(dram: int) -> float:
    spec = kvstore.BlockSpec(model="bench", block_bytes=MIB)
    began = time.perf_counter()
    store = kvstore.open(spec, dram=dram)
    seconds = time.perf_counter() - began
    store.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each (default 5)")
    parser.add_argument("--gib", type=float, default=1.0, help="size of source and target")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args()
    total = int(options.gib * 1024) * MIB
    show = (lambda *_: None) if options.json else print
    report: dict[str, object] = {"cores": os.cpu_count(), "checksum": _core.crc32c_path()}
    show(f"{os.cpu_count()} cores, checksum by {_core.crc32c_path()}, {options.gib:g} GiB each")
    show("blocks        threads  memcpy GB/s   put warm   put cold   get warm   get cold")
    for threads in (0, 1):
        for size, batch, name in ((MIB, 32, "1 MiB x 32"), (65536, 64, "64 KiB x 64")):
            figures = Copies(size, batch, threads, total).run(options.rounds)
            report[f"{name}, {threads or 'default'} threads"] = figures
            row = "   ".join(
                f"{figures[k]:7.2f}x" for k in ("put_warm", "put_cold", "get_warm", "get_cold")
            )
            show(f"{name:12}  {threads or 'default':>7}  {figures['memcpy_gb_s']:11.2f}   {row}")
    report["view of 16 MiB, us"] = view = view_times()
    show(f"view of 16 MiB opened and closed: p50 {view['p50']:.1f} us, p99 {view['p99']:.1f} us")
    report["match of 256 keys, us"] = match = match_times()
    alone, beside = match["alone"], match["beside_a_busy_thread"]
    show(
        f"match_prefix of 256 of 1,000,000 keys: p50 {alone['p50']:.1f} us, "
        f"p99 {alone['p99']:.1f} us"
    )
    show(f"  submitted and drained beside a busy thread: p99 {beside['p99']:.0f} us")
    for count, size in ((500_000, 64), (250_000, 4096)):
        report[f"bytes beside a block of {size}"] = beside_bytes = memory_beside_payload(
            count, size
        )
        show(f"memory beside {count:,} blocks of {size} bytes: {beside_bytes:.0f} bytes a block")
    report["open 4 GiB, s"] = seconds = open_seconds(4 << 30)
    show(f"opening 4 GiB: {seconds:.3f} s")
    if options.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
