"""Values a caller gets back."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidArgument

KEY_BYTES: Final = 32


class BlockKey(bytes):
    """One key, 32 bytes, as indexing or iterating `Keys` gives it.

    A sequence of these is taken wherever keys are; plain bytes are names.
    """

    __slots__ = ()

    def __new__(cls, key: bytes) -> BlockKey:  # noqa: PYI034 - Self needs Python 3.11
        """Raises InvalidArgument unless `key` is 32 bytes."""
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise InvalidArgument(f"a key is {KEY_BYTES} bytes, not {key!r}")
        return super().__new__(cls, key)

    def __repr__(self) -> str:
        return f"BlockKey({self.hex()})"


class Status(enum.IntEnum):
    """What happened to one item of a batch. Absent, empty and failed are three things.

    Its text is its name, "miss". True are OK and EXISTS, which leave nothing to do; the others are
    false.
    """

    OK = 0  # done; the byte count is the block's length
    EXISTS = 1  # put: committed before, by us or another (first writer wins)
    MISS = 2  # not held
    OUT_OF_SPACE = 3  # no room before the deadline, or all in the way is held
    CORRUPT = 4  # a checksum did not match; the block is dropped
    UNAVAILABLE = 5  # the holder could not be asked, or the lease was revoked
    TIMED_OUT = 6  # the deadline passed first
    CANCELLED = 7  # the caller cancelled
    OUTCOME_UNKNOWN = 8  # the reply was lost; it may have happened
    STALE = 9  # the namespace was cleared meanwhile

    def __bool__(self) -> bool:
        return self in (Status.OK, Status.EXISTS)

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, format_spec: str) -> str:
        return format(str(self), format_spec)


class Statuses:
    """The statuses of a batch, one per item, in order. Not true or false: ask for `ok`."""

    __slots__ = ("codes",)

    def __init__(self, codes: bytes) -> None:
        self.codes: npt.NDArray[np.uint8] = np.frombuffer(codes, np.uint8)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> Status:
        return Status(int(self.codes[index]))

    def __iter__(self) -> Iterator[Status]:
        return (Status(int(code)) for code in self.codes)

    def __bool__(self) -> bool:
        raise TypeError(
            f"a {type(self).__name__} is not true or false: use .ok (all) or .blocks (leading run)"
        )

    @property
    def blocks(self) -> int:
        """Length of the leading run that is `OK` or `EXISTS`: what a chain can use."""
        bad = np.flatnonzero(self.codes > Status.EXISTS)
        return int(bad[0]) if len(bad) else len(self)

    @property
    def ok(self) -> bool:
        """All of them: every block was read, or is held now, stored by this call or before."""
        return self.blocks == len(self)

    def count(self, status: Status) -> int:
        """How many items have this status."""
        return int(np.count_nonzero(self.codes == status))

    def _summary(self) -> str:
        counts = ", ".join(f"{self.count(s)} {s}" for s in Status if self.count(s))
        return f"{type(self).__name__}({counts or 'empty'})"

    def __repr__(self) -> str:
        return self._summary()


class PutResult(Statuses):
    """What became of each block of a `put`.

    `visible`: a match anywhere finds the blocks now. `replicas`: nodes that hold them.
    `parent_held`: the block before the first one sent is held (true when nothing was skipped).
    `message`: why blocks found no room, else empty.
    """

    __slots__ = ("message", "parent_held", "replicas", "visible")

    def __init__(self, codes: bytes, *, parent_held: bool, message: str) -> None:
        super().__init__(codes)
        self.parent_held = parent_held
        self.message = message
        self.visible = True
        self.replicas = 1

    @property
    def stored(self) -> int:
        """Blocks this call stored."""
        return self.count(Status.OK)

    def __repr__(self) -> str:
        return self._summary() + (f" {self.message}" if self.message else "")


class GetResult(Statuses):
    """What became of each block of a `get` or `read`; `nbytes[i]` bytes of item i were filled."""

    __slots__ = ("nbytes",)

    def __init__(self, codes: bytes, nbytes: npt.NDArray[np.uint64]) -> None:
        super().__init__(codes)
        self.nbytes = nbytes


@dataclass(frozen=True, slots=True)
class Listed:
    """One block of `store.list()`: key, length in bytes, and text if it has a name."""

    key: BlockKey
    length: int
    text: str | bytes | None
    pinned: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory and counts of a node. Bytes unless said otherwise; counters only grow."""

    blocks: int  # committed blocks of this store's namespace
    bytes: int  # their payload
    version: int  # of the namespace; `clear` raises it
    capacity_bytes: int  # populated so far
    pool_bytes: int  # when fully populated
    free_bytes: int
    taken_bytes: int  # by slots in use, their rounding included
    largest_free_bytes: int  # longest run of free frames
    slots: int  # in use, all namespaces
    granted_blocks: int  # puts under way
    stuck_bytes: int  # of puts that are overdue
    leased_blocks: int
    pinned_blocks: int
    view_bytes: int
    view_bytes_max: int
    requested: int  # blocks asked for by lookups
    hits: int  # and found
    commits: int
    evictions: int
    removals: int
    corrupt: int
    scrubbed: int  # blocks whose bytes were checked in the background
    pages: str  # "hugetlb", "transparent huge" or "4 KiB"
    populating: bool
