"""The compiled kernels as operators of `engine.device.fused`; all others stay torch's."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.device.fused import FusedOperators

_QUERIES = 2048  # at a time, so that what a call works in does not grow with a prompt
_INT, _FLOAT, _ADDRESS = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class CpuKernels:
    """float32 tensors in memory. What is of another type is left to plain code: None."""

    def __init__(self, library: ctypes.CDLL) -> None:
        strided = (_ADDRESS, _INT, _INT)
        self._space = _function(library.attend_space, _INT, *(_INT,) * 5)
        self._attend = _function(
            library.attend, None, *strided * 3, _ADDRESS, *(_INT,) * 7, _FLOAT, _ADDRESS
        )
        self._rms_norm = _function(library.rms_norm, None, *(_ADDRESS,) * 3, _INT, _INT, _FLOAT)
        self._rotate = _function(library.rotate, None, *(_ADDRESS,) * 4, *(_INT,) * 4)
        self._gated = _function(library.gated, None, _ADDRESS, _ADDRESS, _INT, _INT)
        self._add_rows = _function(library.add_rows, None, *(_ADDRESS,) * 4, _INT, _INT)

    @property
    def operators(self) -> FusedOperators:
        return FusedOperators(
            rms_norm=self.rms_norm,
            rotate=self.rotate,
            attend=self.attend,
            gated=self.gated,
            add_rows=self.add_rows,
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float
    ) -> Tensor | None:
        if not _float32(query, key, value) or any(x.stride(2) != 1 for x in (query, key, value)):
            return None
        (n, heads, width), (m, kv_heads, value_width) = query.shape, value.shape
        out = query.new_empty(n, heads, value_width)
        for begin in range(0, n, _QUERIES):
            end = min(begin + _QUERIES, n)
            seen = m - n + end
            low = 0 if window is None else max(0, m - n + begin + 1 - window)
            part = query[begin:end], key[low:seen], value[low:seen]
            sizes = end - begin, seen - low
            space = query.new_empty(self._space(*sizes, heads // kv_heads, width, value_width))
            strided = (word for x in part for word in (x.data_ptr(), x.stride(0), x.stride(1)))
            shape = *sizes, heads, kv_heads, width, value_width, window or m
            self._attend(*strided, out[begin].data_ptr(), *shape, scale, space.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        if not _float32(x, weight):
            return None
        x, width = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        rows = x.numel() // width
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps)
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor | None:
        if not _float32(x, cos, sin):
            return None
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        out = torch.empty_like(x)
        where = (each.data_ptr() for each in (x, cos, sin, out))
        self._rotate(*where, x.shape[0], x.shape[1], cos.shape[1], interleaved)
        return out

    def gated(self, both: Tensor) -> Tensor | None:
        if not _float32(both):
            return None
        both = both.contiguous()
        rows, width = both.shape[0], both.shape[1] // 2
        out = both.new_empty(rows, width)
        self._gated(both.data_ptr(), out.data_ptr(), rows, width)
        return out

    def add_rows(self, out: Tensor, places: Tensor, weights: Tensor, x: Tensor) -> bool:
        same = _float32(out, weights, x) and places.dtype == torch.int32
        if not same or not all(t.is_contiguous() for t in (out, places, weights, x)):
            return False
        where = (each.data_ptr() for each in (out, places, weights, x))
        self._add_rows(*where, x.shape[0], x.shape[1])
        return True


def _function(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]  # ctypes' functions have no type of their own


def _float32(*tensors: Tensor) -> bool:
    return all(tensor.dtype == torch.float32 for tensor in tensors)
