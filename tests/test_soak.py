"""Eight clients on a tiny pool, some of them killed or stopped all the time, two behind a bad line.

No wrong byte, accounts that agree, and neither memory nor descriptors that grow.
"""

import math
import random
import select
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from builders import MIB
from relay import Relay
from small_node import SmallNode, small_node
from soak_client import SoakClient

SEED = 4242
TURN_S = 0.5  # a client answers after so long
ANSWER_S = 60.0
SLACK = 1 * MIB  # what malloc and the interpreter's caches move by, whatever is done
WAYS = ["shm"] * 4 + ["tcp"] * 4


@dataclass
class Series:
    """Resident memory and descriptors of one process over time."""

    samples: list[tuple[float, int, int]] = field(default_factory=list)

    def add(self, when: float, rss: int, fds: int) -> None:
        self.samples.append((when, rss, fds))

    def began(self) -> float:
        return self.samples[0][0] if self.samples else math.inf

    def fifth(self, number: int, begin: float, end: float) -> list[tuple[float, int, int]]:
        step = (end - begin) / 5
        low, high = begin + number * step, begin + (number + 1) * step
        return [sample for sample in self.samples if low <= sample[0] < high]

    def assert_level(self, begin: float, end: float, who: str) -> None:
        """The last fifth is at most 1.05 times the second, by the mean."""
        early, late = self.fifth(1, begin, end), self.fifth(4, begin, end)
        assert early, who
        assert late, who
        for column, slack in ((1, SLACK), (2, 2)):
            before = sum(sample[column] for sample in early) / len(early)
            after = sum(sample[column] for sample in late) / len(late)
            assert after <= 1.05 * before + slack, (who, before, after)


class Soak:
    """The clients, who of them is busy, and what has been seen."""

    def __init__(self, node: SmallNode, stack: ExitStack, chance: random.Random) -> None:
        self.node, self.stack, self.chance = node, stack, chance
        self.seen: Counter[str] = Counter()
        self.started = 0
        self.paused: dict[SoakClient, float] = {}  # until when
        self.series: dict[SoakClient, Series] = {}
        self.of_node = Series()
        slow = stack.enter_context(Relay(node.tcp, rate=20e6))
        self.cutting = stack.enter_context(Relay(node.tcp, pieces=random.Random(SEED)))
        self.addresses = [node.unix] * 4 + [node.tcp, node.tcp, slow.address, self.cutting.address]
        self.clients = [self.start(place) for place in range(len(WAYS))]

    def start(self, place: int) -> SoakClient:
        self.started += 1
        client = SoakClient(
            self.node, self.addresses[place], WAYS[place], SEED * 1000 + self.started
        )
        self.stack.enter_context(client)
        self.series[client] = Series()
        client.tell("run", TURN_S)
        return client

    def hear(self) -> None:
        """Takes what was answered, and tells to go on."""
        outs = {client.process.stdout: client for client in self.clients}
        ready, _, _ = select.select(list(outs), [], [], 0.1)
        now = time.monotonic()
        for out in ready:
            client = outs[out]
            answer = client.answer(ANSWER_S)
            assert "raised" not in answer, (client.seed, answer, client.said())
            assert "wrong" not in answer["seen"], (client.seed, client.said())
            self.seen.update(answer["seen"])
            self.series[client].add(now, answer["rss"], answer["fds"])
            client.tell("run", TURN_S)
        if not self.of_node.samples or now - self.of_node.samples[-1][0] > TURN_S:
            self.of_node.add(now, self.node.rss_anon(), self.node.descriptors())

    def disturb(self) -> None:
        """Stops, kills and replaces, or cuts off."""
        now = time.monotonic()
        for client in [client for client, until in self.paused.items() if until <= now]:
            client.resume()
            del self.paused[client]
        place = self.chance.randrange(len(self.clients))
        client = self.clients[place]
        if client in self.paused:
            return
        kind = self.chance.choice(["kill", "pause", "cut"])
        self.seen[f"disturbed: {kind}"] += 1
        if kind == "pause":
            client.pause()
            self.paused[client] = now + self.chance.uniform(0.2, 3.0)
        elif kind == "cut":
            self.cutting.cut()
        elif place % 4:  # one of each way lives to the end, and shows whether it grows
            client.kill()
            self.clients[place] = self.start(place)


def soak(folder: Path, seconds: float) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    options = {"dram_bytes": 24 * MIB, "lease_ns": 10**9, "grant_ns": 2 * 10**9}
    with small_node(folder, **options) as node:
        with ExitStack() as stack:
            soaking = Soak(node, stack, chance)
            began = time.monotonic()
            end, next_disturbance = began + seconds, began + 2
            while time.monotonic() < end:
                soaking.hear()
                if time.monotonic() > next_disturbance:
                    soaking.disturb()
                    next_disturbance = time.monotonic() + chance.uniform(0.5, 2.5)
            for client in soaking.paused:
                client.resume()
            print(f"{soaking.started} clients started; {dict(soaking.seen)}")
            old = began + seconds / 5
            lived = soaking.series
            survivors = [client for client in soaking.clients if lived[client].began() < old]
        assert soaking.seen["get OK"] > 100
        assert soaking.seen["put OK"] > 100
        assert all(soaking.seen[f"disturbed: {kind}"] > 0 for kind in ("kill", "pause", "cut"))
        soaking.of_node.assert_level(began, end, "the node")
        assert len(survivors) >= 2
        for client in survivors:
            first = soaking.series[client].began()
            soaking.series[client].assert_level(first, end, f"client {client.seed}")
        usage = node.assert_idle(30)
        assert usage["evictions"] > 0
        assert usage["corrupt"] == 0


@pytest.mark.timeout(240)
def test_a_minute_of_it(tmp_path: Path) -> None:
    soak(tmp_path, 60)


@pytest.mark.long
def test_ten_minutes_of_it(tmp_path: Path) -> None:
    soak(tmp_path, 600)
