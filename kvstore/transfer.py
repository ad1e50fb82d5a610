"""Calls in the background: wait for one, poll it, await it, or drain what has finished."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvstore import _core
from kvstore.config import parse_seconds
from kvstore.errors import KvstoreError

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
_FOREVER_NS = (1 << 63) - 1


class Transfer(Generic[T]):
    """One background call. It ends by itself, by its deadline or by `cancel`; never not at all.

    Memory given to it belongs to the store until it is done: reading a target earlier, or changing
    a source, gives what it gives (a source changed while it is copied is stored as it was seen, and
    proves itself as that). Collect each transfer, by `wait`, `await` or `Store.drain`.
    """

    __slots__ = ("__weakref__", "_buffers", "_error", "_finish", "_native", "_result", "_transfers")

    _native: _core.Transfer  # set by the core, in the step that submits it

    def __init__(
        self,
        transfers: Transfers,
        buffers: _core.Buffers | None,
        finish: Callable[[_core.Transfer], T],
    ) -> None:
        self._transfers = transfers
        self._buffers = buffers
        self._finish: Callable[[_core.Transfer], T] | None = finish  # None once it is collected
        self._result: T | None = None
        self._error: KvstoreError | None = None

    @property
    def id(self) -> int:
        """Its number in the store, from 1."""
        return self._native.id

    def done(self) -> bool:
        """Whether it has ended; the caller's memory is the caller's again."""
        return self._native.done

    def cancel(self) -> None:
        """Asks it to end early. It is done soon after; what it did not do is CANCELLED."""
        self._transfers.native.cancel(self._native)

    def wait(self, timeout: float | None = None) -> T:
        """The result. Raises TimeoutError if it is not done in `timeout` seconds (None: for ever),
        and what the call itself would have raised.
        """
        nanos = _FOREVER_NS
        if timeout is not None:
            nanos = int(parse_seconds(timeout, "timeout", zero=True) * 1e9)
        if self._finish is not None:
            if not self._transfers.native.wait(self._native, nanos):
                raise TimeoutError(f"transfer {self.id} is not done after {timeout} s")
            self._collect()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _collect(self) -> None:
        with self._transfers.lock:
            if self._finish is not None:  # else another thread was quicker
                try:
                    self._result = self._finish(self._native)
                except KvstoreError as error:
                    self._error = error
                self._finish = None
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            buffers.release()  # finalizers may run here: no lock is held

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            future = self._transfers.awaiting(self)
            try:
                yield from future
            except BaseException:
                self._transfers.native.abandon(self._native)
                raise
        return self.wait()

    def __repr__(self) -> str:
        return f"Transfer({self.id}, {'done' if self.done() else 'under way'})"


class Transfers:
    """The transfers of one store, for whoever awaits them. Who is under way, and the memory lent to
    it, is known to the core.
    """

    def __init__(self, native: _core.Store) -> None:
        self.native = native
        # Guards all the rest. A finalizer that runs under it may come back.
        self.lock = threading.RLock()
        self._awaited: dict[asyncio.Future[None], Transfer[Any]] = {}
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}  # how many futures each waits for
        self._fd = -1  # outlives close(): a task may still await what close() has ended

    def awaiting(self, transfer: Transfer[Any]) -> asyncio.Future[None]:
        """A future of the running loop that ends when the transfer is done."""
        import asyncio

        self.native.set_awaiting(True)  # first of all, since it refuses in a forked child
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self.lock:
            if self._fd < 0:
                self._fd = self.native.await_fd()
            self._awaited[future] = transfer
            count = self._loops.get(loop, 0)
            self._loops[loop] = count + 1
            if count == 0:
                loop.add_reader(self._fd, self._wake)
            self.native.set_awaiting(True)
        self._wake()  # it may have finished before the descriptor was watched
        return future

    def _wake(self) -> None:
        """Ends the futures of finished transfers, whichever loop woke up first."""
        with self.lock:
            with contextlib.suppress(BlockingIOError):  # another loop was quicker
                os.read(self._fd, 8)
            for future in [f for f, transfer in self._awaited.items() if transfer.done()]:
                del self._awaited[future]
                loop = future.get_loop()
                _call_soon(loop, _end, future)
                self._loops[loop] -= 1
            for loop in [loop for loop, count in self._loops.items() if count == 0]:
                del self._loops[loop]
                _call_soon(loop, self._unwatch, loop)
            if not self._awaited:
                self.native.set_awaiting(False)

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        with self.lock:
            if loop not in self._loops:
                loop.remove_reader(self._fd)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], argument: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
        loop.call_soon_threadsafe(call, argument)


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
