"""Forks, kills and exits: a child owns nothing of its parent's store; nothing outlives the dead.

A child reports by its exit code and never returns into pytest.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import (
    ANY,
    MIB,
    block,
    blocks,
    in_a_forked_child,
    is_block,
    names,
    opened,
    run_python,
)

import kvstore

CHUNK = 100_000


def reads_back(store: kvstore.Store, count: int = 4) -> bool:
    got = np.zeros((count, CHUNK), np.uint8)
    return store.get(names(count), got).ok and all(is_block(got[i], i) for i in range(count))


def test_parent_works_after_a_forked_child_exits() -> None:
    with opened() as store:
        assert store.put(names(4), blocks(range(4), CHUNK)).ok
        assert reads_back(store)
        pid = os.fork()
        if pid == 0:
            time.sleep(0.1)
            os._exit(0)
        for _ in range(100):
            assert reads_back(store)
        assert os.waitpid(pid, 0) == (pid, 0)
        assert reads_back(store)
        assert store.put(["after"], [block(9, CHUNK)]).ok


def test_store_used_in_a_forked_child_is_refused() -> None:
    with opened() as store:
        assert store.put(names(4), blocks(range(4), CHUNK)).ok
        match, entered, redeemed = (store.match_prefix(names(4)) for _ in range(3))
        hit, ticket_hit = entered.__enter__(), redeemed.__enter__()
        ticket = ticket_hit.ticket()
        writing = store.writing(["w"], block_bytes=CHUNK)
        transfer = store.get_async(["b0"], [bytearray(CHUNK)])
        transfer.wait(10)
        room = np.zeros((4, CHUNK), np.uint8)
        parent = os.getpid()
        calls: list[Callable[[], object]] = [
            lambda: store.put(["new"], [b"x"]),
            lambda: store.get(names(4), room),
            lambda: store.put_async(["new"], [b"x"]),
            lambda: store.get_async(names(4), room),
            lambda: store.match_async(names(4)),
            lambda: store.match_prefix(names(4)),
            lambda: store.writing(["new"], block_bytes=1),
            lambda: store.exists(names(4)),
            lambda: store.remove(names(4)),
            lambda: store.touch(names(4)),
            lambda: store.pin(names(4)),
            lambda: store.unpin(names(4)),
            lambda: store.wait(names(4), 0),
            lambda: store.keys(range(16)),
            lambda: store.redeem(ticket),
            lambda: store.attach(ANY),
            store.clear,
            store.list,
            store.usage,
            store.audit,
            store.settle,
            store.drain,
            store.event_fd,
            match.__enter__,
            lambda: hit.read(room),
            hit.views,
            hit.verify,
            hit.ticket,
            lambda: writing.part(0, [bytes(CHUNK)]),
            writing.commit,
        ]

        def use_everything() -> None:
            for call in calls:
                with pytest.raises(kvstore.ForkedStore, match=f"belongs to process {parent}"):
                    call()
            store.close()
            store.close()
            assert not room.any()

        assert in_a_forked_child(use_everything, 10) == 0
        assert reads_back(store)  # and the child's close() closed nothing
        assert hit.read(room).ok
        assert hit.close()
        assert ticket_hit.close()
        writing.part(0, [block(5, CHUNK)])
        assert writing.commit().ok


def test_dropping_everything_in_a_forked_child_does_nothing() -> None:
    held: list[object] = []
    store = kvstore.open(ANY, dram=8 * MIB, view_fraction=1)
    assert store.put(names(4), blocks(range(4), CHUNK)).ok
    hit = store.match_prefix(names(4)).__enter__()
    view = hit.views()[0][0]
    held += [store, hit, view, store.writing(["w"], block_bytes=CHUNK), store.match_prefix(["b0"])]
    held.append(store.put_async(["x"], [bytes(CHUNK)]))
    copies = list(held)
    del store, hit, view

    def drop() -> None:
        held.clear()
        copies.clear()

    assert in_a_forked_child(drop) == 0
    mine: kvstore.Store = held[0]
    assert reads_back(mine)
    assert is_block(held[2], 0)
    assert mine.usage().leased_blocks == 4
    mine.close()


def test_a_forked_child_that_exits_normally_leaves_the_parent_alone() -> None:
    code = """
import os, sys
import kvstore
from builders import ANY, MIB, block, is_block
store = kvstore.open(ANY, dram=8 * MIB)
assert store.put(["k"], [block(1, MIB)]).ok
transfer = store.get_async(["k"], [bytearray(MIB)])
hit = store.match_prefix(["k"]).__enter__()
hit.views()
sys.stdout.flush()
if os.fork() == 0:
    sys.exit(0)                     # the interpreter's whole way out
assert os.wait()[1] == 0
got = bytearray(MIB)
assert store.get(["k"], [got]).ok and is_block(got, 1)
"""
    result = run_python(code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def use_own_store(number: int) -> None:
    with opened(dram=4 * MIB) as store:
        assert store.put(["k"], [block(number, MIB)]).ok
        transfer = store.put_async(["async"], [block(number, CHUNK)], timeout=10)
        assert transfer.wait(10).ok
        got = bytearray(MIB)
        assert store.get(["k"], [got], timeout=10).ok
        assert is_block(got, number)


def test_forked_children_open_their_own_stores() -> None:
    context = multiprocessing.get_context("fork")
    with opened() as store:
        assert store.put(names(4), blocks(range(4), CHUNK)).ok
        for _ in range(5):
            began = time.monotonic()
            children = [context.Process(target=use_own_store, args=(i,)) for i in range(8)]
            for child in children:
                child.start()
            assert reads_back(store)
            for child in children:
                child.join(20)
            assert [child.exitcode for child in children] == [0] * 8
            assert time.monotonic() - began < 20
            assert reads_back(store)


def test_subprocesses_between_gets_disturb_nothing() -> None:
    with opened() as store:
        assert store.put(names(4), blocks(range(4), CHUNK)).ok
        for _ in range(50):
            subprocess.run(["true"], check=True)
            assert reads_back(store)


def shared_memory() -> tuple[list[str], int]:
    """What stands in /dev/shm, and the machine's shared memory in bytes."""
    meminfo = Path("/proc/meminfo").read_text().split()
    return sorted(os.listdir("/dev/shm")), int(meminfo[meminfo.index("Shmem:") + 1]) << 10


def test_killed_process_leaves_no_shared_memory() -> None:
    code = """
import kvstore, time
from builders import ANY, MIB
store = kvstore.open(ANY, dram=64 * MIB)
assert store.settle()
hit = store.match_prefix(["k"]).__enter__()
print("ready", flush=True)
time.sleep(60)
"""
    names_before, bytes_before = shared_memory()
    path = [str(Path(kvstore.__file__).parents[1]), str(Path(__file__).parent)]
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            child.kill()
    deadline = time.monotonic() + 10
    while shared_memory()[1] > bytes_before + 160 * MIB:  # five pools would be 320 MiB
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert shared_memory()[0] == names_before


@pytest.mark.parametrize("how", ["fork", "subprocess"])
def test_descriptors_do_not_reach_children(how: str) -> None:
    def descriptors(pid: int | str) -> set[str]:
        folder = Path(f"/proc/{pid}/fd")
        return {os.readlink(entry) for entry in folder.iterdir() if entry.exists()}

    with opened() as store:
        store.event_fd()
        mine = {target for target in descriptors("self") if "kvstore" in target}
        assert len(mine) >= 2
        if how == "subprocess":
            listing = subprocess.run(
                ["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True
            )
            assert "kvstore" not in listing.stdout
        else:  # a fork keeps descriptors, but none of the pool's memory is mapped in it

            def check() -> None:
                maps = Path("/proc/self/maps").read_text()
                assert "kvstore-data" not in maps

            assert in_a_forked_child(check) == 0
            assert "kvstore-data" in Path("/proc/self/maps").read_text()
