"""A node in a process of its own with deadlines as short as a test wants, and what is seen of it.

The child, this file run by name, is a `_core.Node` and a `_core.Server`. `kvstore node` is the same
two objects behind options for people; these deadlines are not among them.
"""

import ctypes
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from told import Told, num_descriptors, rss_anon, serve_lines, tell_parent, wait_for

import kvstore
from kvstore import _core

MIB = 1 << 20
TOKEN = b"a secret of these tests"
ANY = kvstore.BlockSpec("any", block_bytes=None)
NOBODY = 65534
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 4096, 16384, 1 << 18
HELD = ("granted_blocks", "leased_blocks", "view_bytes", "stuck_bytes")
DEFAULTS: dict[str, Any] = {
    "dram_bytes": 16 * MIB,
    "lock_memory": False,
    "lease_ns": 30 * 10**9,
    "grant_ns": 0,
    "listen": ["127.0.0.1:0"],
    "hello_ns": 0,
    "stall_ns": 0,
    "io_threads": 2,
    "connections_max": 4096,
    "limits": {},  # RLIMIT_...: value, set before anything else
    "without_privileges": False,  # root becomes nobody
    "cgroup": None,  # [what /proc/self/cgroup says, {file below /sys/fs/cgroup: text}]
}


class SmallNode(Told):
    """The process. `ask` it for counts, events, usage, audit, settle, stop."""

    def __init__(
        self, folder: Path, *, environment: dict[str, str] | None = None, **options: Any
    ) -> None:
        self.options = {**DEFAULTS, "socket": str(folder / "node.sock"), **options}
        self.folder = folder
        super().__init__(
            "small_node.py", folder / "node.log", self.options, environment or dict(os.environ)
        )
        try:
            self.started = self.answer()
        except BaseException:
            self.end()
            raise
        addresses = self.started.get("addresses", [])
        self.tcp = next((a for a in addresses if not a.startswith("/")), "")
        self.unix = next((a for a in addresses if a.startswith("/")), "")

    def reborn(self) -> "SmallNode":
        """Another process at the same addresses."""
        return SmallNode(self.folder, **{**self.options, "listen": [self.tcp]})

    def address(self, transport: str) -> str:
        return self.tcp if transport == "tcp" else self.unix

    def connect(self, transport: str, **options: Any) -> kvstore.Store:
        """A real client."""
        options = {"token": TOKEN, "transport": transport, "timeout_s": 5.0, **options}
        return kvstore.connect(self.address(transport), ANY, **options)

    def descriptors(self) -> int:
        return num_descriptors(self.pid)

    def rss_anon(self) -> int:
        return rss_anon(self.pid)

    def usage(self) -> dict[str, int]:
        return dict(self.ask("usage"))

    def assert_idle(self, timeout_s: float = 10) -> dict[str, int]:
        """Soon nothing is granted, leased or viewed, and the accounts agree."""
        usage: dict[str, int] = {}

        def idle() -> bool:
            usage.update(self.usage())
            return all(usage[name] == 0 for name in HELD)

        wait_for(idle, timeout_s, lambda: f"held: { {name: usage[name] for name in HELD} }")
        assert self.ask("audit") == ""
        return usage


@contextmanager
def small_node(folder: Path, **options: Any) -> Iterator[SmallNode]:
    """In the end its accounts agree, unless it was killed."""
    with SmallNode(folder, **options) as node:
        assert "error" not in node.started, node.started
        yield node
        if node.process.poll() is None:
            assert node.ask("audit") == ""


# ---- the child -----------------------------------------------------------------------------------


def pretend_cgroup(own: str, files: dict[str, str]) -> None:
    """In a mount namespace of its own, so that no group of this machine is touched."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    root, told = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/own")
    check(libc.unshare(CLONE_NEWNS))
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    check(libc.mount(b"tmpfs", bytes(root), b"tmpfs", 0, None))
    for name, text in {**files, told.name: own}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    check(libc.mount(bytes(told), f"/proc/{os.getpid()}/cgroup".encode(), None, MS_BIND, None))
    assert Path("/proc/self/cgroup").read_text() == own


def open_node(options: dict[str, Any]) -> tuple[_core.Node, _core.Server]:
    names = ("dram_bytes", "lock_memory", "lease_ns", "grant_ns")
    node = _core.Node(
        **{name: options[name] for name in names},
        reserve_blocks=0,
        view_fraction=0.5,
        copy_threads=1,
        log_evictions=False,
    )
    names = ("listen", "socket", "io_threads", "connections_max", "hello_ns", "stall_ns")
    return node, _core.Server(node, token=TOKEN, **{name: options[name] for name in names})


class Actor:
    """What the parent may ask."""

    def __init__(self, node: _core.Node, server: _core.Server) -> None:
        store = _core.Store(node, b"the node's own namespace".ljust(32), 1 << 20)
        self.counts: Callable[[], Any] = server.counts
        self.events: Callable[[], Any] = server.take_events
        self.usage: Callable[[], Any] = store.usage
        self.audit: Callable[[], Any] = store.audit
        self.settle = lambda: store.settle(60 * 10**9)
        self.wall_clock: Callable[[], Any] = time.time
        self.stop = lambda: server.stop(5 * 10**9)


def main() -> None:
    options = json.loads(sys.argv[1])
    for name, value in options["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if options["cgroup"]:
        try:
            pretend_cgroup(*options["cgroup"])
        except OSError as error:
            tell_parent({"error": "OSError", "message": str(error)})
            return
    if options["without_privileges"] and os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        node, server = open_node(options)
    except kvstore.KvstoreError as error:
        tell_parent({"error": type(error).__name__, "message": str(error)})
        return
    actor = Actor(node, server)
    actor.settle()
    tell_parent({"addresses": server.addresses(), "epoch": server.epoch()})
    serve_lines(actor)


if __name__ == "__main__":
    main()
