"""Python's objects as block memories: what is described is what numpy says the contents are."""

import array
import ctypes
import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from kvstore._core import Buffers
from kvstore.errors import BlockTooLarge, InvalidArgument, SpecMismatch

Array = np.ndarray[Any, Any]


def counted(*shape: int, dtype: str = "uint16") -> Array:
    """Items 0, 1, 2, ..., so that neighbours differ."""
    return np.arange(np.prod(shape), dtype=np.int64).astype(dtype).reshape(shape)


def contents(buffers: Buffers) -> list[bytes]:
    return [buffers.gather(i) for i in range(buffers.num_blocks)]


def rows_of(a: Array) -> list[Array]:
    return [a[i : i + 1] for i in range(len(a))]  # a[i] of one dimension would be a number


def piece_of(item: Array) -> tuple[int, int]:
    return item.ctypes.data, item.nbytes


class OnlyInterface:
    """Shows an array by `__array_interface__` alone."""

    def __init__(self, of: Array) -> None:
        self.of = of
        self.__array_interface__ = dict(of.__array_interface__)


class OnlyDlpack:
    """Shows an array or tensor by DLPack alone."""

    def __init__(self, of: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.of = of
        self.device = device

    def __dlpack__(self) -> object:
        return self.of.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


# ---- forms -------------------------------------------------------------------------------------


@st.composite
def strided_arrays(draw: st.DrawFn) -> Array:
    """Views by slicing, stepping back and transposing; in some, one array repeats."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    view = counted(*shape, dtype=draw(st.sampled_from(["uint8", "float16", "int32", "complex64"])))
    cuts = []
    for length in shape:
        start = draw(st.integers(0, length - 1))
        cuts.append(slice(start, None, draw(st.sampled_from([1, 1, 2, 3, -1, -2]))))
    view = view[tuple(cuts)].transpose(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        copies = draw(st.integers(1, 3))
        view = as_strided(view, (copies, *view.shape), (0, *view.strides))
    return view


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
    assert contents(Buffers([kind(item), whole], 2)) == [whole.tobytes() * len(item), whole.tobytes()]


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


# ---- dtypes ------------------------------------------------------------------------------------

DTYPES = ["float16", "float32", "float64", "int8", "int16", "uint16", "int64", "bool", "complex64"]


# E5, E7
@pytest.mark.parametrize("name", DTYPES)
def test_an_array_must_have_the_dtype_of_the_spec_or_be_bytes(name: str) -> None:
    a = np.ones((2, 8), name)
    for form in (a, OnlyInterface(a), OnlyDlpack(a)):
        assert contents(Buffers(form, 2, None, False, name)) == [a[0].tobytes()] * 2
        with pytest.raises(SpecMismatch, match=f"block 1 is {name}, the spec says bfloat16"):
            Buffers([a[0].view("uint8"), next(iter([form]))], 2, None, False, "bfloat16")
        assert Buffers(form, 2).num_blocks == 2
    if name != "int8":  # as a buffer, signed chars are bytes
        with pytest.raises(SpecMismatch, match=f"is {name}, the spec says bfloat16"):
            Buffers(memoryview(a), 2, None, True, "bfloat16")
    assert Buffers(a.view("uint8"), 2, None, True, name).num_blocks == 2
    assert Buffers(memoryview(a), 2, None, True, name).num_blocks == 2
    assert Buffers(a.tobytes(), 2, a.nbytes // 2, False, name).num_blocks == 2


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_dtypes_beyond_the_buffer_protocol_are_known(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    a = np.arange(16).astype(getattr(ml_dtypes, name)).reshape(2, 8)
    assert contents(Buffers(a, 2, None, True, name)) == [row.tobytes() for row in a]
    assert contents(Buffers(a[:, ::-1], 2)) == [row[::-1].tobytes() for row in a]
    with pytest.raises(SpecMismatch, match=f"is {name}, the spec says float16"):
        Buffers(a, 2, None, True, "float16")


def test_other_byte_orders_and_records_are_other_dtypes() -> None:
    for a in (np.zeros((2, 4), ">f2"), memoryview(np.zeros((2, 4), ">f2"))):
        with pytest.raises(SpecMismatch, match="is byte-swapped float16, the spec says float16"):
            Buffers(a, 2, None, False, "float16")
        assert Buffers(a, 2).num_blocks == 2
    record = np.zeros((2, 4), [("k", "f2"), ("v", "f2")])
    for a in (record, memoryview(record)):
        with pytest.raises(SpecMismatch):
            Buffers(a, 2, None, False, "float16")
        assert Buffers(a, 2).num_blocks == 2
    assert Buffers(np.zeros((2, 4), "V2"), 2, None, False, "float16").num_blocks == 2


def test_python_objects_are_not_bytes() -> None:
    objects = np.array([[None], [None]])
    for a in (objects, memoryview(objects), np.zeros(2, [("O", "u1"), ("name", "O")])):
        with pytest.raises(InvalidArgument, match="holds Python objects"):
            Buffers(a, 2)
    named = np.zeros(2, [("O", "u1")])
    assert Buffers(memoryview(named), 2).num_blocks == 2


# ---- other descriptions ------------------------------------------------------------------------


@given(strided_arrays())
def test_interface_and_dlpack_keep_strides(view: Array) -> None:
    expected = [np.ascontiguousarray(row).tobytes() for row in view]
    assert contents(Buffers(OnlyInterface(view), len(view))) == expected
    assert contents(Buffers(OnlyDlpack(view), len(view))) == expected


def test_interface_arrays_can_be_targets_and_dlpack_ones_cannot() -> None:
    a = np.zeros((2, 8), "uint8")
    assert Buffers(OnlyInterface(a), 2, writable=True).num_blocks == 2
    with pytest.raises(InvalidArgument, match="DLPack"):
        Buffers(OnlyDlpack(a), 2, writable=True)
    a.flags.writeable = False
    with pytest.raises(InvalidArgument, match="read-only"):
        Buffers(OnlyInterface(a), 2, writable=True)


def test_descriptions_that_cannot_be_true_are_refused() -> None:
    a = np.zeros((2, 8), "uint8")
    for change in ({"data": b"text"}, {"data": ("x", False)}, {"shape": "no"}, {"data": (0, False)}):
        liar = OnlyInterface(a)
        liar.__array_interface__.update(change)
        with pytest.raises(InvalidArgument):
            Buffers(liar, 2)
    for strides in ((1 << 62, 1), (-(1 << 63), 1)):
        liar = OnlyInterface(a)
        liar.__array_interface__.update(shape=(5, 8), strides=strides)
        with pytest.raises(InvalidArgument, match="beyond any memory"):
            Buffers(liar, 5)


def test_device_memory_is_refused_with_advice() -> None:
    class OnGpu:
        __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012

    for gpu in (OnGpu(), OnlyDlpack(np.zeros((1, 8), "uint8"), device=(2, 0))):
        for blocks in (gpu, [gpu]):
            with pytest.raises(InvalidArgument, match="memory; copy it to the CPU first"):
                Buffers(blocks, 1)


def test_exceptions_of_an_object_are_named() -> None:
    class Broken:
        @property
        def __array_interface__(self) -> dict[str, Any]:
            raise RuntimeError("out of order")

    class Interrupted:
        @property
        def __array_interface__(self) -> dict[str, Any]:
            raise KeyboardInterrupt

    with pytest.raises(InvalidArgument, match="out of order"):
        Buffers([Broken()], 1)
    with pytest.raises(KeyboardInterrupt):
        Buffers([Interrupted()], 1)
    closed = memoryview(b"abc")
    closed.release()
    with pytest.raises(InvalidArgument, match="released"):
        Buffers([closed], 1)


# ---- torch -------------------------------------------------------------------------------------


def bits(tensor: Any) -> bytes:
    torch = pytest.importorskip("torch")
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize(
    "name",
    ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool",
     "complex64"],
)  # fmt: skip
def test_tensors_are_their_bytes_and_their_dtype_counts(name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    t = torch.arange(48).to(dtype).reshape(4, 12)
    for view in (t, t[1:], t[:, ::3], t.t(), t[:, 2:7], t.expand(2, 4, 12)):
        assert contents(Buffers(view, len(view), None, False, name)) == [bits(v) for v in view]
        assert contents(Buffers(list(view), len(view), None, False, name)) == [bits(v) for v in view]
    other = "float16" if name != "float16" else "bfloat16"
    if name != "uint8":
        with pytest.raises(SpecMismatch, match=f"is {name}, the spec says {other}"):
            Buffers([t], 1, None, True, other)
    assert Buffers([t.view(torch.uint8)], 1, None, True, other).num_blocks == 1


def test_mixed_dtypes_in_a_batch_are_found() -> None:
    torch = pytest.importorskip("torch")
    good, bad = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.float16)
    assert Buffers([good, good], 2, 16, False, "bfloat16").num_blocks == 2
    with pytest.raises(SpecMismatch, match="block 2 is float16, the spec says bfloat16"):
        Buffers([good, good, bad], 3, 16, False, "bfloat16")


def test_tensors_whose_memory_is_not_their_contents_are_refused() -> None:
    torch = pytest.importorskip("torch")
    complexes = torch.zeros(2, 4, dtype=torch.complex64)
    refused = {
        "device meta": torch.zeros(2, 4, device="meta"),
        "torch.sparse_coo": torch.eye(2).to_sparse(),
        "conjugate": complexes.conj(),
        "negative": complexes.conj().imag,
        "describe": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    }
    for why, tensor in refused.items():
        for writable in (False, True):
            with pytest.raises(InvalidArgument, match=why):
                Buffers(tensor, 2, None, writable)


def test_tensors_as_targets() -> None:
    torch = pytest.importorskip("torch")
    t = torch.zeros(4, 8, dtype=torch.bfloat16)
    for view in (t, t.t(), t[:, ::2], t[1:]):
        assert Buffers(view, len(view), writable=True).num_blocks == len(view)
    with pytest.raises(InvalidArgument, match="overlap"):
        Buffers(t.expand(2, 4, 8), 2, writable=True)
    parameter = torch.nn.Parameter(torch.zeros(4, 8))
    assert Buffers(parameter, 4).num_blocks == 4
    with pytest.raises(InvalidArgument, match="requires grad.*detach"):
        Buffers(parameter, 4, writable=True)
    assert Buffers(parameter.detach(), 4, writable=True).num_blocks == 4
    freed = torch.zeros(4, 8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(InvalidArgument, match="its address is 0"):
        Buffers(freed, 4)


def test_tensors_shown_by_dlpack() -> None:
    torch = pytest.importorskip("torch")
    t = torch.arange(16).to(torch.bfloat16).reshape(2, 8).t()
    assert contents(Buffers(OnlyDlpack(t), 8, 4, False, "bfloat16")) == [bits(v) for v in t]
    with pytest.raises(SpecMismatch, match="is bfloat16, the spec says float16"):
        Buffers(OnlyDlpack(t), 8, 4, False, "float16")


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


@pytest.mark.parametrize(
    ("item", "type_name"),
    [
        ("text", "str"), (None, "NoneType"), (5, "int"), (True, "bool"), ([4096, 8], "int"),
        ((4096, 8.0), "int"), ((True, 8), "bool"), ((4096, 8, 1), "int"), ([[b"x"]], "list"),
        (np.int64(4096), "numpy.int64"), (np.float32(1), "numpy.float32"), ({1: b"x"}, "dict"),
    ],
)  # fmt: skip
def test_what_is_no_memory_is_refused_by_type(item: Any, type_name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"of type {type_name} is no array"):
        Buffers([item], 1)


def test_batches_of_a_wrong_type_are_refused() -> None:
    for blocks, type_name in ((iter([b"x"]), "list_iterator"), (None, "NoneType"), ("x", "str")):
        with pytest.raises(InvalidArgument, match=f"source of type {type_name} is no array"):
            Buffers(blocks, 1)


def test_read_only_targets_are_refused() -> None:
    frozen = np.zeros((1, 8), "uint8")
    frozen.flags.writeable = False
    for target in (frozen, [frozen], bytes(8), [[bytes(8)]], memoryview(bytes(8))):
        assert Buffers(target, 1, 8).num_blocks == 1
        with pytest.raises(InvalidArgument, match="target.* is read-only"):
            Buffers(target, 1, 8, writable=True)


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
