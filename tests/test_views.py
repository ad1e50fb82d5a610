"""Views: memory of a block without a copy; read-only, bounded, leased until the last is gone."""

import ctypes
import gc
from typing import Any

import numpy as np
import pytest
from builders import ANY, MIB, assert_idle, block, blocks, fill, is_block, names, opened, resident

import kvstore
from kvstore import BlockSpec, Status


def joined(extents: list[memoryview]) -> bytes:
    return b"".join(extents)


def test_views_show_each_block_read_only() -> None:
    sizes = [1, 4096, MIB + 1, 3 * MIB]
    with opened(dram=16 * MIB, view_fraction=1) as store:
        assert store.put(names(4), [block(i, size) for i, size in enumerate(sizes)]).ok
        with store.match_prefix(names(4)) as hit:
            assert hit.lengths == sizes
            views = hit.views()
            for i, extents in enumerate(views):
                assert sum(view.nbytes for view in extents) == sizes[i]
                assert is_block(joined(extents), i)
                for view in extents:
                    assert view.readonly
                    assert (view.format, view.ndim, view.itemsize) == ("B", 1, 1)
                    with pytest.raises(TypeError):
                        view[0] = 0
                    array = np.frombuffer(view, np.uint8)
                    assert not array.flags.writeable
                    with pytest.raises(ValueError, match="WRITEABLE"):
                        array.setflags(write=True)
            assert list(hit.verify()) == [Status.OK] * 4
            assert store.usage().view_bytes == sum(sizes)
            del array, view, extents, views


def test_large_blocks_of_scattered_memory_have_several_extents() -> None:
    with opened(dram=16 * MIB, view_fraction=1) as store:
        assert store.put(names(8), blocks(range(8), 2 * MIB), chain=False).ok
        assert store.remove(names(8)[::2]) == 4
        assert store.pin(names(8)[1::2]) == 4
        assert store.put(["scattered"], [block(50, 8 * MIB)]).ok
        with store.match_prefix(["scattered"]) as hit:
            extents = hit.views()[0]
            assert len(extents) == 4
            assert is_block(joined(extents), 50)
            got = np.zeros(8 * MIB, np.uint8)
            assert hit.read([got]).ok
            assert is_block(got, 50)
            del extents
        store.unpin(names(8)[1::2])


def test_leaving_while_an_array_is_alive_raises_buffer_error() -> None:
    with opened() as store:
        assert store.put(names(3), blocks(range(3), 1000)).ok
        with (
            pytest.raises(BufferError, match="1 views are still used"),
            store.match_prefix(names(3)) as hit,
        ):
            array = np.frombuffer(hit.views()[1][0], np.uint8)
        usage = store.usage()
        assert (usage.leased_blocks, usage.view_bytes) == (3, 3000)
        assert store.remove(names(3)) == 3
        assert store.put(names(3), blocks(range(3), 1000, 1)).ok
        assert is_block(array, 1)  # its memory was not reused
        assert store.usage().slots == 6
        del array
        usage = store.usage()
        assert (usage.leased_blocks, usage.view_bytes, usage.slots) == (0, 0, 3)


@pytest.mark.parametrize("make", ["slice", "cast", "memoryview", "asarray", "frombuffer"])
def test_leaving_while_a_slice_is_alive_raises_buffer_error(make: str) -> None:
    makers: dict[str, Any] = {
        "slice": lambda view: view[10:20],
        "cast": lambda view: view.cast("b"),
        "memoryview": memoryview,
        "asarray": np.asarray,
        "frombuffer": lambda view: np.frombuffer(view, np.uint8)[3:],
    }
    with opened() as store:
        assert store.put(["k"], [block(1, 1000)]).ok
        hit = store.match_prefix(["k"]).__enter__()
        made = makers[make](hit.views()[0][0])
        with pytest.raises(BufferError):
            hit.close()
        assert store.usage().leased_blocks == 1
        assert len(made) > 0
        assert bytes(made[:5]) in block(1, 1000).tobytes()
        del made
        assert store.usage().leased_blocks == 0
        assert hit.close()  # nothing is left of it


def test_an_exception_in_the_with_is_not_replaced_by_buffer_error() -> None:
    with opened() as store:
        assert store.put(["k"], [block(1, 1000)]).ok
        arrays = []
        match = store.match_prefix(["k"])
        arrays.append(np.frombuffer(match.__enter__().views()[0][0], np.uint8))
        match.__exit__(KeyError, KeyError(), None)  # raises nothing of its own
        assert store.usage().leased_blocks == 1
        assert is_block(arrays.pop(), 1)
        assert store.usage().leased_blocks == 0


def test_views_are_useless_after_the_with() -> None:
    with opened() as store:
        assert store.put(["k"], [block(1, 1000)]).ok
        with store.match_prefix(["k"]) as hit:
            view = hit.views()[0][0]
        with pytest.raises(ValueError, match="released"):
            bytes(view)
        for call in (hit.views, hit.verify, hit.ticket, lambda: hit.read([bytearray(1000)])):
            with pytest.raises(kvstore.StoreClosed):
                call()
        assert hit.held


def test_views_beyond_their_share_are_refused_and_read_works() -> None:
    with opened(view_fraction=0.25) as store:
        held = fill(store)
        with (
            store.match_prefix(held[:3]) as three,
            pytest.raises(kvstore.ViewsRefused, match="read"),
        ):
            three.views()
        with store.match_prefix(held[:2]) as two:
            assert len(two.views()) == 2  # exactly the share
            assert store.usage().view_bytes == store.usage().view_bytes_max == 2 * MIB
            assert len(two.views()) == 2  # again costs nothing
            with store.match_prefix(held[2:3]) as one:
                with pytest.raises(kvstore.ViewsRefused, match=rf"{2 * MIB}"):
                    one.views()
                got = np.zeros(MIB, np.uint8)
                assert one.read([got]).ok
                assert is_block(got, 2)
        with store.match_prefix(held[2:3]) as one:
            assert is_block(joined(one.views()[0]), 2)
    with opened(view_fraction=0) as store:
        assert store.put(["k"], [b"x"]).ok
        with store.match_prefix(["k"]) as hit, pytest.raises(kvstore.ViewsRefused):
            hit.views()


def test_views_never_lapse() -> None:
    with opened(lease_s=0.01, view_fraction=1) as store:
        held = fill(store)
        with store.match_prefix(held[:4]) as hit:
            views = hit.views()
            for number in range(12):  # room for four at a time
                assert store.put([f"new {number}"], [block(number, MIB, 1)], timeout=5).ok
            assert all(is_block(joined(views[i]), i) for i in range(4))
            assert store.exists(held[:4]).all()
            del views
        assert hit.held


def test_views_outlive_their_store() -> None:
    before = resident()["RssShmem"]
    store = kvstore.open(ANY, dram=16 * MIB)
    assert store.put(["k"], [block(1, 1000)]).ok
    hit = store.match_prefix(["k"]).__enter__()
    array = np.frombuffer(hit.views()[0][0], np.uint8)
    store.close()
    assert is_block(array, 1)
    with pytest.raises(BufferError):
        hit.close()
    del store, hit
    gc.collect()
    assert is_block(array, 1)
    del array
    assert resident()["RssShmem"] - before < MIB


def test_a_dropped_hit_ends_with_its_last_view() -> None:
    with opened() as store:
        assert store.put(["k"], [block(1, 1000)]).ok
        view = store.match_prefix(["k"]).__enter__().views()[0][0]
        gc.collect()
        assert store.usage().leased_blocks == 1
        assert is_block(view, 1)
        del view
        gc.collect()
        assert store.usage().leased_blocks == 0


def test_views_survive_remove_and_clear() -> None:
    with (
        opened(view_fraction=1) as store,
        store.attach(BlockSpec("other", block_bytes=None)) as other,
    ):
        assert store.put(names(2), blocks(range(2), MIB)).ok
        with store.match_prefix(names(2)) as hit:
            views = hit.views()
            assert store.remove(["b0"]) == 1
            store.clear()
            assert other.put(names(6, "new"), blocks(range(6), MIB, 1), chain=False).ok
            assert list(other.put(["over"], [bytes(MIB)], timeout=0.01)) != [Status.CORRUPT]
            assert all(is_block(joined(views[i]), i) for i in range(2))
            del views
        assert other.usage().slots == other.usage().blocks
        assert_idle(other)


def test_a_corrupt_block_is_found_by_read_and_verify_and_dropped() -> None:
    with opened(view_fraction=1) as store:
        size = 3 * MIB
        for how in ("get", "verify"):
            assert store.put(names(2), blocks(range(2), size)).ok
            with store.match_prefix(names(2)) as hit:
                array = np.frombuffer(hit.views()[1][0], np.uint8)
                ctypes.memset(array.ctypes.data + MIB + 7, int(array[MIB + 7]) ^ 1, 1)
                del array
                if how == "verify":
                    assert list(hit.verify()) == [Status.OK, Status.CORRUPT]
                else:
                    got = np.full((2, size), 0xAB, np.uint8)
                    result = store.get(names(2), list(got))
                    assert list(result) == [Status.OK, Status.CORRUPT]
                    assert result.nbytes.tolist() == [size, 0]
                    assert is_block(got[0], 0)
                    assert not got[1].any()
            assert store.exists(names(2)).tolist() == [True, False]
            store.clear()
        assert store.usage().corrupt == 2
