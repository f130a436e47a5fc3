"""The operations of `cpu_kernels.c`: compiled where there is a C compiler, for the machine that they run on.

They replace those of `reference` and `attention` on the fast path of a CPU, and have a cache layout of their own: keys
and values in bfloat16, keys in tiles of 16 positions. Knows nothing of models.

Legend: as in `reference`.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer_kernels.attention import PackedRows

SOURCE: Final = Path(__file__).with_name("cpu_kernels.c")
COMPILERS: Final = ("cc", "gcc", "clang")
FLAGS: Final = ("-O3", "-march=native", "-fPIC", "-shared")
KEY_LANES: Final = 16
"""Positions of a key tile: a cache's number of positions is a multiple of it."""
CACHE_DTYPE: Final = torch.bfloat16
_TIMEOUT_S: Final = 60
_LONG, _INT, _FLOAT, _POINTER = ctypes.c_long, ctypes.c_int, ctypes.c_float, ctypes.c_void_p


class NotNative(Exception):
    """Why there is no compiled code here."""


@dataclass(frozen=True)
class NativePlan:
    """What the attention of one step reads, the same for all layers."""

    rows: PackedRows
    block_size: int
    most_keys: int


class NativeOps:
    """The compiled functions. Results of matrix products come, and their inputs leave, as `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Compiles at the first use in a process, in about a second. Raises `NotNative`."""
        self._code = compiled()
        self.dtype = dtype
        self._is_half = int(dtype == torch.bfloat16)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x` [T, C] float32: [T, C]."""
        num_rows, width = x.shape
        out = torch.empty(num_rows, width, dtype=self.dtype)
        self._code.rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            num_rows,
            width,
            eps,
            self._is_half,
            torch.get_num_threads(),
        )
        return out

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`x` [T, C] float32 and `delta` [T, C]: their sum in float32, and its norm."""
        num_rows, width = x.shape
        total, out = torch.empty_like(x), torch.empty(num_rows, width, dtype=self.dtype)
        self._code.add_rms_norm(
            x.data_ptr(), delta.data_ptr(), weight.data_ptr(), total.data_ptr(), out.data_ptr(), num_rows, width, eps,
            self._is_half, torch.get_num_threads(),
        )  # fmt: skip
        return total, out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2C] -> [T, C]."""
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(num_rows, width, dtype=self.dtype)
        self._code.silu_mul(gate_up.data_ptr(), out.data_ptr(), num_rows, width, self._is_half, torch.get_num_threads())
        return out

    def rotate_and_cache(
        self, heads: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, indices: Tensor
    ) -> Tensor:
        """As the reference, into the layout of this module; queries [T, H, D] in float32."""
        num_rows, num_all, dim = heads.shape
        num_kv = keys.shape[0]
        num_heads = num_all - 2 * num_kv
        queries = torch.empty(num_rows, num_heads, dim)
        self._code.rotate_and_cache(
            heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), queries.data_ptr(), keys.data_ptr(), values.data_ptr(),
            indices.data_ptr(), num_rows, num_heads, num_kv, dim, keys.stride(0), self._is_half,
            torch.get_num_threads(),
        )  # fmt: skip
        return queries

    def plan_attention(self, rows: PackedRows, *, block_size: int, group_size: int, num_kv: int) -> NativePlan:
        """Every position attends by itself: nothing is tiled."""
        return NativePlan(rows, block_size, int(rows.positions.max()) + 1)

    def paged_attention(self, queries: Tensor, keys: Tensor, values: Tensor, plan: NativePlan) -> Tensor:
        """As the reference, on the layout of this module: [T, H * D]. Raises `MemoryError`."""
        num_rows, num_heads, dim = queries.shape
        rows = plan.rows
        out = torch.empty(num_rows, num_heads * dim, dtype=self.dtype)
        has_failed = self._code.attend(
            queries.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), rows.slots.data_ptr(),
            rows.positions.data_ptr(), rows.tables.data_ptr(), num_rows, num_heads, keys.shape[0], dim,
            plan.block_size, keys.stride(0), rows.tables.stride(0), plan.most_keys, dim**-0.5, self._is_half,
            torch.get_num_threads(),
        )  # fmt: skip
        if has_failed:
            raise MemoryError(f"no memory for the scores of {plan.most_keys} keys")
        return out


@lru_cache(maxsize=1)
def compiled() -> Any:
    """The library, for this process. Raises `NotNative`."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise NotNative(f"there is no C compiler ({', '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "cpu_kernels.so"
        # Without OpenMP a step runs on one thread: better than no native code.
        for openmp in (["-fopenmp"], []):
            command = [compiler, *FLAGS, *openmp, "-o", str(target), str(SOURCE), "-lm"]
            if error := _failure_of(command):
                continue
            try:
                return _declared(ctypes.CDLL(str(target)))
            except OSError as problem:
                error = str(problem)
    raise NotNative(f"{Path(compiler).name} does not compile it: {error}")


def _failure_of(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[0]


def _declared(code: Any) -> Any:
    """`code` with the types of its arguments: ctypes would pass addresses as 32 bits."""
    code.rms_norm.argtypes = [_POINTER] * 3 + [_LONG] * 2 + [_FLOAT] + [_INT] * 2
    code.add_rms_norm.argtypes = [_POINTER] * 5 + [_LONG] * 2 + [_FLOAT] + [_INT] * 2
    code.silu_mul.argtypes = [_POINTER] * 2 + [_LONG] * 2 + [_INT] * 2
    code.rotate_and_cache.argtypes = [_POINTER] * 7 + [_LONG] * 5 + [_INT] * 2
    code.attend.argtypes = [_POINTER] * 7 + [_LONG] * 8 + [_FLOAT] + [_INT] * 2
    for name in ("rms_norm", "add_rms_norm", "silu_mul", "rotate_and_cache"):
        getattr(code, name).restype = None
    code.attend.restype = _INT
    return code
