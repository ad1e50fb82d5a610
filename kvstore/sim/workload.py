"""Requests: what a replay asks of a store, read from a trace or made from a seed.

A trace is a sequence of `Request`. On disk it has the JSONL form of the Mooncake project's open
traces: one object a line, `timestamp` (ms from the start), `input_length` and `output_length`
(tokens), and `hash_ids`: one id per 512-token block of the input, the last block possibly partial.
An id stands for the block and everything before it, so an equal id means an equal prefix.

Pure: no store, clock or thread. Equal seeds give equal traces, as long as numpy draws alike.
"""

from __future__ import annotations

import bisect
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, cast

import numpy as np

from kvstore.config import show
from kvstore.errors import InvalidArgument

BLOCK_TOKENS: Final = 512  # the traces' block, fixed by their form
REQUESTS_MAX: Final = 100_000_000  # of a made trace
NUMBER_MAX: Final = 1 << 53  # of tokens or milliseconds
LINE_BYTES_MAX: Final = 16 << 20  # a longer line is no trace: an id costs under 20 bytes
ID_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace. Lengths in tokens; `len(hash_ids) == ceil(input_length / 512)`."""

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What is true of a trace before anything is replayed. `hit_ratio_max` is by blocks."""

    requests: int
    blocks: int
    distinct_blocks: int
    chain_blocks_max: int
    input_tokens: int
    output_tokens: int
    duration_ms: int

    @property
    def hit_ratio_max(self) -> float:
        """Block hit ratio of a store that never evicts: each distinct block misses once."""
        return 1.0 - self.distinct_blocks / self.blocks if self.blocks else 0.0


def summarize(requests: Sequence[Request]) -> TraceSummary:
    """Counts a trace. Raises InvalidArgument if it has no request."""
    if not requests:
        raise InvalidArgument("a trace needs at least one request")
    distinct: set[int] = set()
    for request in requests:
        distinct.update(request.hash_ids)
    return TraceSummary(
        requests=len(requests),
        blocks=sum(len(request.hash_ids) for request in requests),
        distinct_blocks=len(distinct),
        chain_blocks_max=max(len(request.hash_ids) for request in requests),
        input_tokens=sum(request.input_length for request in requests),
        output_tokens=sum(request.output_length for request in requests),
        duration_ms=requests[-1].timestamp_ms - requests[0].timestamp_ms,
    )


# ---- traces in files -----------------------------------------------------------------------------


def read_trace(path: str | os.PathLike[str]) -> Iterator[Request]:
    """Yields a trace's requests in order, one line in memory at a time; gzip is told by its magic.

    Raises InvalidArgument, naming file and line, for an unreadable, truncated or empty file, a line
    that is no JSON object, a missing or ill-typed field, ids that do not fit the input length,
    repeat within a row or leave 0..2^63-1, and a timestamp that goes back.
    """
    name = os.fspath(path)
    line_number = 0
    last_ms = 0
    try:
        with _open_trace(name) as lines:
            while line := lines.readline(LINE_BYTES_MAX + 1):
                line_number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise InvalidArgument(f"{name}:{line_number}: line over {LINE_BYTES_MAX} bytes")
                request = _parse_row(line, f"{name}:{line_number}")
                if request.timestamp_ms < last_ms:
                    raise InvalidArgument(
                        f"{name}:{line_number}: timestamp {request.timestamp_ms} ms after "
                        f"{last_ms} ms: rows must be in order of arrival"
                    )
                last_ms = request.timestamp_ms
                yield request
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidArgument(
            f"{name}: gzip data is truncated or damaged after line {line_number}: {error}"
        ) from error
    except OSError as error:
        raise InvalidArgument(f"{name}: {error.strerror or error}") from error
    if line_number == 0:
        raise InvalidArgument(f"{name}: empty trace: no row to replay")


def _open_trace(name: str) -> IO[bytes]:
    raw = open(name, "rb")  # noqa: SIM115 (the caller's `with` closes it)
    if raw.read(2) == b"\x1f\x8b":
        raw.close()
        return cast("IO[bytes]", gzip.open(name, "rb"))
    raw.seek(0)
    return raw


def _parse_row(line: bytes, where: str) -> Request:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise InvalidArgument(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InvalidArgument(f"{where}: a row is a JSON object, not {type(row).__name__}")
    timestamp_ms = _whole_number(row, "timestamp", where)
    input_length = _whole_number(row, "input_length", where)
    output_length = _whole_number(row, "output_length", where)
    ids = row.get("hash_ids")
    if not isinstance(ids, list):
        problem = "is missing" if ids is None else "must be a list"
        raise InvalidArgument(f"{where}: hash_ids {problem}")
    if any(type(each) is not int or not 0 <= each <= ID_MAX for each in ids):
        raise InvalidArgument(f"{where}: hash_ids must be whole numbers in 0..2^63-1")
    if input_length == 0:
        raise InvalidArgument(f"{where}: input_length is 0: a request has at least one token")
    expected = -(-input_length // BLOCK_TOKENS)
    if len(ids) != expected:
        raise InvalidArgument(
            f"{where}: {len(ids)} hash_ids, but {input_length} input tokens make {expected} "
            f"blocks of {BLOCK_TOKENS}"
        )
    if len(set(ids)) != len(ids):
        raise InvalidArgument(
            f"{where}: hash_ids repeat an id: an id includes all blocks before it"
        )
    return Request(timestamp_ms, input_length, output_length, tuple(ids))


def _whole_number(row: dict[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    if value is None:
        raise InvalidArgument(f"{where}: {name} is missing")
    if type(value) is not int or not 0 <= value <= NUMBER_MAX:  # bool is an int, and no count
        raise InvalidArgument(f"{where}: {name} must be a whole number >= 0, not {show(value)}")
    return value


def write_trace(path: str | os.PathLike[str], requests: Iterable[Request]) -> int:
    """Writes requests as JSONL, compressed if the name ends in `.gz`; returns the rows written.

    Equal requests give equal bytes (gzip carries no time or name). The file appears when complete.
    Raises InvalidArgument if it cannot be written.
    """
    target = Path(path)
    rows = 0
    try:
        # A folder, a device or a pipe of that name is no file to be replaced.
        if not target.name or (target.exists() and not target.is_file()):
            raise InvalidArgument(f"{target}: not a regular file; name a file to write")
        part = target.with_name(target.name + ".part")
    except OSError as error:
        raise InvalidArgument(f"{target}: {error.strerror or error}") from error
    try:
        with open(part, "wb") as raw:
            compressed = target.suffix == ".gz"
            out: Any = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if compressed else raw
            with out:
                for request in requests:
                    row = {
                        "timestamp": request.timestamp_ms,
                        "input_length": request.input_length,
                        "output_length": request.output_length,
                        "hash_ids": list(request.hash_ids),
                    }
                    out.write(json.dumps(row).encode() + b"\n")
                    rows += 1
        os.replace(part, target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InvalidArgument(f"{target}: {error.strerror or error}") from error
    return rows


# ---- making a trace ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The shape of a made trace. Lengths in tokens; the defaults hit about .58 by blocks
    with unlimited memory and .37 with a fifth of what that takes."""

    rate_per_s: float = 4.0  # Poisson arrivals of all requests together
    tool_share: float = 0.2  # of requests; the published tool and agent mix has .54
    tools: int = 6  # distinct shared tool prompts, the first the most called (1/rank)
    tool_prompt_tokens: tuple[int, int] = (2_560, 6_144)  # 5 and 12 blocks, as in the paper's mix
    tool_own_tokens: int = 900  # mean of the call's own part
    tool_output_tokens: tuple[int, int] = (3, 50)
    system_prompts: int = 3  # distinct, each in front of many chats
    system_prompt_tokens: tuple[int, int] = (400, 1_800)  # below one block: shares nothing
    open_chats: int = 120  # going on at a time: what sits between two turns of one of them
    first_tokens: int = 4_500  # mean of a chat's first question, documents included
    turn_tokens: int = 1_200  # mean of each later question
    output_tokens: int = 350  # mean answer of a chat; becomes history
    turns: float = 4.0  # mean number of turns of a chat
    input_tokens_max: int = 32_768  # a chat that would grow past it is over

    def __post_init__(self) -> None:
        for name in (
            "tools",
            "tool_own_tokens",
            "system_prompts",
            "open_chats",
            "first_tokens",
            "turn_tokens",
            "output_tokens",
            "input_tokens_max",
        ):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 1e-6 <= self.rate_per_s <= 1e9:
            raise InvalidArgument(f"rate_per_s must be within 1e-6..1e9, not {self.rate_per_s}")
        if not 0.0 <= self.tool_share <= 1.0:
            raise InvalidArgument(f"tool_share must be within 0..1, not {self.tool_share}")
        if not self.turns >= 1.0:
            raise InvalidArgument(f"turns must be at least 1, not {self.turns}")
        for name in ("tool_prompt_tokens", "tool_output_tokens", "system_prompt_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise InvalidArgument(f"{name} must be 1 <= low <= high, not {low}, {high}")
        longest_prompt = max(self.tool_prompt_tokens[1], self.system_prompt_tokens[1])
        if longest_prompt >= self.input_tokens_max:
            raise InvalidArgument(
                f"input_tokens_max of {self.input_tokens_max} leaves no room after a shared "
                f"prompt of {longest_prompt}"
            )


@dataclass(slots=True)
class _Prompt:
    """Text that only grows. `full_ids` names its whole blocks, as many as were ever asked for."""

    tokens: int
    full_ids: list[int] = field(default_factory=list)


class _Generator:
    """Draws requests one after the other. Every draw comes from one PCG64, in one order."""

    def __init__(self, seed: int, workload: Workload) -> None:
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.shape = workload
        self.next_id = 0
        self.tools = self._shared_prompts(workload.tools, workload.tool_prompt_tokens)
        self.systems = self._shared_prompts(workload.system_prompts, workload.system_prompt_tokens)
        self.chats: list[_Prompt] = []  # open ones

    def request(self, timestamp_ms: int) -> Request:
        if self.random.random() < self.shape.tool_share:
            return self._tool_call(timestamp_ms)
        if len(self.chats) < self.shape.open_chats:
            return self._chat(timestamp_ms, self._new_chat(), self.shape.first_tokens)
        chat = self.chats.pop(int(self.random.integers(len(self.chats))))
        return self._chat(timestamp_ms, chat, self.shape.turn_tokens)

    def _tool_call(self, timestamp_ms: int) -> Request:
        tool = self.tools[self._ranked(len(self.tools))]
        own = min(
            self._length(self.shape.tool_own_tokens), self.shape.input_tokens_max - tool.tokens
        )
        call = _Prompt(tool.tokens, self._shared_ids(tool))
        call.tokens += own
        low, high = self.shape.tool_output_tokens
        output = int(self.random.integers(low, high, endpoint=True))
        return Request(timestamp_ms, call.tokens, output, self._ids(call))

    def _chat(self, timestamp_ms: int, chat: _Prompt, question_mean: int) -> Request:
        room = self.shape.input_tokens_max - chat.tokens
        question = min(self._length(question_mean), room)
        output = self._length(self.shape.output_tokens)
        chat.tokens += question
        request = Request(timestamp_ms, chat.tokens, output, self._ids(chat))
        chat.tokens += output
        goes_on = self.random.random() >= 1.0 / self.shape.turns
        if goes_on and chat.tokens < self.shape.input_tokens_max:
            self.chats.append(chat)
        return request

    def _new_chat(self) -> _Prompt:
        system = self.systems[self._ranked(len(self.systems))]
        return _Prompt(system.tokens, self._shared_ids(system))

    def _shared_prompts(self, count: int, tokens: tuple[int, int]) -> list[_Prompt]:
        low, high = tokens
        lengths = self.random.integers(low, high, size=count, endpoint=True)
        return [_Prompt(int(length)) for length in lengths]

    def _shared_ids(self, prompt: _Prompt) -> list[int]:
        """A copy to go on from: a shared prompt shares its whole blocks, never its last part."""
        self._name_full_blocks(prompt)
        return list(prompt.full_ids)

    def _ids(self, prompt: _Prompt) -> tuple[int, ...]:
        self._name_full_blocks(prompt)
        if prompt.tokens % BLOCK_TOKENS == 0:
            return tuple(prompt.full_ids)
        return (*prompt.full_ids, self._take_id())  # a partial block is overtaken by the next turn

    def _name_full_blocks(self, prompt: _Prompt) -> None:
        while len(prompt.full_ids) < prompt.tokens // BLOCK_TOKENS:
            prompt.full_ids.append(self._take_id())

    def _take_id(self) -> int:
        taken = self.next_id
        self.next_id += 1
        return taken

    def _ranked(self, count: int) -> int:
        weights = np.cumsum(1.0 / np.arange(1, count + 1))
        return bisect.bisect(
            weights.tolist(), float(self.random.random() * weights[-1]), hi=count - 1
        )

    def _length(self, mean: int) -> int:
        """Log-normal with sigma 1, at least one token: long tails, as request lengths have."""
        return max(1, round(float(self.random.lognormal(np.log(mean) - 0.5, 1.0))))


def make_trace(seed: int, requests: int, workload: Workload | None = None) -> list[Request]:
    """A made trace of `requests` rows: growing chats behind shared system prompts, and tool calls
    with long shared prompts and short outputs, arriving as one Poisson process.

    Deterministic: the same seed, count and workload give the same rows. Raises InvalidArgument.
    """
    if not 1 <= requests <= REQUESTS_MAX:
        raise InvalidArgument(f"a trace has 1 to {REQUESTS_MAX:,} requests, not {show(requests)}")
    if seed < 0:
        raise InvalidArgument(f"a seed is a whole number >= 0, not {seed}")
    shape = workload or Workload()
    generator = _Generator(seed, shape)
    gaps_ms = generator.random.exponential(1000.0 / shape.rate_per_s, size=requests)
    arrivals_ms = np.floor(np.cumsum(gaps_ms) - gaps_ms[0]).astype(np.int64)
    return [generator.request(int(arrival)) for arrival in arrivals_ms]
