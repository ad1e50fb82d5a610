"""One array, tensor or buffer: whichever way it shows its memory, its dtype and contents count."""

from typing import Any

import numpy as np
import pytest
from arrays import Array, OnlyDlpack, OnlyInterface, contents, strided_arrays
from hypothesis import given

from kvstore._core import Buffers
from kvstore.errors import InvalidArgument, SpecMismatch

# ---- dtypes ------------------------------------------------------------------------------------

DTYPES = ["float16", "float32", "float64", "int8", "int16", "uint16", "int64", "bool", "complex64"]


# E5, E7
@pytest.mark.parametrize("name", DTYPES)
def test_an_array_must_have_the_dtype_of_the_spec_or_be_bytes(name: str) -> None:
    a = np.ones((2, 8), name)
    for form in (a, OnlyInterface(a), OnlyDlpack(a)):
        assert contents(Buffers(form, 2, None, False, name)) == [a[0].tobytes()] * 2
        with pytest.raises(SpecMismatch, match=f"block 1 is {name}, the spec says bfloat16"):
            Buffers([a[0].view("uint8"), form], 2, None, False, "bfloat16")
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
    changes = [("data", b"text"), ("data", ("x", False)), ("data", (0, False)), ("shape", "no")]
    for name, value in changes:
        liar = OnlyInterface(a)
        liar.__array_interface__[name] = value
        with pytest.raises(InvalidArgument):
            Buffers(liar, 2)
    for strides in ((1 << 62, 1), (-(1 << 63), 1)):
        liar = OnlyInterface(a)
        liar.__array_interface__.update(shape=(5, 8), strides=strides)
        with pytest.raises(InvalidArgument, match="beyond any memory"):
            Buffers(liar, 5)


def test_device_memory_is_refused_with_advice() -> None:
    class OnGpu:
        __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012 - as the protocol has it

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
        for form in (view, list(view)):
            assert contents(Buffers(form, len(view), None, False, name)) == [bits(v) for v in view]
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
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
    with pytest.raises(InvalidArgument, match=r"requires grad.*detach"):
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


# ---- no memory, or not to be written ---------------------------------------------------------


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
        with pytest.raises(InvalidArgument, match=r"target.* is read-only"):
            Buffers(target, 1, 8, writable=True)
