"""A client of the wire in plain Python, driven step by step: docs/wire.md implemented once more.

The tables of messages are read from that page, so what it leaves out cannot be said here. `Line` is
one connection, `Client` a session: its control connection and the verbs of the data's way. Nothing
is retried, nothing is checked that a test might want to do wrong.
"""

import array
import hashlib
import hmac
import mmap
import os
import re
import socket
import struct
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvstore
from kvstore import _core

WIRE = Path(__file__).parents[1] / "docs" / "wire.md"
HEADER = struct.Struct("<4sHHIIQQ16s")
MAGIC = b"KVS1"
ANY = kvstore.BlockSpec("any", block_bytes=None)
PART_BYTES = ANY.parts.part_bytes
ZERO_ID = (0, 0)
WHOLE = (1 << 64) - 1
RECEIVE_BYTES = 64 << 10  # little, so that a reader who stops is soon waited for
NUMBERS = {"u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q", "i64": "<q", "status": "<B"}
RAW = {"key": 32, "hash": 32}
NODE, CLIENT = b"\1", b"\2"  # roles in a proof

Fields = list[tuple[str, str] | None]  # None: the mark `?`


class Why(IntEnum):
    PROTOCOL = 0
    VERSION = 1
    TOKEN = 2
    NAMESPACE = 3
    SESSION = 4
    TOO_MANY = 5
    STOPPING = 6


# ---- the tables of docs/wire.md ------------------------------------------------------------------


@cache
def tables() -> tuple[dict[str, int], dict[str, Fields]]:
    """Numbers of the messages, and the fields of messages and structures, by name."""
    text = WIRE.read_text().split("## Messages")[1].split("```")[1]
    lines = re.sub(r"\n {16}", " ", text).strip("\n").splitlines()
    numbers: dict[str, int] = {}
    fields: dict[str, Fields] = {}
    for line in lines:
        found = re.fullmatch(r"([ \d]{2}) (\w+) *(.*)", line)
        assert found, line
        number, name, rest = found.groups()
        if number.strip():
            numbers[name] = int(number)
        fields[name] = []
        for at, half in enumerate(rest.split("?")):
            if at:
                fields[name].append(None)
            named = [each.split() for each in half.split(",") if each.strip()]
            fields[name] += [(field, kind) for field, kind in named]
    return numbers, fields


def type_of(name: str) -> int:
    return tables()[0][name]


def name_of(number: int) -> str:
    return {number: name for name, number in tables()[0].items()}[number]


def _put(kind: str, value: Any, out: bytearray) -> None:
    if kind in NUMBERS:
        out += struct.pack(NUMBERS[kind], value)
    elif kind == "truth":
        out.append(int(value))
    elif kind in RAW:
        assert len(value) == RAW[kind]
        out += value
    elif kind == "id":
        out += struct.pack("<QQ", *value)
    elif kind == "text":
        out += struct.pack("<I", len(value)) + value
    elif kind.startswith("["):
        out += struct.pack("<I", len(value))
        if kind == "[key]":
            out += b"".join(value)
        else:
            for each in value:
                _put(kind[1:-1], each, out)
    else:
        out += encode(kind, **value)


def encode(name: str, /, **values: Any) -> bytes:
    out = bytearray()
    last: Any = None
    for field in tables()[1][name]:
        if field is None:
            if last != _there(name):
                return bytes(out)
            continue
        last = values.pop(field[0])
        _put(field[1], last, out)
    assert not values, f"{name} has no {list(values)}"
    return bytes(out)


def _there(name: str) -> int:
    """The value of the field before `?` with which the rest follows."""
    return 1 if tables()[1][name][0] == ("held", "truth") else 0


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        assert self.at + count <= len(self.data), "a message that ends early"
        self.at += count
        return self.data[self.at - count : self.at]

    def read(self, kind: str) -> Any:
        if kind in NUMBERS:
            return struct.unpack(NUMBERS[kind], self.take(struct.calcsize(NUMBERS[kind])))[0]
        if kind == "truth":
            (byte,) = self.take(1)
            assert byte in (0, 1)
            return byte == 1
        if kind in RAW:
            return self.take(RAW[kind])
        if kind == "id":
            return struct.unpack("<QQ", self.take(16))
        if kind == "text":
            return self.take(self.read("u32"))
        if kind.startswith("["):
            return [self.read(kind[1:-1]) for _ in range(self.read("u32"))]
        return self.fields(kind)

    def fields(self, name: str) -> SimpleNamespace:
        got = SimpleNamespace()
        last: Any = None
        for field in tables()[1][name]:
            if field is None:
                if last != _there(name):
                    break
                continue
            last = self.read(field[1])
            setattr(got, field[0], last)
        return got


def decode(name: str, data: bytes) -> SimpleNamespace:
    reader = Reader(data)
    got = reader.fields(name)
    assert reader.at == len(data), "a message with bytes left over"
    return got


def frame(
    name: str, body: bytes, payload_bytes: int = 0, request: int = 1, trace: bytes = bytes(16)
) -> bytes:
    return HEADER.pack(MAGIC, type_of(name), 0, len(body), 0, payload_bytes, request, trace) + body


def prove(token: bytes, role: bytes, hello: bytes, challenge: bytes) -> bytes:
    """`challenge`: the body with its proof zeroed or not."""
    start = 2 + 32  # version, nonce
    zeroed = challenge[:start] + bytes(32) + challenge[start + 32 :]
    return hmac.digest(token, role + hello + zeroed, "sha256")


def hello_fields(**changed: Any) -> dict[str, Any]:
    fields = {
        "version_min": 1,
        "version_max": 1,
        "data": False,
        "wants_memory": False,
        "nonce": os.urandom(32),
        "session": ZERO_ID,
        "epoch": 0,
        "record": ANY.canonical(),
        "part_bytes": PART_BYTES,
    }
    assert set(changed) <= set(fields)
    return {**fields, **changed}


# ---- one connection ------------------------------------------------------------------------------


class Refused(Exception):
    """The other side said Refusal."""

    def __init__(self, why: int, message: str) -> None:
        super().__init__(f"{Why(why).name}: {message}")
        self.why, self.message = Why(why), message


class Ended(Exception):
    """The other side has closed the connection."""


class Line:
    """One connection, before and after the hello."""

    def __init__(self, address: str, timeout_s: float = 20) -> None:
        self.address = address
        if address.startswith("/"):
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            six = address.startswith("[")
            self.socket = socket.socket(socket.AF_INET6 if six else socket.AF_INET)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(timeout_s)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        try:
            if address.startswith("/"):
                self.socket.connect(address)
            else:
                host, port = address.rsplit(":", 1)
                self.socket.connect((host.strip("[]"), int(port)))
        except BaseException:
            self.socket.close()
            raise
        self.requests = 0
        self.descriptors: list[int] = []
        self.welcome: Any = None

    def close(self) -> None:
        self.socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def __enter__(self) -> "Line":  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, name: str, payload: bytes = b"", **values: Any) -> int:
        """A whole request; its number."""
        return self.send_head(name, len(payload), payload, **values)

    def send_head(self, name: str, payload_bytes: int, begun: bytes = b"", **values: Any) -> int:
        """A request of that much payload, of which `begun` is sent."""
        self.requests += 1
        head = frame(name, encode(name, **values), payload_bytes, self.requests)
        self.socket.sendall(head + begun)
        return self.requests

    def read(self, count: int) -> bytes:
        """Exactly that many bytes."""
        got = bytearray()
        while len(got) < count:
            try:
                piece = self._receive(min(count - len(got), 1 << 20))
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise Ended(f"after {len(got)} of {count} bytes")
            got += piece
        return bytes(got)

    def _receive(self, count: int) -> bytes:
        if self.socket.family != socket.AF_UNIX:
            return self.socket.recv(count)
        room = socket.CMSG_SPACE(8 * 4)
        data, passed, _, _ = self.socket.recvmsg(count, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in passed:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % 4])
                self.descriptors += numbers
        return data

    def receive(self, expected: str) -> SimpleNamespace:
        """A reply's fields, with `request` and `payload` (bytes). Raises Refused and Ended."""
        got = self.receive_head(expected)
        got.payload = self.read(got.payload_bytes)
        return got

    def receive_head(self, expected: str) -> SimpleNamespace:
        magic, number, flags, body_bytes, zero, payload_bytes, request, _ = HEADER.unpack(
            self.read(HEADER.size)
        )
        assert (magic, flags, zero) == (MAGIC, 0, 0)
        body = self.read(body_bytes)
        if name_of(number) == "Refusal":
            refusal = decode("Refusal", body)
            raise Refused(refusal.why, refusal.message.decode())
        assert name_of(number) == expected
        got = decode(expected, body)
        got.request, got.payload_bytes, got.body = request, payload_bytes, body
        return got

    def ask(self, name: str, reply: str, payload: bytes = b"", **values: Any) -> SimpleNamespace:
        number = self.send(name, payload, **values)
        got = self.receive(reply)
        assert got.request == number
        return got

    def greet(self, token: bytes, **changed: Any) -> SimpleNamespace:
        """The whole hello; what the node welcomes with."""
        hello = encode("Hello", **hello_fields(**changed))
        self.requests += 1
        self.socket.sendall(frame("Hello", hello, 0, self.requests))
        challenge = self.receive("Challenge")
        assert hmac.compare_digest(challenge.proof, prove(token, NODE, hello, challenge.body))
        self.welcome = self.ask(
            "Proof", "Welcome", proof=prove(token, CLIENT, hello, challenge.body)
        )
        assert self.welcome.epoch == challenge.epoch
        return self.welcome

    def at_end(self) -> bool:
        """Waits for the other side to say something or to close; whether it closed."""
        try:
            return not self._receive(1)
        except ConnectionResetError:
            return True


# ---- a session -----------------------------------------------------------------------------------


def key(name: str | int) -> bytes:
    """A block key of rank 0 of 1."""
    return hashlib.sha256(str(name).encode()).digest()[:28] + b"\0\0\0\1"


def checksums(data: bytes) -> dict[str, list[int]]:
    parts = range(0, len(data), PART_BYTES)
    return {"parts": [_core.crc32c(data[at : at + PART_BYTES]) for at in parts]}


def new_id() -> tuple[int, int]:
    return struct.unpack("<QQ", os.urandom(16))  # type: ignore[return-value] - the format has two


class Client:
    """A session by its control connection, and the steps of a put and a get on `line`."""

    def __init__(self, address: str, token: bytes, *, shm: bool = False, **changed: Any) -> None:
        self.address, self.token, self.shm = address, token, shm
        self.control = Line(address)
        try:
            self.welcome = self.control.greet(token, wants_memory=shm, **changed)
        except BaseException:
            self.control.close()
            raise
        self.line = self.control  # where the verbs go
        self.lines = [self.control]
        self.memory: mmap.mmap | None = None
        self.headers: mmap.mmap | None = None
        if shm and len(self.control.descriptors) == 2:
            data, headers = self.control.descriptors
            self.memory = mmap.mmap(data, self.welcome.pool_bytes)
            self.headers = mmap.mmap(headers, self.welcome.header_bytes, prot=mmap.PROT_READ)

    def join(self) -> Line:
        """Another connection of the session, which the verbs use from now on."""
        self.line = Line(self.address)
        self.lines.append(self.line)
        self.line.greet(self.token, data=True, session=self.welcome.session)
        return self.line

    def close(self) -> None:
        for line in self.lines:
            line.close()
        for mapped in (self.memory, self.headers):
            if mapped is not None:
                mapped.close()

    def __enter__(self) -> "Client":  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Leaves: else what this process maps would be its own until it ends."""
        if kind is None:
            self.leave()
        self.close()

    def leave(self) -> None:
        """Gives up grants and copying leases, by a new control connection if need be."""
        try:
            self.control.ask("Leave", "Left")
        except (OSError, Ended):
            with Line(self.address) as line:
                line.greet(self.token, wants_memory=self.shm, session=self.welcome.session)
                line.ask("Leave", "Left")

    # put: reserve -> write -> commit

    def reserve(self, keys: list[bytes], lengths: list[int], **changed: Any) -> SimpleNamespace:
        fields = reserve_fields(keys, lengths, **{"attempt": new_id(), **changed})
        return self.line.ask("Reserve", "Granted", **fields)

    def write(self, granted: SimpleNamespace, blocks: list[bytes]) -> SimpleNamespace:
        fields = write_fields(granted, range(len(blocks)))
        return self.line.ask("Write", "Written", b"".join(blocks), **fields)

    def copy(self, slot: SimpleNamespace, data: bytes) -> None:
        """Into granted memory."""
        assert self.memory is not None
        at = 0
        for extent in slot.extents:
            piece = data[at : at + extent.bytes]
            self.memory[extent.offset : extent.offset + len(piece)] = piece
            at += len(piece)

    def commit(self, granted: SimpleNamespace, blocks: list[bytes]) -> SimpleNamespace:
        return self.line.ask("Commit", "PutDone", **commit_fields(granted.attempt, blocks))

    def put(self, keys: list[bytes], blocks: list[bytes]) -> SimpleNamespace:
        """All steps; what is held already is not sent."""
        granted = self.reserve(keys, [len(data) for data in blocks])
        items = [item for item, status in enumerate(granted.statuses) if status == 0]
        if self.memory is not None:
            for item in items:
                self.copy(granted.slots[item], blocks[item])
        elif items:
            payload = b"".join(blocks[item] for item in items)
            self.line.ask("Write", "Written", payload, **write_fields(granted, items))
        return self.commit(granted, blocks)

    # get: lookup -> read -> release

    def lookup(self, keys: list[bytes]) -> SimpleNamespace:
        return self.line.ask("Lookup", "Leased", keys=keys, skip=0, run=True, view=False)

    def read(self, leased: SimpleNamespace, item: int = 0) -> bytes:
        """One leased block: out of the memory, or over the connection."""
        block = leased.blocks[item]
        if self.memory is not None:
            assert block.slot.extents
            return self.peek(block)
        fields = read_fields(leased.lease, item, block.length)
        return self.line.ask("Read", "Blocks", **fields).payload

    def peek(self, block: SimpleNamespace) -> bytes:
        assert self.memory is not None
        pieces = [self.memory[e.offset : e.offset + e.bytes] for e in block.slot.extents]
        return b"".join(pieces)[: block.length]

    def generation(self, slot: int) -> int:
        assert self.headers is not None
        return int(struct.unpack_from("<Q", self.headers, 64 * slot)[0])

    def get(self, keys: list[bytes], room: int) -> SimpleNamespace:
        return self.line.ask("Get", "Blocks", keys=keys, room=[room] * len(keys))

    # the rest

    def usage(self) -> dict[str, int]:
        counts = self.line.ask("Usage", "UsageIs").counts
        return {count.name.decode(): count.value for count in counts}

    def audit(self) -> str:
        return str(self.line.ask("Audit", "AuditIs").problem.decode())


def reserve_fields(keys: list[bytes], lengths: list[int], **changed: Any) -> dict[str, Any]:
    fields = {
        "attempt": ZERO_ID,
        "keys": keys,
        "skip": 0,
        "lengths": lengths,
        "texts": [],
        "version": 0,
        "chain": False,
        "wait_ns": 0,
        "parts": [],
    }
    assert set(changed) <= set(fields)
    return {**fields, **changed}


def write_fields(granted: SimpleNamespace, items: Any) -> dict[str, Any]:
    return {"attempt": granted.attempt, "items": list(items), "first": 0, "bytes": WHOLE}


def commit_fields(attempt: tuple[int, int], blocks: list[bytes]) -> dict[str, Any]:
    parts = [checksums(data) for data in blocks]
    return {"attempt": attempt, "end": len(blocks), "otherwise": 7, "parts": parts}


def read_fields(lease: int, item: int, length: int) -> dict[str, Any]:
    return {"lease": lease, "first_item": item, "room": [length], "first": 0, "bytes": WHOLE}
