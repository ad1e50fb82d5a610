"""Calls that are wrong: each gets a typed error that says why, or a defined answer. Nothing leaks.

`opened` checks after each test that nothing is held and the accounts agree.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import ANY, MIB, Bytes, block, blocks, fill, is_block, names, opened, resident
from builders import run_python as run_in_fresh_python

import kvstore
from kvstore import BlockSpec, InvalidArgument, SpecMismatch, Status

GEOMETRY: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 32}
TOKENS = list(range(48))  # three blocks of 16


# ---- options -------------------------------------------------------------------------------------

IMPOSSIBLE: dict[str, list[Any]] = {
    "lease_s": [0, -1, math.nan, math.inf, "abc", None, True, 1e30],
    "timeout_s": [-1, math.nan, math.inf, "abc", None, True],
    "view_fraction": [-1, -1e-9, 1.5, math.nan, math.inf, "abc", None, True],
    "copy_threads": [-1, math.nan, math.inf, "abc", None, 1.5, True, 100_000],
    "reserve_blocks": [-1, math.nan, math.inf, "abc", None, 1.5, True, 1 << 50],
    "dram": [
        0,
        -1,
        math.nan,
        math.inf,
        "abc",
        None,
        1.5,
        True,
        "",
        "4 parsecs",
        "9" * 400,
        1 << 60,
    ],
}


@pytest.mark.parametrize("option", IMPOSSIBLE)
def test_impossible_options_are_refused(option: str) -> None:
    for value in IMPOSSIBLE[option]:
        with pytest.raises(InvalidArgument, match=option) as raised:
            kvstore.open(ANY, **{"dram": 4 * MIB, option: value})
        assert repr(value)[:20] in str(raised.value) or "out of range" in str(raised.value)
    with pytest.raises(TypeError, match="surprise"):
        kvstore.open(ANY, surprise=1)


def test_extreme_but_possible_options_work() -> None:
    extremes: list[dict[str, Any]] = [
        {"lease_s": 0.001},
        {"timeout_s": 0},
        {"view_fraction": 0},
        {"view_fraction": 1},
        {"copy_threads": 16},
        {"dram": 1},  # one frame
        {"dram": "4 MiB"},
    ]
    for options in extremes:
        with opened(**options) as store:
            got = np.zeros((2, MIB), np.uint8)  # enough for several copying threads
            assert store.put(names(2), blocks(range(2), MIB)).ok
            assert store.get(names(2), got).ok
            assert all(is_block(got[i], i) for i in range(2))


def test_open_beyond_the_memory_there_is_is_refused() -> None:
    meminfo = Path("/proc/meminfo").read_text().split()
    too_much = 10 * (int(meminfo[meminfo.index("MemTotal:") + 1]) >> 10)
    before = resident()["RssShmem"]
    with pytest.raises(kvstore.NotEnoughMemory, match=rf"{too_much} MiB.* \d+ MiB available"):
        kvstore.open(ANY, dram=f"{too_much}MiB")
    assert issubclass(kvstore.NotEnoughMemory, MemoryError)
    assert resident()["RssShmem"] == before
    with opened() as store:
        assert store.put(["k"], [b"x"]).ok


def test_short_lock_limit_is_refused_at_open() -> None:
    code = """
import ctypes, os, resource
import kvstore
from builders import ANY, MIB
resource.setrlimit(resource.RLIMIT_MEMLOCK, (MIB, MIB))
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)   # no privilege to lock as much as one likes
try:
    kvstore.open(ANY, dram=8 * MIB, lock_memory=True)
except kvstore.NotEnoughMemory as error:
    print(error)
kvstore.open(ANY, dram=8 * MIB).close()
"""
    result = run_in_fresh_python(code)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(r"locked memory is 1 MiB.*needs 8 MiB", result.stdout)


def test_a_locked_pool_is_locked() -> None:
    def locked() -> int:
        status = Path("/proc/self/status").read_text().split()
        return int(status[status.index("VmLck:") + 1]) << 10

    before = locked()
    try:
        store = kvstore.open(ANY, dram=8 * MIB, lock_memory=True)
    except kvstore.NotEnoughMemory:
        pytest.skip("no privilege to lock 8 MiB")
    with store:
        assert store.settle()
        assert locked() - before == 8 * MIB
        assert store.put(["k"], [b"x"]).ok
    assert locked() == before


@pytest.mark.parametrize("spec", [None, "llama", {"model": "m"}, kvstore.StoreOptions()])
def test_what_is_no_spec_is_refused(spec: Any) -> None:
    with pytest.raises(InvalidArgument, match="BlockSpec"):
        kvstore.open(spec)
    with opened() as store, pytest.raises(InvalidArgument, match="BlockSpec"):
        store.attach(spec)


# ---- blocks --------------------------------------------------------------------------------------


def test_empty_block_is_refused_with_a_reason() -> None:
    empty: list[Any] = [b"", bytearray(), np.zeros(0), np.zeros((0, 8)), np.zeros((3, 0, 5)), []]
    with opened() as store:
        for nothing in empty:
            for call in (store.put, store.put_async):
                with pytest.raises(InvalidArgument, match="0 bytes: an empty block has no KV"):
                    call(["k"], [nothing])
            if not isinstance(nothing, bytes):  # those are no target at all
                with pytest.raises(InvalidArgument, match="0 bytes"):
                    store.get(["k"], [nothing])
        with pytest.raises(InvalidArgument, match="0 bytes"):
            store.put(["k", "l", "m"], np.zeros((3, 0, 5)))
        with pytest.raises(InvalidArgument, match="block_bytes=0"):
            store.writing(["k"], block_bytes=0)
        assert not store.exists(["k"]).any()
        assert store.usage().slots == 0


def test_get_into_a_buffer_of_another_size_is_refused() -> None:
    size = 64 << 10
    fixed = BlockSpec("fixed", block_bytes=size)
    with opened() as store, store.attach(fixed) as exact:
        assert store.put(["k"], [block(1, size)]).ok
        assert exact.put(["k"], [block(1, size)]).ok
        for wrong in (0, size - 1, size + 1):
            out = bytearray(b"\xab" * wrong)
            with pytest.raises(InvalidArgument, match=rf"{wrong} bytes"):
                exact.get(["k"], [out])
            assert out.count(0xAB) == wrong
        for small in (1, size - 1):
            out = bytearray(b"\xab" * small)
            for call in (store.get, lambda *given: store.get_async(*given).wait(10)):
                with pytest.raises(InvalidArgument, match=rf"{small} bytes.*{size}"):
                    call(["k"], [out])
            assert out.count(0xAB) == small
        room = bytearray(b"\xab" * (size + 1))  # any size: more room than needed is no error
        result = store.get(["k"], [room])
        assert result.ok
        assert result.nbytes.tolist() == [size]
        assert is_block(room[:size], 1)
        assert room[size] == 0xAB


def test_get_into_another_dtype_is_a_spec_mismatch() -> None:
    for dtype, other in [("float16", "uint16"), ("bfloat16", "float16"), ("int32", "float32")]:
        spec = BlockSpec("m", dtype=dtype, **GEOMETRY)
        size = spec.block_bytes
        assert size is not None
        with opened(spec) as store:
            keys = store.keys(TOKENS)
            assert store.put(keys, blocks(range(3), size)).ok  # bytes mean what the spec says
            wrong = np.full((3, size), 0xAB, np.uint8).view(other)
            for call in (store.put, store.get, store.put_async, store.get_async):
                with pytest.raises(SpecMismatch, match=rf"{other}.*{dtype}"):
                    call(keys, wrong)
            with (
                store.match_prefix(keys) as hit,
                pytest.raises(SpecMismatch, match=rf"{other}.*{dtype}"),
            ):
                hit.read(wrong)
            assert (wrong.view(np.uint8) == 0xAB).all()


def test_blocks_of_a_wrong_size_or_number_are_refused() -> None:
    spec = BlockSpec("m", dtype="float16", **GEOMETRY)
    size = spec.block_bytes
    assert size is not None
    with opened(spec) as store:
        keys = store.keys(TOKENS)
        for wrong in (size - 2, size + 2, size // 2, 2 * size):
            with pytest.raises(SpecMismatch, match=f"{wrong} bytes, expected {size}"):
                store.put(keys, [bytes(wrong)] * 3)
        for count in (0, 1, 2, 4):
            given = blocks(range(count), size) if count else np.zeros((0, size), np.uint8)
            for call in (store.put, store.get):
                with pytest.raises(InvalidArgument, match=f"{count} blocks, expected 3"):
                    call(keys, given)
        assert store.usage().blocks == 0


def test_block_larger_than_the_pool_is_refused_at_once() -> None:
    with opened() as store:
        held = fill(store)
        for size in (8 * MIB + 1, 9 * MIB, 64 * MIB):
            for call in (store.put, store.put_async):
                with pytest.raises(kvstore.BlockTooLarge, match=rf"{size} bytes.* {8 * MIB}"):
                    call(["large", "b"], [np.zeros(size, np.uint8), b"x"])
            with pytest.raises(kvstore.BlockTooLarge, match=rf"{size} bytes"):
                store.writing(["large"], block_bytes=size)
        with pytest.raises(kvstore.BlockTooLarge):
            store.writing(["large"], block_bytes=1 << 60)
        assert store.exists(held).all()
        assert store.usage().evictions == 0
        assert store.put(["most"], [block(1, 8 * MIB)]).ok


@pytest.mark.parametrize("what", [7, None, "text", object(), {"a": 1}, [1, 2], [None], [["text"]]])
def test_what_is_no_memory_is_refused(what: Any) -> None:
    with opened() as store:
        for call in (store.put, store.get):
            with pytest.raises(InvalidArgument):
                call(["k"], what)


def test_overlapping_targets_are_refused() -> None:
    arena = np.full(1000, 0xAB, np.uint8)
    with opened() as store:
        assert store.put(names(2), blocks(range(2), 100)).ok
        for targets in ([arena[:100], arena[99:199]], [arena[:100], arena[:100]]):
            with pytest.raises(InvalidArgument, match="overlap"):
                store.get(names(2), targets)
        with pytest.raises(InvalidArgument, match="overlap"):
            store.get(names(2), np.lib.stride_tricks.as_strided(arena, (2, 100), (50, 1)))
        with pytest.raises(InvalidArgument, match="read-only"):
            store.get(["b0"], [bytes(100)])
        assert (arena == 0xAB).all()
        assert store.put(["twice", "the same"], [arena[:100]] * 2).ok  # sources may


# ---- keys ----------------------------------------------------------------------------------------


def bad_keys() -> list[Any]:
    return [
        "one name",
        b"one name",
        7,
        None,
        [7],
        [None],
        [""],
        [b""],
        ["x" * 513],
        ["\ud800"],
        [["nested"]],
        np.zeros(32, np.uint8),
        np.zeros((3, 31), np.uint8),
        np.zeros((3, 33), np.uint8),
        np.zeros((1, 3, 32), np.uint8),
        np.zeros((3, 32), np.int8),
        np.zeros((3, 8), np.uint32),
    ]


@pytest.mark.parametrize("keys", bad_keys(), ids=lambda keys: repr(keys)[:20])
def test_keys_of_a_wrong_form_are_refused_by_every_call(keys: Any) -> None:
    out = np.zeros((3, 10), np.uint8)
    with opened() as store:
        calls: list[Callable[[], object]] = [
            lambda: store.put(keys, out),
            lambda: store.get(keys, out),
            lambda: store.put_async(keys, out),
            lambda: store.get_async(keys, out),
            lambda: store.match_async(keys),
            lambda: store.match_prefix(keys),
            lambda: store.writing(keys, block_bytes=10),
            *(lambda call=call: call(keys) for call in single_calls(store)),
        ]
        for call in calls:
            with pytest.raises(InvalidArgument):
                call()
        assert store.usage().slots == 0


def single_calls(store: kvstore.Store) -> list[Callable[[Any], object]]:
    calls = [store.exists, store.remove, store.touch, store.pin, store.unpin, store.prefetch]
    return [*calls, lambda keys: store.wait(keys, 0)]


def test_empty_and_repeated_batches_are_well_defined() -> None:
    with opened() as store:
        nothing: list[Any] = [[], (), np.zeros((0, 32), np.uint8), store.keys([])]
        for keys in nothing:
            for given in ([], np.zeros((0, 10), np.uint8), b""):
                put, got = store.put(keys, given), store.get(keys, given)
                assert (put.ok, len(put), put.stored, put.message) == (True, 0, 0, "")
                assert (got.ok, len(got), got.blocks, len(got.nbytes)) == (True, 0, 0, 0)
                assert store.put_async(keys, given).wait(10).ok
                assert store.get_async(keys, given).wait(10).ok
            with store.match_prefix(keys) as hit:
                assert (hit.blocks, hit.views(), hit.verify()) == (0, [], [])
                assert hit.read([]).ok
            assert [len(store.exists(keys)), store.remove(keys), store.touch(keys)] == [0] * 3
            assert [store.pin(keys), store.unpin(keys), store.prefetch(keys)] == [0] * 3
            assert store.wait(keys, 0)
        assert store.usage().slots == 0

        twice = store.put(["a", "b", "a"], [block(1, 100), block(2, 100), block(3, 100)])
        assert list(twice) == [Status.OK, Status.OK, Status.EXISTS]
        assert twice.ok
        again = store.put(["a", "b"], [block(4, 100), block(5, 200)])
        assert list(again) == [Status.EXISTS] * 2
        assert (again.ok, again.stored) == (True, 0)
        out = np.zeros((4, 100), np.uint8)
        assert store.get(["a", "b", "a", "a"], list(out)).ok
        assert [is_block(out[i], n) for i, n in enumerate([1, 2, 1, 1])] == [True] * 4
        assert store.match_prefix(["a", "a", "b"]).blocks == 3
        assert store.exists(["a", "a"]).all()
        assert store.remove(["a", "a"]) == 1
        assert store.usage().slots == 1


def test_batches_beyond_the_limit_are_refused() -> None:
    keys = np.zeros((65537, 32), np.uint8)
    with opened() as store:
        for call in (store.exists, store.match_prefix, store.remove, store.pin):
            with pytest.raises(InvalidArgument, match=r"65537.*65536"):
                call(keys)
        with pytest.raises(InvalidArgument, match=r"65537.*65536"):
            store.put(keys, np.zeros((65537, 1), np.uint8))
        assert not store.exists(keys[:65536]).any()


@pytest.mark.parametrize("skip", [-1, 4, 1.0, "1", None, True])
def test_skips_outside_the_chain_are_refused(skip: Any) -> None:
    with opened() as store:
        calls: list[Callable[[], object]] = [
            lambda: store.put(names(3), blocks(range(3), 10), skip_blocks=skip),
            lambda: store.put_async(names(3), blocks(range(3), 10), skip_blocks=skip),
            lambda: store.match_prefix(names(3), skip_blocks=skip),
            lambda: store.match_async(names(3), skip_blocks=skip),
            lambda: store.writing(names(3), skip_blocks=skip, block_bytes=10),
        ]
        for call in calls:
            with pytest.raises(InvalidArgument, match="skip_blocks"):
                call()


def test_other_arguments_of_a_wrong_kind_are_refused() -> None:
    out = [bytearray(10)]
    with opened() as store:
        assert store.put(["k"], [bytes(10)]).ok
        with store.match_prefix(["k"]) as hit:
            calls: list[Callable[[], object]] = [
                *(lambda t=t: store.get(["k"], out, timeout=t) for t in bad_timeouts()),
                *(lambda t=t: store.put(["x"], [b"x"], timeout=t) for t in bad_timeouts()),
                *(lambda t=t: store.wait(["k"], t) for t in bad_timeouts()),
                *(lambda r=r: store.match_prefix(["k"], ranks=r) for r in (0, 2, -1, 1.0, "1")),
                *(lambda t=t: store.redeem(t) for t in (b"", b"short", "x" * 16, None, 7)),
                *(lambda f=f: hit.read(out, first=f) for f in (-1, 2, 1.0, True)),
                lambda: hit.read_part(1, out),
                lambda: hit.read_layer(0, out),
                lambda: store.writing(["x"]),  # of what size?
                lambda: store.writing(["x"], block_bytes=1.5),
                lambda: store.keys([1.5]),
                lambda: store.keys([-1] * 16),
                lambda: store.keys(TOKENS, salt="text"),
                store.evicted,
            ]
            for number, call in enumerate(calls):
                with pytest.raises(InvalidArgument):
                    pytest.fail(f"call {number} gave {call()!r}")


def bad_timeouts() -> list[Any]:
    return [-1, math.nan, math.inf, "1", True]


# ---- closed stores -------------------------------------------------------------------------------


def test_closed_store_refuses_every_call() -> None:
    out: list[Bytes] = [np.full(10, 0xAB, np.uint8)]
    with opened() as other:
        store = other.attach(BlockSpec("closing", block_bytes=None))
        assert store.put(["k"], out).ok
        match, hit = store.match_prefix(["k"]), store.match_prefix(["k"]).__enter__()
        writing = store.writing(["w"], block_bytes=10)
        store.close()
        store.close()
        calls: list[Callable[[], object]] = [
            *(lambda call=call: call(["k"]) for call in single_calls(store)),
            lambda: store.put(["k"], out),
            lambda: store.get(["k"], out),
            lambda: store.put_async(["k"], out),
            lambda: store.get_async(["k"], out),
            lambda: store.match_prefix(["k"]),
            lambda: store.match_async(["k"]),
            lambda: store.writing(["k"], block_bytes=10),
            lambda: store.keys(TOKENS),
            lambda: store.attach(ANY),
            lambda: store.redeem(bytes(16)),
            *(store.clear, store.list, store.usage, store.audit, store.settle),
            *(store.drain, store.event_fd, match.__enter__),
            *(lambda: hit.read(out), hit.views, hit.verify, hit.ticket),
            *(lambda: writing.part(0, out), writing.commit),
        ]
        for number, call in enumerate(calls):
            with pytest.raises(kvstore.StoreClosed, match=r"closed|given back|given up"):
                pytest.fail(f"call {number} gave {call()!r}")
        assert "closed" in repr(store)
        assert hit.close() is False or hit.held
        writing.abort()
        assert (out[0] == 0xAB).all()
