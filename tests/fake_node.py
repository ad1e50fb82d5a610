"""What pretends to be a node, in a thread of the test: it answers as it is told, right or wrong."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import raw
from small_node import TOKEN

Answer = tuple[str, bytes, bytes]  # name, body, payload
MEMORY_BYTES, HEADER_BYTES = 2 << 20, 4096
VALUE = b"0123456789"


def honest(name: str, said: SimpleNamespace) -> Answer | None:
    """A right answer to a request about blocks that hold VALUE, if such there be."""
    keys = len(getattr(said, "keys", []))
    sums = raw.checksums(VALUE)
    extents = [{"offset": 0, "bytes": len(VALUE)}]
    slot = {"slot": 0, "generation": 2, "extents": extents}
    block = {"held": 1, "length": len(VALUE), "part_bytes": 1 << 20, "slot": slot, **sums}
    sent = {"status": 0, "length": len(VALUE), "part_bytes": 1 << 20, **sums}
    done = {
        "known": True,
        "statuses": [0] * max(keys, 1),
        "parent_held": True,
        "stale": False,
        "namespace_version": 1,
        "message": b"",
    }
    granted = {
        "attempt": getattr(said, "attempt", raw.ZERO_ID),
        "statuses": [0] * keys,
        "slots": [slot] * keys,
        "parent_held": True,
        "more": False,
        "message": b"",
    }
    listed = {"key": raw.key("x"), "length": 10, "text": b"x", "pinned": False}
    answers: dict[str, tuple[str, dict[str, Any], bytes]] = {
        "Match": ("Matched", {"blocks": keys, "namespace_version": 1}, b""),
        "Exists": ("Held", {"held": [1] * keys}, b""),
        "Reserve": ("Granted", granted, b""),
        "Write": ("Written", {"status": 0}, b""),
        "Commit": ("PutDone", done, b""),
        "Put": ("PutDone", done, b""),
        "Lookup": (
            "Leased",
            {"lease": 1, "namespace_version": 1, "view": False, "blocks": [block] * keys},
            b"",
        ),
        "Get": (
            "Blocks",
            {"blocks": [sent] * keys, "any_too_small": False, "too_small": 0},
            VALUE * keys,
        ),
        "Read": ("Blocks", {"blocks": [sent], "any_too_small": False, "too_small": 0}, VALUE),
        "Verify": ("Verified", {"statuses": [0]}, b""),
        "Release": ("Released", {"held": True}, b""),
        "Usage": ("UsageIs", {"counts": [{"name": b"blocks", "value": 1}], "pages": b"4 KiB"}, b""),
        "Audit": ("AuditIs", {"problem": b""}, b""),
        "List": ("Listed", {"blocks": [listed], "all": True}, b""),
        "Clear": ("Cleared", {"namespace_version": 2}, b""),
        "Apply": ("Applied", {"count": keys}, b""),
        "Settle": ("Settled", {"settled": True}, b""),
        "Leave": ("Left", {}, b""),
    }
    if name not in answers or getattr(said, "quiet", False):
        return None
    reply, values, payload = answers[name]
    return reply, raw.encode(reply, **values), payload


class FakeNode:
    """Listens until it is closed. `challenge` and `welcome` may change what is said in the hello,
    `answer` what follows; `opens`: raw bytes instead of any challenge.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        token: bytes = TOKEN,
        opens: bytes | None = None,
        challenge: Callable[[bytes, bytes], bytes] = lambda _, body: body,
        descriptors: Callable[[], list[int]] = list,
        answer: Callable[[str, SimpleNamespace], Answer | None] = honest,
    ) -> None:
        self.token, self.opens, self.challenge = token, opens, challenge
        self.descriptors, self.answer = descriptors, answer
        self.heard: list[str] = []
        if path is not None:
            self.server = socket.socket(socket.AF_UNIX)
            self.server.bind(str(path))
            self.address = str(path)
        else:
            self.server = socket.socket(socket.AF_INET)
            self.server.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        self.server.listen(64)
        self.epoch = 77
        self.open: list[socket.socket] = []
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def __enter__(self) -> "FakeNode":  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown(socket.SHUT_RDWR)
        self.threads[0].join()
        for connection in self.open:
            with suppress(OSError):  # it has ended before
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self.threads[1:]:
            thread.join()
        self.server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            self.open.append(connection)
            self.threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self.threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._talk(connection)
            except (OSError, raw.Ended):
                return

    def _read(self, connection: socket.socket, count: int) -> bytes:
        got = b""
        while len(got) < count:
            piece = connection.recv(count - len(got))
            if not piece:
                raise raw.Ended
            got += piece
        return got

    def _hear(self, connection: socket.socket) -> tuple[str, bytes, int]:
        head = raw.HEADER.unpack(self._read(connection, raw.HEADER.size))
        name = raw.name_of(head[1])
        self.heard.append(name)
        body = self._read(connection, head[3])
        self._read(connection, head[5])
        return name, body, head[6]

    def _talk(self, connection: socket.socket) -> None:
        _, hello, request = self._hear(connection)
        if self.opens is not None:
            connection.sendall(self.opens)
            while connection.recv(65536):
                pass
            return
        fields = {"version": 1, "nonce": os.urandom(32), "proof": bytes(32), "epoch": self.epoch}
        body = raw.encode("Challenge", **fields)
        fields["proof"] = raw.prove(self.token, raw.NODE, hello, body)
        body = self.challenge(hello, raw.encode("Challenge", **fields))
        connection.sendall(raw.frame("Challenge", body, 0, request))
        _, _, request = self._hear(connection)
        passed = self.descriptors() if raw.decode("Hello", hello).wants_memory else []
        welcome = {
            "session": (1, 2),
            "epoch": self.epoch,
            "namespace_version": 1,
            "lease_ns": 10**10,
            "pool_bytes": MEMORY_BYTES,
            "header_bytes": HEADER_BYTES if passed else 0,
            "view_bytes_max": MEMORY_BYTES,
            "taken_over": False,
            "socket": b"",
        }
        head = raw.frame("Welcome", raw.encode("Welcome", **welcome), 0, request)
        if passed:
            socket.send_fds(connection, [head], passed)
        else:
            connection.sendall(head)
        while True:
            name, body, request = self._hear(connection)
            answer = self.answer(name, raw.decode(name, body))
            if answer is not None:
                reply, body, payload = answer
                connection.sendall(raw.frame(reply, body, len(payload), request) + payload)
