"""What all blocks of a store have in common, and the namespace that follows from it.

    BlockSpec ──canonical record──SHA-256──> namespace_id ──> root, where the chains of keys start

`docs/block-format.md` has the layouts. Pure values: any thread.
"""

from __future__ import annotations

import struct
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Final

from kvstore import _core
from kvstore.errors import InvalidArgument

CHAIN_BYTES: Final = 28  # the chain hash in a key; the other 4 are the shard
FIELD_BYTES_MAX: Final = 1024  # of one string of a spec, and of a salt
BLOCK_BYTES_MAX: Final = 1 << 40
COUNT_MAX: Final = 1 << 20  # layers, heads, head size, tokens of a block
WORLD_SIZE_MAX: Final = (1 << 16) - 1  # two bytes of the key
OPAQUE_PART_BYTES: Final = 1 << 20
PART_BYTES_MIN: Final = 2 << 10  # heads join until a part has this much

_DTYPES_BY_BYTES: Final = {
    1: "bool int8 uint8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz",
    2: "bfloat16 float16 int16 uint16",
    4: "float32 int32 uint32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}
DTYPE_BYTES: Final = {name: n for n, names in _DTYPES_BY_BYTES.items() for name in names.split()}
_DTYPES_AS_CALLED: Final = {
    "float16": "fp16 f16 half",
    "bfloat16": "bf16",
    "float32": "fp32 f32 float single",
    "float64": "fp64 f64 double",
    "float8_e4m3fn": "fp8 float8 fp8_e4m3 float8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
_DTYPE_MEANT: Final = {
    called: name for name, others in _DTYPES_AS_CALLED.items() for called in others.split()
}
HASHES: Final = ("sha256", "xxh3-128")

_RECORD_TAG: Final = b"kvstore.namespace\x01"  # the last byte is the record's version
_RECORD_FIELDS: Final = (
    *("model", "weights", "adapter", "dtype", "layout", "layers", "kv_heads", "head_dim"),
    *("block_tokens", "tenant", "salt", "hash", "block_bytes"),
)
_ROOT_TAG: Final = b"kvstore.root.v1"
_FROM_GEOMETRY: Final = -1


@dataclass(frozen=True, slots=True)
class PartLayout:
    """How a block is cut into parts, each with a checksum: equal cuts, the last may be shorter.

    Parts go layer, K | V, head: a part is `heads` neighbouring heads of one layer's K or V. Opaque
    blocks know no heads (0).
    """

    part_bytes: int
    heads: int

    def count(self, block_bytes: int) -> int:
        """Parts of a block of this many bytes."""
        return -(-block_bytes // self.part_bytes)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """What all blocks of a store have in common: which KV they hold, and in what form.

    Every field but `rank` and `world_size` enters the namespace: change one and no key matches.

    model, weights, adapter: names; `weights` a fingerprint, so that a fine-tune of the same name
        does not match. layout: a name for the order of bytes inside a block, if not the default
        (layer, K | V, head, token, element).
    layers, kv_heads, head_dim: of the whole model; each of `world_size` ranks holds its share of
        the heads (one head where there are more ranks than heads).
    block_tokens: tokens in a block.
    tenant, salt: keep apart who must not share. hash: how chains are hashed: "sha256", or
        "xxh3-128" where nobody hostile chooses tokens (refused with a tenant or a salt).
    block_bytes: left out, it follows from the geometry: bytes of one rank's block. Given without a
        geometry, blocks are opaque: of this size, or of any size if None.

    Raises InvalidArgument naming field, value and remedy.
    """

    model: str
    _: KW_ONLY
    weights: str = ""
    adapter: str = ""
    dtype: str = "bfloat16"
    layout: str = ""
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    block_tokens: int = 16
    rank: int = 0
    world_size: int = 1
    tenant: str = ""
    salt: bytes = b""
    hash: str = "sha256"
    block_bytes: int | None = _FROM_GEOMETRY
    namespace_id: bytes = field(init=False, repr=False, compare=False)  # 32 bytes
    root: bytes = field(init=False, repr=False, compare=False)  # 28 bytes: where chains start
    block_shape: tuple[int, ...] | None = field(init=False, repr=False, compare=False)
    # layer, K | V, head, token, element; None if opaque, or in an order of its own (layout)

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        for name in ("model", "weights", "adapter", "dtype", "layout", "tenant", "hash"):
            _check_string(name, getattr(self, name))
        if not self.model:
            raise InvalidArgument("model is empty; name the model these blocks belong to")
        check_salt(self.salt)
        if self.hash not in HASHES:
            raise InvalidArgument(f"hash is {self.hash!r}; use one of {', '.join(HASHES)}")
        if self.hash != "sha256" and (self.tenant or self.salt):
            raise InvalidArgument(
                f"hash is {self.hash!r} with a tenant or a salt; only sha256 keeps tenants apart"
            )
        check_int("block_tokens", self.block_tokens, 1, COUNT_MAX)
        check_shard(self.rank, self.world_size)
        object.__setattr__(self, "block_bytes", self._checked_block_bytes())
        object.__setattr__(self, "namespace_id", _core.sha256(self.canonical()))
        root = _core.sha256(_ROOT_TAG + self.namespace_id)[:CHAIN_BYTES]
        object.__setattr__(self, "root", root)
        shape = (self.layers, 2, self.heads_per_rank, self.block_tokens, self.head_dim)
        object.__setattr__(self, "block_shape", None if self.opaque or self.layout else shape)

    def _checked_block_bytes(self) -> int | None:
        for name in ("layers", "kv_heads", "head_dim"):
            check_int(name, getattr(self, name), 0 if self.opaque else 1, COUNT_MAX)
        given = self.block_bytes
        if self.opaque:
            if given is None:
                return None
            if given == _FROM_GEOMETRY:
                raise InvalidArgument(
                    "the spec gives no block size; give layers, kv_heads and head_dim, "
                    "or block_bytes (None: blocks of any size)"
                )
            return check_int("block_bytes", given, 1, BLOCK_BYTES_MAX)
        if self.kv_heads % self.world_size and self.world_size % self.kv_heads:
            raise InvalidArgument(
                f"kv_heads is {self.kv_heads} and world_size {self.world_size}; "
                "one must divide the other, so that every rank holds as many heads"
            )
        block_bytes = 2 * self.layers * self.heads_per_rank * self._head_bytes
        check_int("the size of a block in bytes", block_bytes, 1, BLOCK_BYTES_MAX)
        if given not in (_FROM_GEOMETRY, block_bytes):
            raise InvalidArgument(
                f"block_bytes is {given}, but layers, kv_heads, head_dim, block_tokens, dtype and "
                f"world_size make {block_bytes}; leave block_bytes out"
            )
        return block_bytes

    @property
    def opaque(self) -> bool:
        """The spec gives no geometry: blocks are bytes."""
        return not (self.layers or self.kv_heads or self.head_dim)

    @property
    def heads_per_rank(self) -> int:
        """KV heads in one rank's block (0 if opaque)."""
        if self.opaque:
            return 0
        return max(1, self.kv_heads // self.world_size)

    @property
    def _head_bytes(self) -> int:
        return self.block_tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def parts(self) -> PartLayout:
        """Opaque: parts of 1 MiB. Else as few heads a part as make 2 KiB, or all of them."""
        if self.opaque:
            return PartLayout(OPAQUE_PART_BYTES, heads=0)
        heads = self.heads_per_rank
        for divisor in range(1, heads):
            if heads % divisor == 0 and divisor * self._head_bytes >= PART_BYTES_MIN:
                heads = divisor
                break
        return PartLayout(heads * self._head_bytes, heads)

    def canonical(self) -> bytes:
        """The namespace record: its SHA-256 is `namespace_id`. Layout in docs/block-format.md."""
        record = _RECORD_TAG
        for number, name in enumerate(_RECORD_FIELDS, 1):
            value = getattr(self, name)
            if name == "block_bytes" and not self.opaque:
                value = b""  # follows from the rest and the world size
            elif value is None:
                value = b"any"
            elif isinstance(value, int):
                value = _u64(value)
            elif isinstance(value, str):
                value = value.encode()
            record += struct.pack("<BI", number, len(value)) + value
        return record

    def with_rank(self, rank: int, world_size: int) -> BlockSpec:
        """The same namespace as another rank sees it, or under another world size."""
        size = self.block_bytes if self.opaque else _FROM_GEOMETRY
        return replace(self, rank=rank, world_size=world_size, block_bytes=size)


# ---- encodings and checks ------------------------------------------------------------------------


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def check_int(name: str, value: object, lowest: int, highest: int) -> int:
    """The value, if it is an int in range; else InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{name} is {value!r}; pass an int")
    if not lowest <= value <= highest:
        raise InvalidArgument(f"{name} is {value}; it must be from {lowest} to {highest}")
    return value


def check_shard(rank: int, world_size: int) -> None:
    """InvalidArgument if there is no such rank."""
    check_int("world_size", world_size, 1, WORLD_SIZE_MAX)
    check_int("rank", rank, 0, world_size - 1)


def utf8(name: str, text: str) -> bytes:
    """The text's UTF-8, or InvalidArgument where it has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{name} {text!r} has no UTF-8 form: a lone surrogate at {error.start}"
        ) from None


def _check_dtype(dtype: object) -> None:
    if isinstance(dtype, str):
        if dtype in DTYPE_BYTES:
            return
        meant = dtype.lower().removeprefix("torch.")
        meant = _DTYPE_MEANT.get(meant, meant)
        hint = f"did you mean {meant!r}? " if meant in DTYPE_BYTES else ""
        raise InvalidArgument(f"dtype is {dtype!r}; {hint}use one of {', '.join(DTYPE_BYTES)}")
    # numpy's types have a __name__, its dtypes a name; torch's are told by their text.
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = str(name).removeprefix("torch.")
    hint = f"its name, {name!r}" if name in DTYPE_BYTES else "a str"
    raise InvalidArgument(f"dtype is {dtype!r}; pass {hint}")


def _check_string(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is {value!r}; pass a str")
    if (num_bytes := len(utf8(name, value))) > FIELD_BYTES_MAX:
        raise InvalidArgument(f"{name} has {num_bytes} bytes; at most {FIELD_BYTES_MAX} go")


def check_salt(salt: object) -> None:
    """InvalidArgument if it is no salt."""
    if not isinstance(salt, bytes):
        raise InvalidArgument(f"salt is {salt!r}; pass bytes")
    if len(salt) > FIELD_BYTES_MAX:
        raise InvalidArgument(f"salt has {len(salt)} bytes; at most {FIELD_BYTES_MAX} go")
