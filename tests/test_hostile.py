"""What anybody who reaches a node's sockets may send: it refuses, keeps nothing, and serves on."""

import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import raw
from builders import MIB, block, is_block
from raw import Line, Refused, Why
from small_node import ANY, TOKEN, SmallNode, small_node
from told import wait_for

import kvstore

HELLO_NS = STALL_NS = 400_000_000
SOON_S = 2.0  # the deadline, the 250 ms in which the node looks, and a slow machine
SEED = 20241129
KINDS = ["tcp", "unix"]


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallNode]:
    folder = tmp_path_factory.mktemp("node")
    with small_node(folder, dram_bytes=8 * MIB, hello_ns=HELLO_NS, stall_ns=STALL_NS) as node:
        yield node


@pytest.fixture
def node(one_node: SmallNode) -> Iterator[SmallNode]:
    """The same for all. After each test a good client is served, nobody else is connected, and
    memory and descriptors are what they were.
    """
    with one_node.connect("tcp") as good:
        serves(good)
        memory, descriptors = one_node.rss_anon(), one_node.descriptors()
        yield one_node
        connections = one_node.ask("counts")["connections"]
        wait_for(lambda: one_node.ask("counts")["connections"] <= 3, 10, lambda: str(connections))
        serves(good)
        wait_for(lambda: one_node.descriptors() <= descriptors + 1)
        assert one_node.rss_anon() < memory + 4 * MIB
    one_node.assert_idle()


def serves(store: kvstore.Store) -> None:
    assert store.put(["good"], [block(1, 70_000)])[0] in (kvstore.Status.OK, kvstore.Status.EXISTS)
    got = bytearray(70_000)
    assert store.get(["good"], [got]).ok
    assert is_block(got, 1)


@pytest.fixture(params=KINDS)
def address(request: pytest.FixtureRequest, node: SmallNode) -> str:
    return node.tcp if request.param == "tcp" else node.unix


def refusal(line: Line) -> Refused:
    with pytest.raises(Refused) as refused:
        line.receive("Welcome")
    assert line.at_end()
    return refused.value


def known(address: str) -> Line:
    """A connection with its hello behind it."""
    line = Line(address)
    line.greet(TOKEN)
    return line


# ---- proofs --------------------------------------------------------------------------------------


def begin(line: Line, **changed: object) -> tuple[bytes, bytes]:
    """Hello and challenge, as bodies."""
    hello = raw.encode("Hello", **raw.hello_fields(**changed))
    line.socket.sendall(raw.frame("Hello", hello))
    return hello, line.receive("Challenge").body


def offer(line: Line, proof: bytes) -> Refused:
    line.send("Proof", proof=proof)
    return refusal(line)


def test_a_client_with_another_token_is_refused(address: str) -> None:
    for token in (b"", b"guess", TOKEN + b"x", TOKEN[:-1]):
        with Line(address) as line:
            hello, challenge = begin(line)
            refused = offer(line, raw.prove(token, raw.CLIENT, hello, challenge))
            assert refused.why is Why.TOKEN
            assert "token" in refused.message
        with pytest.raises(kvstore.NodeRefused, match="token"):
            kvstore.connect(address, ANY, token=token or b"-")


def test_a_nodes_own_proof_is_no_proof_of_a_client(address: str) -> None:
    with Line(address) as line:
        _, challenge = begin(line)
        assert offer(line, raw.decode("Challenge", challenge).proof).why is Why.TOKEN


def test_a_proof_serves_once(address: str) -> None:
    nonce = os.urandom(32)
    with Line(address) as first, Line(address) as second:
        hello, challenge = begin(first, nonce=nonce)
        proof = raw.prove(TOKEN, raw.CLIENT, hello, challenge)
        first.ask("Proof", "Welcome", proof=proof)
        same, another = begin(second, nonce=nonce)
        assert same == hello
        assert another != challenge
        assert offer(second, proof).why is Why.TOKEN


def test_each_bit_of_a_proof_counts(address: str) -> None:
    for bit in (0, 7, 100, 255):
        with Line(address) as line:
            hello, challenge = begin(line)
            proof = bytearray(raw.prove(TOKEN, raw.CLIENT, hello, challenge))
            proof[bit // 8] ^= 1 << bit % 8
            assert offer(line, bytes(proof)).why is Why.TOKEN


def test_a_hello_changed_on_its_way_is_found_out_by_both(address: str) -> None:
    fields = raw.hello_fields()
    said = raw.encode("Hello", **fields)
    for changes in ({"version_max": 2}, {"part_bytes": 4096}, {"wants_memory": True}):
        heard = raw.encode("Hello", **{**fields, **changes})
        with Line(address) as line:
            line.socket.sendall(raw.frame("Hello", heard))
            challenge = line.receive("Challenge")
            assert challenge.proof == raw.prove(TOKEN, raw.NODE, heard, challenge.body)
            assert challenge.proof != raw.prove(TOKEN, raw.NODE, said, challenge.body)
            proof = raw.prove(TOKEN, raw.CLIENT, said, challenge.body)
            assert offer(line, proof).why is Why.TOKEN


def test_a_session_is_joined_by_its_name_only(address: str) -> None:
    with known(address) as owner:
        high, low = owner.welcome.session
        for name in ((high, low ^ 1), (high ^ 1, low), raw.ZERO_ID):
            with Line(address) as line, pytest.raises(Refused) as refused:
                line.greet(TOKEN, data=True, session=name)
            assert refused.value.why is Why.SESSION


# ---- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "most"), [(0, 0), (2, 2), (2, 65535), (5, 1), (1, 0)])
def test_no_version_in_common_is_told_with_both_ranges(address: str, least: int, most: int) -> None:
    with Line(address) as line:
        line.send("Hello", **raw.hello_fields(version_min=least, version_max=most))
        refused = refusal(line)
        assert refused.why is Why.VERSION
        assert "1 to 1" in refused.message
        assert f"{least} to {most}" in refused.message


def test_a_hello_of_a_version_to_come_is_told_so_too(address: str) -> None:
    with Line(address) as line:
        line.socket.sendall(raw.frame("Hello", struct.pack("<HH", 2, 9) + b"in another order"))
        assert refusal(line).why is Why.VERSION


def test_the_highest_version_of_both_is_spoken(address: str) -> None:
    with Line(address) as line:
        assert line.greet(TOKEN, version_min=0, version_max=7).epoch
    with Line(address) as line:
        _, challenge = begin(line, version_min=0, version_max=7)
        assert raw.decode("Challenge", challenge).version == 1


# ---- bytes that are no messages ------------------------------------------------------------------


def test_random_bytes_end_the_connection(address: str) -> None:
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    for attempt in range(200):
        data = chance.randbytes(chance.choice([1, 7, 48, 49, 200, 5000, 200_000]))
        if attempt % 3 == 0:
            data = b"KVS1" + data
        line = known(address) if attempt % 2 else Line(address)
        with line, suppress(OSError):  # it has ended before
            line.socket.sendall(data)
            line.socket.shutdown(socket.SHUT_WR)
            while line.socket.recv(65536):
                pass


HEADERS = {
    "magic": (b"KVS2", 1, 0, 0, 0, 0),
    "type zero": (b"KVS1", 0, 0, 0, 0, 0),
    "type beyond": (b"KVS1", 47, 0, 0, 0, 0),
    "type far beyond": (b"KVS1", 65535, 0, 0, 0, 0),
    "flags": (b"KVS1", 39, 1, 0, 0, 0),
    "reserved": (b"KVS1", 39, 0, 0, 1, 0),
    "body": (b"KVS1", 39, 0, (64 << 20) + 1, 0, 0),
    "any body": (b"KVS1", 39, 0, 0xFFFFFFFF, 0, 0),
    "payload": (b"KVS1", 13, 0, 4, 0, (1 << 40) + 1),
    "any payload": (b"KVS1", 13, 0, 4, 0, raw.WHOLE),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_is_none_is_refused_at_once(address: str, what: str) -> None:
    *fields, payload_bytes = HEADERS[what]
    header = raw.HEADER.pack(*fields, payload_bytes, 1, bytes(16))
    for line in (Line(address), known(address)):
        with line:
            line.socket.sendall(header)
            assert refusal(line).why is Why.PROTOCOL


def test_what_is_claimed_before_the_hello_is_bounded(address: str) -> None:
    for body_bytes, payload_bytes in [((64 << 10) + 1, 0), (64 << 20, 0), (200, 1), (200, 1 << 40)]:
        with Line(address) as line:
            head = raw.HEADER.pack(b"KVS1", 1, 0, body_bytes, 0, payload_bytes, 1, bytes(16))
            line.socket.sendall(head + bytes(200 if payload_bytes else 0))
            assert refusal(line).why is Why.PROTOCOL


@pytest.mark.parametrize("name", [name for name in raw.tables()[0] if name != "Hello"])
def test_only_a_hello_comes_first_and_only_requests_later(address: str, name: str) -> None:
    chance = random.Random(name)
    with Line(address) as line:
        line.socket.sendall(raw.frame(name, chance.randbytes(60)))
        assert refusal(line).why is Why.PROTOCOL
    with Line(address) as line:
        begin(line)
        line.socket.sendall(raw.frame(name, chance.randbytes(61)))
        assert refusal(line).why in (Why.PROTOCOL, Why.TOKEN)
    with known(address) as line:
        line.socket.sendall(raw.frame(name, chance.randbytes(61)))
        assert refusal(line).why is Why.PROTOCOL


# One of each message a client may send, all lists filled.
KEYS = [raw.key("a"), raw.key("b")]
RESERVE = raw.reserve_fields(KEYS, [5, 6], attempt=(1, 2), texts=[b"a", b"b"])
SUMS = [{"parts": [1]}, {"parts": [2, 3]}]
REQUESTS = {
    "Match": {"keys": KEYS, "skip": 0, "ranks": 1},
    "Exists": {"keys": KEYS},
    "Reserve": RESERVE,
    "ReserveMore": {"attempt": (1, 2), "chain": True, "wait_ns": 0},
    "Write": {"attempt": (1, 2), "items": [0, 1], "first": 0, "bytes": raw.WHOLE},
    "Commit": {"attempt": (1, 2), "end": 2, "otherwise": 7, "parts": SUMS},
    "Put": {**RESERVE, "parts": SUMS},
    "Lookup": {"keys": KEYS, "skip": 0, "run": True, "view": False},
    "Redeem": {"ticket": (3, 4)},
    "Get": {"keys": KEYS, "room": [9, 9]},
    "Read": {"lease": 7, "first_item": 0, "room": [9], "first": 0, "bytes": raw.WHOLE},
    "Release": {"lease": 7, "quiet": False},
    "MakeView": {"lease": 7},
    "Ticket": {"lease": 7},
    "Verify": {"lease": 7},
    "Complain": {"lease": 7, "item": 0},
    "Apply": {"operation": 1, "keys": KEYS},
    "Settle": {"wait_ns": 0},
}


def count_offsets(name: str, body: bytes) -> list[int]:
    """Where in a body the counts of its lists and texts stand."""
    found: list[int] = []

    class Noting(raw.Reader):
        def read(self, kind: str) -> object:
            if kind == "text" or kind.startswith("["):
                found.append(self.at)
            return super().read(kind)

    Noting(body).fields(name)
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_counts_beyond_the_message_are_refused(address: str, name: str) -> None:
    body = raw.encode(name, **REQUESTS[name])
    for offset in count_offsets(name, body):
        for count in (0xFFFFFFFF, 0x80000000, 65537, len(body) + 1):
            changed = bytearray(body)
            struct.pack_into("<I", changed, offset, count)
            with known(address) as line:
                line.socket.sendall(raw.frame(name, bytes(changed)))
                assert refusal(line).why is Why.PROTOCOL


def test_a_hellos_text_beyond_it_is_refused(address: str) -> None:
    body = raw.encode("Hello", **raw.hello_fields())
    (offset,) = count_offsets("Hello", body)
    for count in (0xFFFFFFFF, 65537, len(body)):
        with Line(address) as line:
            changed = bytearray(body)
            struct.pack_into("<I", changed, offset, count)
            line.socket.sendall(raw.frame("Hello", bytes(changed)))
            assert refusal(line).why is Why.PROTOCOL


@pytest.mark.parametrize("name", REQUESTS)
def test_a_body_cut_at_any_byte_is_refused(address: str, name: str) -> None:
    body = raw.encode(name, **REQUESTS[name])
    for length in range(len(body)):
        with known(address) as line:
            line.socket.sendall(raw.frame(name, body[:length]))
            assert refusal(line).why is Why.PROTOCOL


@pytest.mark.parametrize("name", ["Hello", "Put", "Write", "Commit", "Lookup", "Get"])
def test_a_client_may_end_at_any_byte(address: str, name: str, node: SmallNode) -> None:
    """With the payload, and with what it was granted before."""
    payload = {"Put": b"12345678901", "Write": b"12345678901"}.get(name, b"")
    for length in range(1000):
        line = Line(address) if name == "Hello" else known(address)
        fields = dict(raw.hello_fields()) if name == "Hello" else dict(REQUESTS[name])
        if name in ("Write", "Commit"):
            line.ask("Reserve", "Granted", **{**RESERVE, "attempt": (1, 2)})
        whole = raw.frame(name, raw.encode(name, **fields), len(payload)) + payload
        if length >= len(whole):
            line.close()
            break
        with line:
            line.socket.sendall(whole[:length])
    else:
        pytest.fail("the message is longer than was tried")
    assert node.assert_idle()["slots"] <= 1  # the good client's


# ---- slow ----------------------------------------------------------------------------------------


def drip(line: Line, data: bytes, pause_s: float = 0.02) -> float:
    """A byte at a time until the node closes; how long that took, in seconds."""
    began = time.monotonic()
    line.socket.settimeout(pause_s)
    for byte in data:
        try:
            line.socket.sendall(bytes([byte]))
            if not line.socket.recv(65536):
                break
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            break
    return time.monotonic() - began


def test_a_slow_hello_is_cut_off(address: str, node: SmallNode) -> None:
    stalled = node.ask("counts")["stalled"]
    hello = raw.frame("Hello", raw.encode("Hello", **raw.hello_fields()))
    with Line(address) as line:
        assert HELLO_NS / 1e9 <= drip(line, hello) < SOON_S
    with Line(address) as line:
        begin(line)
        assert drip(line, raw.frame("Proof", bytes(32)), 0.05) < SOON_S
    for sent in (0, 1, 47, 48, 100):  # and then nothing more
        with Line(address) as line:
            line.socket.sendall(hello[:sent])
            began = time.monotonic()
            assert line.at_end()
            assert time.monotonic() - began < SOON_S
    assert node.ask("counts")["stalled"] == stalled + 7


def test_a_slow_request_is_cut_off(address: str, node: SmallNode) -> None:
    exists = raw.frame("Exists", raw.encode("Exists", keys=KEYS * 3))
    with known(address) as line:
        assert drip(line, exists) < SOON_S
    for sent in (1, 47, 48, 60):
        with known(address) as line:
            line.socket.sendall(exists[:sent])
            began = time.monotonic()
            assert line.at_end()
            assert time.monotonic() - began < SOON_S
    with known(address) as line:
        line.ask("Reserve", "Granted", **{**RESERVE, "attempt": (1, 2)})
        head = raw.frame("Write", raw.encode("Write", **REQUESTS["Write"]), 11)
        line.socket.sendall(head + b"12345")
        began = time.monotonic()
        assert line.at_end()
        assert time.monotonic() - began < SOON_S


def test_a_quiet_client_is_no_slow_one(address: str, node: SmallNode) -> None:
    with known(address) as line:
        line.socket.settimeout(2 * STALL_NS / 1e9)
        with pytest.raises(TimeoutError):
            line.socket.recv(1)
        line.socket.settimeout(20)
        assert line.ask("Exists", "Held", keys=KEYS).held == [0, 0]


# ---- what a client is passed ---------------------------------------------------------------------


def test_shared_memory_lets_nobody_change_headers_or_sizes(node: SmallNode, tmp_path: Path) -> None:
    from raw_client import Actor

    actor = Actor(node.unix, "shm")
    actor.hello()
    with actor.client:
        assert actor.forbidden() == []


def test_no_memory_is_passed_over_tcp(node: SmallNode) -> None:
    with raw.Client(node.tcp, TOKEN, shm=True) as client:
        assert client.welcome.header_bytes == 0
        assert client.control.descriptors == []
        assert client.reserve([raw.key("tcp")], [5]).slots[0].extents == []
