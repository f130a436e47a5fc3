"""Device operations behind one table. Knows nothing of models, of wires, or of the engine."""

from deepinfer_kernels.attention import PackedRows
from deepinfer_kernels.linear import LinearWeight
from deepinfer_kernels.native import KEY_LANES
from deepinfer_kernels.ops import Ops, UnknownAccelerator, select_ops

__all__ = ["KEY_LANES", "LinearWeight", "Ops", "PackedRows", "UnknownAccelerator", "select_ops"]
