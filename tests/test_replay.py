"""A trace through a real store, held against a small model of LRU that knows nothing of it."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import _core
from kvstore.errors import InvalidArgument
from kvstore.sim.checkers import OrphanCounter, Uint8Array
from kvstore.sim.replay import (
    ReplayOptions,
    ReplayReport,
    deal,
    due_times_s,
    pool_size,
    replay,
)
from kvstore.sim.workload import (
    BLOCK_TOKENS,
    Request,
    make_trace,
    read_trace,
    summarize,
)
from kvstore.types import Status

TRACE = make_trace(11, 400)
SUMMARY = summarize(TRACE)


def chain(timestamp_ms: int, *ids: int, last_tokens: int = BLOCK_TOKENS) -> Request:
    tokens = BLOCK_TOKENS * (len(ids) - 1) + last_tokens
    return Request(timestamp_ms, tokens, 1, ids)


def lru_model(requests: Sequence[Request], capacity_blocks: int) -> tuple[int, int, int]:
    """Hit blocks, hit tokens and evictions of one LRU list, least recent first."""
    held: OrderedDict[int, None] = OrderedDict()
    hit_blocks = hit_tokens = evictions = 0
    for request in [*requests, Request(0, 0, 0, ())]:  # the last one only evicts
        while len(held) > capacity_blocks:
            held.popitem(last=False)
            evictions += 1
        leading = 0
        while leading < len(request.hash_ids) and request.hash_ids[leading] in held:
            leading += 1
        hit_blocks += leading
        hit_tokens += min(leading * BLOCK_TOKENS, request.input_length)
        for block in reversed(request.hash_ids):
            held[block] = None
            held.move_to_end(block)
    return hit_blocks, hit_tokens, evictions


def assert_clean(report: ReplayReport) -> None:
    assert report.ok
    assert report.wrong_bytes == 0
    assert report.verified_bytes == report.hit_blocks * report.block_bytes
    assert report.mismatches == ()
    assert report.unread_blocks == report.unstored_blocks == {}
    assert report.orphaned == 0


# ---- against the model ---------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 777, 4096, 65536])
def test_unlimited_replay_hits_all_but_each_blocks_first_use(block_bytes: int) -> None:
    report = replay(TRACE, ReplayOptions(block_bytes=block_bytes))
    assert_clean(report)
    assert report.block_hit_ratio == pytest.approx(SUMMARY.hit_ratio_max, abs=1e-12)
    assert report.hit_tokens == lru_model(TRACE, SUMMARY.distinct_blocks)[1]
    assert report.token_hit_ratio == report.hit_tokens / SUMMARY.input_tokens
    assert report.evictions == 0
    assert report.blocks_left == SUMMARY.distinct_blocks
    assert report.written_bytes == SUMMARY.distinct_blocks * block_bytes


@pytest.mark.parametrize("capacity_blocks", [1, 40, 150, 500, 511, 1200])
def test_bounded_replay_equals_the_model(capacity_blocks: int) -> None:
    report = replay(TRACE, ReplayOptions(block_bytes=4096, capacity_blocks=capacity_blocks))
    assert_clean(report)
    expected = lru_model(TRACE, capacity_blocks)
    assert (report.hit_blocks, report.hit_tokens, report.evictions) == expected
    assert report.blocks_left == capacity_blocks


def test_capacity_is_exact_for_blocks_of_more_than_a_frame() -> None:
    trace = TRACE[:12]
    for block_bytes in (_core.FRAME_BYTES, _core.FRAME_BYTES + 5, 2 * _core.FRAME_BYTES + 700_000):
        report = replay(trace, ReplayOptions(block_bytes=block_bytes, capacity_blocks=30))
        assert_clean(report)
        assert (report.hit_blocks, report.hit_tokens, report.evictions) == lru_model(trace, 30)
        assert report.blocks_left == 30


def test_a_partial_last_block_counts_its_own_tokens() -> None:
    requests = [chain(0, 1, 2, last_tokens=100), chain(1, 1, 2, last_tokens=100)]
    report = replay(requests, ReplayOptions(block_bytes=64))
    assert (report.hit_blocks, report.hit_tokens, report.input_tokens) == (2, 612, 1224)


TRACE_RATIOS = [
    ("conversation_trace.jsonl.gz", 0, 0.3664),
    ("conversation_trace.jsonl.gz", 30_000, 0.3257),
    ("conversation_trace.jsonl.gz", 10_000, 0.2116),
    ("synthetic_trace.jsonl.gz", 0, 0.6396),
    ("synthetic_trace.jsonl.gz", 30_000, 0.6242),
    ("synthetic_trace.jsonl.gz", 10_000, 0.4239),
]


@pytest.mark.trace
@pytest.mark.parametrize(("name", "capacity_blocks", "ratio"), TRACE_RATIOS)
def test_recorded_traces_hit_as_their_authors_lru(
    name: str, capacity_blocks: int, ratio: float
) -> None:
    requests = list(read_trace(Path(os.environ["KVSTORE_TRACES"]) / name))
    report = replay(requests, ReplayOptions(block_bytes=4096, capacity_blocks=capacity_blocks))
    assert_clean(report)
    assert report.block_hit_ratio == pytest.approx(ratio, abs=0.001)
    assert report.blocks_left == (capacity_blocks or report.distinct_blocks)


# ---- a store that lies ---------------------------------------------------------------------------


class LyingStore:
    """A real store whose hits are read by `read(hit, out)`; remembers that it was closed."""

    def __init__(self, read: Callable[[Any, Uint8Array], Any]) -> None:
        self.read = read
        self.closed = False

    def open(self, spec: kvstore.BlockSpec, **options: Any) -> AbstractContextManager[Any]:
        self.store = kvstore.open(spec, **options)
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *raised: object) -> None:
        self.store.close()
        self.closed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def match_prefix(self, keys: Any) -> Any:
        return LyingMatch(self.store.match_prefix(keys), self.read)


class LyingMatch:
    def __init__(self, match: Any, read: Callable[[Any, Uint8Array], Any]) -> None:
        self.match = match
        self.lie = read
        self.blocks = match.blocks

    def __enter__(self) -> Any:
        self.hit = self.match.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.match.__exit__(*raised)

    def read(self, out: Uint8Array) -> Any:
        return self.lie(self.hit, out)


def damage_bytes(*places: tuple[int, int]) -> Callable[[Any, Uint8Array], Any]:
    """A read after which (block, offset) holds another byte."""

    def read(hit: Any, out: Uint8Array) -> Any:
        result = hit.read(out)
        for place in places:
            out[place] ^= 0xFF
        return result

    return read


def test_wrong_bytes_are_counted_and_named() -> None:
    requests = [chain(0, 4, 5, 6), chain(1, 4, 5, 6, 7)]

    lying = LyingStore(damage_bytes((1, 100), (1, 102)))
    report = replay(requests, ReplayOptions(block_bytes=1000), open_store=lying.open)
    assert not report.ok
    assert report.wrong_bytes == 2
    (mismatch,) = report.mismatches
    assert (mismatch.request, mismatch.key_index, mismatch.hash_id) == (1, 1, 5)
    assert (mismatch.offset, mismatch.wrong_bytes) == (100, 2)
    expected, got = bytes.fromhex(mismatch.expected), bytes.fromhex(mismatch.got)
    assert [a ^ b for a, b in zip(expected, got, strict=True)] == [255, 0, 255, 0, 0, 0, 0, 0]
    assert report.as_dict()["ok"] is False


def test_a_read_that_fills_nothing_is_wrong_bytes() -> None:
    # The target still holds the very bytes that were put from it, so it must not be left alone.
    requests = [chain(0, 1, 2), chain(1, 1, 2)]
    lying = LyingStore(lambda hit, out: hit.read(np.empty_like(out)))
    report = replay(requests, ReplayOptions(), open_store=lying.open)
    assert report.wrong_bytes > 1.9 * report.block_bytes


def test_leased_blocks_that_do_not_come_back_fail_the_replay() -> None:
    class Lost:
        blocks = 1
        ok = False

        def __iter__(self) -> Iterator[Status]:
            return iter([Status.OK, Status.CORRUPT])

    def lose(hit: Any, out: Uint8Array) -> Any:
        hit.read(out)
        return Lost()

    requests = [chain(0, 1, 2), chain(1, 1, 2)]
    report = replay(requests, ReplayOptions(), open_store=LyingStore(lose).open)
    assert not report.ok
    assert report.unread_blocks == {"corrupt": 1}
    assert report.hit_blocks == 1
    assert report.wrong_bytes == 0


def test_described_mismatches_are_bounded_and_all_are_counted() -> None:
    chats = [chain(index, 10 * (index % 2), 10 * (index % 2) + 1) for index in range(40)]
    lying = LyingStore(damage_bytes((0, 0), (1, 0)))
    report = replay(chats, ReplayOptions(block_bytes=64), open_store=lying.open)
    assert report.wrong_bytes == 2 * 38
    assert len(report.mismatches) == 10


def test_a_failing_replay_closes_the_store() -> None:
    lying = LyingStore(damage_bytes())
    calls = 0

    def fail_later() -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        replay(TRACE, ReplayOptions(), progress=fail_later, open_store=lying.open)
    assert lying.closed
    assert calls == 5


def test_evictions_that_leave_a_child_behind_are_counted() -> None:
    chain = [b"a", b"b", b"c"]
    orphans = OrphanCounter()
    orphans.stored(chain, 0, [Status.OK] * 3)
    orphans.stored([b"a", b"b", b"d"], 2, [Status.OK])
    orphans.evicted([b"c", b"d", b"b", b"a"])
    assert orphans.orphaned == 0
    orphans.stored(chain, 0, [Status.OK, Status.EXISTS, Status.OUT_OF_SPACE])
    orphans.evicted([b"a"])
    assert orphans.orphaned == 0
    orphans.stored(chain, 0, [Status.OK] * 3)
    orphans.evicted([b"b", b"a", b"c"])
    assert orphans.orphaned == 1
    orphans.stored(chain, 0, [Status.OK] * 3)
    orphans.evicted([b"a", b"b", b"c"])
    assert orphans.orphaned == 3


def test_a_store_that_evicts_heads_first_is_seen() -> None:
    class HeadsFirst(LyingStore):
        """Takes a chain apart from its head, as no store should."""

        def evicted(self) -> list[bytes]:
            held = [each.key for each in self.store.list() if each.key in self.order]
            victims = sorted(held, key=self.order.index)
            self.store.remove(np.frombuffer(b"".join(victims), np.uint8).reshape(-1, 32))
            return victims

        def put(self, keys: Any, blocks: Any, **options: Any) -> Any:
            self.order = [*getattr(self, "order", []), *keys]
            return self.store.put(keys, blocks, **options)

    requests = [chain(0, 1, 2, 3), chain(1, 9)]
    report = replay(
        requests, ReplayOptions(block_bytes=64), open_store=HeadsFirst(damage_bytes()).open
    )
    assert report.orphaned == 2


# ---- plans ---------------------------------------------------------------------------------------


def test_progress_is_called_once_a_request() -> None:
    calls: list[None] = []
    replay(TRACE[:50], ReplayOptions(block_bytes=64), progress=lambda: calls.append(None))
    assert len(calls) == 50


@pytest.mark.parametrize("block_bytes", [1, 65, 4096, 65536, 700_000, 2 << 20, (2 << 20) + 9])
@pytest.mark.parametrize("clients", [1, 4])
def test_pools_round_up_to_whole_frames_and_reserve_the_rest(
    block_bytes: int, clients: int
) -> None:
    options = ReplayOptions(block_bytes=block_bytes, capacity_blocks=100, clients=clients)
    size = pool_size(options, SUMMARY)
    assert size.dram_bytes % _core.FRAME_BYTES == 0
    assert size.slots - size.reserve_blocks == 100
    assert size.reserve_blocks >= clients * SUMMARY.chain_blocks_max
    assert size.dram_bytes >= size.slots * block_bytes
    if block_bytes < _core.FRAME_BYTES:
        frames = size.dram_bytes // _core.FRAME_BYTES
        assert size.slots == frames * _core.slots_per_frame(block_bytes)


def test_chats_stay_with_one_client_in_order_and_work_is_spread() -> None:
    dealt = deal(TRACE, 4)
    assert sorted(index for each in dealt for index in each) == list(range(len(TRACE)))
    assert all(each == sorted(each) for each in dealt)
    load = [sum(len(TRACE[index].hash_ids) for index in each) for each in dealt]
    assert max(load) < 2 * min(load)

    # Two chats behind one shared block 0, turn by turn; a partial last block is overtaken.
    rows = [
        chain(0, 0, 1, 2, last_tokens=9),
        chain(1, 0, 3, 4),
        chain(2, 0, 1, 5, 6),
        chain(3, 0, 3, 4, 7),
        chain(4, 0, 1, 5, 6, 8),
    ]
    assert deal(rows, 2) == [[0, 2, 4], [1, 3]]
    assert deal(rows, 1) == [[0, 1, 2, 3, 4]]


def test_requests_of_a_tick_are_spread_inside_it() -> None:
    stamps_ms = [1000, 1000, 1000, 4000, 7000, 7000]
    rows = [chain(stamp, index) for index, stamp in enumerate(stamps_ms)]
    assert due_times_s(rows, 1.0) == pytest.approx([0, 1, 2, 3, 6, 7.5])
    assert due_times_s(rows, 10.0) == pytest.approx([0, 0.1, 0.2, 0.3, 0.6, 0.75])
    assert due_times_s(rows[:3], 1.0) == [0, 0, 0]


def test_speed_paces_the_requests() -> None:
    rows = [chain(index * 100, index) for index in range(6)]
    paced = replay(rows, ReplayOptions(block_bytes=64, speed=2.0))
    assert 0.25 <= paced.wall_s < 5.0
    assert paced.late_ms_max is not None
    assert replay(rows, ReplayOptions(block_bytes=64)).late_ms_max is None


@pytest.mark.parametrize(
    "change",
    [
        {"block_bytes": 0},
        {"capacity_blocks": -1},
        {"clients": 0},
        {"clients": 257},
        {"speed": -1.0},
        {"speed": float("nan")},
        {"speed": float("inf")},
    ],
)
def test_impossible_options_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(change)).partition("_")[0]):
        ReplayOptions(**change)


def test_an_embedded_store_has_one_client() -> None:
    with pytest.raises(InvalidArgument, match="one client"):
        replay(TRACE, ReplayOptions(clients=2))


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one request"):
        replay([], ReplayOptions())


def test_more_memory_than_the_machine_has_is_refused() -> None:
    huge = ReplayOptions(block_bytes=64 << 10, capacity_blocks=1 << 32)
    with pytest.raises(kvstore.NotEnoughMemory):
        replay(TRACE, huge)
