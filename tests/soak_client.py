"""One client of the soak, a process of its own: random calls, and what came of them.

Told `run`, it works for that many seconds and answers what it has seen since the last time. A
block's number is its name's; its length is of its number too, so any client can check any block.
"""

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from builders import block, is_block
from small_node import TOKEN, SmallNode
from told import Told, num_descriptors, rss_anon, serve_lines

import kvstore

NAMES = 400
LENGTHS = (100, 5_000, 65_536, 200_000, 1_500_000)
SPEC = kvstore.BlockSpec("soak", block_bytes=None)
EXPECTED = (
    kvstore.NodeUnavailable,
    kvstore.LeaseRevoked,
    kvstore.ViewsRefused,
    TimeoutError,
)


class SoakClient(Told):
    """The process."""

    def __init__(self, node: SmallNode, address: str, transport: str, seed: int) -> None:
        options = {"address": address, "transport": transport, "seed": seed}
        super().__init__("soak_client.py", node.folder / f"client-{seed}.log", options)
        self.transport, self.seed = transport, seed


def length_of(number: int) -> int:
    return LENGTHS[number % len(LENGTHS)] + number


class Actor:
    """The calls, chosen by `seed`."""

    def __init__(self, address: str, transport: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.store = kvstore.connect(address, SPEC, token=TOKEN, transport=transport, timeout_s=2.0)
        self.seen: Counter[str] = Counter()

    def run(self, seconds: float) -> dict[str, Any]:
        """Counts by kind of what came out, `wrong` among them; and what this process uses."""
        self.seen.clear()
        calls = [self.put, self.put, self.get, self.get, self.get, self.read, self.view, self.write]
        calls += [self.put_async, self.get_async, self.cancel, self.remove]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.one(self.chance.choice(calls))
        pid = os.getpid()
        return {"seen": dict(self.seen), "rss": rss_anon(pid), "fds": num_descriptors(pid)}

    def one(self, call: Callable[[], None]) -> None:
        try:
            call()
        except EXPECTED as error:
            self.seen[type(error).__name__] += 1

    def some(self, most: int = 6) -> list[int]:
        return self.chance.sample(range(NAMES), self.chance.randint(1, most))

    def count(self, what: str, result: Any) -> None:
        for status in result:
            self.seen[f"{what} {status.name}"] += 1

    def check(self, number: int, got: Any) -> None:
        self.seen["bytes"] += len(got)
        if not is_block(got, number):
            self.seen["wrong"] += 1
            print(f"block {number} is wrong: {bytes(got[:32]).hex()}", file=sys.stderr)

    def put(self) -> None:
        numbers = self.some()
        blocks = [block(number, length_of(number)) for number in numbers]
        self.count("put", self.store.put(names(numbers), blocks, chain=False, timeout=0.5))

    def targets(self, numbers: list[int]) -> list[bytearray]:
        return [bytearray(length_of(number)) for number in numbers]

    def compare(self, numbers: list[int], result: Any, targets: list[bytearray]) -> None:
        self.count("get", result)
        for number, status, target in zip(numbers, result, targets, strict=True):
            if status is kvstore.Status.OK:
                self.check(number, target)

    def get(self) -> None:
        numbers = self.some()
        targets = self.targets(numbers)
        self.compare(numbers, self.store.get(names(numbers), targets), targets)

    def read(self) -> None:
        """Under a lease, some of them a little later."""
        numbers = self.some(3)
        with self.store.match_prefix(names(numbers)) as hit:
            held = numbers[: hit.blocks]
            targets = self.targets(held)
            time.sleep(self.chance.choice([0, 0, 0.001, 0.02]))
            self.compare(held, hit.read(targets), targets)

    def view(self) -> None:
        numbers = self.some(2)
        with self.store.match_prefix(names(numbers)) as hit:
            for number, pieces in zip(numbers, hit.views(), strict=False):
                time.sleep(self.chance.choice([0, 0.005]))
                self.check(number, b"".join(pieces))
                for piece in pieces:
                    piece.release()

    def write(self) -> None:
        """In parts; sometimes given up in the middle."""
        number = self.chance.randrange(NAMES)
        length = length_of(number)
        data = block(number, length)
        writing = self.store.writing(names([number]), block_bytes=length, timeout=0.5)
        with writing:
            for part, start in enumerate(range(0, length, SPEC.parts.part_bytes)):
                if self.chance.random() < 0.1:
                    writing.abort()
                    self.seen["given up"] += 1
                    return
                writing.part(part, data[None, start : start + SPEC.parts.part_bytes])
        assert writing.result is not None
        self.count("writing", writing.result)

    def put_async(self) -> None:
        numbers = self.some()
        blocks = [block(number, length_of(number)) for number in numbers]
        transfer = self.store.put_async(names(numbers), blocks, chain=False, timeout=0.5)
        self.count("put", transfer.wait(30))

    def get_async(self) -> None:
        numbers = self.some()
        targets = self.targets(numbers)
        self.compare(numbers, self.store.get_async(names(numbers), targets).wait(30), targets)

    def cancel(self) -> None:
        number = self.chance.randrange(NAMES)
        data = block(number, length_of(number))
        transfer = self.store.put_async(names([number]), [data], timeout=0.5)
        transfer.cancel()
        self.count("cancelled", transfer.wait(30))

    def remove(self) -> None:
        if self.chance.random() < 0.1:
            self.seen["removed"] += self.store.remove(names(self.some(3)))


def names(numbers: list[int]) -> list[str]:
    return [f"block {number}" for number in numbers]


def main() -> None:
    options = json.loads(sys.argv[1])
    serve_lines(Actor(options["address"], options["transport"], options["seed"]))


if __name__ == "__main__":
    main()
