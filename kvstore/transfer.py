"""Calls that go on in the background: wait for one, poll it, await it, or drain what has finished."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvstore import _core
from kvstore.config import parse_seconds

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
_FOREVER_NS = (1 << 63) - 1


class Transfer(Generic[T]):
    """One background call. It ends by itself, by its deadline or by `cancel`; never not at all.

    Memory given to it belongs to the store until it is done: reading a target earlier, or changing
    a source, gives what it gives (a source changed while it is copied is stored as it was seen, and
    proves itself as that). Collect each transfer once, by `wait`, `await` or `Store.drain`.
    """

    __slots__ = ("__weakref__", "_buffers", "_finish", "_native", "_result", "_transfers")

    def __init__(
        self,
        transfers: Transfers,
        native: _core.Transfer,
        buffers: _core.Buffers | None,
        finish: Callable[[_core.Transfer], T],
    ) -> None:
        self._transfers = transfers
        self._native = native
        self._buffers = buffers
        self._finish = finish
        self._result: T | None = None

    @property
    def id(self) -> int:
        """Its number in the store, from 1."""
        return self._native.id

    def done(self) -> bool:
        """Whether it has ended; the caller's memory is the caller's again."""
        return self._native.done

    def cancel(self) -> None:
        """Asks it to end early. It is done soon after; what it did not do is CANCELLED."""
        self._native.cancel()

    def wait(self, timeout: float | None = None) -> T:
        """The result. Raises TimeoutError if it is not done in `timeout` seconds (None: for ever),
        and what the call itself would have raised.
        """
        if self._result is None:
            nanos = _FOREVER_NS
            if timeout is not None:
                nanos = int(parse_seconds(timeout, "timeout", zero=True) * 1e9)
            if not self._transfers.native.wait(self._native, nanos):
                raise TimeoutError(f"transfer {self.id} is not done after {timeout} s")
            self._collect()
        assert self._result is not None
        return self._result

    def _collect(self) -> None:
        self._transfers.forget(self)
        try:
            self._result = self._finish(self._native)
        finally:
            if self._buffers is not None:
                self._buffers.release()
                self._buffers = None

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            future = self._transfers.awaiting(self)
            try:
                yield from future
            except BaseException:
                self.cancel()
                raise
        return self.wait()

    def __repr__(self) -> str:
        return f"Transfer({self.id}, {'done' if self.done() else 'under way'})"


class Transfers:
    """The transfers of one store: keeps them, and the memory lent to them, until collected."""

    def __init__(self, native: _core.Store) -> None:
        self.native = native
        self._known: dict[int, Transfer[Any]] = {}
        self._lock = threading.Lock()
        self._awaited: dict[int, tuple[Transfer[Any], asyncio.Future[None]]] = {}
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}  # how many futures each waits for

    def add(self, transfer: Transfer[T]) -> Transfer[T]:
        """Keeps it until it is collected."""
        self._known[transfer.id] = transfer
        return transfer

    def forget(self, transfer: Transfer[Any]) -> None:
        """It has been collected."""
        self._known.pop(transfer.id, None)

    def drain(self) -> list[Transfer[Any]]:
        """What has finished and was not collected otherwise, in order of finishing."""
        finished = []
        for native in self.native.drain():
            transfer = self._known.pop(native.id, None)
            if transfer is not None:
                finished.append(transfer)
        return finished

    def awaiting(self, transfer: Transfer[Any]) -> asyncio.Future[None]:
        """A future of the running loop that ends when the transfer is done."""
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._awaited[transfer.id] = (transfer, future)
            count = self._loops.get(loop, 0)
            self._loops[loop] = count + 1
            self.native.set_awaiting(True)
            if count == 0:
                loop.add_reader(self.native.await_fd(), self._wake)
        self._wake()  # it may have finished before the descriptor was watched
        return future

    def _wake(self) -> None:
        """Ends the futures of finished transfers, whichever loop woke up first."""
        with self._lock:
            fd = self.native.await_fd()
            try:
                os.read(fd, 8)
            except BlockingIOError:
                pass  # another loop was quicker
            for number in [n for n, (transfer, _) in self._awaited.items() if transfer.done()]:
                _, future = self._awaited.pop(number)
                loop = future.get_loop()
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_end, future)
                self._loops[loop] -= 1
            for loop in [loop for loop, count in self._loops.items() if count == 0]:
                del self._loops[loop]
                if not loop.is_closed():
                    loop.call_soon_threadsafe(self._unwatch, loop, fd)
            if not self._awaited:
                self.native.set_awaiting(False)

    def _unwatch(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        with self._lock:
            if loop not in self._loops:
                loop.remove_reader(fd)


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
