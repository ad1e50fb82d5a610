"""One client of a replay: its requests against a store, its buffer, its figures.

It runs in the replay's own process, or as `python -m kvstore.sim.client` in one of its own, which
reads its work as JSON lines on stdin and answers with JSON lines on stdout:

    {"address", "token", "work"}, a row a request, null ──>   <── {"ready": its transport}
    {"go": true} ──>            <── {"done": index} each, {"tally": ...}; at any time {"error": ...}

The end of stdin ends such a process at once: it does not outlive who started it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import IO, Any, Final

import numpy as np

import kvstore
from kvstore.errors import KvstoreError, NodeUnavailable, NotEnoughMemory
from kvstore.keys import keys_from_ids
from kvstore.sim.checkers import (
    OrphanCounter,
    Uint8Array,
    Uint64Array,
    check_payload,
    first_difference,
    make_payload,
)
from kvstore.sim.workload import BLOCK_TOKENS
from kvstore.spec import BlockSpec
from kvstore.types import Status

POISON: Final = 0xA5  # a target is filled with it, so bytes that were not written show
MISMATCHES_MAX: Final = 10  # described in a report; all are counted
SETTLE_TIMEOUT_S: Final = 30.0
CALL_TIMEOUT_S: Final = 30.0  # over a node: many clients on few CPUs wait for each other
EXIT_ORPHANED: Final = 3
STDIN: Final = 0


@dataclass(frozen=True, slots=True)
class Task:
    """One request for a client. `due_s`: when it is sent, from the start; None: at once."""

    index: int
    due_s: float | None
    input_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all clients of a replay have in common."""

    block_bytes: int
    generation: int  # written into every payload
    settle: bool  # before each request, so that eviction has reached its capacity
    chain_blocks_max: int
    salt: str  # hex; of the namespace: a node's replays are strangers to each other

    @property
    def spec(self) -> BlockSpec:
        """The replay's namespace."""
        return BlockSpec(
            model="trace replay",
            salt=bytes.fromhex(self.salt),
            block_tokens=BLOCK_TOKENS,
            block_bytes=self.block_bytes,
        )


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


@dataclass(slots=True)
class Tally:
    """What one client did. Times in seconds, one a call."""

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

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "mismatches": [asdict(each) for each in self.mismatches]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Tally:
        """The inverse of `as_dict`."""
        tally = cls(**values)
        tally.unread, tally.unstored = Counter(tally.unread), Counter(tally.unstored)
        tally.mismatches = [Mismatch(**each) for each in values["mismatches"]]
        return tally


class Client:
    """Runs tasks, in order, against a store that somebody else opened and closes."""

    def __init__(
        self, store: Any, work: Work, progress: Callable[[int], None], orphans: OrphanCounter | None
    ) -> None:
        self.store = store
        self.work = work
        self.spec = work.spec
        self.progress = progress  # told the index of each request that is done
        self.orphans = orphans
        self.tally = Tally()
        shape = (work.chain_blocks_max, work.block_bytes)
        try:
            self.buffer: Uint8Array = np.empty(shape, dtype=np.uint8)
        except MemoryError as error:
            raise NotEnoughMemory(
                f"no memory for a client's buffer of {shape[0]} blocks of {shape[1]} bytes"
            ) from error

    def run(self, tasks: Iterable[Task]) -> Tally:
        """All of them; what came of it."""
        start_s = time.perf_counter()
        for task in tasks:
            if task.due_s is not None:
                self._wait_until(start_s + task.due_s)
            self._request(task)
            self.progress(task.index)
        return self.tally

    def settle(self) -> None:
        """Waits until background eviction has reached its goal."""
        settle(self.store)
        if self.orphans is not None:
            self.orphans.evicted(self.store.evicted())

    def _wait_until(self, due_s: float) -> None:
        early_s = due_s - time.perf_counter()
        if early_s > 0:
            time.sleep(min(early_s, threading.TIMEOUT_MAX))
        else:
            self.tally.late_s = max(self.tally.late_s, -early_s)

    def _request(self, task: Task) -> None:
        tally = self.tally
        ids = np.array(task.hash_ids, dtype=np.uint64)
        keys = keys_from_ids(self.spec, ids)
        if self.work.settle:
            self.settle()

        start_s = time.perf_counter()
        match = self.store.match_prefix(keys)
        tally.match_s.append(time.perf_counter() - start_s)
        num_hit = self._read(match, task.index, ids) if match.blocks else 0
        tally.hit_blocks += num_hit
        tally.hit_tokens += min(num_hit * BLOCK_TOKENS, task.input_length)

        blocks = self.buffer[num_hit : len(ids)]
        make_payload(
            ids[num_hit:], self.work.block_bytes, generation=self.work.generation, out=blocks
        )
        start_s = time.perf_counter()
        result = self.store.put(keys, blocks, skip_blocks=num_hit)
        tally.put_s.append(time.perf_counter() - start_s)
        tally.written_blocks += result.stored
        if self.orphans is not None:
            self.orphans.stored(list(keys), num_hit, result)
        if not result.ok:
            unstored = _names(result, Status.OK, Status.EXISTS)
            if str(Status.UNAVAILABLE) in unstored:
                raise NodeUnavailable(f"request {task.index}: {result.message or 'node is gone'}")
            tally.unstored.update(unstored)

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
        generation = self.work.generation
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


def settle(store: Any) -> None:
    """Waits until exactly the wanted capacity is left, if the pool has been full."""
    if not store.settle(timeout=SETTLE_TIMEOUT_S):
        raise KvstoreError(f"eviction did not catch up in {SETTLE_TIMEOUT_S:g} s")


def _names(statuses: Iterable[Status], *fine: Status) -> Counter[str]:
    return Counter(str(status) for status in statuses if status not in fine)


# ---- in a process of its own ---------------------------------------------------------------------


def serve(source: IO[bytes], answer: Callable[[dict[str, Any]], None]) -> None:
    """Reads the work, does it, answers. The store's errors are answers; an early end is an end."""
    lines = (json.loads(line) for line in source)
    setup = next(lines, None)
    if setup is None:
        return
    work = Work(**setup["work"])
    tasks = [Task(*row) for row in _rows(lines)]
    try:
        token = bytes.fromhex(setup["token"]) or None
        with kvstore.connect(
            setup["address"], work.spec, token=token, timeout_s=CALL_TIMEOUT_S
        ) as store:
            client = Client(store, work, lambda index: answer({"done": index}), None)
            answer({"ready": store.transport})
            if next(lines, None) is None:
                return
            _end_with_stdin()
            answer({"tally": client.run(tasks).as_dict()})
    except KvstoreError as error:
        answer({"error": {"kind": type(error).__name__, "message": str(error)}})


def _rows(lines: Iterator[Any]) -> Iterator[list[Any]]:
    """Rows up to the line that says that there are no more."""
    return iter(lambda: next(lines, None), None)


def _end_with_stdin() -> None:
    """From here on the end of stdin, which says that the parent is gone, ends the process."""

    def watch() -> None:
        while os.read(STDIN, 4096):
            pass
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, daemon=True).start()


def _answer(value: dict[str, Any]) -> None:
    try:
        print(json.dumps(value), flush=True)
    except BrokenPipeError:
        os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    serve(sys.stdin.buffer, _answer)
