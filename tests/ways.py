"""Ways to a store: in process, over shared memory, over TCP in its forms; and stores that stumble.

What a test does with one `Way` it may do with each: `kvstore.open` and `kvstore.connect` promise
the same. Nodes are shared by tests that want the same options; each test leaves its node empty.
"""

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from builders import ANY, MIB
from nodes import CALL_TIMEOUT_S, NodeProcess, assert_node_idle
from relay import Relay

import kvstore
from kvstore.arguments import sources, targets

PLAIN = ("local", "shm", "tcp")
REMOTE = ("shm", "tcp")
WAYS = ("local", "shm", "tcp", "tcp6", "tcp unix", "relay")
LATE = ("late local", "late shm", "late tcp")  # step by step, each of them late
SEED = 20240611

_TO_THE_END = (1 << 64) - 1
_OF_THE_NODE = ("lease_s", "view_fraction", "reserve_blocks")


def has_ipv6() -> bool:
    """Whether [::1] is there."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


class Nodes:
    """Running nodes by their options."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: dict[tuple[tuple[str, Any], ...], NodeProcess] = {}

    def take(self, **options: Any) -> NodeProcess:
        """A populated node with nothing in it."""
        key = tuple(sorted(options.items()))
        if key not in self._nodes:
            listen = ["127.0.0.1:0", *(["[::1]:0"] if has_ipv6() else [])]
            self._nodes[key] = NodeProcess(self._folder, listen=listen, **options)
        return self._nodes[key]

    def discard(self, node: NodeProcess) -> None:
        """It is in no state for another test."""
        self._nodes = {key: each for key, each in self._nodes.items() if each is not node}
        node.kill()

    def stop(self) -> None:
        """All of them, in order."""
        with ExitStack() as stack:
            for node in self._nodes.values():
                stack.enter_context(node)


class Way:
    """One way to a store."""

    def __init__(self, name: str, nodes: Nodes, folder: Path) -> None:
        self.name = name
        self.nodes = nodes
        self.folder = folder
        self.local = name.endswith("local")
        self.shares_memory = name.endswith(("local", "shm"))
        self.pid = os.getpid()  # of whom the memory is, once opened
        self.slow = name == "relay"  # tens of megabytes a second

    @contextmanager
    def opened(
        self, spec: kvstore.BlockSpec = ANY, *, dram: int = 8 * MIB, **options: Any
    ) -> Iterator[Any]:
        """A populated, empty store (`builders.opened` where it is local). At the end of the test
        nothing is held and the accounts agree.
        """
        options.setdefault("timeout_s", CALL_TIMEOUT_S)
        with ExitStack() as stack:
            if self.local:
                store = stack.enter_context(kvstore.open(spec, dram=dram, **options))
            else:
                of_node = {name: options.pop(name) for name in _OF_THE_NODE if name in options}
                node = self.nodes.take(dram=dram, **of_node)
                self.pid = node.pid
                store = stack.enter_context(self._emptied(node, spec, options))
            assert store.settle(60)
            yield Late(store) if self.name.startswith("late") else store
            assert_node_idle(store)

    @contextmanager
    def _emptied(
        self, node: NodeProcess, spec: kvstore.BlockSpec, options: dict[str, Any]
    ) -> Iterator[kvstore.Store]:
        try:
            with self.connect(node, spec, **options) as store:
                yield store
                store.clear()
                usage = store.usage()
        except BaseException:
            print(f"---- log of the node at {node.address}\n{node.log()}")
            self.nodes.discard(node)
            raise
        if usage.slots:  # blocks of namespaces the test has attached to
            self.nodes.discard(node)

    @contextmanager
    def connect(
        self, node: NodeProcess, spec: kvstore.BlockSpec = ANY, **options: Any
    ) -> Iterator[kvstore.Store]:
        """A store of that node, by this way."""
        options.setdefault("timeout_s", CALL_TIMEOUT_S)
        address = node.path if "unix" in self.name else node.addresses["6" in self.name]
        transport = "shm" if self.shares_memory else "tcp"
        with ExitStack() as stack:
            if self.name == "relay":
                pieces = random.Random(SEED)
                relay = stack.enter_context(Relay(node.address, rate=100e6, pieces=pieces))
                address = relay.address
            yield stack.enter_context(
                kvstore.connect(address, spec, transport=transport, **options)
            )


# ---- step by step --------------------------------------------------------------------------------

PUT_STEPS = ("reserve", "write", "commit")
GET_STEPS = ("lookup", "read", "release")


class Stepped:
    """A store whose put and get are the steps of the transport, with `at(step)` before each.

    `at` may sleep, raise, or return a shorter timeout (nanoseconds) for the step.
    """

    def __init__(self, store: kvstore.Store, at: Callable[[str], int | None]) -> None:
        self._store = store
        self._at = at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __enter__(self) -> "Stepped":  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def _timeout_ns(self, step: str, timeout: float | None) -> int:
        given = self._at(step)
        return self._store._timeout_ns(timeout) if given is None else given

    def put(
        self,
        keys: Any,
        blocks: Any,
        *,
        skip_blocks: int = 0,
        chain: bool = True,
        timeout: float | None = None,
    ) -> kvstore.PutResult:
        """reserve → write → commit"""
        array, version, texts = self._store._resolve(keys)
        buffers = sources(self._store.spec, blocks, len(array) - skip_blocks, skip_blocks)
        lengths = [buffers.block_bytes(i) for i in range(buffers.num_blocks)]
        timeout_ns = self._timeout_ns("reserve", timeout)
        grants = self._store._native.reserve(
            array, lengths, skip_blocks, chain, version, texts, timeout_ns
        )
        timeout_ns = self._timeout_ns("write", timeout)
        written = grants.write(buffers, 0, _TO_THE_END, timeout_ns)
        if written != kvstore.Status.OK:
            codes = [written if code == kvstore.Status.OK else code for code in grants.statuses()]
            grants.abort()
            return kvstore.PutResult(bytes(codes), parent_held=False, message="")
        self._at("commit")
        codes, parent_held, message = grants.commit()
        return kvstore.PutResult(codes, parent_held=parent_held or not skip_blocks, message=message)

    def get(self, keys: Any, out: Any, *, timeout: float | None = None) -> kvstore.GetResult:
        """lookup → read → release"""
        array, _, _ = self._store._resolve(keys)
        buffers = targets(self._store.spec, out, len(array))
        self._at("lookup")
        leases = self._store._native.lookup(array, 0, False)
        timeout_ns = self._timeout_ns("read", timeout)
        codes, nbytes = leases.read(0, buffers, 0, _TO_THE_END, timeout_ns)
        self._at("release")
        leases.release()
        return kvstore.GetResult(codes, np.frombuffer(nbytes, np.uint64))


class Late(Stepped):
    """Each step comes a little late, a seeded while."""

    def __init__(self, store: kvstore.Store) -> None:
        random_s = random.Random(SEED)

        def at(step: str) -> None:
            time.sleep(random_s.random() * 0.002)  # what is being tested, no wait

        super().__init__(store, at)
