"""Damaged messages of a client that is known, sent to a real node: it lives, serves others, and its
accounts agree. What is never a message, and hellos, are in test_hostile.py.
"""

import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import raw
from builders import MIB, block, is_block
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from small_node import TOKEN, SmallNode, small_node

import kvstore

BOUND_S = 13.0  # no new round after that
EXAMPLES, ROUNDS = 75, 8
SEED = int(os.environ.get("FUZZ_SEED", "7"))
NAMES = [name for name in raw.tables()[0] if name not in ("Hello", "Proof")]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallNode]:
    with small_node(tmp_path_factory.mktemp("node"), stall_ns=10**9) as started:
        yield started


# ---- valid messages, by the tables ---------------------------------------------------------------

KEYS = [raw.key(number) for number in range(4)]
IDS = [(1, 1), (2, 2), raw.ZERO_ID]
SMALL = st.sampled_from([0, 1, 2, 3, 5, 64, 4096, MIB, 1 << 31, (1 << 32) - 1])
KINDS: dict[str, st.SearchStrategy[object]] = {
    "u8": st.integers(0, 255),
    "u16": st.integers(0, 3),
    "u32": st.one_of(st.integers(0, 4), SMALL),
    "u64": st.one_of(st.integers(0, 100), SMALL, st.sampled_from([1 << 40, raw.WHOLE])),
    "i64": st.sampled_from([0, 1, -1, 10**6, 5 * 10**7, -(1 << 63)]),
    "truth": st.booleans(),
    "status": st.integers(0, 9),
    "key": st.sampled_from(KEYS),
    "hash": st.binary(min_size=32, max_size=32),
    "id": st.sampled_from(IDS),
    "text": st.binary(max_size=20),
}


def of(kind: str) -> st.SearchStrategy[object]:
    if kind in KINDS:
        return KINDS[kind]
    if kind.startswith("["):
        return st.lists(of(kind[1:-1]), max_size=4)
    return st.fixed_dictionaries(
        {field[0]: of(field[1]) for field in raw.tables()[1][kind] if field is not None}
    )


def framed(name: str, payload: bytes = b"", **values: object) -> bytes:
    return raw.frame(name, raw.encode(name, **values), len(payload)) + payload


@st.composite
def singles(draw: st.DrawFn) -> list[bytes]:
    """A message of valid fields, with some payload where one belongs."""
    name = draw(st.sampled_from(NAMES))
    values = {f[0]: draw(of(f[1])) for f in raw.tables()[1][name] if f is not None}
    carries = name in ("Put", "Write") or draw(st.integers(0, 9)) == 0
    payload = bytes(draw(st.sampled_from([0, 1, 5, 64, 69, 5000]))) if carries else b""
    return [framed(name, payload, **values)]


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """A put, in steps or in one message, and a get: all of it makes sense."""
    lengths = draw(st.lists(st.sampled_from([1, 5, 64, 5000, 3 * MIB]), min_size=1, max_size=3))
    keys = draw(st.permutations(KEYS))[: len(lengths)]
    blocks = [bytes(length) for length in lengths]
    fields = raw.reserve_fields(keys, lengths, attempt=(1, 1), chain=draw(st.booleans()))
    payload = b"".join(blocks)
    if draw(st.booleans()) and len(payload) <= 64 << 10:
        fields["parts"] = [raw.checksums(data) for data in blocks]
        said = [framed("Put", payload, **fields)]
    else:
        write = {"attempt": (1, 1), "items": range(len(blocks)), "first": 0, "bytes": raw.WHOLE}
        said = [
            framed("Reserve", **fields),
            framed("Write", payload, **write),
            framed("Commit", **raw.commit_fields((1, 1), blocks)),
        ]
    said.append(framed("Get", keys=keys, room=lengths))
    said.append(framed("Apply", operation=draw(st.integers(0, 3)), keys=keys))
    return said


@st.composite
def batches(draw: st.DrawFn) -> list[bytes]:
    """Messages one behind the other, some of them damaged."""
    said = [*draw(conversations())]
    for more in draw(st.lists(singles(), max_size=3)):
        said.insert(draw(st.integers(0, len(said))), more[0])
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 4]))):
        which = draw(st.integers(0, len(said) - 1))
        frame = bytearray(said[which] or b"K")
        at = draw(st.integers(0, min(len(frame), 300) - 1))
        frame[at] = draw(st.one_of(st.just(0xFF), st.just(0), st.integers(0, 255)))
        if draw(st.integers(0, 9)) == 0:
            del frame[at:]
        said[which] = bytes(frame)
    return said


# ---- sent ----------------------------------------------------------------------------------------


def send_all(node: SmallNode, transport: str, messages: list[bytes]) -> None:
    """What is answered is read until the node closes or has said all."""
    with raw.Client(node.address(transport), TOKEN, shm=transport == "shm") as client:
        line = client.join()
        with suppress(OSError):  # it may be closed at any of them
            for message in messages:
                line.socket.sendall(message)
            line.socket.shutdown(socket.SHUT_WR)
            line.socket.settimeout(5)
            while line.socket.recv(1 << 16):
                pass


def serves(store: kvstore.Store, number: int) -> None:
    name = f"good {number % 8}"
    store.remove([name])
    assert store.put([name], [block(number, 3000)]).ok
    got = bytearray(3000)
    assert store.get([name], [got]).ok
    assert is_block(got, number)


def test_damaged_messages_harm_nobody(node: SmallNode) -> None:
    deadline = time.monotonic() + BOUND_S
    tried = 0

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(batches(), st.sampled_from(["tcp", "shm"]))
    def run(messages: list[bytes], transport: str) -> None:
        nonlocal tried
        tried += 1
        send_all(node, transport, messages)

    with node.connect("tcp") as good:
        for round_seed in range(SEED, SEED + ROUNDS):
            print(f"seed {round_seed}")
            seed(round_seed)(run)()
            serves(good, tried)
            assert node.ask("audit") == ""
            if time.monotonic() > deadline:
                break
    print(f"{tried} batches of messages")
    usage = node.assert_idle()
    assert usage["commits"] > 50
    assert node.ask("counts")["requests"] > 100


def test_bits_flipped_in_a_whole_put_and_get(node: SmallNode) -> None:
    """Every outcome is a right block or none; the reader checks what the node says it holds."""
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    data = block(9, 5000).tobytes()
    with raw.Client(node.tcp, TOKEN) as reader:
        for attempt in range(300):
            key = raw.key(f"flip {attempt}")
            fields = raw.reserve_fields([key], [len(data)], parts=[raw.checksums(data)])
            frame = bytearray(raw.frame("Put", raw.encode("Put", **fields), len(data)) + data)
            at = chance.randrange(len(frame))
            frame[at] ^= 1 << chance.randrange(8)
            send_all(node, "tcp", [bytes(frame)])
            held = reader.lookup([key])
            for item in range(len(held.blocks)):
                assert reader.read(held, item) == data, (attempt, at)
            reader.line.ask("Release", "Released", lease=held.lease, quiet=False)
    node.assert_idle()


def test_the_page_and_this_client_agree_on_every_type(tmp_path: Path) -> None:
    """A page without a message, or a field, could not be read as this one is."""
    numbers, fields = raw.tables()
    assert sorted(numbers.values()) == list(range(1, 47))
    header = (raw.WIRE.parents[1] / "cpp" / "wire.h").read_text()
    names = header.split("enum class Type")[1].split("};")[0].split("\n")
    listed = [line.split(",")[0].strip().split(" ")[0] for line in names if "  k" in line]
    assert [name.removeprefix("k") for name in listed] == sorted(numbers, key=numbers.__getitem__)
    assert set(numbers) <= set(fields)
