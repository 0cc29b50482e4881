"""Calls the library of compiled loops (``kernel_library.py``) on torch's tensors.

It takes threads from the OpenMP runtime that torch has loaded, and no more of them than torch uses. Without a library there are
no kernels: ``load_kernels`` says why, and the engine computes with torch.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from llamarl.engine.kernel_library import KernelsUnavailable, build_library, executable, suits

__all__ = ["Kernels", "load_kernels"]

_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "add_norm": (_POINTER, _POINTER, _POINTER, _FLOAT, _POINTER, _SIZE, _SIZE, _INT),
    "rotate_and_store": (
        *(_POINTER,) * 3, _SIZE, *(_POINTER,) * 2, _FLOAT, *(_POINTER,) * 3, *(_SIZE,) * 4, _INT,
    ),
    "decode_attention": (*(_POINTER,) * 7, *(_SIZE,) * 6, _FLOAT, _INT),
    "gated_silu": (_POINTER, _POINTER, _SIZE, _SIZE, _INT),
    "quantize_rows": (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _INT),
    "scale_rows": (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _INT),
}  # fmt: skip


_FLOAT32_ONLY = ("quantize_rows", "scale_rows")


class Kernels:
    """The compiled loops on CPU tensors of one type; all are contiguous, and nobody checks again.

    Args:
        dtype: float32 or bfloat16: of what products read and write, of norms' weights and cache. int8 products read and write float32.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        for name, arguments in _SIGNATURES.items():
            kind = torch.float32 if name in _FLOAT32_ONLY else dtype
            function = getattr(library, f"{name}_{str(kind).removeprefix('torch.')}")
            function.argtypes, function.restype = arguments, None
            setattr(self, f"_{name}", function)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """``x += delta``; returns the RMS norm of ``x``, [T, E], in this ``dtype``; ``x`` is float32."""
        out = torch.empty_like(x, dtype=self.dtype)
        T, E = x.shape
        self._add_norm(  # type: ignore[attr-defined]
            x.data_ptr(), _pointer(delta), weight.data_ptr(), eps, out.data_ptr(), T, E, torch.get_num_threads()
        )
        return out

    def rotate_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Head norms (if any) and rotary embedding of q and k in place, k and v into the cache.

        Args:
            qkv: [T, (H + 2 KV) * D].
            cos, sin: [T, R] float32; the first R features of a head are rotated.
            slots: [T].
            keys, values: [num_blocks, block_size, KV, D].
        """
        KV, D = keys.shape[2:]
        heads = qkv.shape[1] // D - 2 * KV
        q_norm, k_norm = norms or (None, None)
        self._rotate_and_store(  # type: ignore[attr-defined]
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[-1], _pointer(q_norm), _pointer(k_norm), eps,
            slots.data_ptr(), keys.data_ptr(), values.data_ptr(), len(qkv), heads, KV, D, torch.get_num_threads(),
        )  # fmt: skip

    def decode_attention(
        self,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        blocks: Tensor,
        offsets: Tensor,
        lengths: Tensor,
        window: int | None,
        scale: float,
        out: Tensor,
    ) -> None:
        """The first N rows of ``qkv``, one query a sequence, into the first N rows of ``out``, [T, H * D].

        Args:
            blocks: Block tables of the sequences, one after another.
            offsets: [N] where each begins.
            lengths: [N] cached tokens, the new one included.
        """
        block, KV, D = keys.shape[1:]
        self._decode_attention(  # type: ignore[attr-defined]
            qkv.data_ptr(), keys.data_ptr(), values.data_ptr(), blocks.data_ptr(), offsets.data_ptr(), lengths.data_ptr(),
            out.data_ptr(), len(lengths), qkv.shape[1] // D - 2 * KV, KV, D, block, window or 0, scale,
            torch.get_num_threads(),
        )  # fmt: skip

    def gated_silu(self, rows: Tensor) -> Tensor:
        """silu(gate) * up, [T, I], of rows [gate, up], [T, 2 I]."""
        T, I = len(rows), rows.shape[1] // 2  # noqa: E741
        out = rows.new_empty(T, I)
        self._gated_silu(rows.data_ptr(), out.data_ptr(), T, I, torch.get_num_threads())  # type: ignore[attr-defined]
        return out

    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, K] float32 as uint8 around 128, and the scale of each row; of a row that is not finite the scale is NaN."""
        T, K = x.shape
        out, scales = torch.empty(T, K, dtype=torch.uint8), torch.empty(T)
        self._quantize_rows(  # type: ignore[attr-defined]
            x.data_ptr(), out.data_ptr(), scales.data_ptr(), T, K, torch.get_num_threads()
        )
        return out, scales

    def scale_rows(self, x: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """``x`` [T, N] float32 times each row's scale plus the bias, in place."""
        T, N = x.shape
        self._scale_rows(  # type: ignore[attr-defined]
            x.data_ptr(), scales.data_ptr(), _pointer(bias), T, N, torch.get_num_threads()
        )
        return x


def load_kernels(dtype: torch.dtype = torch.float32, library: str = "") -> Kernels:
    """The compiled kernels for float32 or bfloat16.

    Args:
        library: File of a run that has one; empty: that of this machine, built if it is not there.

    Raises:
        KernelsUnavailable: No compiler, or it failed; or the library is damaged or of another kind of processor.
    """
    return Kernels(_load_library(library or str(build_library())), dtype)


@cache
def _load_library(path: str) -> ctypes.CDLL:
    if not suits(Path(path)):
        raise KernelsUnavailable(f"{path} was built for another kind of processor: run on processors of one kind")
    try:
        return ctypes.CDLL(str(executable(Path(path))))
    except OSError as error:
        raise KernelsUnavailable(f"the compiled library does not load: {error}") from error


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
