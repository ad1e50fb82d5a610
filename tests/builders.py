"""What the store's tests build on: small stores that must end clean, self-proving blocks.

A block's words name its number, its generation and their place (`kvstore.sim.checkers`), so that a
mix of two blocks, a shift, a cut or zero fill shows.
"""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore.sim.checkers import check_payload, make_payload

Bytes = npt.NDArray[np.uint8]

MIB = 1 << 20
ANY = kvstore.BlockSpec("any", block_bytes=None)  # opaque, blocks of any size


@contextmanager
def opened(
    spec: kvstore.BlockSpec = ANY, *, dram: int = 8 * MIB, **options: Any
) -> Iterator[kvstore.Store]:
    """A populated store. At the end of the test nothing is held and the accounts agree."""
    with kvstore.open(spec, dram=dram, **options) as store:
        assert store.settle(60)
        yield store
        assert_idle(store)


def assert_idle(store: kvstore.Store) -> None:
    assert store.settle(60)
    usage = store.usage()
    held = (usage.leased_blocks, usage.granted_blocks, usage.view_bytes, usage.stuck_bytes)
    assert held == (0, 0, 0, 0)
    store.audit()


def names(count: int, prefix: str = "b") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def block(number: int, num_bytes: int, generation: int = 0) -> Bytes:
    return make_payload([number], num_bytes, generation=generation)[0]


def blocks(numbers: Sequence[int], num_bytes: int, generation: int = 0) -> Bytes:
    """(n, num_bytes)"""
    return make_payload(list(numbers), num_bytes, generation=generation)


def is_block(got: Any, number: int, generation: int = 0) -> bool:
    flat = np.frombuffer(got, np.uint8)
    return len(check_payload(flat[None], [number], generation=generation)) == 0


def fill(store: kvstore.Store, block_bytes: int = MIB, prefix: str = "full") -> list[str]:
    """Fills the pool with blocks 0, 1, ... that fit it without rest; their names.

    Few and large, so that background eviction wants no reserve (a sixteenth) of them.
    """
    count = store.usage().capacity_bytes // block_bytes
    assert count < 16
    held = names(count, prefix)
    assert store.put(held, blocks(range(count), block_bytes), chain=False).ok
    assert store.usage().free_bytes < block_bytes
    return held


def resident() -> dict[str, int]:
    """Resident memory of this process, in bytes: RssAnon, RssFile, RssShmem."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = [line.replace(":", "").split() for line in lines if line.startswith("Rss")]
    return {name: int(kib) << 10 for name, kib, _ in found}


def in_a_forked_child(work: Callable[[], object], timeout_s: float = 20) -> int:
    """Runs it in a fork of this process; the child's exit code, 0 if it neither raised nor hung."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + timeout_s
    while (waited := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"the child did not end within {timeout_s} s")
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(waited[1])


def run_python(
    code: str, *, timeout_s: float = 30, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Runs code in a fresh interpreter that finds the same package, and these builders."""
    path = [str(Path(kvstore.__file__).parents[1]), str(Path(__file__).parent)]
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        **options,
    )


def write_private(path: Path, text: str, mode: int = 0o600) -> Path:
    """A file of that text, by default for its owner alone."""
    path.write_text(text)
    path.chmod(mode)
    return path
