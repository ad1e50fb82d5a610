"""What nobody does on purpose: interrupts, finalizers, exits and limits in the middle of a call."""

from __future__ import annotations

import gc
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from builders import ANY, MIB, opened

import kvstore
from kvstore import BlockSpec, Status, _core

FOUR_HEADS = BlockSpec("m", layers=2, kv_heads=4, head_dim=8, dtype="float32", block_tokens=16)


def run(
    program: str, *, limits: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter's outcome."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=limits,
    )


# ---- transfers


def test_memory_stays_lent_when_nobody_keeps_the_transfer() -> None:
    with opened() as store:
        store.put(["a"], [bytes(MIB)])
        target = bytearray(MIB)
        store.get_async(["a"], [target])
        gc.collect()
        with pytest.raises(BufferError):
            target.append(1)
        time.sleep(0.05)
        with pytest.raises(BufferError):
            target.append(1)
        assert [list(done.wait()) for done in store.drain()] == [[Status.OK]]
        target.append(1)


def test_a_refused_match_leaves_nothing_under_way() -> None:
    with opened() as store:
        with pytest.raises(kvstore.InvalidArgument, match="65537"):
            store.match_async(np.zeros((65537, 32), np.uint8))
        began = time.monotonic()
    assert time.monotonic() - began < 5  # closed


def test_a_finalizer_may_use_the_store_while_memory_comes_back() -> None:
    with opened() as store:
        done = []
        source = np.ones(MIB, np.uint8)
        weakref.finalize(source, lambda: done.append(store.put_async(["b"], [bytes(10)]).wait()))
        transfer = store.put_async(["a"], [source])
        del source
        assert transfer.wait(10).ok
        del transfer
        gc.collect()
        assert done
        assert done[0].ok


def test_an_await_given_up_holds_nothing_for_ever() -> None:
    import asyncio

    with opened() as store:
        store.put(["a"], [bytes(MIB)])

        async def give_up() -> bytearray:
            target = bytearray(MIB)
            task = asyncio.ensure_future(_awaited(store.get_async(["a"], [target])))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return target

        async def many() -> list[bytearray]:
            return [await give_up() for _ in range(50)]

        targets = asyncio.run(many())
        time.sleep(0.1)
        store.match_async(["a"]).wait()  # any call in the background looks after them
        for target in targets:
            target.append(1)


async def _awaited(transfer: kvstore.Transfer[kvstore.GetResult]) -> kvstore.GetResult:
    return await transfer


# ---- views, keys, parts


def test_a_view_cannot_be_taken_anew_once_its_lease_has_ended() -> None:
    with opened() as store:
        store.put(["a"], [b"\x07" * 4096])
        with store.match_prefix(["a"]) as hit:
            view = hit.views()[0][0]
            extent = view.obj
            assert memoryview(extent)[0] == 7
            view.release()
            del view
            gc.collect()
        with pytest.raises(BufferError, match="lease has ended"):
            memoryview(extent)


def test_one_key_in_two_namespaces_is_two_blocks() -> None:
    raw = np.arange(32, dtype=np.uint8).reshape(1, 32)
    with opened() as store, store.attach(BlockSpec("other", block_bytes=None)) as other:
        store.put(raw, [b"first"])
        store.pin(raw)
        assert other.put(raw, [b"second"]).ok
        a, b = bytearray(5), bytearray(6)
        assert store.get(raw, [a]).ok
        assert other.get(raw, [b]).ok
        assert (bytes(a), bytes(b)) == (b"first", b"second")
        assert other.remove(raw) == 1
        assert list(store.exists(raw)) == [True]
        store.unpin(raw)


def test_blocks_of_another_number_of_ranks_are_read_whole() -> None:
    with opened(FOUR_HEADS) as store, store.attach(FOUR_HEADS.with_rank(0, 2)) as rank:
        assert store.spec.parts.part_bytes != rank.spec.parts.part_bytes
        keys = rank.keys(range(64))
        source = np.random.default_rng(1).integers(0, 256, (4, rank.spec.block_bytes), np.uint8)
        assert rank.put(keys, source).ok
        raw = np.array(keys.array)
        with store.match_prefix(raw) as hit:
            targets = [bytearray(rank.spec.block_bytes) for _ in range(4)]
            codes, _ = hit._leases.read(
                0, _core.Buffers(targets, 4, None, True, None), 0, 1 << 62, 10**9
            )
            assert list(codes) == [Status.OK] * 4
            assert b"".join(targets) == source.tobytes()
            assert list(hit.verify()) == [Status.OK] * 4
        assert store.usage().corrupt == 0


def test_strided_keys_are_refused_by_the_core() -> None:
    with opened() as store:
        keys = np.zeros((4, 32), np.uint8)
        for wrong in (keys[::-1], keys[::2], keys[:, ::2]):
            with pytest.raises(kvstore.InvalidArgument, match=r"contiguous|32"):
                store._native.exists(wrong)


# ---- close, interrupts, exit


def test_closing_ends_a_put_that_waits() -> None:
    store = kvstore.open(ANY, dram=2 * MIB, lease_s=3600)
    store.settle()
    store.put(["a"], [bytes(2 * MIB)])
    results = []
    with store.attach(ANY) as holder, holder.match_prefix(["a"]):
        thread = threading.Thread(
            target=lambda: results.append(store.put(["b"], [bytes(MIB)], timeout=60))
        )
        thread.start()
        time.sleep(0.2)
        began = time.monotonic()
        store.close()
        thread.join()
        assert time.monotonic() - began < 3
    assert list(results[0]) == [Status.CANCELLED]


@pytest.fixture
def interrupt_soon() -> Iterator[None]:
    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("interrupt_soon")
@pytest.mark.parametrize("call", ["put", "wait"])
def test_an_interrupt_ends_a_call_that_waits_for_room(call: str) -> None:
    with opened(dram=2 * MIB, lease_s=3600) as store:
        store.put(["a"], [bytes(2 * MIB)])
        began = time.monotonic()
        transfers: list[kvstore.Transfer[kvstore.PutResult]] = []

        def waits() -> None:
            if call == "put":
                store.put(["b"], [bytes(MIB)], timeout=60)
            else:
                transfers.append(store.put_async(["b"], [bytes(MIB)], timeout=5))
                transfers[0].wait()

        with store.match_prefix(["a"]), pytest.raises(KeyboardInterrupt):
            waits()
        assert time.monotonic() - began < 3
        for transfer in transfers:  # it goes on, until it has room or its time is over
            transfer.wait(20)


def test_closing_from_a_finalizer_inside_a_call_does_not_hang() -> None:
    outcome = run("""
        import gc, kvstore
        store = kvstore.open(kvstore.BlockSpec("m", block_bytes=None), dram="8MiB")
        for number in range(3000):
            store.put([f"{number}"], [b"x"])
        class Closes:
            def __init__(self):
                self.me = self
            def __del__(self):
                store.close()
                print("closed")
        gc.collect()
        gc.set_threshold(5)
        Closes()
        try:
            for _ in range(50):
                store.list()
        except kvstore.StoreClosed:
            print("ended")
    """)
    assert outcome.stdout.split() == ["closed", "ended"], outcome.stderr


@pytest.mark.parametrize(
    "call",
    ["kvstore.keys.make_keys(spec, numbers)", "store.put_async(['x'], [bytes(1 << 20)]).wait()"],
)
def test_exit_beside_busy_daemon_threads_is_clean(call: str) -> None:
    for _ in range(3):
        outcome = run(f"""
            import threading, time, kvstore, numpy
            spec = kvstore.BlockSpec("m", block_bytes=None)
            store = kvstore.open(spec, dram="2MiB", lease_s=3600, timeout_s=20)
            store.settle()
            store.put(["a"], [bytes(2 << 20)])
            hit = store.match_prefix(["a"]).__enter__()
            numbers = numpy.arange(2_000_000, dtype=numpy.uint32)
            def work():
                try:
                    while True:
                        {call}
                except kvstore.KvstoreError:
                    pass  # a traceback printed while the interpreter ends would end it badly
            for _ in range(3):
                threading.Thread(target=work, daemon=True).start()
            time.sleep(0.3)
        """)
        assert outcome.returncode == 0, outcome.stderr
        assert "terminate" not in outcome.stderr


@pytest.mark.parametrize("extra_mib", [20, 30, 36, 44, 50, 60])
def test_too_little_address_space_is_a_typed_error(extra_mib: int) -> None:
    outcome = run(f"""
        import resource, kvstore, numpy
        spec = kvstore.BlockSpec("m", block_bytes=None)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ({extra_mib} << 20),) * 2)
        try:
            store = kvstore.open(spec, dram="16MiB", copy_threads=2)
            store.put(["a"], [bytes(100)])
            store.put_async(["b"], [bytes(100)]).wait()
            store.close()
        except (kvstore.NotEnoughMemory, MemoryError) as error:
            print(type(error).__name__, error)
    """)
    assert outcome.returncode == 0, outcome.stderr


def test_no_descriptors_left_is_a_typed_error() -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

    outcome = run(
        """
        import os, kvstore
        held = []
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            pass
        for spare in range(6):
            for _ in range(spare):
                os.close(held.pop())
            try:
                kvstore.open(kvstore.BlockSpec("m", block_bytes=None), dram="2MiB").close()
                print("opened")
                break
            except (OSError, kvstore.KvstoreError) as error:
                print(type(error).__name__)
    """,
        limits=few,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.split()[-1] == "opened"
