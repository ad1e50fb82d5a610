"""Numbers, names and files no one means: typed errors, never a crash, never a wait without end."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import ANY, opened

import kvstore
from kvstore.sim.workload import Workload, make_trace, read_trace, write_trace

HUGE = 10**400
LONG = 10**5000  # more digits than Python prints


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.keys(np.array([1, 2], object)),
        lambda store: store.keys(deque([1, None])),
        lambda store: store.keys([LONG]),
        lambda store: store.put(["a"], [b"x"], timeout=HUGE),
        lambda store: store.put(["a"], [b"x"], skip_blocks=LONG),
        lambda _: kvstore.open(ANY, lease_s=HUGE),
        lambda _: kvstore.open(ANY, dram=LONG),
        lambda _: kvstore.open(ANY, copy_threads=LONG),
        lambda _: kvstore.open(ANY, view_fraction=LONG),
        lambda _: make_trace(0, LONG),
        lambda _: make_trace(0, 1 << 63),
        lambda _: Workload(rate_per_s=1e-14),
    ],
)
def test_absurd_numbers_are_refused(call: Callable[[kvstore.Store], Any]) -> None:
    with opened() as store, pytest.raises(kvstore.InvalidArgument) as caught:
        call(store)
    assert len(str(caught.value)) < 300


def test_a_target_with_odd_attributes_is_refused() -> None:
    class Odd:
        shape = "ab"
        nbytes = "many"

    spec = kvstore.BlockSpec("odd", block_bytes=64)
    with opened(spec) as store:
        keys = store.keys(range(16))
        store.put(keys, [bytes(64)])
        with store.match_prefix(keys) as hit, pytest.raises(kvstore.InvalidArgument, match="Odd"):
            hit.read(Odd())


@pytest.mark.parametrize("name", ["timestamp", "input_length", "output_length"])
def test_a_row_beyond_all_measure_is_refused(tmp_path: Path, name: str) -> None:
    row = {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1], name: HUGE}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(kvstore.InvalidArgument, match=name):
        list(read_trace(path))


def test_only_regular_files_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for target in (Path("/dev/null"), folder, Path(), Path("/"), tmp_path / ("x" * 300)):
        with pytest.raises(kvstore.InvalidArgument):
            write_trace(target, make_trace(0, 1))
    assert Path("/dev/null").is_char_device()
    assert list(tmp_path.iterdir()) == [folder]
