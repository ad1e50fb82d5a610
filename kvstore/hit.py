"""What a match finds (`Match`), holds (`Hit`), and a put in parts (`Writing`)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvstore import _core
from kvstore.arguments import check_shape
from kvstore.errors import InvalidArgument, NodeUnavailable, StoreClosed
from kvstore.spec import BlockSpec
from kvstore.types import GetResult, PutResult, Status

_TO_THE_END = (1 << 64) - 1


class Match:
    """A leading run of blocks, as it was when asked. `with match as hit` takes leases on it.

    `blocks` and `tokens` count what follows the skipped blocks; `by_node`: blocks per node.
    """

    __slots__ = (
        *("_array", "_asked", "_hit", "_native", "_place", "_skip_blocks", "_spec", "_timeout_ns"),
        "blocks",
    )

    def __init__(
        self,
        spec: BlockSpec,
        native: _core.Store,
        place: str,
        array: npt.NDArray[np.uint8],
        skip_blocks: int,
        matched: int,
        timeout_ns: int,
    ) -> None:
        self._spec = spec
        self._native = native
        self._place = place
        self._asked = matched >= 0
        blocks = max(matched, 0)
        self._array = array[: skip_blocks + blocks]
        self._skip_blocks = skip_blocks
        self._timeout_ns = timeout_ns
        self._hit: Hit | None = None
        self.blocks = blocks

    @property
    def tokens(self) -> int:
        """Matched tokens: `blocks` times the spec's `block_tokens`. Nothing, if keys are names."""
        return self.blocks * self._spec.block_tokens

    @property
    def by_node(self) -> dict[str, int]:
        """Length of the run per node, by its address ("local" in process). Empty if no node could
        be asked, which is a miss otherwise.
        """
        return {self._place: self.blocks} if self._asked else {}

    if not TYPE_CHECKING:  # type checkers know what a match has

        def __getattr__(self, name):
            if name.startswith("_") or not hasattr(Hit, name):
                raise AttributeError(f"'Match' object has no attribute {name!r}")
            used = f"{name}(...)" if callable(getattr(Hit, name)) else name
            raise AttributeError(
                f"a match holds no blocks, a hit does: use `with match as hit: hit.{used}`"
            )

    async def __aenter__(self) -> NoReturn:
        raise TypeError("a match is entered without waiting: use plain `with match as hit`")

    async def __aexit__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Hit:
        if self._hit is not None:
            raise InvalidArgument("this match is entered already; match again for another hit")
        leases = self._native.lookup(self._array, self._skip_blocks, True)
        self._hit = Hit(self._spec, leases, self._timeout_ns)
        return self._hit

    def __exit__(self, kind: object, *_: object) -> None:
        hit, self._hit = self._hit, None
        if hit is not None:
            hit._leave(quiet=kind is not None)

    def __repr__(self) -> str:
        tokens = "" if self._spec.opaque else f", {self.tokens} tokens"
        return f"Match({self.blocks} blocks{tokens})"


class Hit:
    """Blocks under lease: their memory is not reused until it is closed. May be shorter than the
    match it came from, if blocks went in between. A context manager of its own too (`redeem`).
    """

    __slots__ = ("_leases", "_lengths", "_spec", "_timeout_ns", "_views", "held")

    def __init__(self, spec: BlockSpec, leases: _core.Leases, timeout_ns: int) -> None:
        self._spec = spec
        self._leases = leases
        self._lengths = leases.lengths()
        self._timeout_ns = timeout_ns
        self._views: list[memoryview] = []
        self.held: bool | None = None  # once closed: whether the lease held until then

    @property
    def blocks(self) -> int:
        """Blocks under lease."""
        return len(self._lengths)

    @property
    def tokens(self) -> int:
        """Their tokens, as `Match.tokens`."""
        return self.blocks * self._spec.block_tokens

    @property
    def lengths(self) -> list[int]:
        """Bytes of each block."""
        return list(self._lengths)

    def read(self, out: Any, *, first: int = 0) -> GetResult:
        """Copies blocks from `first` on into `out` (forms as for `Store.get`), checking each.

        `out` may have room for fewer blocks, or for more: the rest is MISS and untouched.
        Raises SpecMismatch, and LeaseRevoked if the lease ran out and its memory was needed.
        """
        check_shape(self._spec, out)
        return self._read(out, first, 0, _TO_THE_END, self._spec.block_bytes)

    def read_part(self, part: int, out: Any) -> GetResult:
        """Copies one part (see `BlockSpec.parts`) of every block."""
        start, length = _part_range(self._spec, part, self._lengths)
        return self._read(out, 0, start, length, length)

    def read_layer(self, layer: int, out: Any) -> GetResult:
        """Copies one layer (all its parts) of every block."""
        start, length = _layer_range(self._spec, layer)
        return self._read(out, 0, start, length, length)

    def _read(
        self, out: Any, first: int, start: int, length: int, block_bytes: int | None
    ) -> GetResult:
        if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= self.blocks:
            raise InvalidArgument(f"first={first!r}; the hit has {self.blocks} blocks")
        room = _num_blocks(out, block_bytes)
        count = min(room, self.blocks - first)
        dtype = None if self._spec.opaque else self._spec.dtype
        buffers = _core.Buffers(
            _leading(out, count, room, block_bytes), count, block_bytes, True, dtype
        )
        codes, nbytes = self._leases.read(first, buffers, start, length, self._timeout_ns)
        buffers.release()
        rest = room - count
        codes += bytes([Status.MISS]) * rest
        nbytes += bytes(8 * rest)
        return GetResult(codes, np.frombuffer(nbytes, np.uint64))

    def views(self) -> list[list[memoryview]]:
        """Read-only memory of each block without a copy: one memoryview per extent, mostly one.

        The lease then lasts until the last view, and all made from it (np.frombuffer), is gone.
        A forked child does not inherit this memory: touching a view there ends it (SIGSEGV).
        Raises ViewsRefused beyond `view_fraction` of the pool. Not checked: see `verify`.
        """
        views = self._leases.views()
        self._views += [view for block in views for view in block]
        return views

    def verify(self) -> list[Status]:
        """Checks every block's bytes in place; a corrupt one is dropped from the store."""
        return [Status(code) for code in self._leases.verify()]

    def ticket(self) -> bytes:
        """16 bytes by which another store handle of this process may lease the same blocks
        (`Store.redeem`), as long as this lease lasts.
        """
        return self._leases.ticket()

    def close(self) -> bool:
        """Gives the lease back; whether it held until now.

        Raises BufferError if an array made from a view is still alive: the lease ends with it.
        """
        return self._leave(quiet=False)

    def _leave(self, *, quiet: bool) -> bool:
        for view in self._views:
            with contextlib.suppress(BufferError):  # something was made from it
                view.release()
        self._views = []
        self.held = self._leases.release()
        alive = self._leases.num_exported()  # also by slices, which do not stop a release
        if alive and not quiet:
            raise BufferError(
                f"{alive} views are still used (by np.frombuffer, say); drop what was made from "
                "them before leaving the `with`. Their blocks stay leased until then"
            )
        return self.held

    def __enter__(self) -> Hit:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._leave(quiet=kind is not None)

    def __repr__(self) -> str:
        return f"Hit({self.blocks} blocks{'' if self.held is None else ', closed'})"


class Writing:
    """A put in parts. Made by `Store.writing`; `result` is there once the `with` has ended.

    Every part must be written once; blocks become readable together, at the end.
    """

    __slots__ = ("_count", "_grants", "_length", "_missing", "_spec", "_timeout_ns", "result")

    def __init__(
        self, spec: BlockSpec, grants: _core.Grants, count: int, length: int, timeout_ns: int
    ) -> None:
        self._spec = spec
        self._grants = grants
        self._count = count
        self._length = length
        self._missing = set(range(spec.parts.count(length)))
        self._timeout_ns = timeout_ns
        self.result: PutResult | None = None

    def part(self, part: int, blocks: Any) -> None:
        """Writes one part (see `BlockSpec.parts`) of every block; held ones are passed over."""
        start, length = _part_range(self._spec, part, [self._length])
        self._write(start, length, blocks)

    def layer(self, layer: int, blocks: Any) -> None:
        """Writes one layer (all its parts) of every block."""
        start, length = _layer_range(self._spec, layer)
        self._write(start, length, blocks)

    def _write(self, start: int, length: int, blocks: Any) -> None:
        dtype = None if self._spec.opaque else self._spec.dtype
        buffers = _core.Buffers(blocks, self._count, length, False, dtype)
        status = Status(self._grants.write(buffers, start, length, self._timeout_ns))
        buffers.release()
        if status is not Status.OK:
            self._grants.abort()
            if status is Status.UNAVAILABLE:
                raise NodeUnavailable("the node this put was begun at was lost; put again")
            if status is Status.CANCELLED:
                raise StoreClosed("the store was closed while the part was written")
            raise TimeoutError(f"writing the part took longer than {self._timeout_ns / 1e9:g} s")
        part_bytes = self._spec.parts.part_bytes
        self._missing -= set(range(start // part_bytes, -(-(start + length) // part_bytes)))

    def commit(self) -> PutResult:
        """Makes the blocks readable. Called when the `with` ends."""
        if self._missing:
            self._grants.abort()
            missing = sorted(self._missing)
            raise InvalidArgument(
                f"{len(missing)} of {self._spec.parts.count(self._length)} parts were not written "
                f"(first: {missing[0]}); nothing was stored"
            )
        codes, parent_held, message = self._grants.commit()
        self.result = PutResult(codes, parent_held=parent_held, message=message)
        return self.result

    def abort(self) -> None:
        """Gives up: nothing is stored."""
        with contextlib.suppress(StoreClosed):  # that gave it up
            self._grants.abort()
        self._missing = set()

    def __enter__(self) -> Writing:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self.result is None:
            try:
                self.commit()
            except StoreClosed:
                if self._missing:
                    raise


def _part_range(spec: BlockSpec, part: int, lengths: list[int]) -> tuple[int, int]:
    shortest = min(lengths, default=0)
    most = spec.parts.count(shortest)
    if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part < most:
        raise InvalidArgument(f"part={part!r}; the blocks have parts 0 to {most - 1}")
    start = part * spec.parts.part_bytes
    return start, min(spec.parts.part_bytes, max(lengths) - start)


def _layer_range(spec: BlockSpec, layer: int) -> tuple[int, int]:
    if spec.opaque or spec.block_bytes is None:
        raise InvalidArgument("the spec is opaque: its blocks have parts but no layers")
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < spec.layers:
        raise InvalidArgument(f"layer={layer!r}; the spec has layers 0 to {spec.layers - 1}")
    length = spec.block_bytes // spec.layers
    return layer * length, length


def _num_blocks(out: Any, block_bytes: int | None) -> int:
    """How many blocks a target has room for."""
    shape = getattr(out, "shape", None)
    if isinstance(out, (list, tuple)):
        return len(out)
    if isinstance(shape, tuple) and len(shape) > 1:
        return int(shape[0])
    if block_bytes is None:
        raise InvalidArgument(
            "the spec leaves the block size open; pass a list with one target a block"
        )
    nbytes = getattr(out, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes // block_bytes
    try:
        return memoryview(out).nbytes // block_bytes
    except TypeError:
        raise InvalidArgument(f"a {type(out).__name__} is no memory to read into") from None


def _leading(out: Any, count: int, room: int, block_bytes: int | None) -> Any:
    """The part of a target for its first `count` blocks."""
    if count == room:
        return out
    shape = getattr(out, "shape", None)
    if isinstance(out, (list, tuple)) or (shape is not None and len(shape) > 1):
        return out[:count]
    assert block_bytes is not None
    if shape is not None:
        return out[: count * len(out) // room]
    return memoryview(out).cast("B")[: count * block_bytes]
