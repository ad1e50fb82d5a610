"""The keys of token blocks, of ids and of names, in the namespace of a `BlockSpec`.

    root ──chain over tokens──> Keys

A key says everything its bytes depend on, so equal keys mean equal KV: in any process, on any
machine, in any version of this package (`docs/block-format.md` has the layouts, golden vectors in
the tests pin them). Python's own `hash()` takes no part. Pure values: any thread.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from kvstore import _core
from kvstore.config import show
from kvstore.errors import InvalidArgument
from kvstore.spec import CHAIN_BYTES, BlockSpec, check_int, check_salt, check_shard, utf8
from kvstore.types import KEY_BYTES, BlockKey

TEXT_KEY_BYTES_MAX: Final = 512
EXTRA_BYTES_MAX: Final = 1 << 20  # extra keys of one block, with their lengths
TOKEN_MAX: Final = (1 << 32) - 1
ID_MAX: Final = (1 << 64) - 1

_SALT_TAG: Final = b"kvstore.salt.v1"
_TEXT_TAG: Final = b"kvstore.text.v1"
_BLOCK_TAG: Final = b"kvstore.block.v1"  # as in cpp/chain.cc; here for XXH3

TokenIds = Sequence[int] | npt.NDArray[Any] | Any
"""Integers from 0 to 2^32 - 1: a sequence, an integer array, or a tensor on the CPU."""

Extra = Sequence[bytes | Sequence[bytes] | None]
"""Per full block: nothing, one extra key, or several."""


# ---- keys ----------------------------------------------------------------------------------------


class Keys:
    """Immutable row of block keys, in order: 32 bytes each, 28 of hash and 4 of shard.

    `version` is the namespace's when the keys were made; a store that was cleared since refuses to
    put under them. `namespace_id` is their spec's, None if made from bytes or an array: stores of
    another namespace refuse them. `keys[i]` is a `BlockKey`; `keys[a:b]`, `keys[mask]` and
    `keys[[i, j]]` are Keys; `np.asarray(keys)` is (n, 32) uint8.
    """

    __slots__ = ("_array", "_namespace_id", "_version")
    _array: npt.NDArray[np.uint8]
    _version: int
    _namespace_id: bytes | None

    def __init__(
        self,
        keys: bytes | npt.NDArray[np.uint8] | Keys,
        version: int = 0,
        namespace_id: bytes | None = None,
    ) -> None:
        """Copies `keys`: n * 32 bytes, or an (n, 32) uint8 array."""
        if isinstance(keys, Keys):
            namespace_id = namespace_id or keys.namespace_id
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
        self._version = check_int("version", version, 0, ID_MAX)
        self._namespace_id = namespace_id

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """(n, 32) uint8, read-only, not copied."""
        return self._array

    @property
    def version(self) -> int:
        """Version of the namespace these keys were made under."""
        return self._version

    @property
    def namespace_id(self) -> bytes | None:
        """The `namespace_id` of the spec they were made for, if that is known."""
        return self._namespace_id

    def with_rank(self, rank: int, world_size: int) -> Keys:
        """The keys of the same blocks' shards at another rank: computed, not hashed."""
        check_shard(rank, world_size)
        keys = self._array.copy()
        keys[:, CHAIN_BYTES:] = np.frombuffer(_shard(rank, world_size), np.uint8)
        return Keys(keys, self._version, self._namespace_id)

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> BlockKey: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | npt.NDArray[Any]) -> Keys: ...
    def __getitem__(self, index: Any) -> BlockKey | Keys:
        if isinstance(index, int | np.integer):
            return BlockKey(self._array[int(index)].tobytes())
        return Keys(self._array[index], self._version, self._namespace_id)

    def __iter__(self) -> Iterator[BlockKey]:
        return (BlockKey(key.tobytes()) for key in self._array)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Keys):
            return NotImplemented
        return self._version == other._version and np.array_equal(self._array, other._array)

    # As arrays, they are not hashed; the type that object gives this name knows no None.
    __hash__ = None  # type: ignore[assignment]

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        return np.array(self._array, dtype) if copy else np.asarray(self._array, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return Keys, (self._array.tobytes(), self._version, self._namespace_id)

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
    return Keys(keys, version, spec.namespace_id)


def keys_from_ids(spec: BlockSpec, ids: TokenIds, *, version: int = 0) -> Keys:
    """Keys of ids (0 to 2^64 - 1) that each stand for a block and everything before it.

    For traces, and engines that have hashed their blocks already. Always SHA-256; never equal to
    keys of tokens or text.
    """
    keys = _core.id_keys(spec.root, _ids(ids), spec.rank, spec.world_size)
    return Keys(keys, version, spec.namespace_id)


def text_key(spec: BlockSpec, text: str | bytes) -> bytes:
    """Key (32 bytes) of a name of 1 to 512 bytes; a str counts as its UTF-8.

    Names are compared byte for byte: no normalisation, no case folding. Always SHA-256.
    """
    name = utf8("text key", text) if isinstance(text, str) else text
    if not isinstance(name, bytes):
        raise InvalidArgument(f"a text key is str or bytes, not {type(text).__name__}")
    if not 1 <= len(name) <= TEXT_KEY_BYTES_MAX:
        raise InvalidArgument(f"a text key has 1 to {TEXT_KEY_BYTES_MAX} bytes, not {len(name)}")
    digest = _core.sha256(_TEXT_TAG + spec.root + _u32(len(name)) + name)
    return digest[:CHAIN_BYTES] + _shard(spec.rank, spec.world_size)


# ---- the chain -----------------------------------------------------------------------------------


def _chain_start(spec: BlockSpec, salt: bytes, parent: bytes | None) -> bytes:
    check_salt(salt)
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
    if given.ndim == 0:  # None, a number, an iterator
        raise InvalidArgument(f"{what}s are a {kind}; pass a list or array of integers")
    if given.ndim != 1:
        raise InvalidArgument(f"{what}s are a {kind} of shape {given.shape}; pass one dimension")
    if given.dtype.kind in "iu":
        bad = np.flatnonzero((given < 0) | (given > highest))
    else:
        bad = np.arange(given.size)  # none, where there is nothing at all
    if bad.size:
        value = given[bad[0]]
        value = value.item() if isinstance(value, np.generic) else value
        raise InvalidArgument(
            f"{what} {bad[0]} is {show(value)} ({type(value).__name__}); "
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


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _shard(rank: int, world_size: int) -> bytes:
    return struct.pack(">HH", rank, world_size)
