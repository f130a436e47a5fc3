"""DeepInfer: an asynchronous streaming runtime for large language models.

async with Engine("smollm2-135m") as engine:
    async for tok in engine.stream("The capital of France is", SamplingParams(max_tokens=32)):
        print(tok.text, end="", flush=True)
"""

from deepinfer.config import EngineConfig
from deepinfer.engine import Engine, EngineStats
from deepinfer.errors import (
    ConfigError,
    ConnectionLost,
    ConnectionRejected,
    ContextLengthExceeded,
    DeepInferError,
    DuplicateRequestId,
    EngineClosed,
    EngineError,
    ForkedEngine,
    GrammarError,
    InternalError,
    InvalidRequest,
    ModelError,
    ModelFileError,
    ModelTooLarge,
    Overloaded,
    SlowConsumer,
    UnknownModel,
    UnsupportedModel,
    WorkerLost,
    WorkerStartError,
    WrongLoop,
)
from deepinfer.migrating import SamplingParams
from deepinfer.result import Completion, LogprobView, Sample, SampleView
from deepinfer.stream import Logprob, TokenChunk, TokenLogprob, TokenStream
from deepinfer.sync import SyncEngine, SyncStream
from deepinfer.wire.client import Client, connect
from deepinfer_protocol import VERSION as __version__

__all__ = [
    "Client",
    "Completion",
    "ConfigError",
    "ConnectionLost",
    "ConnectionRejected",
    "ContextLengthExceeded",
    "DeepInferError",
    "DuplicateRequestId",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineError",
    "EngineStats",
    "ForkedEngine",
    "GrammarError",
    "InternalError",
    "InvalidRequest",
    "Logprob",
    "LogprobView",
    "ModelError",
    "ModelFileError",
    "ModelTooLarge",
    "Overloaded",
    "Sample",
    "SampleView",
    "SamplingParams",
    "SlowConsumer",
    "SyncEngine",
    "SyncStream",
    "TokenChunk",
    "TokenLogprob",
    "TokenStream",
    "UnknownModel",
    "UnsupportedModel",
    "WorkerLost",
    "WorkerStartError",
    "WrongLoop",
    "__version__",
    "connect",
]
