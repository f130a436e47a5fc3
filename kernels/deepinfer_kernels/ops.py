"""The table of device operations, chosen once per process by accelerator. Knows nothing of models.

Models call these functions and nothing else that computes. `kernels/README.md` lists shapes, dtypes and promises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from deepinfer_kernels import attention, half, reference
from deepinfer_kernels.attention import Ints, PackedRows
from deepinfer_kernels.draws import Draw, Verify
from deepinfer_kernels.expert_tiles import ExpertTiles
from deepinfer_kernels.linear import TILE_ROWS, LinearWeight, linear, pack_linear
from deepinfer_kernels.native import CACHE_DTYPE, NativeOps, NotNative
from deepinfer_kernels.row_formats import fake_quantize_activation


class UnknownAccelerator(ValueError):
    """No table exists for the accelerator, or the accelerator is not there."""


class PlanAttention(Protocol):
    def __call__(self, rows: PackedRows, *, block_size: int, group_size: int, num_kv: int) -> Any: ...


class TurnPairs(Protocol):
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor: ...


class ExpertLinear(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, tiles: ExpertTiles) -> Tensor: ...


@dataclass(frozen=True)
class Ops:
    """One function per device operation. Same signatures on every accelerator."""

    accelerator: str
    arithmetic: str
    """`float32`, or in words what is faster."""
    device: torch.device
    dtype: torch.dtype
    """Of what the layers add up: the embedding and the sums behind it."""
    cache_dtype: torch.dtype
    """Of cached keys and values; how they lie there is between `rotate_and_cache` and `paged_attention`."""
    is_batch_invariant: bool
    """A row's bits depend on its own sequence only."""
    row_multiple: int
    """Steps whose number of positions is a multiple of it need no padding inside."""
    pack_linear: Callable[[Tensor], LinearWeight]
    pack_project: Callable[[Tensor], LinearWeight]
    """For `project`."""
    pack_exact: Callable[[Tensor], LinearWeight]
    """For `linear` on float32 rows: in float32 whatever the arithmetic is, results too."""
    linear: Callable[[Tensor, LinearWeight], Tensor]
    project: Callable[[Tensor, LinearWeight], Tensor]
    """A `linear` whose result is float32: logits."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotate_and_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    embedding: Callable[[Tensor, Tensor], Tensor]
    exact_norm: Callable[[Tensor, Tensor, float], Tensor]
    """`rms_norm` of float32 [..., C], in float32 whatever the arithmetic is."""
    sigmoid: Callable[[Tensor], Tensor]
    round_activation: Callable[[Tensor, int], Tensor]
    """What FP8 leaves of float32 [..., C], with one scale for each group of so many."""
    turn_pairs: TurnPairs
    stream_mixes: Callable[[Tensor, Tensor, Tensor, Tensor, int, float, float], tuple[Tensor, Tensor, Tensor]]
    expand_streams: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    expert_linear: ExpertLinear | None
    """Products of many rows with a weight each. `None`: nothing is gained over one expert after the other."""
    draw: Draw | None
    verify: Verify | None
    """Tokens of many rows in one launch. `None`: nothing is gained over a few operations on some rows after others."""
    plan_attention: PlanAttention
    """The plan is opaque: it goes to `paged_attention` of the same table."""
    paged_attention: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    is_flat: Callable[[Ints], bool]
    """What is launched for rows of these sizes depends on the padded size of the step alone: a graph can hold it."""
    typical_steps: Callable[[int], list[Ints]]
    """Sizes of rows, for that many kv heads, whose steps launch every variant that is compiled at its first use."""


ACCELERATORS: Final = ("cpu", "nvidia")
DTYPES: Final = {"cpu": ("float32", "fast"), "nvidia": ("bfloat16", "float32")}
"""Arithmetics by accelerator; the first one is what `auto` means."""


def select_ops(accelerator: str, *, batch_invariant: bool, dtype: str = "auto", rank: int = 0) -> Ops:
    """The operations for `accelerator` in the arithmetic `dtype`, on its device `rank`. Raises `UnknownAccelerator`."""
    if accelerator not in ACCELERATORS:
        raise UnknownAccelerator(f"accelerator {accelerator!r} is unknown: it is one of {', '.join(ACCELERATORS)}")
    dtypes = DTYPES[accelerator]
    if dtype not in ("auto", *dtypes):
        raise UnknownAccelerator(f"accelerator {accelerator!r} has no dtype {dtype!r}: it has {', '.join(dtypes)}")
    arithmetic = dtypes[0] if dtype == "auto" else dtype
    if accelerator == "nvidia":
        return _nvidia_ops(arithmetic, rank)
    exact = _cpu_ops(batch_invariant)
    return exact if arithmetic == "float32" else _fast_ops(exact)


def _cpu_ops(batch_invariant: bool) -> Ops:
    return Ops(
        accelerator="cpu",
        arithmetic="float32",
        device=torch.device("cpu"),
        dtype=torch.float32,
        cache_dtype=torch.float32,
        is_batch_invariant=batch_invariant,
        row_multiple=TILE_ROWS,
        pack_linear=partial(pack_linear, batch_invariant=batch_invariant),
        pack_project=partial(pack_linear, batch_invariant=batch_invariant),
        pack_exact=partial(pack_linear, batch_invariant=batch_invariant),
        linear=linear,
        project=linear,
        rms_norm=reference.rms_norm,
        add_rms_norm=reference.add_rms_norm,
        rotate_and_cache=reference.rotate_and_cache,
        silu_mul=reference.silu_mul,
        embedding=reference.embedding,
        exact_norm=reference.rms_norm,
        sigmoid=reference.sigmoid,
        round_activation=fake_quantize_activation,
        turn_pairs=reference.turn_pairs,
        stream_mixes=reference.stream_mixes,
        expand_streams=reference.expand_streams,
        expert_linear=None,
        draw=None,
        verify=None,
        plan_attention=attention.plan_attention,
        paged_attention=attention.paged_attention,
        is_flat=lambda counts: False,
        typical_steps=lambda num_kv: [],
    )


def _fast_ops(exact: Ops) -> Ops:
    """`exact` with weights of half the width, and compiled code between the products where there is a C compiler.

    Logits are never rounded: they come from fp16 weights.
    """
    reason = half.missing_for_half()
    if reason:
        return replace(exact, arithmetic=f"float32, since {reason}")
    has_bf16 = half.has_bf16_products()
    products = "bf16 products, fp16 head" if has_bf16 else "fp16 weights"
    try:
        native, lacking = NativeOps(torch.bfloat16 if has_bf16 else torch.float32), ""
    except NotNative as missing:
        native, lacking = None, f"; not native: {missing}"
    pack = partial(half.pack_bf16, keeps_bf16=native is not None) if has_bf16 else half.pack_fp16
    fast = replace(
        exact,
        arithmetic=f"fast ({products}{lacking})",
        row_multiple=1,
        pack_linear=partial(pack, batch_invariant=exact.is_batch_invariant),
        pack_project=partial(half.pack_fp16, batch_invariant=exact.is_batch_invariant),
    )
    if native is None:
        return fast
    return replace(
        fast,
        arithmetic=f"fast ({products}, native)",
        cache_dtype=CACHE_DTYPE,
        project=_project_from_half,
        rms_norm=native.rms_norm,
        add_rms_norm=native.add_rms_norm,
        rotate_and_cache=native.rotate_and_cache,
        silu_mul=native.silu_mul,
        plan_attention=native.plan_attention,
        paged_attention=native.paged_attention,
    )


def _project_from_half(x: Tensor, weight: LinearWeight) -> Tensor:
    return linear(x.float(), weight)


def _nvidia_ops(arithmetic: str, rank: int) -> Ops:
    if not torch.cuda.is_available():
        raise UnknownAccelerator(f"accelerator 'nvidia': this torch ({torch.__version__}) sees no CUDA device")
    if rank >= torch.cuda.device_count():
        raise UnknownAccelerator(f"accelerator 'nvidia': rank {rank}, but {torch.cuda.device_count()} devices are seen")
    try:
        from deepinfer_kernels import nvidia
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UnknownAccelerator("accelerator 'nvidia' needs triton, which comes with torch's CUDA builds") from None
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    # Sums of split products stay in float32. Of the whole process, which is a worker's own.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    dtype = torch.bfloat16 if arithmetic == "bfloat16" else torch.float32
    return Ops(
        accelerator="nvidia",
        arithmetic=arithmetic,
        device=device,
        dtype=dtype,
        cache_dtype=dtype,
        is_batch_invariant=False,
        row_multiple=TILE_ROWS,
        pack_linear=partial(nvidia.pack_linear, dtype=dtype),
        pack_project=partial(nvidia.pack_linear, dtype=dtype),
        pack_exact=partial(nvidia.pack_linear, dtype=torch.float32),
        linear=linear,
        project=nvidia.project,
        rms_norm=nvidia.rms_norm,
        add_rms_norm=nvidia.add_rms_norm,
        rotate_and_cache=nvidia.rotate_and_cache,
        silu_mul=nvidia.silu_mul,
        embedding=reference.embedding,
        exact_norm=nvidia.exact_norm,
        sigmoid=torch.sigmoid,
        round_activation=nvidia.round_activation,
        turn_pairs=nvidia.turn_pairs,
        stream_mixes=nvidia.stream_mixes,
        expand_streams=nvidia.expand_streams,
        expert_linear=nvidia.expert_linear,
        draw=nvidia.draw,
        verify=nvidia.verify,
        plan_attention=nvidia.plan_attention,
        paged_attention=nvidia.paged_attention,
        is_flat=nvidia.is_flat,
        typical_steps=nvidia.typical_steps,
    )
