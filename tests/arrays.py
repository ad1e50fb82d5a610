"""Arrays to describe, and objects that show an array in one way only."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from kvstore._core import Buffers

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
