"""What a replay checks: that every byte is the one put, and that no block outlives its parent.

Pure: values in, findings out. Equal ids give equal payloads on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidArgument
from kvstore.types import Status

Uint8Array = npt.NDArray[np.uint8]
Uint64Array = npt.NDArray[np.uint64]

_STEP: Final = 0x9E3779B97F4A7C15  # odd, so that multiples of it repeat only after 2^64 words
_PIECE_WORDS: Final = 8_192  # 64 KiB of expected words at a time
_PIECE_ROWS_WORDS: Final = 32_768  # 256 KiB: expected words stay in the second-level cache
_WORD: Final = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class Difference:
    """How one block differs: first wrong byte, up to 8 bytes from there, and how many in all."""

    offset: int
    expected: bytes
    got: bytes
    wrong_bytes: int


def make_payload(
    ids: npt.ArrayLike, block_bytes: int, *, generation: int = 0, out: Uint8Array | None = None
) -> Uint8Array:
    """Self-proving bytes, shape (n, block_bytes) uint8, for `n` ids (whole numbers below 2^64).

    Word j of a block is mix(id, generation, block_bytes) + (j + 1) * step modulo 2^64, little
    endian; a tail under 8 bytes is the front of its word. So every word names its block, its
    generation and its place, and a mix-up, shift, truncation or zero fill differs.
    `out`: written and returned, of just that shape. Raises InvalidArgument.
    """
    mixed = _mix(ids, generation, block_bytes)
    if out is None:
        out = np.empty((len(mixed), block_bytes), dtype=np.uint8)
    elif out.dtype != np.uint8 or out.shape != (len(mixed), block_bytes):
        raise InvalidArgument(
            f"out must be uint8 of shape {(len(mixed), block_bytes)}, not {out.dtype} {out.shape}"
        )
    for rows, columns, expected in _pieces(mixed, block_bytes):
        out[rows, columns] = expected
    return out


def check_payload(
    got: Uint8Array, ids: npt.ArrayLike, *, generation: int = 0
) -> npt.NDArray[np.intp]:
    """Indices of the blocks of `got` (n, block_bytes) that are not the payload of their id.

    Every byte is compared. Raises InvalidArgument if `got` is not one uint8 row per id.
    """
    if got.dtype != np.uint8 or got.ndim != 2:
        raise InvalidArgument(f"got must be uint8 of two dimensions, not {got.dtype} {got.shape}")
    mixed = _mix(ids, generation, got.shape[1])
    if len(mixed) != len(got):
        raise InvalidArgument(f"{len(got)} blocks for {len(mixed)} ids")
    wrong = np.zeros(len(got), dtype=np.bool_)
    for rows, columns, expected in _pieces(mixed, got.shape[1]):
        differs = got[rows, columns] != expected
        if differs.any():
            wrong[rows] |= differs.any(axis=1)
    return np.flatnonzero(wrong)


def first_difference(got: Uint8Array, block_id: int, *, generation: int = 0) -> Difference | None:
    """Where one block (block_bytes,) first leaves the payload of its id; None if nowhere."""
    expected = make_payload([block_id], len(got), generation=generation)[0]
    wrong = np.flatnonzero(got != expected)
    if len(wrong) == 0:
        return None
    offset = int(wrong[0])
    piece = slice(offset, offset + 8)
    return Difference(offset, expected[piece].tobytes(), got[piece].tobytes(), len(wrong))


def _mix(ids: npt.ArrayLike, generation: int, block_bytes: int) -> Uint64Array:
    """One 64-bit start per id: the finisher of SplitMix64, a bijection, over what names the block.

    The size goes in so that a block cut short is not the payload of a shorter block.
    """
    if block_bytes < 1:
        raise InvalidArgument(f"block_bytes must be at least 1, not {block_bytes}")
    if not 0 <= generation < 1 << 32:
        raise InvalidArgument(f"generation must be within 0..2^32-1, not {generation}")
    mixed = np.array(ids, dtype=np.uint64)
    if mixed.ndim != 1:
        raise InvalidArgument(f"ids must have one dimension, not {mixed.ndim}")
    salt = generation * 0xD1B54A32D192ED03 + block_bytes * 0xA0761D6478BD642F
    mixed ^= np.uint64(salt & 0xFFFF_FFFF_FFFF_FFFF)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _pieces(mixed: Uint64Array, block_bytes: int) -> Iterator[tuple[slice, slice, Uint8Array]]:
    """Expected bytes piece by piece: (rows, columns, bytes), valid until the next is asked for."""
    words = min(-(-block_bytes // 8), _PIECE_WORDS)
    rows_max = max(1, min(len(mixed), _PIECE_ROWS_WORDS // words))
    ramp = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(_STEP)
    scratch = np.empty((rows_max, words), dtype=_WORD)
    scratch_bytes = scratch.view(np.uint8)
    for column in range(0, block_bytes, 8 * words):
        columns = slice(column, min(column + 8 * words, block_bytes))
        shift = np.uint64(column // 8 * _STEP & 0xFFFF_FFFF_FFFF_FFFF)
        for row in range(0, len(mixed), rows_max):
            rows = slice(row, min(row + rows_max, len(mixed)))
            starts = mixed[rows] + shift
            np.add(starts[:, None], ramp[None, :], out=scratch[: len(starts)])
            yield rows, columns, scratch_bytes[: len(starts), : columns.stop - column]


class OrphanCounter:
    """Counts evictions that took a block while a block chained to it was still held.

    Told of every put and every eviction in their order, it needs no help from the store's policy.
    """

    def __init__(self) -> None:
        self.orphaned = 0
        self._held: dict[bytes, bytes] = {}  # key → its parent's, which is empty for a first block
        self._num_children: Counter[bytes] = Counter()  # held ones, by parent

    def stored(self, chain: Sequence[bytes], first: int, statuses: Iterable[Status]) -> None:
        """A put of `chain[first:]` ended with these statuses."""
        for place, status in enumerate(statuses, first):
            if status is Status.OK:
                parent = chain[place - 1] if place else b""
                self._held[chain[place]] = parent
                self._num_children[parent] += 1

    def evicted(self, keys: Iterable[bytes]) -> None:
        """These left, in this order."""
        for key in keys:
            self._num_children[self._held.pop(key)] -= 1
            self.orphaned += self._num_children[key] > 0
