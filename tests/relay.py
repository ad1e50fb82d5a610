"""A relay of TCP connections that slows, splits, delays, drops, changes or cuts what passes.

    client ── up ──> relay ──> node          node ── down ──> relay ──> client

A thread of this process; everything it does, it does on request or when bytes come.
"""

import random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

Direction = Literal["up", "down"]

_READ_BYTES = 64 << 10
_PENDING_MAX = 256 << 10
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST and drops what was not sent


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class _Flow:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        self.source, self.sink, self.direction = source, sink, direction
        self.pending: deque[tuple[float, bytes]] = deque()  # due when, what
        self.pending_bytes = 0
        self.ended = False  # the source has
        self.shut = False  # and the sink knows


class Relay:
    """Forwards `address` to `target`, with what is wrong with it set by attributes and methods.

    rate: bytes a second, both directions together; None: all there are. pieces: what passes is
    cut into pieces of odd sizes, by that generator. delay_s: how much later all comes.
    """

    def __init__(
        self,
        target: str,
        *,
        rate: float | None = None,
        pieces: random.Random | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self._target = _endpoint(target)
        self._pieces = pieces
        self._lock = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        # The thread's own, read by others as they are.
        self.rate = rate
        self.delay_s = delay_s
        self.passed: dict[Direction, int] = {"up": 0, "down": 0}
        self.connections = 0  # accepted so far
        self.cuts = 0
        self._flows: list[_Flow] = []
        self._frozen = self._refusing = self._ending = False
        self._dropped: set[Direction] = set()
        self._flips: dict[Direction, int] = {}  # at which byte
        self._cut_at: int | None = None
        self._allowance = 0.0
        self._counted_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    # ---- what a test says

    def so_far(self) -> dict[Direction, int]:
        """Bytes that have passed each way: all of those that have arrived, too."""
        self._tell(lambda: None)  # the thread counts what it has sent before it obeys
        return dict(self.passed)

    @property
    def total(self) -> int:
        """Bytes that have passed, both ways; those just sent may not be counted yet."""
        return self.passed["up"] + self.passed["down"]

    def cut(self) -> None:
        """Resets all connections, now. New ones pass."""
        self._tell(self._cut)

    def cut_after(self, num_bytes: int) -> None:
        """Resets all connections once so many more bytes have passed, both ways together."""
        self._tell(lambda: setattr(self, "_cut_at", self.total + num_bytes))

    def never_cut(self) -> None:
        """Forgets `cut_after`."""
        self._tell(lambda: setattr(self, "_cut_at", None))

    def refuse(self, refusing: bool = True) -> None:
        """Resets new connections."""
        self._tell(lambda: setattr(self, "_refusing", refusing))

    def freeze(self) -> None:
        """Nothing passes; connections stay open, and new ones are accepted."""
        self._tell(lambda: setattr(self, "_frozen", True))

    def thaw(self) -> None:
        self._tell(lambda: setattr(self, "_frozen", False))

    def drop(self, *directions: Direction) -> None:
        """What goes that way vanishes; with no direction, all passes again."""
        self._tell(lambda: setattr(self, "_dropped", set(directions)))

    def flip(self, direction: Direction, after_bytes: int) -> None:
        """Changes one bit of the byte that passes after so many more of that direction."""
        self._tell(lambda: self._flips.update({direction: self.passed[direction] + after_bytes}))

    def wait(self, condition: Callable[["Relay"], bool], timeout_s: float = 10.0) -> None:
        """Until it holds; it is looked at whenever something passes, comes or ends."""
        with self._lock:
            assert self._lock.wait_for(lambda: condition(self), timeout_s), "waited in vain"

    def close(self) -> None:
        self._tell(lambda: setattr(self, "_ending", True))
        self._thread.join(10)
        assert not self._thread.is_alive()

    def __enter__(self) -> "Relay":  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, command: Callable[[], None]) -> None:
        """Runs it in the relay's thread; done when this returns."""
        if threading.current_thread() is self._thread:
            command()
            return
        done = threading.Event()
        with self._lock:
            self._commands += [command, done.set]
            self._wake_write.send(b"x")  # within: the command may close it
        assert done.wait(10) or not self._thread.is_alive()

    # ---- the thread

    def _run(self) -> None:
        while not self._ending:
            poller = select.poll()
            poller.register(self._wake_read, select.POLLIN)
            poller.register(self._listener, select.POLLIN)
            wanted: dict[int, int] = {}
            now = time.monotonic()
            due_s = 60.0
            for flow in self._flows:
                if not flow.ended and flow.pending_bytes < _PENDING_MAX and not self._frozen:
                    wanted[flow.source.fileno()] = (
                        wanted.get(flow.source.fileno(), 0) | select.POLLIN
                    )
                if flow.pending and not self._frozen:
                    wait_s = max(flow.pending[0][0] - now, self._pause_s(now))
                    due_s = min(due_s, wait_s)
                    if wait_s <= 0:
                        wanted[flow.sink.fileno()] = (
                            wanted.get(flow.sink.fileno(), 0) | select.POLLOUT
                        )
            for descriptor, events in wanted.items():
                poller.register(descriptor, events)
            ready = dict(poller.poll(1000 * due_s if due_s > 0 else None))
            self._obey(ready)
            if self._listener.fileno() in ready:
                self._accept()
            for flow in list(self._flows):
                self._move(flow, ready)
            with self._lock:
                self._lock.notify_all()
        self._cut()
        for each in (self._listener, self._wake_read, self._wake_write):
            each.close()

    def _obey(self, ready: dict[int, int]) -> None:
        if self._wake_read.fileno() in ready:
            self._wake_read.recv(4096)
        while True:
            with self._lock:
                if not self._commands:
                    return
                command = self._commands.popleft()
            command()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self.connections += 1
        if self._refusing:
            _reset(client)
            return
        try:
            node = socket.create_connection(self._target, timeout=10)
        except OSError:
            _reset(client)
            return
        for each in (client, node):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._flows += [_Flow(client, node, "up"), _Flow(node, client, "down")]

    def _move(self, flow: _Flow, ready: dict[int, int]) -> None:
        if flow not in self._flows:  # cut meanwhile
            return
        try:
            if ready.get(flow.source.fileno(), 0) and not flow.ended and not self._frozen:
                self._take(flow)
            self._pass_on(flow)
        except BlockingIOError:
            return
        except OSError:  # reset by either end: the other one hears of it
            self._end(flow)

    def _take(self, flow: _Flow) -> None:
        if flow.pending_bytes >= _PENDING_MAX:
            return
        got = flow.source.recv(_READ_BYTES)
        flow.ended = not got
        if got and flow.direction not in self._dropped:
            flow.pending.append((time.monotonic() + self.delay_s, got))
            flow.pending_bytes += len(got)

    def _pass_on(self, flow: _Flow) -> None:
        while flow.pending and not self._frozen:
            now = time.monotonic()
            due, piece = flow.pending[0]
            if due > now or self._pause_s(now) > 0:
                return
            most = len(piece)
            if self._pieces is not None:
                most = min(most, self._pieces.choice((1, 2, 3, 7, 47, 1447, 4095, 16381, 65535)))
            if self._cut_at is not None:
                most = min(most, max(0, self._cut_at - self.total))
            sent = flow.sink.send(self._changed(flow.direction, piece[:most])) if most else 0
            flow.pending_bytes -= sent
            self._allowance -= sent
            if sent == len(piece):
                flow.pending.popleft()
            else:
                flow.pending[0] = (due, piece[sent:])
            self.passed[flow.direction] += sent
            if self._cut_at is not None and self.total >= self._cut_at:
                self._cut()
                return
        if flow.ended and not flow.pending and not flow.shut:
            flow.shut = True
            flow.sink.shutdown(socket.SHUT_WR)
            if all(each.shut for each in self._flows if flow.sink in (each.source, each.sink)):
                self._end(flow)

    def _changed(self, direction: Direction, piece: bytes) -> bytes:
        at = self._flips.get(direction, -1) - self.passed[direction]
        if not 0 <= at < len(piece):
            return piece
        del self._flips[direction]
        return piece[:at] + bytes([piece[at] ^ 0x10]) + piece[at + 1 :]

    def _pause_s(self, now: float) -> float:
        """How long until the rate allows the next piece."""
        if self.rate is None:
            return 0.0
        self._allowance += (now - self._counted_at) * self.rate
        self._allowance = min(self._allowance, self.rate / 50)
        self._counted_at = now
        return max(0.0, -self._allowance / self.rate)

    def _end(self, flow: _Flow) -> None:
        both = [each for each in self._flows if flow.sink in (each.source, each.sink)]
        self._flows = [each for each in self._flows if each not in both]
        for end in (flow.source, flow.sink):
            _reset(end)

    def _cut(self) -> None:
        self._cut_at = None
        self.cuts += 1
        for flow in list(self._flows):
            if flow in self._flows:
                self._end(flow)


def _reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()
