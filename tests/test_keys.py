"""Keys: golden vectors against a reference of our own in plain Python, and what keeps keys apart.

The reference below shares no code with the package. `golden/keys.json` is frozen: a change that
breaks it makes every block stored before unreachable.
"""

import hashlib
import json
import os
import struct
import subprocess
import sys
import unicodedata
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore import _core
from kvstore.errors import InvalidArgument
from kvstore.keys import keys_from_ids, make_keys, text_key
from kvstore.spec import BlockSpec

HERE = Path(__file__).parent
GOLDEN = json.loads(
    (HERE / "golden" / "keys.json").read_text(),
    object_hook=lambda item: bytes.fromhex(item["hex"]) if set(item) == {"hex"} else item,
)
FORMAT = (HERE.parent / "docs" / "block-format.md").read_text()
GEOMETRY: dict[str, Any] = {"layers": 2, "kv_heads": 8, "head_dim": 128}
NOT_INTEGERS = [True, 1.0, None, "1", b"1", [1], np.float32(1), np.bool_(True)]


def spec_of(**fields: Any) -> BlockSpec:
    return BlockSpec(fields.pop("model", "llama"), **{**GEOMETRY, **fields})


# ---- reference -----------------------------------------------------------------------------------


def reference_record(model: str, **fields: Any) -> bytes:
    opaque = "layers" not in fields
    size = fields.get("block_bytes")
    values = [
        model.encode(),
        fields.get("weights", "").encode(),
        fields.get("adapter", "").encode(),
        fields.get("dtype", "bfloat16").encode(),
        fields.get("layout", "").encode(),
        struct.pack("<Q", fields.get("layers", 0)),
        struct.pack("<Q", fields.get("kv_heads", 0)),
        struct.pack("<Q", fields.get("head_dim", 0)),
        struct.pack("<Q", fields.get("block_tokens", 16)),
        fields.get("tenant", "").encode(),
        fields.get("salt", b""),
        fields.get("hash", "sha256").encode(),
        b"" if not opaque else b"any" if size is None else struct.pack("<Q", size),
    ]
    record = b"kvstore.namespace\x01"
    for i, value in enumerate(values):
        record += struct.pack("<BI", i + 1, len(value)) + value
    return record


def reference_root(record: bytes) -> bytes:
    namespace_id = hashlib.sha256(record).digest()
    return hashlib.sha256(b"kvstore.root.v1" + namespace_id).digest()[:28]


def reference_chain(
    record: bytes,
    tokens: list[int],
    *,
    block_tokens: int = 16,
    salt: bytes = b"",
    extra: Any = None,
    shard: tuple[int, int] = (0, 1),
    xxh3: bool = False,
) -> list[bytes]:
    parent = reference_root(record)
    if salt:
        salted = b"kvstore.salt.v1" + parent + struct.pack("<I", len(salt)) + salt
        parent = hashlib.sha256(salted).digest()[:28]
    keys = []
    for i in range(len(tokens) // block_tokens):
        block = tokens[i * block_tokens :][:block_tokens]
        message = b"kvstore.block.v1" + parent + struct.pack("<I", block_tokens)
        message += struct.pack(f"<{block_tokens}I", *block)
        more = extra[i] if extra and extra[i] is not None else []
        for key in [more] if isinstance(more, bytes) else more:
            message += struct.pack("<I", len(key)) + key
        if xxh3:
            parent = xxhash.xxh3_128(message).digest() + bytes(12)
        else:
            parent = hashlib.sha256(message).digest()[:28]
        keys.append(parent + struct.pack(">HH", *shard))
    return keys


def reference_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


# ---- golden vectors ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN["specs"])
def test_absent_empty_and_present_fields_have_golden_keys(name: str) -> None:
    case = GOLDEN["specs"][name]
    fields, call, tokens = case["spec"], case["call"], list(range(100, 165))
    spec = BlockSpec(**fields)
    record = reference_record(**fields)
    assert spec.canonical().hex() == record.hex() == case["record"]
    assert spec.namespace_id == hashlib.sha256(record).digest()
    assert spec.root.hex() == reference_root(record).hex() == case["root"]
    expected = reference_chain(
        record,
        tokens,
        block_tokens=fields.get("block_tokens", 16),
        shard=(fields.get("rank", 0), fields.get("world_size", 1)),
        xxh3=fields.get("hash") == "xxh3-128",
        **call,
    )
    keys = [key.hex() for key in make_keys(spec, tokens, **call)]
    assert keys == [key.hex() for key in expected] == case["keys"]


def test_golden_keys_are_equal_only_where_the_format_says_so() -> None:
    cases = dict(GOLDEN["specs"])
    assert cases.pop("rank 3 of 4")["root"] == cases["plain"]["root"]
    assert cases.pop("no extra keys")["keys"] == cases["plain"]["keys"]
    keys = [key for case in cases.values() for key in case["keys"]]
    assert len(set(keys)) == len(keys) == 4 * (len(cases) - 1) + 2


def test_text_and_id_keys_are_golden() -> None:
    spec = BlockSpec("anything", block_bytes=None)
    root = reference_root(reference_record("anything", block_bytes=None))
    for text, key in GOLDEN["texts"]:
        message = b"kvstore.text.v1" + root + struct.pack("<I", len(text)) + text
        assert text_key(spec, text).hex() == key
        assert key == hashlib.sha256(message).hexdigest()[:56] + "00000001"
    for number, key in GOLDEN["ids"]:
        message = b"kvstore.ident.v1" + root + struct.pack("<Q", number)
        assert keys_from_ids(spec, [number])[0].hex() == key
        assert key == hashlib.sha256(message).hexdigest()[:56] + "00000001"


def test_worked_example_of_the_format_page_is_right() -> None:
    spec = BlockSpec("demo", layers=1, kv_heads=2, head_dim=64)
    record = reference_record("demo", layers=1, kv_heads=2, head_dim=64)
    keys = make_keys(spec, range(40))
    assert list(keys) == reference_chain(record, list(range(40)))
    block = bytes((i * 7 + i // 256) % 256 for i in range(8192))
    assert (spec.block_bytes, spec.parts.part_bytes) == (8192, 2048)
    parts = [reference_crc32c(block[i : i + 2048]) for i in range(0, 8192, 2048)]
    assert parts == [_core.crc32c(block[i : i + 2048]) for i in range(0, 8192, 2048)]
    content_id = _core.crc32c(struct.pack("<4I", *parts))
    assert content_id == reference_crc32c(struct.pack("<4I", *parts))
    shown = [spec.namespace_id.hex(), spec.root.hex()]
    shown += [*(key.hex() for key in keys), keys.with_rank(1, 2)[0].hex()]
    shown += [text_key(spec, "system prompt").hex(), keys_from_ids(spec, [7])[0].hex()]
    shown += [f"{checksum:08x}" for checksum in (*parts, content_id)]
    page = "".join(FORMAT.split())
    assert [value for value in shown if value not in page] == []
    lines = FORMAT.split("The record, 133 bytes:")[1].split("namespace id")[0].splitlines()
    columns = [line[4:46].replace(" ", "") for line in lines]
    assert "".join(columns) == spec.canonical().hex() == record.hex()


KEYS_IN_A_FRESH_PROCESS = """
import hashlib
from kvstore.keys import make_keys, text_key
from kvstore.spec import BlockSpec
digest = hashlib.sha256()
for i in range(100):
    spec = BlockSpec("llama", layers=2, kv_heads=8, head_dim=128, tenant="t" * (i % 2))
    tokens = [(i * 7919 + j * 104729) % 128000 for j in range(16 * (i % 7) + 5)]
    extra = [None, b"", [b"image"], [], b"x", [b"", b"y"]][: i % 7] if i % 3 else None
    digest.update(make_keys(spec, tokens, salt=b"s" * (i % 4), extra=extra).array.tobytes())
    digest.update(text_key(spec, f"text {i}"))
print(digest.hexdigest())
"""


def test_keys_are_equal_in_fresh_processes() -> None:
    def start(seed: int) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", KEYS_IN_A_FRESH_PROCESS]
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    outputs = [process.communicate(timeout=60)[0] for process in [start(s) for s in range(20)]]
    assert {output.strip() for output in outputs} == {GOLDEN["fresh_process"]}


# ---- chains --------------------------------------------------------------------------------------


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=80),
    block_tokens=st.integers(1, 20),
    salt=st.binary(max_size=40),
    data=st.data(),
)
def test_chains_equal_the_reference(
    tokens: list[int], block_tokens: int, salt: bytes, data: st.DataObject
) -> None:
    item = st.none() | st.binary(max_size=90) | st.lists(st.binary(max_size=30), max_size=3)
    num_blocks = len(tokens) // block_tokens
    extra = data.draw(st.none() | st.lists(item, min_size=num_blocks, max_size=num_blocks))
    record = reference_record("llama", block_tokens=block_tokens, **GEOMETRY)
    expected = reference_chain(record, tokens, block_tokens=block_tokens, salt=salt, extra=extra)
    assert list(make_keys(spec_of(block_tokens=block_tokens), tokens, salt=salt, extra=extra)) == (
        expected
    )


def test_partial_last_block_gets_no_key() -> None:
    spec = spec_of()
    whole = make_keys(spec, range(48))
    assert [len(make_keys(spec, range(n))) for n in (0, 1, 15, 16, 47, 48)] == [0, 0, 0, 1, 2, 3]
    assert make_keys(spec, range(63)) == whole
    assert make_keys(spec, range(32)) == whole[:2]


def test_one_token_changes_its_key_and_all_after() -> None:
    tokens = list(range(160))
    before = make_keys(spec_of(), tokens)
    tokens[70] += 1
    after = make_keys(spec_of(), tokens)
    assert before[:4] == after[:4]
    assert not set(before[4:]) & set(after[4:])


def test_chain_continues_from_a_parent() -> None:
    spec, whole = spec_of(), make_keys(spec_of(), range(96), salt=b"s")
    for parent in (whole[1], whole[1][:28]):
        assert make_keys(spec, range(32, 96), parent=parent) == whole[2:]
    bad: list[Any] = [b"", bytes(27), bytes(33), "x" * 28]
    for parent in bad:
        with pytest.raises(InvalidArgument, match=r"parent is .*32 bytes of the block before"):
            make_keys(spec, range(16), parent=parent)
    with pytest.raises(InvalidArgument, match="parent and salt"):
        make_keys(spec, range(16), parent=whole[0], salt=b"s")


def test_long_chains_equal_the_reference() -> None:
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 2**32, 40_000, dtype=np.uint32)  # long enough to drop the lock
    expected = reference_chain(reference_record("llama", **GEOMETRY), tokens.tolist())
    assert list(make_keys(spec_of(), tokens)) == expected


def test_salts_separate_and_absent_is_empty() -> None:
    spec = spec_of()
    chains = [make_keys(spec, range(64), salt=salt) for salt in (b"", b"a", b"b", b"ab", b"\0")]
    assert chains[0] == make_keys(spec, range(64))
    assert len({key for chain in chains for key in chain}) == 5 * 4
    salted_spec = make_keys(spec_of(salt=b"a"), range(64))
    assert not set(salted_spec) & set(chains[1])  # a spec's salt is another namespace
    for salt in ("a", None, 5, bytearray(b"a"), bytes(1025)):
        with pytest.raises(InvalidArgument, match="salt"):
            make_keys(spec, range(64), salt=salt)


def test_extra_keys_give_distinct_chains() -> None:
    spec, tokens = spec_of(block_tokens=1), [0]
    digests = (i.to_bytes(3, "big") for i in range(70_000))
    keys = {make_keys(spec, tokens, extra=[digest])[0] for digest in digests}
    assert len(keys) == 70_000


def test_extra_keys_are_told_apart_by_their_borders() -> None:
    spec = spec_of()
    items = [None, b"", [b"", b""], b"ab", [b"a", b"b"], [b"ab", b""], [b"", b"ab"], b"\0" * 4]
    keys = [make_keys(spec, range(16), extra=[item])[0] for item in items]
    assert len(set(keys)) == len(items)
    assert make_keys(spec, range(16), extra=[[]])[0] == keys[0]  # no extra keys, either way
    assert make_keys(spec, range(16), extra=[[b"ab"]])[0] == keys[3]


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ([b"a"], "1 items for 2 full blocks"),
        ([None] * 3, "3 items for 2 full blocks"),
        (b"ab", "extra is a bytes"),
        ([b"a", "b"], "extra of block 1 is 'b'"),
        ([[b"a", 1], None], "extra of block 0"),
        ([None, bytes(1 << 20)], "extra of block 1 has 1048580 bytes"),
    ],
)
def test_bad_extra_keys_are_refused(extra: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        make_keys(spec_of(), range(33), extra=extra)


class Tensor:
    """What a tensor on the CPU looks like to numpy."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self.values, np.int64)


class Number:
    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        np.array,
        *(lambda t, dtype=dtype: np.array(t, dtype) for dtype in ("i4", "u4", "u8", ">i4", "i2")),
        lambda t: np.repeat(np.array(t, np.uint32), 3)[::3],
        lambda t: np.ndarray(len(t), np.uint32, b"\0" + np.array(t, np.uint32).tobytes(), 1),
        lambda t: [np.int32(i) for i in t],
        lambda t: [np.uint64(i) for i in t],
        lambda t: array("q", t),
        lambda t: memoryview(array("I", t)),
        Tensor,
    ],
)
def test_integer_types_of_equal_value_give_one_key(convert: Any) -> None:
    tokens = [7, 0, 1, 32_000, *range(100, 128)]
    expected = make_keys(spec_of(), tokens)
    assert make_keys(spec_of(), convert(tokens)) == expected
    assert keys_from_ids(spec_of(), convert(tokens)) == keys_from_ids(spec_of(), tokens)


def test_ranges_and_index_types_are_integers_too() -> None:
    assert make_keys(spec_of(), range(16)) == make_keys(spec_of(), list(range(16)))
    assert make_keys(spec_of(), [Number()] * 16) == make_keys(spec_of(), [7] * 16)


def test_torch_tensors_give_the_key_of_their_integers() -> None:
    torch = pytest.importorskip("torch")
    tokens, expected = list(range(32)), make_keys(spec_of(), range(32))
    for dtype in (torch.int32, torch.int64):
        assert make_keys(spec_of(), torch.tensor(tokens, dtype=dtype)) == expected
    assert make_keys(spec_of(), list(torch.tensor(tokens))) == expected
    with pytest.raises(InvalidArgument):
        make_keys(spec_of(), torch.zeros(16, dtype=torch.bfloat16))


@pytest.mark.parametrize("bad", [-1, 2**32, 2**64, -(2**70), *NOT_INTEGERS])
def test_what_is_no_token_is_refused_with_its_position(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^token 5 is .*from 0 to 4294967295$"):
        make_keys(spec_of(), [*range(5), bad, *range(20)])


@pytest.mark.parametrize("bad", [-1, 2**64, *NOT_INTEGERS])
def test_what_is_no_id_is_refused_with_its_position(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^id 2 is .*from 0 to 18446744073709551615$"):
        keys_from_ids(spec_of(), [1, 2, bad, 3])


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        (np.array([0, 1, -3] * 8, np.int32), "token 2 is -3"),
        (np.array([0, 2**32] * 8), "token 1 is 4294967296"),
        (np.zeros(16), r"token 0 is 0.0 \(float\)"),
        (np.ones(16, bool), r"token 0 is True \(bool\)"),
        (np.zeros((2, 16), int), r"shape \(2, 16\)"),
        (np.int64(3), "tokens are a int64; pass a list or array"),
        (7, "tokens are a int; pass a list or array"),
        (None, "tokens are a NoneType; pass a list or array"),
        ("text", "tokens are a str"),
        (b"1234", "tokens are a bytes"),
        ({1, 2}, "tokens are a set"),
        ([[1, 2], [3, 4]], r"token 0 is \[1, 2\]"),
    ],
)
def test_arrays_that_hold_no_tokens_are_refused(tokens: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        make_keys(spec_of(), tokens)


def test_a_list_that_shrinks_while_it_is_read_does_no_harm() -> None:
    class Shrinking:
        def __index__(self) -> int:
            tokens.clear()
            return 1

    tokens: list[Any] = [Shrinking(), *range(100)]
    assert len(make_keys(spec_of(), tokens)) == 0


def test_ids_stand_apart_from_tokens_and_text() -> None:
    spec = spec_of(block_tokens=1)
    ids = keys_from_ids(spec, [0, 1, 2**63, 2**64 - 1], version=4)
    assert ids == keys_from_ids(spec, np.array([0, 1, 2**63, 2**64 - 1], np.uint64), version=4)
    others = [*make_keys(spec, [0, 1]), text_key(spec, "0"), text_key(spec, bytes(8))]
    assert len({*ids, *others}) == 8


# ---- namespaces ----------------------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "model": "other",
    "weights": "sha256:1",
    "adapter": "lora",
    "dtype": "float16",
    "layout": "NHD",
    "layers": 3,
    "kv_heads": 4,
    "head_dim": 64,
    "block_tokens": 32,
    "tenant": "t",
    "salt": b"s",
    "hash": "xxh3-128",
}


def test_changing_any_field_of_the_spec_changes_every_key() -> None:
    base = spec_of(block_tokens=32, tenant="", salt=b"")
    specs = [base]
    for name, value in CHANGES.items():
        specs.append(spec_of(**{"block_tokens": 32, name: value if name != "block_tokens" else 16}))
    specs += [BlockSpec("llama", block_tokens=32, block_bytes=size) for size in (None, 1, 4096)]
    keys = [key for spec in specs for key in make_keys(spec, range(64))]
    keys += [key for spec in specs for key in (text_key(spec, "a"), keys_from_ids(spec, [1])[0])]
    assert len({spec.namespace_id for spec in specs}) == len(specs) == len(CHANGES) + 4
    assert len(set(keys)) == len(keys)


def test_weak_hash_needs_an_explicit_choice() -> None:
    assert spec_of().hash == "sha256"
    weak = spec_of(hash="xxh3-128")
    assert all(key[16:28] == bytes(12) for key in make_keys(weak, range(64)))
    for fields in ({"tenant": "t"}, {"salt": b"s"}):
        with pytest.raises(InvalidArgument, match="only sha256 keeps tenants apart"):
            spec_of(hash="xxh3-128", **fields)
    with pytest.raises(InvalidArgument, match="only sha256 keeps salts apart"):
        make_keys(weak, range(64), salt=b"s")


# ---- text keys -----------------------------------------------------------------------------------

WORD = "caf\u00e9"
TEXTS: list[str | bytes] = [
    *("a/b", "a\\b", ".", "..", "/", "~", " ", "a", "a ", "A", "a\0", "a\0b", "\0", "a\n", "a\nb"),
    *("\U0001f600", unicodedata.normalize("NFC", WORD), unicodedata.normalize("NFD", WORD)),
    *(b"\xff\xfe", b"\xed\xa0\x80", b"\x80", "x" * 511, "x" * 512, "\u00e9" * 256),
]


def test_text_keys_are_distinct_or_refused_by_length() -> None:
    spec = BlockSpec("anything", block_bytes=None)
    assert len({text_key(spec, text) for text in TEXTS}) == len(TEXTS)
    assert text_key(spec, WORD) == text_key(spec, WORD.encode())
    for text in ("", b"", "x" * 513, "\u00e9" * 257, b"x" * 1024, b"x" * (1 << 20)):
        size = len(text.encode() if isinstance(text, str) else text)
        with pytest.raises(InvalidArgument, match=f"1 to 512 bytes, not {size}$"):
            text_key(spec, text)
    with pytest.raises(InvalidArgument, match=r"text key .* lone surrogate at 1$"):
        text_key(spec, "a\ud800")
    for other in (None, 5, bytearray(b"a"), ["a"]):
        with pytest.raises(InvalidArgument, match="str or bytes, not"):
            text_key(spec, other)
