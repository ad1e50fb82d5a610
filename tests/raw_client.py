"""A client in a process of its own that can be stopped or killed between any two of its steps.

The child, this file run by name, drives `raw.Client` (tcp or shm) or a real store, one step a line.
Its blocks are self-proving by number; a block has the number of its key's name.
"""

import json
import mmap
import os
import signal
import socket
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import raw
from builders import MIB, block, is_block
from small_node import ANY, TOKEN, SmallNode
from told import Told, serve_lines

import kvstore


class RawClient(Told):
    """The process. `ask` it for the methods of Actor."""

    def __init__(
        self,
        node: SmallNode,
        transport: str,
        name: str = "client",
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        options = {"address": node.address(transport), "transport": transport}
        super().__init__("raw_client.py", node.folder / f"{name}.log", options, environment)


class Actor:
    """Steps; each keeps what the next ones need."""

    def __init__(self, address: str, transport: str) -> None:
        self.address, self.transport = address, transport
        self.shm = transport == "shm"
        self.numbers: list[int] = []
        self.length = 0

    def hello(self, session: list[int] | None = None) -> bool:
        """True: it has taken over the session."""
        named = tuple(session or raw.ZERO_ID)
        self.client = raw.Client(self.address, TOKEN, shm=self.shm, session=named)
        return bool(self.client.welcome.taken_over)

    def session(self) -> list[int]:
        return list(self.client.welcome.session)

    # ---- put

    def reserve(self, numbers: list[int], length: int, wait_ns: int = 0) -> list[int]:
        self.numbers, self.length = numbers, length
        keys = [raw.key(number) for number in numbers]
        self.granted = self.client.reserve(keys, [length] * len(keys), wait_ns=wait_ns)
        return list(self.granted.statuses)

    def _blocks(self) -> list[bytes]:
        return [block(number, self.length).tobytes() for number in self.numbers]

    def write_half(self) -> None:
        """Of all blocks in one payload (tcp), or of each block's bytes (shm)."""
        blocks = self._blocks()
        if self.shm:
            for slot, data in zip(self.granted.slots, blocks, strict=True):
                self.client.copy(slot, data[: self.length // 2])
            return
        data = b"".join(blocks)
        fields = raw.write_fields(self.granted, range(len(blocks)))
        self.client.line.send_head("Write", len(data), data[: len(data) // 2], **fields)

    def write_rest(self) -> None:
        """What write_half left out; over shared memory what it wrote must still be there."""
        blocks = self._blocks()
        if not self.shm:
            data = b"".join(blocks)
            self.client.line.socket.sendall(data[len(data) // 2 :])
            self.client.line.receive("Written")
            return
        for slot, data in zip(self.granted.slots, blocks, strict=True):
            begun = SimpleNamespace(slot=slot, length=self.length // 2)
            assert self.client.peek(begun) == data[: self.length // 2]
            self.client.copy(slot, data)

    def commit_half(self) -> None:
        """The request without a look at its answer."""
        self.client.line.send("Commit", **raw.commit_fields(self.granted.attempt, self._blocks()))

    def commit_rest(self) -> list[int]:
        done = self.client.line.receive("PutDone")
        return [int(status) for status in done.statuses] if done.known else [-1]

    # ---- get

    def lookup(self, numbers: list[int]) -> int:
        self.numbers = numbers
        self.leased = self.client.lookup([raw.key(number) for number in numbers])
        return len(self.leased.blocks)

    def get_begin(self, numbers: list[int], length: int) -> None:
        """All but the first kilobyte of the answer is still on its way (tcp)."""
        self.numbers = numbers
        keys = [raw.key(number) for number in numbers]
        self.client.line.send("Get", keys=keys, room=[length] * len(keys))
        self.left = self.client.line.receive_head("Blocks").payload_bytes
        self.begun = self.client.line.read(1024)

    def get_rest(self) -> bool:
        """Whether the block, a single one, is what was put."""
        return is_block(self.begun + self.client.line.read(self.left - 1024), self.numbers[0])

    def read_begin(self) -> None:
        """The first kilobyte of the first block, out of the memory (shm)."""
        self.begun = self.client.peek(self.leased.blocks[0])[:1024]

    def view(self) -> bool:
        return bool(self.client.line.ask("MakeView", "ViewMade", lease=self.leased.lease).made)

    def intact(self, numbers: list[int] | None = None) -> bool:
        """Whether every leased block is, in the memory it was in, what was put."""
        named = zip(self.leased.blocks, numbers or self.numbers, strict=True)
        return all(is_block(self.client.peek(each), number) for each, number in named)

    def unmoved(self) -> bool:
        """Whether no leased slot has another generation by now."""
        slots = [each.slot for each in self.leased.blocks]
        return all(self.client.generation(s.slot) == s.generation for s in slots)

    def release(self) -> bool:
        fields = {"lease": self.leased.lease, "quiet": False}
        return bool(self.client.line.ask("Release", "Released", **fields).held)

    # ---- the session

    def join(self) -> None:
        self.client.join()

    def use_control(self) -> None:
        self.client.line = self.client.control

    def lose_control(self) -> None:
        self.client.control.socket.shutdown(socket.SHUT_RDWR)

    def take_over(self) -> bool:
        """A new control connection of this process for the same session."""
        line = raw.Line(self.address)
        welcome = line.greet(TOKEN, wants_memory=self.shm, session=self.client.welcome.session)
        self.client.lines.append(line)
        self.client.control = self.client.line = line
        return bool(welcome.taken_over)

    def fork(self) -> int:
        """A child that holds copies of all descriptors and does nothing; its pid."""
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        return pid

    def forbidden(self) -> list[str]:
        """What the passed descriptors let a client do that it should not."""
        data, headers = self.client.control.descriptors
        tries = {
            "map headers for writing": lambda: mmap.mmap(headers, 4096),
            "write headers": lambda: os.pwrite(headers, b"x", 0),
            "shrink headers": lambda: os.ftruncate(headers, 0),
            "shrink data": lambda: os.ftruncate(data, 0),
            "grow data": lambda: os.ftruncate(data, 1 << 40),
        }
        return [name for name, attempt in tries.items() if not fails(attempt)]

    # ---- a real store in the same process

    def connect(self) -> None:
        self.store = kvstore.connect(
            self.address, ANY, token=TOKEN, transport=self.transport, timeout_s=5.0
        )

    def begin(self, name: str, length: int) -> None:
        """A put in parts that is not committed yet."""
        self.writing = self.store.writing([name], block_bytes=length)
        self.writing.__enter__()

    def finish(self, number: int) -> bool:
        """Of a put of one part."""
        self.writing.part(0, block(number, MIB)[None])
        return bool(self.writing.commit().ok)

    def put_and_get(self, name: str, number: int) -> bool:
        got = bytearray(MIB)
        put = self.store.put([name], block(number, MIB)[None])
        return put.ok and self.store.get([name], [got]).ok and is_block(got, number)

    def get_in(self, name: str, timeout_s: float) -> str:
        return str(self.store.get([name], [bytearray(MIB)], timeout=timeout_s)[0].name)

    def open_hit(self, name: str) -> int:
        self.match = self.store.match_prefix([name])
        self.hit = self.match.__enter__()
        return int(self.hit.blocks)

    def open_views(self) -> None:
        self.views = self.hit.views()


def fails(attempt: Any) -> bool:
    try:
        attempt()
    except OSError:
        return True
    return False


def main() -> None:
    options = json.loads(sys.argv[1])
    serve_lines(Actor(options["address"], options["transport"]))


if __name__ == "__main__":
    main()
