"""EngineConfig: every setting of an engine, its bounds, and which of three sources wins.

A constructor argument beats an environment variable beats a default. Knows nothing of what acts on a setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from deepinfer.catalog import default_cache_dir
from deepinfer.env import ENVIRONMENT_NAMES, cache_home, read_settings
from deepinfer.errors import ConfigError
from deepinfer_protocol.limits import MAX_DRAFTS

Positive = Meta(ge=1, le=2**31 - 1)
_HOME_OF_DTYPE: Final = {"bfloat16": "nvidia", "fast": "cpu"}
"""Those that one accelerator alone has."""


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Settings of one engine. Sizes are in tokens unless the name says otherwise; times are in seconds."""

    model: Annotated[str, Meta(description="A known name, a .gguf file or a model folder; `fake` for tests.")] = ""
    accelerator: Annotated[Literal["cpu", "nvidia", "ascend"], Meta(description="What the workers run on.")] = "cpu"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "fast"],
        Meta(description="Arithmetic of the model: float32 or, for speed, fast on cpu, bfloat16 on nvidia."),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(description="`dummy`: random weights of the shapes that config.json tells, to measure a model's speed."),
    ] = "auto"
    cuda_graphs: Annotated[
        bool, Meta(description="nvidia: replay captured launches for small steps; the tokens are the same.")
    ] = True
    overlap: Annotated[bool, Meta(description="Two steps in flight instead of one; the tokens are the same.")] = True
    batch_invariant: Annotated[
        bool, Meta(description="A token never depends on who else is in the batch (the reference path).")
    ] = True
    num_workers: Annotated[int, Meta(ge=1, le=1024, description="Worker processes; each holds the whole model.")] = 1
    num_threads: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="CPU threads of each worker's device; 0: one for a small DeepSeek, else its share of all.",
        ),
    ] = 0
    max_model_len: Annotated[
        int, Meta(ge=0, le=1 << 24, description="Longest sequence, prompt included; 0: the model's own.")
    ] = 0
    max_num_seqs: Annotated[int, Meta(ge=1, le=65_536, description="Sequences that run at once on a worker.")] = 256
    max_batch_tokens: Annotated[
        int, Meta(ge=1, le=65_536, description="Positions that a step computes on a worker.")
    ] = 512
    prefill_chunk: Annotated[int, Meta(ge=1, le=65_536, description="Positions of one prompt in a step.")] = 256
    block_size: Annotated[
        int, Meta(ge=0, le=4096, description="Tokens of a KV block; 0: 16, or more where the model's rows need it.")
    ] = 0
    num_blocks: Annotated[int, Meta(ge=0, le=1 << 24, description="KV blocks of a worker; 0: from the bytes.")] = 0
    kv_cache_bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 44, description="Memory for KV blocks; 0: 1 GiB at most on cpu, what is free on nvidia."),
    ] = 0
    prefix_cache: Annotated[bool, Meta(description="Reuse the KV rows of equal prefixes.")] = True
    prefix_hits: Annotated[
        Literal["bounded", "exact"],
        Meta(
            description="What a hit recomputes where a slot has a state of its own: its window (bounded), or all that "
            "reaches it (exact: the tokens are those of a run without a hit)."
        ),
    ] = "bounded"
    prefill_truncation: Annotated[
        Literal["compact", "off"],
        Meta(
            description="compact: the decoder half of a YOCO model computes the last positions of a prompt only; off: "
            "all of them, and prefix hits are exact."
        ),
    ] = "compact"
    prefill_keep_tokens: Annotated[
        int, Meta(ge=1, le=1 << 24, description="compact: positions at a prompt's end that go through all layers.")
    ] = 140
    cache_format: Annotated[
        Literal["auto", "packed", "bfloat16", "float32"],
        Meta(description="How cache rows are kept; packed: the formats that the model was released with."),
    ] = "auto"
    quantize_activations: Annotated[
        bool, Meta(description="Round activations where the released model does; off: for parity tests.")
    ] = True
    quantize_cache: Annotated[
        bool, Meta(description="Round cache rows where the released model does; off: for parity tests.")
    ] = True
    num_drafts: Annotated[
        int,
        Meta(
            ge=-1,
            le=MAX_DRAFTS,
            description="Longest draft of a model with draft stages, verified by the step behind it; 0: none, -1: as "
            "long as the model's block. The tokens of a request with a seq_seed, or greedy, are the same.",
        ),
    ] = -1
    scheduled_drafts: Annotated[
        bool,
        Meta(description="Verify as many drafts as pay off, by their confidence and by what steps cost; off: all."),
    ] = False
    cost_table: Annotated[
        str,
        Meta(description="For scheduled drafts: what steps cost, by `deepinfer costs`; empty: measured at start."),
    ] = ""
    max_queued_requests: Annotated[int, Positive, Meta(description="Requests that wait before one is refused.")] = 4096
    max_queued_tokens: Annotated[
        int, Positive, Meta(description="Prompt tokens that wait before a request is refused.")
    ] = 4_000_000
    ageing_s: Annotated[float, Meta(gt=0, le=1e6, description="Waiting this long is worth one step of priority.")] = (
        10.0
    )
    max_unread_tokens: Annotated[int, Meta(ge=2, le=1 << 24, description="Unread tokens at which a stream pauses.")] = (
        4096
    )
    slow_consumer_s: Annotated[
        float, Meta(gt=0, le=1e6, description="How long a paused stream lives before it ends with SlowConsumer.")
    ] = 60.0
    step_timeout_s: Annotated[
        float, Meta(ge=0, le=1e6, description="A step that takes longer is a lost worker; 0: never.")
    ] = 120.0
    start_timeout_s: Annotated[float, Meta(gt=0, le=1e6, description="How long workers may take to load.")] = 600.0
    seed: Annotated[
        int,
        Meta(ge=-1, le=2**63 - 1, description="Seeds of requests without one come from it, by call; -1: at random."),
    ] = -1
    cache_dir: Annotated[str, Meta(description="Where pulled models are kept.")] = ""
    runtime_dir: Annotated[str, Meta(description="Where the engine's socket lives, in a folder of its own.")] = ""
    tokenizer: Annotated[str, Meta(description="A model whose tokenizer is used instead of the model's own.")] = ""
    own_thread: Annotated[bool, Meta(description="Run the core in a thread with a loop of its own.")] = False
    fake_step_s: Annotated[float, Meta(ge=0, le=3600, description="`fake` only: how long a step takes.")] = 0.0
    fake_vocab_size: Annotated[int, Meta(ge=2, le=2**31 - 1, description="`fake` only: tokens it knows.")] = 32_000
    fake_check_stamps: Annotated[bool, Meta(description="`fake` only: check every KV row at every read.")] = True
    fake_replay_tokens: Annotated[
        int, Meta(ge=0, le=1 << 20, description="`fake` only: positions that its slots keep a state of.")
    ] = 0
    fake_num_drafts: Annotated[
        int, Meta(ge=0, le=MAX_DRAFTS, description="`fake` only: tokens of its draft block; 0: it has no draft stages.")
    ] = 0

    @property
    def has_bounded_hits(self) -> bool:
        """Prefix hits may be an approximation; never with the truncation off, which asks for none."""
        return self.prefix_hits == "bounded" and self.prefill_truncation == "compact"

    @property
    def measures_costs(self) -> bool:
        """Workers time steps of several sizes before they are ready."""
        return self.scheduled_drafts and not self.cost_table and self.num_drafts != 0

    @property
    def model_cache_dir(self) -> Path:
        return Path(self.cache_dir).expanduser() if self.cache_dir else default_cache_dir(cache_home())


class Setting(NamedTuple):
    """One line of `deepinfer env`."""

    field: str
    variable: str | None
    argument: Any  # msgspec.UNSET when not given
    environment: str | None
    default: Any
    value: Any
    description: str


def resolve_config(arguments: Mapping[str, Any]) -> EngineConfig:
    """The configuration from constructor arguments, environment and defaults. Raises `ConfigError` by field."""
    return _build({setting.field: setting.value for setting in explain_config(arguments)})


def explain_config(arguments: Mapping[str, Any], *, strict: bool = True) -> list[Setting]:
    """Where each setting comes from. Raises `ConfigError` for an unknown argument or a value out of bounds.

    With `strict` off, arguments may be text, as the environment's are.
    """
    environment = read_settings()
    hints = get_type_hints(EngineConfig, include_extras=True)
    for name in arguments:
        if name not in hints:
            raise ConfigError(name, "there is no such setting; `deepinfer env` lists them")
    defaults = EngineConfig()
    settings = []
    for field, hint in hints.items():
        argument, text, default = arguments.get(field, msgspec.UNSET), environment.get(field), getattr(defaults, field)
        if argument is not msgspec.UNSET and argument is not None:
            value = _convert(field, argument, hint, strict=strict)
        elif text is not None:
            value = _convert(ENVIRONMENT_NAMES[field], text, hint, strict=False)
        else:
            value = default
        description = next(meta.description for meta in hint.__metadata__ if meta.description)
        settings.append(Setting(field, ENVIRONMENT_NAMES.get(field), argument, text, default, value, description))
    return settings


def _convert(name: str, value: Any, hint: Any, *, strict: bool) -> Any:
    try:
        return msgspec.convert(value, hint, strict=strict)
    except msgspec.ValidationError as error:
        choices = get_args(get_args(hint)[0])
        known = f" (known: {', '.join(choices)})" if choices else ""
        raise ConfigError(name, f"{value!r}: {error}{known}") from None


def _build(values: dict[str, Any]) -> EngineConfig:
    config = EngineConfig(**values)
    if config.max_num_seqs > config.max_batch_tokens:
        raise ConfigError(
            "max_num_seqs",
            f"{config.max_num_seqs} sequences need a position each, max_batch_tokens is {config.max_batch_tokens}",
        )
    home = _HOME_OF_DTYPE.get(config.dtype, config.accelerator)
    if home != config.accelerator:
        raise ConfigError(
            "dtype", f"{config.dtype!r} is an arithmetic of {home}, accelerator is {config.accelerator!r}"
        )
    return config
