"""Traces as files, made traces, and payloads that prove themselves. No store is involved."""

import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import InvalidArgument
from kvstore.sim.checkers import check_payload, first_difference, make_payload
from kvstore.sim.workload import (
    BLOCK_TOKENS,
    Request,
    Workload,
    make_trace,
    read_trace,
    summarize,
    write_trace,
)

ROW = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
GOOD = json.dumps(ROW).encode() + b"\n"


def row_with(**changes: object) -> bytes:
    return json.dumps({**ROW, **changes}).encode() + b"\n"


def row_without(name: str) -> bytes:
    return json.dumps({key: value for key, value in ROW.items() if key != name}).encode() + b"\n"


# ---- made traces ---------------------------------------------------------------------------------


def test_the_same_seed_writes_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    here, there = tmp_path / "here.jsonl.gz", tmp_path / "there.jsonl.gz"
    write_trace(here, make_trace(3, 150))
    code = (
        "import sys; from kvstore.sim.workload import make_trace, write_trace;"
        "write_trace(sys.argv[1], make_trace(3, 150))"
    )
    subprocess.run([sys.executable, "-c", code, str(there)], check=True)
    assert here.read_bytes() == there.read_bytes()
    assert here.read_bytes()[4:8] == bytes(4)  # gzip's time stamp
    assert make_trace(3, 150) != make_trace(4, 150)


def test_made_rows_have_the_published_form(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    assert write_trace(path, make_trace(1, 300)) == 300
    parent_of: dict[int, int] = {}
    last_ms = 0
    for line in path.read_text().splitlines():
        row = json.loads(line)
        assert list(row) == ["timestamp", "input_length", "output_length", "hash_ids"]
        assert len(row["hash_ids"]) == -(-row["input_length"] // BLOCK_TOKENS)
        assert row["timestamp"] >= last_ms
        last_ms = row["timestamp"]
        # An id stands for its block and everything before it: it never has two predecessors.
        for parent, child in zip([-1, *row["hash_ids"]], row["hash_ids"], strict=False):
            assert parent_of.setdefault(child, parent) == parent
    assert sorted(parent_of) == list(range(len(parent_of)))


def test_made_traces_hold_growing_chats_and_tool_calls() -> None:
    rows = make_trace(2, 600, Workload(tool_share=0.5))
    whole_chains = {row.hash_ids[: row.input_length // BLOCK_TOKENS] for row in rows}
    grown = sum(
        row.hash_ids[:end] in whole_chains
        for row in rows
        for end in [row.input_length // BLOCK_TOKENS - 1]
        if row.output_length > 50 and end > 3
    )
    assert grown > 20
    fifth_blocks = Counter(row.hash_ids[4] for row in rows if len(row.hash_ids) > 4)
    tools = {block for block, count in fifth_blocks.items() if count > 20}
    assert 3 <= len(tools) <= 6
    calls = [row for row in rows if len(row.hash_ids) > 4 and row.hash_ids[4] in tools]
    assert 0.4 < len(calls) / len(rows) < 0.6
    assert all(3 <= row.output_length <= 50 for row in calls)


def test_made_arrivals_are_a_poisson_process() -> None:
    stamps_ms = np.array([row.timestamp_ms for row in make_trace(0, 4000, Workload(rate_per_s=2))])
    gaps_ms = np.diff(stamps_ms)
    assert stamps_ms[0] == 0
    assert np.mean(gaps_ms) == pytest.approx(500, rel=0.05)
    assert np.std(gaps_ms) == pytest.approx(np.mean(gaps_ms), rel=0.05)  # exponential gaps


def test_default_workload_reuses_about_half_of_its_blocks() -> None:
    for seed in range(3):
        assert 0.5 < summarize(make_trace(seed, 1000)).hit_ratio_max < 0.65


@pytest.mark.parametrize(
    "change",
    [
        {"rate_per_s": 0.0},
        {"tool_share": 1.5},
        {"turns": 0.5},
        {"tools": 0},
        {"tool_output_tokens": (9, 3)},
        {"input_tokens_max": 6_144},
    ],
)
def test_impossible_workloads_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(change))):
        Workload(**change)


@pytest.mark.parametrize(("seed", "requests"), [(-1, 5), (0, 0)])
def test_impossible_counts_are_refused(seed: int, requests: int) -> None:
    with pytest.raises(InvalidArgument):
        make_trace(seed, requests)


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_reading_returns_what_was_written(tmp_path: Path, name: str) -> None:
    rows = make_trace(5, 40)
    write_trace(tmp_path / name, rows)
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
    assert list(read_trace(tmp_path / name)) == rows
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_gzip_is_recognised_without_its_suffix(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(GOOD))
    assert list(read_trace(path)) == [Request(5, 600, 3, (0, 1))]


def test_rows_stream_before_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOOD + b"broken\n")
    rows = read_trace(path)
    assert next(rows).hash_ids == (0, 1)
    with pytest.raises(InvalidArgument):
        next(rows)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{not json\n", "not JSON"),
        (b"\n", "not JSON"),
        (b'{"timestamp": "\xff"}\n', "not JSON"),
        (b"[" * 100_000 + b"\n", "not JSON"),
        (b"[1, 2]\n", "JSON object"),
        (row_without("timestamp"), "timestamp is missing"),
        (row_without("input_length"), "input_length is missing"),
        (row_without("output_length"), "output_length is missing"),
        (row_without("hash_ids"), "hash_ids is missing"),
        (row_with(timestamp=4), "in order of arrival"),
        (row_with(timestamp=1.5), "timestamp must be a whole number"),
        (row_with(input_length=True), "input_length must be a whole number"),
        (row_with(output_length=-1), "output_length must be a whole number"),
        (row_with(input_length=0, hash_ids=[]), "input_length is 0"),
        (row_with(hash_ids=[0]), "1 hash_ids, but 600 input tokens make 2 blocks"),
        (row_with(hash_ids=[0, 1, 2]), "3 hash_ids"),
        (row_with(hash_ids="01"), "must be a list"),
        (row_with(hash_ids=[0, "1"]), "whole numbers"),
        (row_with(hash_ids=[0, -1]), "whole numbers"),
        (row_with(hash_ids=[0, 1 << 63]), "whole numbers"),
        (row_with(hash_ids=[7, 7]), "repeat"),
    ],
)
def test_malformed_rows_are_named_by_file_and_line(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOOD + line + GOOD)
    with pytest.raises(InvalidArgument, match=reason) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "\n" not in str(caught.value)


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    for content in (b"", gzip.compress(b"")):
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match="empty trace"):
            list(read_trace(path))
    with pytest.raises(InvalidArgument, match="No such file"):
        list(read_trace(tmp_path / "absent.jsonl"))
    with pytest.raises(InvalidArgument, match="directory"):
        list(read_trace(tmp_path))


def test_truncated_and_damaged_gzip_are_told_from_a_short_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    whole = gzip.compress(GOOD * 5000, mtime=0)
    wrong_checksum = whole[:-5] + bytes([whole[-5] ^ 0xFF]) + whole[-4:]
    for content in (whole[: len(whole) // 2], whole[:-8], wrong_checksum, whole[:3]):
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match="truncated or damaged"):
            list(read_trace(path))


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        write_trace(tmp_path / "absent" / "trace.jsonl", make_trace(0, 1))
    (tmp_path / "trace.jsonl").mkdir()
    with pytest.raises(InvalidArgument, match="not a regular file"):
        write_trace(tmp_path / "trace.jsonl", make_trace(0, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


# ---- payloads ------------------------------------------------------------------------------------

SIZES = [8, 9, 15, 1000, 4096, 65536 + 13, (1 << 20) + 8]  # about the pieces of 64 KiB, and tails


@pytest.mark.parametrize("block_bytes", [1, 7, *SIZES])
def test_payloads_match_themselves_and_nothing_else(block_bytes: int) -> None:
    ids = np.array([5, 2**63, 7, 0], dtype=np.uint64)
    payload = make_payload(ids, block_bytes, generation=1)
    assert payload.shape == (4, block_bytes)
    assert check_payload(payload, ids, generation=1).tolist() == []
    into = np.zeros_like(payload)
    assert make_payload(ids, block_bytes, generation=1, out=into) is into
    assert np.array_equal(into, payload)
    assert first_difference(payload[2], 7, generation=1) is None


@pytest.mark.parametrize("block_bytes", SIZES)
def test_a_mix_up_shows(block_bytes: int) -> None:
    ids = np.arange(6)
    payload = make_payload(ids, block_bytes)
    payload[[1, 4]] = payload[[4, 1]]
    assert check_payload(payload, ids).tolist() == [1, 4]
    assert check_payload(make_payload(ids, block_bytes, generation=2), ids).tolist() == [*range(6)]


@pytest.mark.parametrize("block_bytes", SIZES)
@pytest.mark.parametrize("by", [1, 4, 8, 65536])
def test_a_shift_shows(block_bytes: int, by: int) -> None:
    ids = np.arange(3)
    payload = make_payload(ids, block_bytes)
    payload[1, by:] = payload[1, :-by].copy()
    assert check_payload(payload, ids).tolist() == ([1] if by < block_bytes else [])


@pytest.mark.parametrize("block_bytes", SIZES)
def test_a_zero_fill_shows_at_either_end(block_bytes: int) -> None:
    ids = np.arange(3)
    for part in (slice(0, 8), slice(block_bytes - 8, block_bytes), slice(None)):
        payload = make_payload(ids, block_bytes)
        payload[2, part] = 0
        assert check_payload(payload, ids).tolist() == [2]


@pytest.mark.parametrize("block_bytes", SIZES)
def test_a_truncation_shows(block_bytes: int) -> None:
    # The front of a longer block is not the payload of a shorter one.
    longer = make_payload([3], block_bytes + 8)
    assert check_payload(longer[:, :block_bytes], [3]).tolist() == [0]
    with pytest.raises(InvalidArgument, match="2 blocks for 3 ids"):
        check_payload(make_payload([0, 1], block_bytes), [0, 1, 2])


@pytest.mark.parametrize("block_bytes", [13, 65536 + 13])
def test_any_single_wrong_byte_shows_and_is_described(block_bytes: int) -> None:
    ids = np.arange(2)
    payload = make_payload(ids, block_bytes)
    places = {0, 1, 7, 8, block_bytes // 2, block_bytes - 13, block_bytes - 6, block_bytes - 1}
    for offset in sorted(places):
        before = payload[1, offset : offset + 8].tobytes()
        payload[1, offset] ^= 0x10
        assert check_payload(payload, ids).tolist() == [1]
        difference = first_difference(payload[1], 1)
        assert difference is not None
        assert (difference.offset, difference.wrong_bytes) == (offset, 1)
        assert difference.expected == before
        assert difference.got == payload[1, offset : offset + 8].tobytes()
        payload[1, offset] ^= 0x10


def test_blocks_that_are_wrong_in_different_places_all_show() -> None:
    payload = make_payload(np.arange(4), 3 * 65536)
    payload[0, 10] ^= 1
    payload[1, 65536 + 10] ^= 1
    payload[3, 2 * 65536 + 10] ^= 1
    assert check_payload(payload, np.arange(4)).tolist() == [0, 1, 3]


def test_every_word_names_its_key_generation_and_offset() -> None:
    words = [make_payload(np.arange(5), 1 << 17, generation=each).view("<u8") for each in range(2)]
    assert len(np.unique(words)) == 2 * 5 * (1 << 14)


def test_payload_calls_with_wrong_shapes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least 1"):
        make_payload([1], 0)
    with pytest.raises(InvalidArgument, match="one dimension"):
        make_payload([[1]], 8)
    with pytest.raises(InvalidArgument, match="generation"):
        make_payload([1], 8, generation=-1)
    with pytest.raises(InvalidArgument, match="shape"):
        make_payload([1], 8, out=np.empty((2, 8), np.uint8))
    with pytest.raises(InvalidArgument, match="two dimensions"):
        check_payload(np.empty(8, np.uint8), [1])
