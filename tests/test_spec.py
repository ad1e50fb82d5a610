"""What a `BlockSpec` accepts and works out, and `Keys` as a value."""

import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from kvstore.errors import InvalidArgument
from kvstore.keys import Keys, make_keys, text_key
from kvstore.spec import DTYPE_BYTES, BlockSpec

GEOMETRY: dict[str, Any] = {"layers": 2, "kv_heads": 8, "head_dim": 128}


def spec_of(**fields: Any) -> BlockSpec:
    return BlockSpec(fields.pop("model", "llama"), **{**GEOMETRY, **fields})


# ---- the namespace -------------------------------------------------------------------------------


def test_neighbouring_fields_do_not_run_together() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("abc", "")]
    assert len({spec_of(model=m, weights=w).namespace_id for m, w in pairs}) == 3


def test_rank_is_a_suffix_and_not_in_the_namespace() -> None:
    first = spec_of(world_size=4)
    third = first.with_rank(3, 8)
    assert third.namespace_id == spec_of().namespace_id == first.namespace_id
    keys = make_keys(first, range(64), version=2)
    assert keys.with_rank(3, 8) == make_keys(third, range(64), version=2)
    assert [key[28:] for key in keys.with_rank(258, 65535)] == [b"\x01\x02\xff\xff"] * 4
    assert text_key(third, "a") == text_key(first, "a")[:28] + b"\0\3\0\x08"
    for rank, world_size in [(-1, 1), (1, 1), (0, 0), (0, 65536), (True, 2), (0.0, 1)]:
        with pytest.raises(InvalidArgument, match=r"rank is|world_size is"):
            keys.with_rank(rank, world_size)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model": ""}, "model is empty"),
        ({"model": 5}, "model is 5; pass a str"),
        ({"weights": None}, "weights is None; pass a str"),
        ({"adapter": "\ud800"}, "adapter .* has no UTF-8 form: a lone surrogate at 0"),
        ({"tenant": "\u00e9" * 513}, "tenant has 1026 bytes; at most 1024"),
        ({"salt": "s"}, "salt is 's'; pass bytes"),
        ({"dtype": "bf16"}, "'bf16'; did you mean 'bfloat16'[?] use one of bool, .*float16"),
        ({"dtype": "fp16"}, "did you mean 'float16'"),
        ({"dtype": "half"}, "did you mean 'float16'"),
        ({"dtype": "torch.bfloat16"}, "did you mean 'bfloat16'"),
        ({"dtype": "int3"}, "dtype is 'int3'; use one of bool"),
        ({"dtype": np.float16}, "pass its name, 'float16'"),
        ({"dtype": np.dtype("float32")}, "pass its name, 'float32'"),
        ({"dtype": float}, "dtype is <class 'float'>; pass a str"),
        ({"hash": "md5"}, "hash is 'md5'; use one of sha256, xxh3-128"),
        ({"layers": 0}, "layers is 0; it must be from 1"),
        ({"layers": -1}, "layers is -1"),
        ({"layers": None, "kv_heads": 0, "head_dim": 0, "block_bytes": 1}, "layers is None; pass"),
        ({"dtype": ["int8"]}, "dtype is .*; pass a str"),
        ({"layers": 2.0}, "layers is 2.0; pass an int"),
        ({"kv_heads": True}, "kv_heads is True; pass an int"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"block_tokens": 0}, "block_tokens is 0; it must be from 1"),
        ({"block_tokens": 1 << 21}, "block_tokens is 2097152"),
        ({"world_size": 3}, "kv_heads is 8 and world_size 3; one must divide the other"),
        ({"world_size": 12}, "kv_heads is 8 and world_size 12"),
        ({"rank": 1}, "rank is 1; it must be from 0 to 0"),
        ({"world_size": 0}, "world_size is 0"),
        ({"block_bytes": 4096}, "block_bytes is 4096, but .* make 131072; leave block_bytes out"),
        ({"block_bytes": None}, "block_bytes is None, but"),
        ({"layers": 1 << 20, "block_tokens": 1 << 20}, "the size of a block in bytes is"),
    ],
)
def test_bad_fields_are_refused_with_value_and_remedy(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        spec_of(**fields)


@pytest.mark.parametrize(
    ("block_bytes", "why"),
    [(0, "is 0; it must be from 1"), (-5, "is -5"), (1.5, "pass an int"), (2**41, "must be")],
)
def test_bad_sizes_of_opaque_blocks_are_refused(block_bytes: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        BlockSpec("anything", block_bytes=block_bytes)


def test_a_spec_without_any_size_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="gives no block size; give layers"):
        BlockSpec("anything")


def test_specs_are_values() -> None:
    spec = spec_of(tenant="t")
    assert spec == spec_of(tenant="t") != spec_of()
    assert len({spec, spec_of(tenant="t")}) == 1
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert replace(spec, tenant="u") == spec_of(tenant="u")
    with pytest.raises(FrozenInstanceError):
        spec.model = "other"


def test_block_bytes_are_one_ranks() -> None:
    assert spec_of().block_bytes == 2 * 2 * 8 * 128 * 16 * 2
    assert [spec_of(world_size=n).block_bytes for n in (2, 4, 8, 16, 32)] == [
        65536,
        32768,
        16384,
        16384,  # more ranks than heads: each holds one
        16384,
    ]
    assert spec_of(dtype="float8_e5m2").block_bytes == 65536
    opaque = BlockSpec("anything", block_bytes=None)
    assert opaque.block_bytes is None
    assert opaque.with_rank(1, 2).block_bytes is None
    assert BlockSpec("anything", block_bytes=100).with_rank(1, 2).block_bytes == 100


def test_item_bytes_are_those_of_numpy_where_it_has_the_dtype() -> None:
    for name, item_bytes in DTYPE_BYTES.items():
        if hasattr(np, name):
            assert np.dtype(name).itemsize == item_bytes
        else:
            assert item_bytes == (1 if name.startswith("float8") else 2)


@pytest.mark.parametrize(
    ("fields", "heads", "part_bytes", "num_parts"),
    [
        ({}, 1, 4096, 2 * 2 * 8),
        ({"head_dim": 64}, 1, 2048, 2 * 2 * 8),
        ({"head_dim": 63}, 2, 4032, 2 * 2 * 4),
        ({"head_dim": 16}, 4, 2048, 2 * 2 * 2),
        ({"head_dim": 1}, 8, 256, 2 * 2),  # all heads make less than 2 KiB
        ({"head_dim": 16, "kv_heads": 6}, 6, 3072, 2 * 2),  # 4 heads would do, 4 is no divisor
        ({"head_dim": 16, "kv_heads": 12}, 4, 2048, 2 * 2 * 3),
        ({"head_dim": 16, "world_size": 4}, 2, 1024, 2 * 2),
        ({"kv_heads": 7, "head_dim": 32}, 7, 7168, 2 * 2),
    ],
)
def test_heads_join_until_a_part_has_2_kib(
    fields: dict[str, Any], heads: int, part_bytes: int, num_parts: int
) -> None:
    spec = spec_of(**fields)
    assert (spec.parts.heads, spec.parts.part_bytes) == (heads, part_bytes)
    assert spec.block_bytes == part_bytes * num_parts
    assert spec.parts.count(spec.block_bytes) == num_parts


def test_opaque_blocks_have_parts_of_1_mib() -> None:
    parts = BlockSpec("anything", block_bytes=None).parts
    assert (parts.part_bytes, parts.heads) == (1 << 20, 0)
    assert [parts.count(n) for n in (1, 1 << 20, (1 << 20) + 1, 5 << 20)] == [1, 1, 2, 5]


# ---- Keys ----------------------------------------------------------------------------------------


def test_keys_are_an_immutable_row_of_bytes() -> None:
    keys = make_keys(spec_of(), range(80), version=7)
    assert (len(keys), keys.version, keys.array.shape) == (5, 7, (5, 32))
    assert [keys[i] for i in range(5)] == list(keys) == [row.tobytes() for row in keys.array]
    assert keys[-1] == keys[4]
    assert keys[1:3] == Keys(keys[1] + keys[2], 7)
    assert keys[::-2] == Keys(keys[4] + keys[2] + keys[0], 7)
    assert np.shares_memory(np.asarray(keys), keys.array)
    for array in (keys.array, np.asarray(keys), keys[1:].array):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    with pytest.raises(IndexError):
        keys[5]
    with pytest.raises(AttributeError):
        keys.version = 8
    with pytest.raises(TypeError):
        hash(keys)
    assert repr(keys).startswith(f"Keys(5, version 7, first {keys[0].hex()}")


def test_keys_are_equal_by_bytes_and_version() -> None:
    keys = make_keys(spec_of(), range(80), version=7)
    assert keys == Keys(keys.array, 7) == Keys(np.array(keys), 7)
    assert keys != Keys(keys.array, 8)
    assert keys != keys[:4]
    assert keys != list(keys)
    copy = pickle.loads(pickle.dumps(keys))
    assert copy == keys
    assert not copy.array.flags.writeable


def test_keys_copy_what_they_are_made_of() -> None:
    array = np.zeros((2, 32), np.uint8)
    keys = Keys(array)
    array[:] = 1
    assert not keys.array.any()
    assert len(Keys(b"")) == 0


@pytest.mark.parametrize(
    "bad", [bytes(31), np.zeros((2, 31), np.uint8), np.zeros(32, np.uint8), np.zeros((1, 32)), "x"]
)
def test_what_is_no_row_of_keys_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="keys"):
        Keys(bad)
