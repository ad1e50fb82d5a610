"""A call's blocks: their forms, counts, sizes and overlap, and how long their memory is held."""

import array
import ctypes
import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest
from arrays import Array, contents, counted, piece_of, rows_of, strided_arrays
from hypothesis import given
from hypothesis import strategies as st

from kvstore._core import Buffers
from kvstore.errors import BlockTooLarge, InvalidArgument, SpecMismatch

# ---- forms -------------------------------------------------------------------------------------


@given(strided_arrays())
def test_blocks_of_an_array_are_its_logical_contents(view: Array) -> None:
    expected = [np.ascontiguousarray(row).tobytes() for row in view]
    rows = rows_of(view)
    assert contents(Buffers(view, len(view))) == expected
    assert contents(Buffers(rows, len(view))) == expected
    doubled = [[row, row] for row in rows]
    assert contents(Buffers(doubled, len(view))) == [e + e for e in expected]


@given(strided_arrays())
def test_targets_are_refused_exactly_where_bytes_repeat(view: Array) -> None:
    items = {
        sum(i * stride for i, stride in zip(index, view.strides, strict=True))
        for index in np.ndindex(view.shape)
    }
    for target in (view, rows_of(view)):
        if len(items) == view.size:
            assert Buffers(target, len(view), writable=True).num_blocks == len(view)
        else:
            with pytest.raises(InvalidArgument, match="overlap"):
                Buffers(target, len(view), writable=True)


@given(strided_arrays(), st.data())
def test_lists_mix_arrays_and_pointers(view: Array, data: st.DataObject) -> None:
    whole = np.ascontiguousarray(view)
    numbers = (np.uint64(whole.ctypes.data), np.int32(whole.nbytes))
    forms = [view, whole, memoryview(view), piece_of(whole), numbers]
    chosen = data.draw(st.lists(st.integers(0, len(forms) - 1), min_size=1, max_size=4))
    item = [forms[i] for i in chosen]
    kind = data.draw(st.sampled_from([list, tuple]))
    expected = [whole.tobytes() * len(item), whole.tobytes()]
    assert contents(Buffers([kind(item), whole], 2)) == expected


@pytest.mark.parametrize("source", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, "u1")])
def test_flat_bytes_are_cut_into_blocks(source: Any) -> None:
    flat = bytes(range(24))
    assert contents(Buffers(source(flat), 3, 8)) == [flat[:8], flat[8:16], flat[16:]]
    assert contents(Buffers(source(flat), 24)) == [bytes([i]) for i in flat]
    assert contents(Buffers(source(flat), 1)) == [flat]
    assert contents(Buffers(source(flat), 1, 24)) == [flat]


def test_flat_items_wider_than_a_byte_are_cut_by_bytes() -> None:
    flat = counted(12)
    assert contents(Buffers(flat, 8, 3)) == [flat.tobytes()[i : i + 3] for i in range(0, 24, 3)]
    back = flat[::-1]
    assert contents(Buffers(back, 3, 8)) == [row.tobytes() for row in back.reshape(3, 4).copy()]
    assert contents(Buffers(back, 1)) == [back.copy().tobytes()]
    with pytest.raises(InvalidArgument, match="items of 2 bytes that cross the borders of blocks"):
        Buffers(back, 8, 3)


def test_any_buffer_is_a_block() -> None:
    shared = mmap.mmap(-1, 16)
    ints = (ctypes.c_uint16 * 8)(*range(8))
    buffers = [bytearray(16), shared, ints, array.array("I", [1, 2, 3, 4]), memoryview(b"x" * 16)]
    assert contents(Buffers(buffers, 5, 16)) == [bytes(buffer) for buffer in buffers]
    assert Buffers(buffers[:4], 4, 16, True).num_blocks == 4


def test_zero_dimensional_arrays_are_pieces_but_not_batches() -> None:
    assert contents(Buffers([np.array(7, "uint32")], 1)) == [b"\7\0\0\0"]
    with pytest.raises(InvalidArgument, match="no axis"):
        Buffers(np.array(7), 1)


def test_an_empty_batch_has_no_blocks() -> None:
    for empty in ([], (), b"", np.zeros((0, 4096), "uint8")):
        assert Buffers(empty, 0, 4096, writable=not isinstance(empty, bytes)).num_blocks == 0
    with pytest.raises(InvalidArgument, match="has 3 blocks, expected 0"):
        Buffers(np.zeros((3, 0), "uint8"), 0, 4096)


# E11: a view is its logical contents or refused, as source and as target.
def test_views_are_never_their_raw_neighbours() -> None:
    a = counted(6, 8)
    back = memoryview(bytearray(range(8)))[::-1]
    for view in (a.T, a[:, ::2], a[1:], a[::-1, ::-3], back):
        expected = [np.ascontiguousarray(row).tobytes() for row in np.asarray(view)]
        for writable in (False, True):
            assert contents(Buffers(view, len(view), None, writable)) == expected
    assert back.readonly is False


def test_writes_reach_a_strided_target() -> None:
    a = np.zeros((4, 6), "uint8")
    held = Buffers(a[:, ::2], 4, 3, writable=True)
    a[2, 4] = 9
    assert held.gather(2) == b"\0\0\x09"


# ---- holding -----------------------------------------------------------------------------------


def test_memory_lives_until_release() -> None:
    class Owned(np.ndarray[Any, Any]):
        pass

    owner = np.zeros((2, 8), "uint8").view(Owned)
    gone = weakref.ref(owner)
    held = Buffers([owner[0], owner[1]], 2)
    del owner
    gc.collect()
    assert gone() is not None
    held.release()
    gc.collect()
    assert gone() is None
    assert held.num_blocks == 0
    held.release()
    with pytest.raises(IndexError):
        held.gather(0)


def test_release_from_within_release_does_no_harm() -> None:
    gone = []

    class Releases(np.ndarray[Any, Any]):
        def __del__(self) -> None:
            gone.append(self[0])
            held.release()

    blocks = [np.full(8, i, "uint8").view(Releases) for i in range(4)]
    held = Buffers(blocks, 4)
    del blocks
    held.release()
    assert sorted(gone) == [0, 1, 2, 3]


def test_held_memory_keeps_its_size() -> None:
    grown = bytearray(16)
    resized = np.zeros(16, "uint8")
    held = Buffers([grown, resized], 2)
    with pytest.raises(BufferError):
        grown.extend(b"more")
    with pytest.raises(ValueError, match="resize"):
        resized.resize(32)
    held.release()
    grown.extend(b"more")


def test_a_refused_batch_holds_nothing() -> None:
    first = bytearray(16)
    with pytest.raises(InvalidArgument):
        Buffers([first, "text"], 2)
    first.extend(b"more")


def test_a_list_changed_by_its_own_item_does_no_harm() -> None:
    blocks: list[Any] = [bytearray(2) for _ in range(8)]

    class Clears:
        memory = np.zeros(2, "uint8")

        @property
        def __array_interface__(self) -> dict[str, Any]:
            blocks.clear()
            return dict(self.memory.__array_interface__)

    blocks[0] = Clears()
    assert contents(Buffers(blocks, 8)) == [bytes(2)] * 8


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [np.zeros((3, 8), "uint8"), [bytes(8)] * 3])
def test_wrong_counts_name_both(blocks: Any) -> None:
    with pytest.raises(InvalidArgument, match="has 3 blocks, expected 4"):
        Buffers(blocks, 4)
    with pytest.raises(InvalidArgument, match="has 3 blocks, expected 1"):
        Buffers(blocks, 1, 24)


def test_wrong_sizes_name_block_size_and_expected() -> None:
    with pytest.raises(SpecMismatch, match="source block 1 has 7 bytes, expected 8"):
        Buffers([bytes(8), bytes(7)], 2, 8)
    with pytest.raises(SpecMismatch, match="target block 1 has 9 bytes, expected 8"):
        Buffers([bytearray(8), [bytearray(8), bytearray(1)]], 2, 8, True)
    with pytest.raises(SpecMismatch, match="block 0 has 9 bytes, expected 8"):
        Buffers(np.zeros((2, 9), "uint8"), 2, 8)
    with pytest.raises(SpecMismatch, match="has 17 bytes, expected 2 blocks of 8"):
        Buffers(bytes(17), 2, 8)
    with pytest.raises(InvalidArgument, match="has 17 blocks, expected 2"):
        Buffers(bytes(17), 2)


@pytest.mark.parametrize("block_bytes", [None, 8])
@pytest.mark.parametrize(
    "blocks", [[bytes(8), b""], [bytes(8), []], [bytes(8), [b"", np.zeros((3, 0))]]]
)
def test_empty_blocks_are_refused_with_the_reason(blocks: Any, block_bytes: int | None) -> None:
    with pytest.raises(InvalidArgument, match="block 1 has 0 bytes: an empty block has no KV"):
        Buffers(blocks, 2, block_bytes)


def test_empty_blocks_of_an_array_are_refused() -> None:
    for blocks, n in ((np.zeros((2, 0)), 2), (b"", 1)):
        with pytest.raises(InvalidArgument, match="block 0 has 0 bytes: an empty block has no KV"):
            Buffers(blocks, n)


def test_empty_pieces_count_nothing() -> None:
    one = bytearray(b"x")
    address = ctypes.addressof(ctypes.c_char.from_buffer(one))
    assert contents(Buffers([[b"", one, (address, 0), np.zeros((2, 0))]], 1)) == [b"x"]


@pytest.mark.parametrize(
    ("piece", "why"),
    [
        ((0, 8), "no memory"),
        ((0, 0), "no memory"),
        ((4096, -1), "negative"),
        ((-4096, 8), "negative"),
        ((1 << 64, 8), "64 bits"),
        ((4096, 1 << 70), "64 bits"),
        ((1 << 63, 1 << 63), "no memory"),
        ((np.int64(4096), np.int64(-1)), "negative"),
    ],
)
def test_pieces_that_cannot_be_memory_are_refused(piece: tuple[int, int], why: str) -> None:
    with pytest.raises(InvalidArgument, match=f"source block 0 is .*{why}"):
        Buffers([piece], 1)
    with pytest.raises(InvalidArgument, match=f"source block 0, piece 1, is .*{why}"):
        Buffers([[b"x", piece]], 1)


def test_blocks_beyond_the_limit_are_refused() -> None:
    for item in ((4096, (1 << 40) + 1), [(1 << 20, 1 << 40), (4096, 1)]):
        with pytest.raises(BlockTooLarge, match="beyond 1099511627776 bytes"):
            Buffers([item], 1)
    huge = np.broadcast_to(np.zeros(1, "uint8"), (1, 1 << 41))
    with pytest.raises(BlockTooLarge, match="has 2199023255552 bytes, the most is 1099511627776"):
        Buffers(huge, 1)
    assert Buffers([(1 << 20, 1 << 40)], 1, 1 << 40).block_bytes(0) == 1 << 40


def test_overlapping_targets_are_refused_and_sources_are_not() -> None:
    a = counted(4, 8, dtype="uint8")
    windows = np.lib.stride_tricks.sliding_window_view(a.reshape(-1), 8, writeable=True)
    overlapping: list[tuple[Any, int]] = [
        ([a[0], a[0]], 2),
        ([a[:2], a[1:3]], 2),
        ([[a[0, :5], a[0, 4:]]], 1),
        ([a[:, ::2], a[:, 1::2], a[3, 7:]], 3),
        ([piece_of(a[0]), memoryview(a)[:1]], 2),
        (windows, len(windows)),
    ]
    for blocks, n in overlapping:
        assert Buffers(blocks, n).num_blocks == n
        with pytest.raises(InvalidArgument, match="target blocks overlap"):
            Buffers(blocks, n, writable=True)
    assert Buffers([a[:, ::2], a[:, 1::2]], 2, writable=True).num_blocks == 2
    assert Buffers(a.reshape(4, 2, 4).transpose(1, 2, 0), 2, writable=True).num_blocks == 2


def test_overlap_between_two_batches_is_exact() -> None:
    a = np.zeros((4, 8), "uint8")
    left, right = Buffers(a[:, ::2], 4), Buffers(a[:, 1::2], 4)
    assert not left.overlaps(right)
    assert left.overlaps(left)
    assert right.overlaps(Buffers([a[3, 7:]], 1))
    assert not left.overlaps(Buffers([a[3, 7:]], 1))
