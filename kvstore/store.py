"""put, get and match_prefix, and what belongs to them. Read this first.

    put: reserve → write → commit | abort          get: lookup → read → release

Each call turns its arguments into keys and block memories and hands them to the core, which moves
the bytes without the interpreter. Threads: any; a store may be used from many at once.
"""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import _core
from kvstore.arguments import KeysLike, resolve_keys, sources, targets
from kvstore.config import ConnectOptions, StoreOptions, parse_seconds, parse_token, show
from kvstore.errors import AuditFailed, InvalidArgument
from kvstore.hit import Hit, Match, Writing
from kvstore.keys import Extra, Keys, TokenIds, make_keys
from kvstore.spec import BlockSpec
from kvstore.transfer import Transfer, Transfers
from kvstore.types import BlockKey, GetResult, Listed, PutResult, Usage


def open(  # the verb users know; the builtin is not used here  # noqa: A001
    spec: BlockSpec,
    *,
    dram: int | str = "1GiB",
    timeout_s: float = 1.0,
    lease_s: float = 30.0,
    copy_threads: int = 0,
    reserve_blocks: int = 0,
    view_fraction: float = 0.25,
    lock_memory: bool = False,
    log_evictions: bool = False,
) -> Store:
    """A store in this process: a client and a node in one, no daemon, no socket.

    Returns at once; memory is populated in the background. Options: `kvstore.StoreOptions`.
    Raises InvalidArgument, and NotEnoughMemory if machine, cgroup or memlock are too small.
    """
    options = StoreOptions(
        dram=dram,
        timeout_s=timeout_s,
        lease_s=lease_s,
        copy_threads=copy_threads,
        reserve_blocks=reserve_blocks,
        view_fraction=view_fraction,
        lock_memory=lock_memory,
        log_evictions=log_evictions,
    )
    _check_spec(spec)
    node = _core.Node(
        dram_bytes=options.dram_bytes,
        lock_memory=lock_memory,
        reserve_blocks=reserve_blocks,
        view_fraction=view_fraction,
        lease_ns=int(lease_s * 1e9),
        copy_threads=copy_threads,
        log_evictions=log_evictions,
    )
    return Store(spec, _attach(node, spec), options, "local")


def connect(
    address: str,
    spec: BlockSpec,
    *,
    token: str | bytes | Path | None = None,
    timeout_s: float = 1.0,
    transport: str = "auto",
    connections: int = 4,
    copy_threads: int = 0,
) -> Store:
    """A store in another process, a `kvstore node`; its calls are those of an embedded one.

    `address`: "10.0.0.5:7400", "[::1]:7400", or the path of the node's unix socket. Options:
    `kvstore.ConnectOptions`. Raises InvalidArgument, NodeUnavailable (nobody there in time) and
    NodeRefused (wrong token, no version in common, stopping).
    """
    options = ConnectOptions(
        token=token,
        timeout_s=timeout_s,
        transport=transport,
        connections=connections,
        copy_threads=copy_threads,
    )
    _check_spec(spec)
    if not isinstance(address, str) or not address:
        raise InvalidArgument(
            f'address={show(address)}; use text: "HOST:PORT", or the path of a unix socket'
        )
    return Store(spec, _connect(address, spec, options), options, address)


class Store:
    """Blocks of one namespace. Made by `kvstore.open` and `kvstore.connect`; a context manager that
    closes itself.
    """

    def __init__(
        self,
        spec: BlockSpec,
        native: _core.Store,
        options: StoreOptions | ConnectOptions,
        place: str,
    ) -> None:
        self.spec = spec
        self.options = options
        self._native = native
        self._place = place  # the node's address, "local" in process
        self._transfers = Transfers(self._native)
        self._close = weakref.finalize(self, _close_native, self._native, os.getpid())

    def attach(self, spec: BlockSpec) -> Store:
        """A store of another namespace over the same memory (another model, adapter or tenant).

        The memory of `kvstore.open` lives until all of them are closed; a connected store connects
        once more.
        """
        _check_spec(spec)
        if isinstance(self.options, ConnectOptions):
            native = _connect(self._place, spec, self.options)
        else:
            native = _attach(self._native.node(), spec)
        return Store(spec, native, self.options, self._place)

    def close(self) -> None:
        """Ends transfers, grants and leases; views live on until the last of them is gone."""
        self._close()

    def __enter__(self) -> Store:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- keys

    def keys(self, token_ids: TokenIds, *, salt: bytes = b"", extra: Extra | None = None) -> Keys:
        """Keys of the full blocks of a prompt; see `kvstore.keys.make_keys`."""
        return make_keys(
            self.spec, token_ids, salt=salt, extra=extra, version=self._native.version()
        )

    def _resolve(self, keys: KeysLike) -> tuple[npt.NDArray[np.uint8], int, list[bytes]]:
        return resolve_keys(self.spec, keys)

    # ---- put

    def put(
        self,
        keys: KeysLike,
        blocks: Any,
        *,
        skip_blocks: int = 0,
        chain: bool = True,
        timeout: float | None = None,
    ) -> PutResult:
        """Stores blocks. `keys` names the whole chain, `blocks` starts after `skip_blocks` of it.

        blocks: an array, tensor or buffer of shape (n, ...); or a list of n items, an item being an
        array or buffer, or a list of pieces, a piece an array or a (pointer, length) pair. Strides
        are fine; with as many axes as `BlockSpec.block_shape` a block must have that shape.
        A block held already is EXISTS and not sent. When room runs out, a chain keeps a leading
        run; `chain=False` says that the keys have nothing to do with each other.
        `timeout` seconds (default `timeout_s`) bound the wait for room and the copy.
        Raises InvalidArgument, SpecMismatch, BlockTooLarge, StaleKeys, BufferBusy.
        """
        array, version, texts = self._resolve(keys)
        count = len(array) - _skip(skip_blocks, len(array))
        buffers = sources(self.spec, blocks, count, skip_blocks)
        codes, parent_held, message = self._native.put(
            array, buffers, skip_blocks, chain, version, texts, self._timeout_ns(timeout)
        )
        return PutResult(codes, parent_held=parent_held or skip_blocks == 0, message=message)

    def writing(
        self,
        keys: KeysLike,
        *,
        skip_blocks: int = 0,
        block_bytes: int | None = None,
        chain: bool = True,
        timeout: float | None = None,
    ) -> Writing:
        """A put in parts: `with store.writing(keys) as writing: writing.part(i, blocks)`.

        Slots are reserved now; the blocks become readable together when the `with` ends, and
        nothing is left of them if it raises. `block_bytes`: needed where the spec leaves it open.
        """
        array, version, texts = self._resolve(keys)
        count = len(array) - _skip(skip_blocks, len(array))
        length = self._fixed_length(block_bytes)
        timeout_ns = self._timeout_ns(timeout)
        grants = self._native.reserve(
            array, [length] * count, skip_blocks, chain, version, texts, timeout_ns
        )
        return Writing(self.spec, grants, count, length, timeout_ns)

    # ---- get

    def match_prefix(self, keys: KeysLike, *, skip_blocks: int = 0, ranks: int = 1) -> Match:
        """How many blocks after `skip_blocks` are held without a gap. A hint: nothing is locked,
        nothing touched; `with match as hit` takes leases.

        `ranks=world_size` asks for all ranks' shards at once: a block counts if every rank has it.
        """
        array, _, _ = self._resolve(keys)
        _skip(skip_blocks, len(array))
        matched = self._native.match(array, skip_blocks, self._ranks(ranks))
        return self._match(array, skip_blocks, matched)

    def _match(self, array: npt.NDArray[np.uint8], skip_blocks: int, matched: int) -> Match:
        timeout_ns = self._timeout_ns(None)
        return Match(self.spec, self._native, self._place, array, skip_blocks, matched, timeout_ns)

    def redeem(self, ticket: bytes) -> Hit | None:
        """The blocks behind a ticket (`Hit.ticket`) under leases of this store's own; None if the
        ticket's lease has ended.
        """
        if not isinstance(ticket, bytes):
            raise InvalidArgument(f"a ticket is 16 bytes, not {type(ticket).__name__}")
        leases = self._native.redeem(ticket)
        return None if leases is None else Hit(self.spec, leases, self._timeout_ns(None))

    def get(self, keys: KeysLike, out: Any, *, timeout: float | None = None) -> GetResult:
        """Fills `out` (same forms as `put`'s blocks, writable, no byte twice) with the blocks of
        `keys`, each checked against its checksums. A failed item's memory is zeroed if touched.

        Raises InvalidArgument, SpecMismatch, BufferBusy; never because a block is missing.
        """
        array, _, _ = self._resolve(keys)
        buffers = targets(self.spec, out, len(array))
        codes, nbytes = self._native.get(array, buffers, self._timeout_ns(timeout))
        return GetResult(codes, np.frombuffer(nbytes, np.uint64))

    # ---- in the background

    def put_async(
        self,
        keys: KeysLike,
        blocks: Any,
        *,
        skip_blocks: int = 0,
        chain: bool = True,
        timeout: float | None = None,
    ) -> Transfer[PutResult]:
        """`put` in the background. The blocks' memory is the store's until the transfer is done."""
        array, version, texts = self._resolve(keys)
        count = len(array) - _skip(skip_blocks, len(array))
        buffers = sources(self.spec, blocks, count, skip_blocks)
        timeout_ns = self._timeout_ns(timeout)

        def finish(done: _core.Transfer) -> PutResult:
            codes, parent_held, message = done.put_result()
            return PutResult(codes, parent_held=parent_held or skip_blocks == 0, message=message)

        transfer = Transfer(self._transfers, buffers, finish)
        self._native.put_async(
            array, buffers, skip_blocks, chain, version, texts, timeout_ns, transfer
        )
        return transfer

    def get_async(
        self, keys: KeysLike, out: Any, *, timeout: float | None = None
    ) -> Transfer[GetResult]:
        """`get` in the background. `out` is the store's until the transfer is done."""
        array, _, _ = self._resolve(keys)
        buffers = targets(self.spec, out, len(array))

        def finish(done: _core.Transfer) -> GetResult:
            codes, nbytes = done.get_result(buffers)
            return GetResult(codes, np.frombuffer(nbytes, np.uint64))

        transfer = Transfer(self._transfers, buffers, finish)
        self._native.get_async(array, buffers, self._timeout_ns(timeout), transfer)
        return transfer

    def match_async(
        self, keys: KeysLike, *, skip_blocks: int = 0, ranks: int = 1
    ) -> Transfer[Match]:
        """`match_prefix` as a transfer."""
        array, _, _ = self._resolve(keys)
        _skip(skip_blocks, len(array))
        checked_ranks = self._ranks(ranks)

        def finish(done: _core.Transfer) -> Match:
            return self._match(array, skip_blocks, done.matched)

        transfer = Transfer(self._transfers, None, finish)
        self._native.match_async(array, skip_blocks, checked_ranks, transfer)
        return transfer

    def event_fd(self) -> int:
        """A descriptor that becomes readable when a transfer has finished; `drain` quiets it."""
        return self._native.event_fd()

    def drain(self) -> list[Transfer[Any]]:
        """Transfers that have finished and were not waited for, in order of finishing."""
        finished = self._native.drain()
        for transfer in finished:
            transfer._collect()
        return finished

    # ---- one by one

    def exists(self, keys: KeysLike) -> npt.NDArray[np.bool_]:
        """Which keys are held, each by itself. Nothing is touched."""
        array, _, _ = self._resolve(keys)
        return np.frombuffer(self._native.exists(array), np.bool_)

    def remove(self, keys: KeysLike) -> int:
        """Removes blocks, pinned or not; the number held. Readers keep what they lease."""
        return self._native.remove(self._resolve(keys)[0])

    def touch(self, keys: KeysLike) -> int:
        """Marks a chain as used, its head as the youngest; the number that are held."""
        return self._native.touch(self._resolve(keys)[0])

    def pin(self, keys: KeysLike) -> int:
        """Protects blocks from eviction until as many `unpin` (65,535 at most); the number held."""
        return self._native.pin(self._resolve(keys)[0])

    def unpin(self, keys: KeysLike) -> int:
        """Ends one `pin` of each; the number that were pinned."""
        return self._native.unpin(self._resolve(keys)[0])

    def prefetch(self, keys: KeysLike) -> int:
        """Brings blocks up to memory. Here they are there already: the number that are held."""
        return int(np.count_nonzero(self.exists(keys)))

    def wait(self, keys: KeysLike, timeout: float | None = None) -> bool:
        """Waits until all keys are held, put by whomever; False after `timeout` seconds."""
        array, _, _ = self._resolve(keys)
        deadline = time.monotonic() + self._timeout_ns(timeout) / 1e9
        pause = 0.0002
        while not all(self._native.exists(array)):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.01)
        return True

    def clear(self) -> int:
        """Forgets every block of the namespace, also those of puts under way: they, and puts under
        keys made before, are refused as stale. Returns the namespace's new version.
        """
        return self._native.clear()

    # ---- looking in

    @property
    def transport(self) -> str:
        """The way to the blocks: "local" (in this process), "shm" or "tcp"."""
        return self._native.transport()

    def list(self) -> list[Listed]:
        """The namespace's blocks, in no order."""
        return [
            Listed(BlockKey(key), length, _text(text), pinned)
            for key, length, text, pinned in self._native.list()
        ]

    def usage(self) -> Usage:
        """Memory and counts now."""
        counts = self._native.usage()  # a node of another version may count more, or less
        return Usage(**{field.name: counts.get(field.name, 0) for field in fields(Usage)})

    def audit(self) -> None:
        """Checks that table, allocator, policy and counts agree. Raises AuditFailed.

        Exact only while no other call is under way.
        """
        problem = self._native.audit()
        if problem:
            raise AuditFailed(problem)

    def settle(self, timeout: float = 10.0) -> bool:
        """Waits until memory is populated and background eviction has restored its reserve."""
        return self._native.settle(int(parse_seconds(timeout, "timeout", zero=True) * 1e9))

    def evicted(self) -> Keys:
        """Keys evicted since the last call, in order. Needs `log_evictions=True`."""
        if isinstance(self.options, ConnectOptions):
            raise InvalidArgument("a node does not log its evictions; an embedded store can")
        if not self.options.log_evictions:
            raise InvalidArgument("evictions are not logged; open with log_evictions=True")
        return Keys(self._native.evicted())

    def __repr__(self) -> str:
        state = "open" if self._close.alive else "closed"
        if isinstance(self.options, ConnectOptions):
            where = f"{self._place!r}, {self.transport if self._close.alive else '-'}"
        else:
            where = f"dram={self.options.dram!r}"
        return f"Store({self.spec.model!r}, {where}, {state})"

    # ---- arguments

    def _fixed_length(self, block_bytes: int | None) -> int:
        fixed = self.spec.block_bytes
        if block_bytes is None:
            if fixed is None:
                raise InvalidArgument("the spec leaves the block size open; give block_bytes=")
            return fixed
        if isinstance(block_bytes, bool) or not isinstance(block_bytes, int) or block_bytes < 1:
            raise InvalidArgument(f"block_bytes={block_bytes!r}; use an int of at least 1")
        if fixed not in (None, block_bytes):
            raise InvalidArgument(f"block_bytes={block_bytes}, but the spec says {fixed}")
        return block_bytes

    def _timeout_ns(self, timeout: float | None) -> int:
        if timeout is None:
            return int(self.options.timeout_s * 1e9)
        return int(parse_seconds(timeout, "timeout", zero=True) * 1e9)

    def _ranks(self, ranks: int) -> int:
        if not isinstance(ranks, int) or ranks not in (1, self.spec.world_size):
            raise InvalidArgument(
                f"ranks={ranks!r}; use 1, or the spec's world_size ({self.spec.world_size})"
            )
        return ranks


def _attach(node: _core.Node, spec: BlockSpec) -> _core.Store:
    return _core.Store(node, spec.namespace_id, spec.parts.part_bytes)


def _connect(address: str, spec: BlockSpec, options: ConnectOptions) -> _core.Store:
    return _core.connect(
        address,
        parse_token(options.token),
        spec.canonical(),
        spec.parts.part_bytes,
        options.transport,
        options.connections,
        options.copy_threads,
        int(options.timeout_s * 1e9),
    )


def _check_spec(spec: BlockSpec) -> None:
    if not isinstance(spec, BlockSpec):
        raise InvalidArgument(f"spec is {type(spec).__name__}; pass a kvstore.BlockSpec")


def _close_native(native: _core.Store, owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves its parent's store alone
        native.close()


def _skip(skip_blocks: int, count: int) -> int:
    if isinstance(skip_blocks, bool) or not isinstance(skip_blocks, int):
        raise InvalidArgument(f"skip_blocks={skip_blocks!r} is no int")
    if not 0 <= skip_blocks <= count:
        raise InvalidArgument(f"skip_blocks={show(skip_blocks)}, but the chain has {count} keys")
    return skip_blocks


def _text(text: bytes) -> str | bytes | None:
    if not text:
        return None
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text
