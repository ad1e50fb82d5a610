"""Replays a trace through an embedded store and checks every byte that comes back.

Per request, in order: keys from its `hash_ids` (a partial last block included), `match_prefix`, a
read of what matched, the check, then a put that names the whole chain and sends what was missing
(`client`). One client in trace order: its figures are exact. `replay` opens the store and closes it
on every way out. `processes` has several clients, in processes of their own, over one node.
The clocks are here and in `client`; `workload` has none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import numpy as np

import kvstore
from kvstore import _core
from kvstore.errors import InvalidArgument
from kvstore.sim.checkers import OrphanCounter
from kvstore.sim.client import MISMATCHES_MAX, Client, Mismatch, Tally, Task, Work
from kvstore.sim.workload import BLOCK_TOKENS, Request, TraceSummary, summarize
from kvstore.spec import BlockSpec

UNLIMITED_RESERVE: Final = 1  # the smallest; 0 would let the store choose one
CLIENTS_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How a trace is replayed. Checked when made: raises InvalidArgument."""

    block_bytes: int = 64 << 10  # bytes of each 512-token block; real KV has more, ratios are equal
    capacity_blocks: int = 0  # blocks left before each lookup once the pool is full; 0 = unlimited
    clients: int = 1  # more are processes over one node; the turns of a chat stay on one, in order
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
    transport: str  # "local", or how the clients reached the node: "shm", "tcp"
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
    orphaned: int | None  # evictions that left a child behind; None: over a node, not counted
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


def plan(
    requests: Sequence[Request], options: ReplayOptions, summary: TraceSummary, salt: bytes = b""
) -> tuple[Work, list[list[Task]]]:
    """What all clients have in common, and the tasks of each."""
    work = Work(
        block_bytes=options.block_bytes,
        generation=options.generation,
        settle=options.capacity_blocks > 0,
        chain_blocks_max=summary.chain_blocks_max,
        salt=salt.hex(),
    )
    due_s = due_times_s(requests, options.speed) if options.speed else None
    tasks = [
        Task(index, due_s[index] if due_s else None, request.input_length, request.hash_ids)
        for index, request in enumerate(requests)
    ]
    return work, [[tasks[index] for index in dealt] for dealt in deal(requests, options.clients)]


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

    `progress` is called after each request. Wrong bytes do not raise: see `ReplayReport.ok`.
    Raises InvalidArgument for an empty trace, NotEnoughMemory if this machine lacks the memory, and
    whatever the store raises.
    """
    if options.clients != 1:
        raise InvalidArgument("an embedded store has one client; several are processes over a node")
    summary = summarize(requests)
    size = pool_size(options, summary)
    work, (tasks,) = plan(requests, options, summary)
    with open_store(
        work.spec,
        dram=size.dram_bytes,
        reserve_blocks=size.reserve_blocks,
        log_evictions=True,
    ) as store:
        advance = progress or (lambda: None)
        orphans = OrphanCounter()
        client = Client(store, work, lambda _: advance(), orphans)
        start_s = time.perf_counter()
        tally = client.run(tasks)
        wall_s = time.perf_counter() - start_s
        client.settle()
        store.audit()
        usage = store.usage()
    return make_report(
        options,
        summary,
        [tally],
        transport="local",
        evictions=int(usage.evictions),
        orphaned=orphans.orphaned,
        blocks_left=int(usage.blocks),
        wall_s=wall_s,
    )


def _percentiles(seconds: list[float]) -> Percentiles:
    if not seconds:
        return Percentiles(0, 0.0, 0.0, 0.0)
    p50, p90, p99 = (np.percentile(seconds, (50, 90, 99)) * 1e6).tolist()
    return Percentiles(len(seconds), p50, p90, p99)


def _rate(amounts: Sequence[int], seconds: Sequence[float]) -> float:
    """10^9 a second: the sum of what each client reached while it was in the calls."""
    pairs = zip(amounts, seconds, strict=True)
    return sum(amount / spent for amount, spent in pairs if spent > 0) / 1e9


def make_report(
    options: ReplayOptions,
    summary: TraceSummary,
    tallies: Sequence[Tally],
    *,
    transport: str,
    evictions: int,
    orphaned: int | None,
    blocks_left: int,
    wall_s: float,
) -> ReplayReport:
    """The figures of all clients in one."""
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
        transport=transport,
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
        evictions=evictions,
        orphaned=orphaned,
        blocks_left=blocks_left,
        verified_bytes=sum(read),
        wrong_bytes=sum(tally.wrong_bytes for tally in tallies),
        unread_blocks=dict(sum((tally.unread for tally in tallies), Counter())),
        unstored_blocks=dict(sum((tally.unstored for tally in tallies), Counter())),
        mismatches=tuple(mismatches[:MISMATCHES_MAX]),
        late_ms_max=max(tally.late_s for tally in tallies) * 1000.0 if options.speed else None,
        wall_s=wall_s,
    )
