"""How a call's arguments become keys and block memories, and what is said where they cannot.

Nothing is kept here: values in, values out. Threads: any.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore import _core
from kvstore.errors import InvalidArgument, SpecMismatch
from kvstore.keys import Keys, text_key
from kvstore.spec import DTYPE_BYTES, BlockSpec
from kvstore.types import KEY_BYTES, BlockKey

KeysLike: TypeAlias = Keys | npt.NDArray[np.uint8] | Sequence[BlockKey] | Sequence[str | bytes]
"""Keys of the store's namespace, a sequence of single ones (`keys[i]`), an (n, 32) uint8 array of
them, or names: str or bytes of 1 to 512 bytes. Only Keys are known by spec and version."""

_NO_TEXTS: list[bytes] = []
_TOKEN_IDS = "token ids? make keys of them first: store.keys(ids)"
_SHOWN_NAME_MAX = 32


def resolve_keys(spec: BlockSpec, keys: KeysLike) -> tuple[npt.NDArray[np.uint8], int, list[bytes]]:
    """(n, 32) array, version (0: the current one), and texts if the keys are names."""
    if isinstance(keys, Keys):
        if keys.namespace_id not in (None, spec.namespace_id):
            raise SpecMismatch(
                f"keys are of the namespace {keys.namespace_id[:4].hex()}..., the store's is "
                f"{spec.namespace_id[:4].hex()}...: another spec; make them by store.keys(ids) of "
                "this store, or use them in one of their own spec, store.attach(spec)"
            )
        return keys.array, keys.version, _NO_TEXTS
    if isinstance(keys, np.ndarray):
        if keys.ndim == 1 and keys.dtype.kind in "iu" and keys.dtype != np.uint8:
            raise InvalidArgument(f"keys are a row of {keys.dtype}; {_TOKEN_IDS}")
        return Keys(keys).array, 0, _NO_TEXTS
    names = _listed(keys)
    num_keys = sum(isinstance(name, BlockKey) for name in names)
    if num_keys:
        if num_keys < len(names):
            raise InvalidArgument(
                f"{num_keys} of {len(names)} keys are BlockKeys, the others names; pass one kind"
            )
        array = np.frombuffer(b"".join(names), np.uint8).reshape(-1, KEY_BYTES)
        return array, 0, _NO_TEXTS
    if names and hasattr(names[0], "__index__"):
        raise InvalidArgument(f"keys are a list of {type(names[0]).__name__}; {_TOKEN_IDS}")
    joined = b"".join(text_key(spec, name) for name in names)
    texts = [name.encode() if isinstance(name, str) else bytes(name) for name in names]
    return np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES), 0, texts


def _listed(keys: Any) -> list[Any]:
    kind = type(keys).__name__
    if isinstance(keys, BlockKey):
        raise InvalidArgument("keys are one BlockKey, as keys[i] gives; pass keys[i:i+1]")
    if isinstance(keys, (str, bytes, bytearray, memoryview)):
        shown = repr(keys) if len(keys) <= _SHOWN_NAME_MAX else "name"
        raise InvalidArgument(f"keys are one {kind}; pass a list of names, [{shown}]")
    if isinstance(keys, int):
        raise InvalidArgument(f"keys are one {kind}; {_TOKEN_IDS}")
    try:
        return list(keys)
    except TypeError:
        raise InvalidArgument(
            f"keys are {kind}; pass Keys, (n, 32) uint8, or a list of names"
        ) from None


def sources(spec: BlockSpec, blocks: Any, count: int, skip_blocks: int) -> _core.Buffers:
    """Memory of the `count` blocks to put."""
    try:
        return _buffers(spec, blocks, count, writable=False)
    except InvalidArgument as error:
        if skip_blocks or not _too_few(str(error)):
            raise
        raise type(error)(
            f"{error}; leave out leading blocks that are held by skip_blocks=match.blocks"
        ) from None


def targets(spec: BlockSpec, out: Any, count: int) -> _core.Buffers:
    """Memory that `count` whole blocks are read into."""
    return _buffers(spec, out, count, writable=True)


def _buffers(spec: BlockSpec, blocks: Any, count: int, *, writable: bool) -> _core.Buffers:
    if count == 0 and hasattr(blocks, "__len__") and len(blocks) == 0:
        blocks = ()
    check_shape(spec, blocks)
    dtype = None if spec.opaque else spec.dtype
    return _core.Buffers(blocks, count, spec.block_bytes, writable, dtype)


def _too_few(message: str) -> bool:
    found = re.match(
        r"source has (\d+) (?:blocks|bytes), expected (\d+)(?: blocks of (\d+))?$", message
    )
    return found is not None and int(found[1]) < int(found[2]) * int(found[3] or 1)


def check_shape(spec: BlockSpec, blocks: Any) -> None:
    """Raises SpecMismatch where an array has an axis for each of a block's, but of other lengths.

    Arrays with fewer axes are free; the last axis may count bytes instead of elements.
    """
    expected = spec.block_shape
    if expected is None:
        return
    try:
        if isinstance(blocks, (list, tuple)):
            for block in blocks:
                shape = getattr(block, "shape", None)
                if shape is not None and shape != expected and len(shape) == len(expected):
                    _compare(spec, tuple(shape), expected)
            return
        shape = getattr(blocks, "shape", None)
        if shape is not None and shape[1:] != expected and len(shape) == len(expected) + 1:
            _compare(spec, tuple(shape), (shape[0], *expected))
    except (TypeError, RuntimeError):  # of an object that has no plain shape: the core says why
        return


def _compare(spec: BlockSpec, given: tuple[int, ...], expected: tuple[int, ...]) -> None:
    in_bytes = (*expected[:-1], expected[-1] * DTYPE_BYTES[spec.dtype])
    if given != in_bytes:
        raise SpecMismatch(
            f"blocks have shape {given}, the spec says {expected}: layer, K | V, head, token, "
            "element; transpose them (a view will do), pass fewer axes, or name your order by "
            "BlockSpec's layout="
        )
