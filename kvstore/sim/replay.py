"""Replays a trace through an embedded store and checks every byte that comes back.

Per request, in order: keys from its `hash_ids` (a partial last block included), `match_prefix`, a
read of what matched, the check, then a put that names the whole chain and sends what was missing.

Who owns what: `replay` opens the store and closes it on every way out. Each client is one thread
with one buffer of the longest chain; they share nothing but the store, the progress call and a stop
flag. One client runs in the caller's thread, in trace order: its figures are exact.
The clocks are here; `workload` has none.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

import numpy as np

import kvstore
from kvstore import _core
from kvstore.errors import InvalidArgument, KvstoreError, NotEnoughMemory
from kvstore.keys import keys_from_ids
from kvstore.sim.checkers import (
    OrphanCounter,
    Uint8Array,
    Uint64Array,
    check_payload,
    first_difference,
    make_payload,
)
from kvstore.sim.workload import BLOCK_TOKENS, Request, TraceSummary, summarize
from kvstore.spec import BlockSpec
from kvstore.types import Status

POISON: Final = 0xA5  # a target is filled with it, so bytes that were not written show
MISMATCHES_MAX: Final = 10  # described in a report; all are counted
UNLIMITED_RESERVE: Final = 1  # the smallest; 0 would let the store choose one
SETTLE_TIMEOUT_S: Final = 30.0
CLIENTS_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How a trace is replayed. Checked when made: raises InvalidArgument."""

    block_bytes: int = 64 << 10  # bytes of each 512-token block; real KV has more, ratios are equal
    capacity_blocks: int = 0  # blocks left before each lookup once the pool is full; 0 = unlimited
    clients: int = 1  # threads over the one store; the turns of a chat stay on one, in order
    speed: float = 0.0  # trace seconds per second; 0 = as fast as possible
    generation: int = 0  # written into every payload; tells two replays apart

    def __post_init__(self) -> None:
        if self.block_bytes < 1:
            raise InvalidArgument(f"block bytes must be at least 1, not {self.block_bytes}")
        if self.capacity_blocks < 0:
            raise InvalidArgument(
                f"capacity must be a number of blocks, or 0 for unlimited, "
                f"not {self.capacity_blocks}"
            )
        if not 1 <= self.clients <= CLIENTS_MAX:
            raise InvalidArgument(f"clients must be within 1..{CLIENTS_MAX}, not {self.clients}")
        if not 0.0 <= self.speed < float("inf"):
            raise InvalidArgument(f"speed must be 0 (no pauses) or positive, not {self.speed}")


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Memory that holds `slots` blocks, `reserve_blocks` of them kept free by eviction."""

    dram_bytes: int
    slots: int
    reserve_blocks: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One block that came back wrong; `expected` and `got` are hex, from the first wrong byte."""

    request: int
    key_index: int
    hash_id: int
    offset: int
    expected: str
    got: str
    wrong_bytes: int


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of `count` calls, in microseconds; zeros where there was none."""

    count: int
    p50_us: float
    p90_us: float
    p99_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What a replay did. Ratios over the whole trace, cold start. Rates in 10^9 bytes a second,
    inside the store's calls, summed over the clients; `wall_s` includes making and checking bytes.
    """

    block_bytes: int
    capacity_blocks: int
    clients: int
    speed: float
    requests: int
    blocks: int
    distinct_blocks: int
    hit_blocks: int
    block_hit_ratio: float
    input_tokens: int
    hit_tokens: int
    token_hit_ratio: float
    read_bytes: int
    written_bytes: int
    read_gb_per_s: float
    write_gb_per_s: float
    match: Percentiles
    get: Percentiles
    put: Percentiles
    evictions: int
    orphaned: int | None  # evictions that left a child behind; None: several clients, not counted
    blocks_left: int
    verified_bytes: int
    wrong_bytes: int
    unread_blocks: dict[str, int]  # leased, yet not returned, by status
    unstored_blocks: dict[str, int]  # neither stored nor there already, by status
    mismatches: tuple[Mismatch, ...]
    late_ms_max: float | None  # furthest behind the trace's clock; None at speed 0
    wall_s: float

    @property
    def ok(self) -> bool:
        """Every block the store leased came back, byte for byte."""
        return self.wrong_bytes == 0 and not self.unread_blocks

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, `ok` included."""
        return {"ok": self.ok, **asdict(self)}


def pool_size(options: ReplayOptions, summary: TraceSummary) -> PoolSize:
    """Slots for the blocks that stay and for each client's longest chain on its way in.

    The reserve makes the difference: eviction stops at exactly `capacity_blocks`, however the slots
    round up to whole frames. Unlimited: all distinct blocks fit and nothing is ever evicted.
    """
    kept = options.capacity_blocks or summary.distinct_blocks
    wanted = kept + options.clients * summary.chain_blocks_max + UNLIMITED_RESERVE
    frames_each, tail_bytes = divmod(_core.slot_bytes(options.block_bytes), _core.FRAME_BYTES)
    frames = wanted * frames_each
    if tail_bytes:
        tails_per_frame = _core.slots_per_frame(tail_bytes)
        frames += -(-wanted // tails_per_frame)
    slots = frames * tails_per_frame if frames_each == 0 else wanted
    reserve_blocks = slots - kept if options.capacity_blocks else UNLIMITED_RESERVE
    return PoolSize(frames * _core.FRAME_BYTES, slots, reserve_blocks)


def due_times_s(requests: Sequence[Request], speed: float) -> list[float]:
    """When each request is sent, in seconds from the start.

    Traces stamp all requests of a tick alike: they are spread evenly over the time to the next
    tick (the last one over the time since the tick before it), not sent as a burst.
    """
    start_ms = requests[0].timestamp_ms
    due: list[float] = []
    tick_ms = 0
    first = 0
    while first < len(requests):
        stamp_ms = requests[first].timestamp_ms
        end = first
        while end < len(requests) and requests[end].timestamp_ms == stamp_ms:
            end += 1
        if end < len(requests):
            tick_ms = requests[end].timestamp_ms - stamp_ms
        count = end - first
        due += [
            (stamp_ms - start_ms + tick_ms * place / count) / (1000.0 * speed)
            for place in range(count)
        ]
        first = end
    return due


def deal(requests: Sequence[Request], clients: int) -> list[list[int]]:
    """Indices of the requests of each client, ascending; the turns of one chat go to one client.

    A trace names no chats. A request continues the one whose latest request ended in a whole block
    that this chain contains, the deepest such; else it opens a chat, dealt to the client with the
    fewest blocks so far.
    """
    dealt: list[list[int]] = [[] for _ in range(clients)]
    load = [0] * clients
    client_of_end: dict[int, int] = {}
    for index, request in enumerate(requests):
        end = next((each for each in reversed(request.hash_ids) if each in client_of_end), None)
        client = load.index(min(load)) if end is None else client_of_end.pop(end)
        num_whole = request.input_length // BLOCK_TOKENS
        if num_whole:
            client_of_end[request.hash_ids[num_whole - 1]] = client
        dealt[client].append(index)
        load[client] += len(request.hash_ids)
    return dealt


class OpenStore(Protocol):
    """The seam to the store under test: `kvstore.open`, or something faulty."""

    def __call__(
        self, spec: BlockSpec, *, dram: int, reserve_blocks: int, log_evictions: bool
    ) -> AbstractContextManager[Any]:
        """A store to enter; `reserve_blocks` slots are kept free by background eviction."""
        ...


def replay(
    requests: Sequence[Request],
    options: ReplayOptions,
    *,
    progress: Callable[[], None] | None = None,
    open_store: OpenStore = kvstore.open,
) -> ReplayReport:
    """Replays a trace through a new embedded store and reports; the store is closed on return.

    `progress` is called after each request, from any client's thread. Wrong bytes do not raise:
    see `ReplayReport.ok`. Raises InvalidArgument for an empty trace, NotEnoughMemory if this
    machine lacks the memory, and whatever the store raises.
    """
    summary = summarize(requests)
    size = pool_size(options, summary)
    spec = BlockSpec(
        model="trace replay", block_tokens=BLOCK_TOKENS, block_bytes=options.block_bytes
    )
    with open_store(
        spec,
        dram=size.dram_bytes,
        reserve_blocks=size.reserve_blocks,
        log_evictions=options.clients == 1,
    ) as store:
        run = _Run(requests, options, summary, spec, store, progress or (lambda: None))
        _drive(run)
        wall_s = time.perf_counter() - run.start_s
        run.settle()
        store.audit()
        usage = store.usage()
    return _report(run, usage, wall_s)


class _Run:
    """What the clients of one replay share."""

    def __init__(
        self,
        requests: Sequence[Request],
        options: ReplayOptions,
        summary: TraceSummary,
        spec: BlockSpec,
        store: Any,
        progress: Callable[[], None],
    ) -> None:
        self.requests = requests
        self.options = options
        self.summary = summary
        self.spec = spec
        self.store = store
        self.progress = progress
        self.due_s = due_times_s(requests, options.speed) if options.speed else None
        self.stop = threading.Event()
        # Puts and evictions of several clients have no one order to count in.
        self.orphans = OrphanCounter() if options.clients == 1 else None
        self.clients = [_Client(self, dealt) for dealt in deal(requests, options.clients)]
        self.start_s = time.perf_counter()

    def settle(self) -> None:
        """Waits until exactly `capacity_blocks` are left, if the pool has been full."""
        if not self.store.settle(timeout=SETTLE_TIMEOUT_S):
            raise KvstoreError(f"eviction did not catch up in {SETTLE_TIMEOUT_S:g} s")
        if self.orphans is not None:
            self.orphans.evicted(self.store.evicted())


@dataclass(slots=True)
class _Tally:
    hit_blocks: int = 0
    hit_tokens: int = 0
    written_blocks: int = 0
    wrong_bytes: int = 0
    late_s: float = 0.0
    match_s: list[float] = field(default_factory=list)
    get_s: list[float] = field(default_factory=list)
    put_s: list[float] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    unstored: Counter[str] = field(default_factory=Counter)
    mismatches: list[Mismatch] = field(default_factory=list)


class _Client:
    """One thread's requests, buffer and figures."""

    def __init__(self, run: _Run, dealt: list[int]) -> None:
        self.run = run
        self.dealt = dealt
        self.tally = _Tally()
        self.error: BaseException | None = None
        shape = (run.summary.chain_blocks_max, run.options.block_bytes)
        try:
            self.buffer: Uint8Array = np.empty(shape, dtype=np.uint8)
        except MemoryError as error:
            raise NotEnoughMemory(
                f"no memory for a client's buffer of {shape[0]} blocks of {shape[1]} bytes"
            ) from error

    def run_all(self) -> None:
        for index in self.dealt:
            self._wait_until_due(index)
            if self.run.stop.is_set():
                return
            self._request(index)
            self.run.progress()

    def run_thread(self) -> None:
        try:
            self.run_all()
        except BaseException as error:  # raised again in the caller's thread
            self.error = error
            self.run.stop.set()

    def _wait_until_due(self, index: int) -> None:
        if self.run.due_s is None:
            return
        early_s = self.run.due_s[index] - (time.perf_counter() - self.run.start_s)
        if early_s > 0:
            self.run.stop.wait(min(early_s, threading.TIMEOUT_MAX))
        else:
            self.tally.late_s = max(self.tally.late_s, -early_s)

    def _request(self, index: int) -> None:
        request = self.run.requests[index]
        store, tally = self.run.store, self.tally
        ids = np.array(request.hash_ids, dtype=np.uint64)
        keys = keys_from_ids(self.run.spec, ids)
        if self.run.options.capacity_blocks:
            self.run.settle()

        start_s = time.perf_counter()
        match = store.match_prefix(keys)
        tally.match_s.append(time.perf_counter() - start_s)
        num_hit = self._read(match, index, ids) if match.blocks else 0
        tally.hit_blocks += num_hit
        tally.hit_tokens += min(num_hit * BLOCK_TOKENS, request.input_length)

        blocks = self.buffer[num_hit : len(ids)]
        make_payload(
            ids[num_hit:],
            self.run.options.block_bytes,
            generation=self.run.options.generation,
            out=blocks,
        )
        start_s = time.perf_counter()
        result = store.put(keys, blocks, skip_blocks=num_hit)
        tally.put_s.append(time.perf_counter() - start_s)
        tally.written_blocks += result.stored
        if self.run.orphans is not None:
            self.run.orphans.stored(list(keys), num_hit, result)
        if not result.ok:
            tally.unstored.update(_names(result, Status.OK, Status.EXISTS))

    def _read(self, match: Any, index: int, ids: Uint64Array) -> int:
        """Reads what matched, checks it all, and returns the leading run that came back."""
        self.buffer[: match.blocks].fill(POISON)
        start_s = time.perf_counter()
        with match as hit:
            out = self.buffer[: hit.blocks]
            result = hit.read(out)
        self.tally.get_s.append(time.perf_counter() - start_s)
        if not result.ok:
            self.tally.unread.update(_names(result, Status.OK))
        num_read = int(result.blocks)
        self._check(out[:num_read], index, ids[:num_read])
        return num_read

    def _check(self, got: Uint8Array, index: int, ids: Uint64Array) -> None:
        generation = self.run.options.generation
        for wrong in check_payload(got, ids, generation=generation).tolist():
            difference = first_difference(got[wrong], int(ids[wrong]), generation=generation)
            assert difference is not None  # check_payload just saw it
            self.tally.wrong_bytes += difference.wrong_bytes
            if len(self.tally.mismatches) < MISMATCHES_MAX:
                self.tally.mismatches.append(
                    Mismatch(
                        index,
                        wrong,
                        int(ids[wrong]),
                        difference.offset,
                        difference.expected.hex(),
                        difference.got.hex(),
                        difference.wrong_bytes,
                    )
                )


def _drive(run: _Run) -> None:
    """Runs all clients to their end; on any failure or interrupt all stop first, then it raises."""
    run.start_s = time.perf_counter()
    if len(run.clients) == 1:
        run.clients[0].run_all()
        return
    threads = [threading.Thread(target=client.run_thread) for client in run.clients]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        run.stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    for client in run.clients:
        if client.error is not None:
            raise client.error


def _names(statuses: Iterable[Status], *fine: Status) -> Counter[str]:
    return Counter(str(status) for status in statuses if status not in fine)


def _percentiles(seconds: list[float]) -> Percentiles:
    if not seconds:
        return Percentiles(0, 0.0, 0.0, 0.0)
    p50, p90, p99 = (np.percentile(seconds, (50, 90, 99)) * 1e6).tolist()
    return Percentiles(len(seconds), p50, p90, p99)


def _rate(amounts: Sequence[int], seconds: Sequence[float]) -> float:
    """10^9 a second: the sum of what each client reached while it was in the calls."""
    pairs = zip(amounts, seconds, strict=True)
    return sum(amount / spent for amount, spent in pairs if spent > 0) / 1e9


def _report(run: _Run, usage: Any, wall_s: float) -> ReplayReport:
    options, summary = run.options, run.summary
    tallies = [client.tally for client in run.clients]
    hit_blocks = sum(tally.hit_blocks for tally in tallies)
    hit_tokens = sum(tally.hit_tokens for tally in tallies)
    read = [tally.hit_blocks * options.block_bytes for tally in tallies]
    written = [tally.written_blocks * options.block_bytes for tally in tallies]
    mismatches = sorted(
        (each for tally in tallies for each in tally.mismatches), key=lambda each: each.request
    )
    return ReplayReport(
        block_bytes=options.block_bytes,
        capacity_blocks=options.capacity_blocks,
        clients=options.clients,
        speed=options.speed,
        requests=summary.requests,
        blocks=summary.blocks,
        distinct_blocks=summary.distinct_blocks,
        hit_blocks=hit_blocks,
        block_hit_ratio=hit_blocks / summary.blocks,
        input_tokens=summary.input_tokens,
        hit_tokens=hit_tokens,
        token_hit_ratio=hit_tokens / summary.input_tokens,
        read_bytes=sum(read),
        written_bytes=sum(written),
        read_gb_per_s=_rate(read, [sum(tally.get_s) for tally in tallies]),
        write_gb_per_s=_rate(written, [sum(tally.put_s) for tally in tallies]),
        match=_percentiles([each for tally in tallies for each in tally.match_s]),
        get=_percentiles([each for tally in tallies for each in tally.get_s]),
        put=_percentiles([each for tally in tallies for each in tally.put_s]),
        evictions=int(usage.evictions),
        orphaned=None if run.orphans is None else run.orphans.orphaned,
        blocks_left=int(usage.blocks),
        verified_bytes=sum(read),
        wrong_bytes=sum(tally.wrong_bytes for tally in tallies),
        unread_blocks=dict(sum((tally.unread for tally in tallies), Counter())),
        unstored_blocks=dict(sum((tally.unstored for tally in tallies), Counter())),
        mismatches=tuple(mismatches[:MISMATCHES_MAX]),
        late_ms_max=max(tally.late_s for tally in tallies) * 1000.0 if options.speed else None,
        wall_s=wall_s,
    )
