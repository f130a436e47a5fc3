"""The table of device operations, chosen once per process by accelerator. Knows nothing of models.

Models call these functions and nothing else that computes. `kernels/README.md` lists shapes, dtypes and promises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deepinfer_kernels import reference
from deepinfer_kernels.attention import AttentionPlan, PlanAttention, paged_attention, plan_attention
from deepinfer_kernels.linear import LinearWeight, linear, pack_linear, pack_linear_plain


class UnknownAccelerator(ValueError):
    """No table exists for the accelerator, or the accelerator is not there."""


@dataclass(frozen=True)
class Ops:
    """One function per device operation. Same signatures on every accelerator."""

    accelerator: str
    arithmetic: str
    """`float32`, or in words what is faster."""
    device: torch.device
    is_batch_invariant: bool
    """A row's bits depend on its own sequence only."""
    pack_linear: Callable[[Tensor], LinearWeight]
    linear: Callable[[Tensor, LinearWeight], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    embedding: Callable[[Tensor, Tensor], Tensor]
    kv_write: Callable[[Tensor, Tensor, Tensor], None]
    plan_attention: PlanAttention
    paged_attention: Callable[[Tensor, Tensor, Tensor, AttentionPlan], Tensor]


ACCELERATORS: Final = ("cpu", "nvidia")
DTYPES: Final = {"cpu": ("float32",), "nvidia": ("float32",)}
"""Arithmetics by accelerator; the first one is what `auto` means."""


def select_ops(accelerator: str, *, batch_invariant: bool, dtype: str = "auto") -> Ops:
    """The operations for `accelerator` in the arithmetic `dtype`. Raises `UnknownAccelerator`."""
    if accelerator not in ACCELERATORS:
        raise UnknownAccelerator(f"accelerator {accelerator!r} is unknown: it is one of {', '.join(ACCELERATORS)}")
    if accelerator == "nvidia" and not torch.cuda.is_available():
        raise UnknownAccelerator(f"accelerator 'nvidia': this torch ({torch.__version__}) sees no CUDA device")
    dtypes = DTYPES[accelerator]
    if dtype not in ("auto", *dtypes):
        raise UnknownAccelerator(f"accelerator {accelerator!r} has no dtype {dtype!r}: it has {', '.join(dtypes)}")
    is_cpu = accelerator == "cpu"

    def pack(weight: Tensor) -> LinearWeight:
        return pack_linear(weight, batch_invariant=batch_invariant) if is_cpu else pack_linear_plain(weight)

    return Ops(
        accelerator=accelerator,
        arithmetic=dtypes[0] if dtype == "auto" else dtype,
        device=torch.device("cpu" if is_cpu else "cuda"),
        is_batch_invariant=batch_invariant and is_cpu,
        pack_linear=pack,
        linear=linear,
        rms_norm=reference.rms_norm,
        rotary=reference.rotary,
        silu_mul=reference.silu_mul,
        embedding=reference.embedding,
        kv_write=reference.kv_write,
        plan_attention=plan_attention,
        paged_attention=paged_attention,
    )
