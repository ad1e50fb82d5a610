"""What a client makes of a node that is none, or that lies: it refuses, or fails in typed ways."""

import contextlib
import fcntl
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import raw
from fake_node import HEADER_BYTES, MEMORY_BYTES, VALUE, Answer, FakeNode, honest
from small_node import ANY, TOKEN

import kvstore
from kvstore.types import Status

SEED = 77
TIMEOUT_S = 0.5
TYPED = set(Status)


def connect(node: FakeNode, transport: str = "auto") -> kvstore.Store:
    return kvstore.connect(node.address, ANY, token=TOKEN, timeout_s=TIMEOUT_S, transport=transport)


def refused(node: FakeNode, match: str) -> None:
    """And it has not been given the client's own proof."""
    with node, pytest.raises(kvstore.NodeRefused, match=match):
        connect(node)
    assert node.heard == ["Hello"]


# ---- the hello -----------------------------------------------------------------------------------


def test_a_node_that_does_not_know_the_token_gets_no_proof() -> None:
    refused(FakeNode(token=b"another"), "token")
    refused(FakeNode(token=b""), "token")


def test_a_proof_for_another_hello_is_none() -> None:
    """Replayed from an earlier connection, with its nonce or with a fresh one."""
    first: list[bytes] = []

    def replay(_: bytes, body: bytes) -> bytes:
        first.append(body)
        return first[0]

    with FakeNode(challenge=replay) as node:
        connect(node).close()
        before = len(first)
        with pytest.raises(kvstore.NodeRefused, match="token"):
            connect(node)
        assert len(first) == before + 1
    refused(FakeNode(challenge=lambda _, body: body[:2] + os.urandom(32) + body[34:]), "token")


def test_each_byte_of_a_challenge_is_proved() -> None:
    for at in (0, 2, 33, 34, 65, 66, 73):

        def flip(_: bytes, body: bytes, at: int = at) -> bytes:
            return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]

        refused(FakeNode(challenge=flip), "token")


def test_a_clients_proof_as_a_nodes_is_none() -> None:
    def reflect(hello: bytes, body: bytes) -> bytes:
        proof = raw.prove(TOKEN, raw.CLIENT, hello, body)
        return body[:34] + proof + body[66:]

    refused(FakeNode(challenge=reflect), "token")


def test_a_version_the_client_does_not_speak_is_refused() -> None:
    def newer(hello: bytes, body: bytes) -> bytes:
        body = b"\2\0" + body[2:]
        return body[:34] + raw.prove(TOKEN, raw.NODE, hello, body) + body[66:]

    refused(FakeNode(challenge=newer), "version 2.*1 to 1")


OPENINGS = {
    "random": random.Random(SEED).randbytes(4096),
    "zeros": bytes(4096),
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100),
    "64 MiB": raw.HEADER.pack(raw.MAGIC, 2, 0, 64 << 20, 0, 0, 1, bytes(16)) + bytes(100),
    "another message": raw.frame("Welcome", bytes(100)),
    "no challenge": raw.frame("Challenge", bytes(75)),
    "reply to another": raw.frame("Challenge", bytes(74), 0, 9),
}


@pytest.mark.parametrize("opening", OPENINGS)
def test_an_answer_that_is_none_ends_the_try_at_once(opening: str) -> None:
    with FakeNode(opens=OPENINGS[opening]) as node:
        began = time.monotonic()
        with pytest.raises(kvstore.NodeUnavailable):
            connect(node)
        assert time.monotonic() - began < TIMEOUT_S / 2
        assert node.heard == ["Hello"]


@pytest.mark.parametrize("begun", [0, 20, 60])
def test_a_node_that_falls_silent_is_given_up_in_time(begun: int) -> None:
    opening = raw.frame("Challenge", bytes(74))[:begun]
    with FakeNode(opens=opening) as node:
        began = time.monotonic()
        with pytest.raises(kvstore.NodeUnavailable, match="in time"):
            connect(node)
        assert TIMEOUT_S * 0.9 < time.monotonic() - began < TIMEOUT_S + 1


# ---- memory --------------------------------------------------------------------------------------

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def memory(length: int, seals: int = SEALS) -> int:
    made = os.memfd_create("fake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(made, length)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made


@contextlib.contextmanager
def sharing(tmp_path: Path, passed: list[int], **options: Any) -> Iterator[FakeNode]:
    try:
        with FakeNode(tmp_path / "fake", descriptors=lambda: passed, **options) as node:
            yield node
    finally:
        for descriptor in passed:
            os.close(descriptor)


BAD_MEMORY = {
    "one descriptor": lambda: [memory(MEMORY_BYTES)],
    "three descriptors": lambda: [memory(MEMORY_BYTES) for _ in range(3)],
    "short blocks": lambda: [memory(MEMORY_BYTES - 4096), memory(HEADER_BYTES)],
    "short headers": lambda: [memory(MEMORY_BYTES), memory(HEADER_BYTES - 64)],
    "unsealed": lambda: [memory(MEMORY_BYTES, 0), memory(HEADER_BYTES)],
    "unsealed headers": lambda: [memory(MEMORY_BYTES), memory(HEADER_BYTES, 0)],
    "no files": lambda: [*os.pipe()],
}


@pytest.mark.parametrize("what", BAD_MEMORY)
def test_memory_that_could_end_the_client_is_not_mapped(tmp_path: Path, what: str) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with (
        sharing(tmp_path, BAD_MEMORY[what]()) as node,
        pytest.raises((kvstore.NodeUnavailable, kvstore.NodeRefused)),
    ):
        connect(node, "shm")
    assert len(os.listdir("/proc/self/fd")) == descriptors


BAD_SLOTS = {
    "beyond the end": [{"offset": MEMORY_BYTES - 5, "bytes": 10}],
    "far beyond": [{"offset": 1 << 63, "bytes": 10}],
    "overflowing": [{"offset": raw.WHOLE - 4, "bytes": 10}],
    "endless": [{"offset": 0, "bytes": raw.WHOLE}],
    "short": [{"offset": 0, "bytes": 9}],
    "empty pieces": [{"offset": 0, "bytes": 0}] * 3,
    "nowhere": [],
}


@pytest.mark.parametrize("what", BAD_SLOTS)
def test_places_outside_the_memory_are_not_believed(tmp_path: Path, what: str) -> None:
    slot = {"slot": 0, "generation": 2, "extents": BAD_SLOTS[what]}

    def lie(name: str, said: SimpleNamespace) -> Answer | None:
        answer = honest(name, said)
        assert answer is None or answer[0] != "Blocks"
        if answer and answer[0] in ("Leased", "Granted"):
            good = raw.encode(
                "Slot",
                slot=0,
                generation=2,
                extents=[{"offset": 0, "bytes": len(VALUE)}],
            )
            return answer[0], answer[1].replace(good, raw.encode("Slot", **slot)), b""
        return answer

    passed = [memory(MEMORY_BYTES), memory(HEADER_BYTES)]
    with sharing(tmp_path, passed, answer=lie) as node, connect(node, "shm") as store:
        got = bytearray(len(VALUE))
        assert store.get(["x"], [got])[0] is not Status.OK
        assert got == bytes(len(VALUE))
        with store.match_prefix(["x"]) as hit, pytest.raises(kvstore.KvstoreError):
            hit.views()
        writing = store.writing(["y"], block_bytes=10)
        with pytest.raises((TimeoutError, kvstore.KvstoreError)):
            writing.part(0, [VALUE])


# ---- answers -------------------------------------------------------------------------------------


def exercise(store: kvstore.Store) -> None:
    """All calls once. What they answer is typed, and bytes are the right ones or none."""
    got = bytearray(len(VALUE))
    result = store.get(["x"], [got])
    assert result[0] in TYPED
    assert bytes(got) == VALUE if result[0] is Status.OK else bytes(got) == bytes(len(VALUE))
    assert store.put(["x"], [VALUE])[0] in TYPED
    large = store.put(["x"], [bytes(100_000)])
    assert large[0] in TYPED
    match = store.match_prefix(["x", "y"])
    assert 0 <= match.blocks <= 2
    calls = [
        lambda: store.exists(["x", "y"]),
        store.list,
        store.usage,
        store.audit,
        lambda: store.touch(["x"]),
        store.clear,
    ]
    for call in calls:
        with contextlib.suppress(kvstore.KvstoreError):
            call()
    with contextlib.suppress(kvstore.KvstoreError), match as hit:
        assert hit.blocks <= 2
        assert all(status in TYPED for status in hit.verify())
        targets = [bytearray(len(VALUE)) for _ in range(hit.blocks)]
        for status, target in zip(hit.read(targets), targets, strict=True):
            assert status in TYPED
            assert bytes(target) == (VALUE if status is Status.OK else bytes(len(VALUE)))


def test_an_honest_fake_is_believed() -> None:
    with FakeNode() as node, connect(node) as store:
        exercise(store)
        got = bytearray(len(VALUE))
        assert store.get(["x"], [got]).ok
        assert got == VALUE


def mutated(chance: random.Random, answer: Answer) -> Answer:
    name, body, payload = answer
    kind = chance.randrange(7)
    if kind == 0 and body:
        at = chance.randrange(len(body))
        body = body[:at] + bytes([body[at] ^ 1 << chance.randrange(8)]) + body[at + 1 :]
    elif kind == 1 and body:
        at = chance.randrange(len(body))
        body = body[:at] + b"\xff" * min(4, len(body) - at) + body[at + 4 :]
    elif kind == 2:
        body = body[: chance.randrange(len(body) + 1)]
    elif kind == 3:
        body += chance.randbytes(chance.randrange(1, 40))
    elif kind == 4 and payload:
        at = chance.randrange(len(payload))
        payload = payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
    elif kind == 5:
        payload = payload[:-1] if chance.random() < 0.5 else payload + b"more"
    else:
        name = raw.name_of(chance.randrange(1, 47))
    return name, body, payload


@pytest.mark.parametrize("seed", range(SEED, SEED + 30))
def test_answers_that_are_damaged_are_never_more_than_failures(seed: int) -> None:
    """A part of a block that comes wrong is CORRUPT or the connection is given up: never OK."""
    print(f"seed {seed}")
    chance = random.Random(seed)

    def answer(name: str, said: SimpleNamespace) -> Answer | None:
        right = honest(name, said)
        return mutated(chance, right) if right and chance.random() < 0.4 else right

    began = time.monotonic()
    with FakeNode(answer=answer) as node:
        for _ in range(4):
            try:
                store = connect(node)
            except kvstore.KvstoreError:
                continue
            with store:
                exercise(store)
    assert time.monotonic() - began < 60
