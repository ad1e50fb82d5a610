"""What names a block: the namespace a spec declares, and the keys of token blocks in it.

    BlockSpec ──canonical record──SHA-256──> namespace_id ──> root ──chain over tokens──> Keys

A key says everything its bytes depend on, so equal keys mean equal KV: in any process, on any
machine, in any version of this package (`docs/block-format.md` has the layouts, golden vectors in
the tests pin them). Python's own `hash()` takes no part. Pure values: any thread.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from kvstore import _core
from kvstore.errors import InvalidArgument

KEY_BYTES: Final = 32
CHAIN_BYTES: Final = 28  # the chain hash in a key; the other 4 are the shard
TEXT_KEY_BYTES_MAX: Final = 512
FIELD_BYTES_MAX: Final = 1024  # of one string of a spec, and of a salt
EXTRA_BYTES_MAX: Final = 1 << 20  # extra keys of one block, with their lengths
BLOCK_BYTES_MAX: Final = 1 << 40
COUNT_MAX: Final = 1 << 20  # layers, heads, head size, tokens of a block
WORLD_SIZE_MAX: Final = (1 << 16) - 1  # two bytes of the key
OPAQUE_PART_BYTES: Final = 1 << 20
PART_BYTES_MIN: Final = 2 << 10  # heads join until a part has this much
TOKEN_MAX: Final = (1 << 32) - 1
ID_MAX: Final = (1 << 64) - 1

_DTYPES_BY_BYTES: Final = {
    1: "bool int8 uint8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz",
    2: "bfloat16 float16 int16 uint16",
    4: "float32 int32 uint32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}
DTYPE_BYTES: Final = {name: n for n, names in _DTYPES_BY_BYTES.items() for name in names.split()}
HASHES: Final = ("sha256", "xxh3-128")

_RECORD_TAG: Final = b"kvstore.namespace\x01"  # the last byte is the record's version
_RECORD_FIELDS: Final = (
    *("model", "weights", "adapter", "dtype", "layout", "layers", "kv_heads", "head_dim"),
    *("block_tokens", "tenant", "salt", "hash", "block_bytes"),
)
_ROOT_TAG: Final = b"kvstore.root.v1"
_SALT_TAG: Final = b"kvstore.salt.v1"
_TEXT_TAG: Final = b"kvstore.text.v1"
_BLOCK_TAG: Final = b"kvstore.block.v1"  # as in cpp/chain.cc; here for XXH3
_FROM_GEOMETRY: Final = -1

TokenIds = Sequence[int] | npt.NDArray[Any] | Any
"""Integers from 0 to 2^32 - 1: a sequence, an integer array, or a tensor on the CPU."""

Extra = Sequence[bytes | Sequence[bytes] | None]
"""Per full block: nothing, one extra key, or several."""


# ---- the namespace -------------------------------------------------------------------------------


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

    def __post_init__(self) -> None:
        for name in ("model", "weights", "adapter", "dtype", "layout", "tenant", "hash"):
            _check_string(name, getattr(self, name))
        if not self.model:
            raise InvalidArgument("model is empty; name the model these blocks belong to")
        _check_salt(self.salt)
        if self.dtype not in DTYPE_BYTES:
            raise InvalidArgument(f"dtype is {self.dtype!r}; use one of {', '.join(DTYPE_BYTES)}")
        if self.hash not in HASHES:
            raise InvalidArgument(f"hash is {self.hash!r}; use one of {', '.join(HASHES)}")
        if self.hash != "sha256" and (self.tenant or self.salt):
            raise InvalidArgument(
                f"hash is {self.hash!r} with a tenant or a salt; only sha256 keeps tenants apart"
            )
        _check_int("block_tokens", self.block_tokens, 1, COUNT_MAX)
        _check_shard(self.rank, self.world_size)
        object.__setattr__(self, "block_bytes", self._checked_block_bytes())
        object.__setattr__(self, "namespace_id", _core.sha256(self.canonical()))
        root = _core.sha256(_ROOT_TAG + self.namespace_id)[:CHAIN_BYTES]
        object.__setattr__(self, "root", root)

    def _checked_block_bytes(self) -> int | None:
        for name in ("layers", "kv_heads", "head_dim"):
            _check_int(name, getattr(self, name), 0 if self.opaque else 1, COUNT_MAX)
        given = self.block_bytes
        if self.opaque:
            if given is None:
                return None
            if given == _FROM_GEOMETRY:
                raise InvalidArgument(
                    "the spec gives no block size; give layers, kv_heads and head_dim, "
                    "or block_bytes (None: blocks of any size)"
                )
            return _check_int("block_bytes", given, 1, BLOCK_BYTES_MAX)
        if self.kv_heads % self.world_size and self.world_size % self.kv_heads:
            raise InvalidArgument(
                f"kv_heads is {self.kv_heads} and world_size {self.world_size}; "
                "one must divide the other, so that every rank holds as many heads"
            )
        block_bytes = 2 * self.layers * self.heads_per_rank * self._head_bytes
        _check_int("the size of a block in bytes", block_bytes, 1, BLOCK_BYTES_MAX)
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


# ---- keys ----------------------------------------------------------------------------------------


class Keys:
    """Immutable row of block keys, in order: 32 bytes each, 28 of hash and 4 of shard.

    `version` is the namespace's when the keys were made; a store that was cleared since refuses to
    put under them. `keys[i]` is bytes, `keys[a:b]` are Keys, `np.asarray(keys)` is (n, 32) uint8.
    """

    __slots__ = ("_array", "_version")
    _array: npt.NDArray[np.uint8]
    _version: int

    def __init__(self, keys: bytes | npt.NDArray[np.uint8] | Keys, version: int = 0) -> None:
        """Copies `keys`: n * 32 bytes, or an (n, 32) uint8 array."""
        if not isinstance(keys, bytes):
            given = np.asarray(keys)
            if given.dtype != np.uint8 or given.ndim != 2 or given.shape[1] != KEY_BYTES:
                raise InvalidArgument(
                    f"keys are a {given.dtype} array of shape {given.shape}; pass (n, 32) uint8"
                )
            keys = given.tobytes()
        if len(keys) % KEY_BYTES:
            raise InvalidArgument(f"keys have {len(keys)} bytes; a key has {KEY_BYTES}")
        self._array = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)  # read-only: over bytes
        self._version = _check_int("version", version, 0, ID_MAX)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """(n, 32) uint8, read-only, not copied."""
        return self._array

    @property
    def version(self) -> int:
        """Version of the namespace these keys were made under."""
        return self._version

    def with_rank(self, rank: int, world_size: int) -> Keys:
        """The keys of the same blocks' shards at another rank: computed, not hashed."""
        _check_shard(rank, world_size)
        keys = self._array.copy()
        keys[:, CHAIN_BYTES:] = np.frombuffer(_shard(rank, world_size), np.uint8)
        return Keys(keys, self._version)

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Keys: ...
    def __getitem__(self, index: int | slice) -> bytes | Keys:
        if isinstance(index, slice):
            return Keys(self._array[index], self._version)
        key: bytes = self._array[index].tobytes()
        return key

    def __iter__(self) -> Iterator[bytes]:
        return (key.tobytes() for key in self._array)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Keys):
            return NotImplemented
        return self._version == other._version and np.array_equal(self._array, other._array)

    __hash__ = None  # type: ignore[assignment]

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        return np.array(self._array, dtype) if copy else np.asarray(self._array, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return Keys, (self._array.tobytes(), self._version)

    def __repr__(self) -> str:
        if not len(self):
            return f"Keys(none, version {self._version})"
        return f"Keys({len(self)}, version {self._version}, first {self[0].hex()})"


def make_keys(
    spec: BlockSpec,
    token_ids: TokenIds,
    *,
    salt: bytes = b"",
    extra: Extra | None = None,
    parent: bytes | None = None,
    version: int = 0,
) -> Keys:
    """Keys of the full blocks of `token_ids`: key i names everything up to the end of block i.

    A partial last block gets no key. `salt` keeps requests apart that must not share; b"" is none.
    `extra` has one item per full block: None, bytes, or a list of bytes (an image's digest, an
    adapter); None and an empty list are alike, b"" is a key of its own. `parent` continues a chain:
    the key (or its first 28 bytes) of the block before; its salt is in it already.

    Raises InvalidArgument naming the position and value of what is no token id.
    """
    tokens = _tokens(token_ids)
    num_blocks = len(tokens) // spec.block_tokens
    start = _chain_start(spec, salt, parent)
    packed = None if extra is None else _pack_extra(extra, num_blocks)
    if spec.hash == "sha256":
        shard = spec.rank, spec.world_size
        keys = _core.chain_keys(start, tokens, spec.block_tokens, packed, *shard)
    else:
        keys = _chain_keys_xxh3(spec, start, tokens, packed or [None] * num_blocks)
    return Keys(keys, version)


def keys_from_ids(spec: BlockSpec, ids: TokenIds, *, version: int = 0) -> Keys:
    """Keys of ids (0 to 2^64 - 1) that each stand for a block and everything before it.

    For traces, and engines that have hashed their blocks already. Always SHA-256; never equal to
    keys of tokens or text.
    """
    return Keys(_core.id_keys(spec.root, _ids(ids), spec.rank, spec.world_size), version)


def text_key(spec: BlockSpec, text: str | bytes) -> bytes:
    """Key (32 bytes) of a name of 1 to 512 bytes; a str counts as its UTF-8.

    Names are compared byte for byte: no normalisation, no case folding. Always SHA-256.
    """
    name = _utf8("text key", text) if isinstance(text, str) else text
    if not isinstance(name, bytes):
        raise InvalidArgument(f"a text key is str or bytes, not {type(text).__name__}")
    if not 1 <= len(name) <= TEXT_KEY_BYTES_MAX:
        raise InvalidArgument(f"a text key has 1 to {TEXT_KEY_BYTES_MAX} bytes, not {len(name)}")
    digest = _core.sha256(_TEXT_TAG + spec.root + _u32(len(name)) + name)
    return digest[:CHAIN_BYTES] + _shard(spec.rank, spec.world_size)


# ---- the chain -----------------------------------------------------------------------------------


def _chain_start(spec: BlockSpec, salt: bytes, parent: bytes | None) -> bytes:
    _check_salt(salt)
    if salt and spec.hash != "sha256":
        raise InvalidArgument(f"hash is {spec.hash!r} with a salt; only sha256 keeps salts apart")
    if parent is None:
        if not salt:
            return spec.root
        return _core.sha256(_SALT_TAG + spec.root + _u32(len(salt)) + salt)[:CHAIN_BYTES]
    if salt:
        raise InvalidArgument("parent and salt: the parent's chain has its salt already, drop it")
    if not isinstance(parent, bytes) or len(parent) not in (CHAIN_BYTES, KEY_BYTES):
        raise InvalidArgument(f"parent is {parent!r}; pass the 32 bytes of the block before")
    return parent[:CHAIN_BYTES]


def _chain_keys_xxh3(
    spec: BlockSpec, parent: bytes, tokens: npt.NDArray[np.uint32], extra: list[bytes | None]
) -> bytes:
    import xxhash  # only who asks for it loads it

    count, shard = _u32(spec.block_tokens), _shard(spec.rank, spec.world_size)
    words, step = tokens.tobytes(), 4 * spec.block_tokens
    keys = []
    for i, more in enumerate(extra):
        message = _BLOCK_TAG + parent + count + words[i * step : (i + 1) * step] + (more or b"")
        parent = xxhash.xxh3_128_digest(message).ljust(CHAIN_BYTES, b"\0")
        keys.append(parent + shard)
    return b"".join(keys)


def _tokens(token_ids: TokenIds) -> npt.NDArray[np.uint32]:
    """One contiguous row of u32, whatever it was."""
    if isinstance(token_ids, list | tuple | range):
        return np.frombuffer(_core.pack_tokens(token_ids), np.uint32)
    return np.require(_integers("token", token_ids, TOKEN_MAX), np.uint32, ["C", "A"])


def _ids(ids: TokenIds) -> npt.NDArray[np.uint64]:
    if isinstance(ids, list | tuple | range):
        return np.frombuffer(_core.pack_ids(ids), np.uint64)
    return np.require(_integers("id", ids, ID_MAX), np.uint64, ["C", "A"])


def _integers(what: str, values: Any, highest: int) -> npt.NDArray[Any]:
    """A one-dimensional array of integers in range, or InvalidArgument."""
    kind = type(values).__name__
    if isinstance(values, str | bytes | bytearray):
        raise InvalidArgument(f"{what}s are a {kind}; pass a list or array of integers")
    try:
        given = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # as of a tensor on a device
        raise InvalidArgument(f"{what}s are a {kind} that numpy cannot read: {error}") from None
    if given.ndim != 1:
        raise InvalidArgument(f"{what}s are a {kind} of shape {given.shape}; pass one dimension")
    if given.dtype.kind in "iu":
        bad = np.flatnonzero((given < 0) | (given > highest))
    else:
        bad = np.arange(given.size)  # none, where there is nothing at all
    if bad.size:
        value = given[bad[0]].item()
        raise InvalidArgument(
            f"{what} {bad[0]} is {value!r} ({type(value).__name__}); "
            f"{what}s are integers from 0 to {highest}"
        )
    return given


def _pack_extra(extra: Extra, num_blocks: int) -> list[bytes | None]:
    """Per block its extra keys as they enter the message: each behind its length."""
    given: object = extra
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise InvalidArgument(f"extra is a {type(extra).__name__}; pass a list, an item per block")
    if len(extra) != num_blocks:
        raise InvalidArgument(f"extra has {len(extra)} items for {num_blocks} full blocks")
    return [_pack_extra_keys(block, keys) for block, keys in enumerate(extra)]


def _pack_extra_keys(block: int, keys: bytes | Sequence[bytes] | None) -> bytes | None:
    if keys is None:
        return None
    several = [keys] if isinstance(keys, bytes) else keys
    if not isinstance(several, list | tuple) or not all(isinstance(k, bytes) for k in several):
        raise InvalidArgument(
            f"extra of block {block} is {keys!r}; pass None, bytes, or a list of bytes"
        )
    packed = b"".join(_u32(len(key)) + key for key in several)
    if len(packed) > EXTRA_BYTES_MAX:
        raise InvalidArgument(
            f"extra of block {block} has {len(packed)} bytes; pass a digest, "
            f"at most {EXTRA_BYTES_MAX} bytes go"
        )
    return packed


# ---- encodings and checks ------------------------------------------------------------------------


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _shard(rank: int, world_size: int) -> bytes:
    return struct.pack(">HH", rank, world_size)


def _check_int(name: str, value: object, lowest: int, highest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{name} is {value!r}; pass an int")
    if not lowest <= value <= highest:
        raise InvalidArgument(f"{name} is {value}; it must be from {lowest} to {highest}")
    return value


def _check_shard(rank: int, world_size: int) -> None:
    _check_int("world_size", world_size, 1, WORLD_SIZE_MAX)
    _check_int("rank", rank, 0, world_size - 1)


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{name} {text!r} has no UTF-8 form: a lone surrogate at {error.start}"
        ) from None


def _check_string(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is {value!r}; pass a str")
    if (num_bytes := len(_utf8(name, value))) > FIELD_BYTES_MAX:
        raise InvalidArgument(f"{name} has {num_bytes} bytes; at most {FIELD_BYTES_MAX} go")


def _check_salt(salt: object) -> None:
    if not isinstance(salt, bytes):
        raise InvalidArgument(f"salt is {salt!r}; pass bytes")
    if len(salt) > FIELD_BYTES_MAX:
        raise InvalidArgument(f"salt has {len(salt)} bytes; at most {FIELD_BYTES_MAX} go")
