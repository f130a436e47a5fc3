"""The messages of DeepInfer's wires. msgspec and the standard library only."""

from deepinfer_protocol.codec import (
    config_length,
    decode,
    decode_config,
    encode,
    encode_config,
)
from deepinfer_protocol.errors import ProtocolError
from deepinfer_protocol.messages import (
    AnyMessage,
    Fault,
    Hello,
    MaskBatch,
    Message,
    Progress,
    Ready,
    RowFlag,
    Shutdown,
    SlotAdmit,
    SlotSampling,
    StepPlan,
    StepResult,
    WorkerConfig,
    pack_int32,
    split_columns,
    unpack_float32,
    unpack_int32,
)
from deepinfer_protocol.sampling import SamplingParams
from deepinfer_protocol.version import VERSION, wire_version

__all__ = [
    "VERSION",
    "AnyMessage",
    "Fault",
    "Hello",
    "MaskBatch",
    "Message",
    "Progress",
    "ProtocolError",
    "Ready",
    "RowFlag",
    "SamplingParams",
    "Shutdown",
    "SlotAdmit",
    "SlotSampling",
    "StepPlan",
    "StepResult",
    "WorkerConfig",
    "config_length",
    "decode",
    "decode_config",
    "encode",
    "encode_config",
    "pack_int32",
    "split_columns",
    "unpack_float32",
    "unpack_int32",
    "wire_version",
]
