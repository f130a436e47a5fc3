"""Names that other engines have for what is asked here: which mean the same, and what to do about those that do not.

A program that was written for vLLM or SGLang keeps its arguments: an alias becomes our name, an argument that asks for
nothing is dropped, and one that asks for what is not served is refused with what to do instead. Nothing is ignored
that would change an answer. `docs/migrating.md` shows the tables. Knows nothing of what the arguments do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import Struct

from deepinfer.config import EngineConfig
from deepinfer.errors import ConfigError, InvalidRequest
from deepinfer_protocol import SamplingParams as PlainSamplingParams


class Elsewhere(NamedTuple):
    """An argument of another engine that has no counterpart here."""

    advice: str
    harmless: tuple[Any, ...] = (None,)
    """Values that ask for nothing."""


class Ignored(NamedTuple):
    """An argument of another engine that changes no answer: whatever its value, it is dropped."""

    reason: str


Table = Mapping[str, Elsewhere | Ignored]

# ---- sampling parameters

PARAM_ALIASES: Final[Mapping[str, str]] = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "seed": "seq_seed",
    "sampling_seed": "seq_seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_CONSTRAINED: Final = "give json_schema, regex, choice or grammar (Lark) itself"
FOREIGN_PARAMS: Final[Table] = {
    "use_beam_search": Elsewhere("beam search is not served: take the best cumulative_logprob of n samples", (False,)),
    "beam_width": Elsewhere("beam search is not served: take the best cumulative_logprob of n samples", (None, 1)),
    "best_of": Elsewhere("all n samples are returned: take the best by cumulative_logprob", (None, 1)),
    "length_penalty": Elsewhere("beam search is not served", (1.0, None)),
    "early_stopping": Elsewhere("beam search is not served", (False, None)),
    "structured_outputs": Elsewhere(_CONSTRAINED),
    "guided_decoding": Elsewhere(_CONSTRAINED),
    "ebnf": Elsewhere(_CONSTRAINED),
    "structural_tag": Elsewhere(_CONSTRAINED),
    "stop_regex": Elsewhere("stop takes strings, not patterns: end the request from your loop", (None, [], ())),
    "logits_processors": Elsewhere(
        "no code runs in the sampler: logit_bias, allowed_token_ids, banned_token_ids and bad_words are data",
        (None, [], ()),
    ),
    "custom_params": Elsewhere("no code runs in the sampler", (None, {})),
    "extra_args": Elsewhere("nothing here reads it", (None, {})),
    "logprob_token_ids": Elsewhere("ask for logprobs, the best of each token", (None, [], ())),
    "flat_logprobs": Elsewhere("log probabilities come as one entry a token", (False, None)),
    "output_kind": Elsewhere("stream() yields deltas, generate() returns the whole", (None, "delta", 1)),
    "stream_interval": Elsewhere("a chunk has what is new since the last read", (None, 1)),
    "truncate_prompt_tokens": Elsewhere("cut the prompt yourself: one that is too long is refused"),
    "thinking_token_budget": Elsewhere("it is not served: max_tokens bounds the whole answer"),
    "repetition_detection": Elsewhere("it is not served: repetition_penalty or frequency_penalty may help"),
    "spaces_between_special_tokens": Ignored("special tokens in the text are spelt as the tokenizer has them"),
}


class _Renaming(type(Struct)):  # type: ignore[misc]
    """Makes a constructor understand the names of other engines."""

    if not TYPE_CHECKING:  # checkers see the fields that there are

        def __call__(cls, **fields):
            known = cls.__struct_fields__
            if not fields.keys() <= set(known):
                fields = rename_params(fields, known)
            return super().__call__(**fields)


class SamplingParams(PlainSamplingParams, frozen=True, metaclass=_Renaming):
    __doc__ = f"""{PlainSamplingParams.__doc__}
    Also takes the names that vLLM and SGLang have for its fields. Raises `InvalidRequest` for what they have and is not
    served here, and for two names of one field with two values; `TypeError` for a name that none of them has.
    """


def rename_params(fields: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """`fields` by our names. Raises `InvalidRequest`; names that nobody has stay."""
    own = {name: value for name, value in fields.items() if name in known}
    for name, value in fields.items():
        if name in PARAM_ALIASES:
            _take_alias(own, name, PARAM_ALIASES[name], value, InvalidRequest)
        elif name in FOREIGN_PARAMS:
            _drop(FOREIGN_PARAMS[name], name, value, InvalidRequest)
        elif name not in known:
            own[name] = value
    return own


# ---- settings of an engine

SETTING_ALIASES: Final[Mapping[str, str]] = {
    "model_path": "model",
    "max_num_batched_tokens": "max_batch_tokens",
    "enable_prefix_caching": "prefix_cache",
    "num_gpu_blocks_override": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "download_dir": "cache_dir",
    "data_parallel_size": "num_workers",
    "async_scheduling": "overlap",
    "tokenizer_path": "tokenizer",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "prefill_chunk",
    "page_size": "block_size",
    "dp_size": "num_workers",
    "random_seed": "seed",
    "speculative_num_steps": "num_drafts",
}
_ONE_DEVICE: Final = "a worker is one device and holds the whole model; num_workers adds workers"
_OWN_DRAFTS: Final = "a model drafts by its own DSpark stages alone: num_drafts says how many tokens"
_DRAFT_METHODS: Final = (None, "mtp", "deepseek_mtp", "dspark")
_CODE: Final = "no code from model folders is run"
FOREIGN_SETTINGS: Final[Table] = {
    "trust_remote_code": Elsewhere(_CODE, (False, None)),
    "tensor_parallel_size": Elsewhere(_ONE_DEVICE, (1, None)),
    "pipeline_parallel_size": Elsewhere(_ONE_DEVICE, (1, None)),
    "tp_size": Elsewhere(_ONE_DEVICE, (1, None)),
    "pp_size": Elsewhere(_ONE_DEVICE, (1, None)),
    "enable_expert_parallel": Elsewhere(_ONE_DEVICE, (False, None)),
    "kv_cache_dtype": Elsewhere("KV rows are kept in the model's own type", (None, "auto")),
    "quantization": Elsewhere("the weights say how they are stored: give a GGUF file"),
    "revision": Elsewhere("known models are pinned by checksum: pull another revision into a folder and name it"),
    "tokenizer_revision": Elsewhere("pull another revision into a folder and name it: tokenizer"),
    "tokenizer_mode": Elsewhere("there is one tokenizer", (None, "auto", "fast")),
    "skip_tokenizer_init": Elsewhere("detokenize=False streams token ids", (False, None)),
    "device": Elsewhere("it is accelerator: cpu, nvidia or ascend", (None, "auto")),
    "enable_chunked_prefill": Elsewhere("prompts are always cut: prefill_chunk says where", (True, None)),
    "disable_radix_cache": Elsewhere("it is prefix_cache=False", (False, None)),
    "speculative_config": Elsewhere(_OWN_DRAFTS),
    "speculative_model": Elsewhere(_OWN_DRAFTS),
    "speculative_draft_model_path": Elsewhere(_OWN_DRAFTS),
    "speculative_algorithm": Elsewhere(_OWN_DRAFTS, (None, "NEXTN", "DSPARK")),
    "speculative_eagle_topk": Elsewhere("a block is one chain of drafts", (None, 1)),
    "speculative_num_draft_tokens": Elsewhere("it is num_drafts, which does not count the token before the drafts"),
    "enable_lora": Elsewhere("adapters are not served", (False, None)),
    "lora_paths": Elsewhere("adapters are not served"),
    "hf_overrides": Elsewhere("the model's own configuration is used", (None, {})),
    "hf_token": Elsewhere("huggingface_hub finds a token by itself"),
    "generation_config": Elsewhere("defaults are those of SamplingParams", (None, "vllm")),
    "override_generation_config": Elsewhere("defaults are those of SamplingParams", (None, {})),
    "max_logprobs": Elsewhere("at most 20 are served", tuple(range(21))),
    "logprobs_mode": Elsewhere("log probabilities are the model's own", (None, "raw_logprobs")),
    "logits_processors": Elsewhere("no code runs in the sampler", (None, [], ())),
    "limit_mm_per_prompt": Elsewhere("text only is served", (None, {})),
    "cpu_offload_gb": Elsewhere("weights are not offloaded", (0, 0.0, None)),
    "kv_transfer_config": Elsewhere("KV rows stay with their worker"),
    "gpu_memory_utilization": Ignored("kv_cache_bytes or num_blocks say how much the KV cache takes"),
    "mem_fraction_static": Ignored("kv_cache_bytes or num_blocks say how much the KV cache takes"),
    "swap_space": Ignored("a preempted sequence is computed again"),
    "enforce_eager": Ignored("it says how a step is launched, not what it gives"),
    "compilation_config": Ignored("it says how a step is launched, not what it gives"),
    "max_seq_len_to_capture": Ignored("it says how a step is launched, not what it gives"),
    "disable_custom_all_reduce": Ignored("a worker is one device"),
    "distributed_executor_backend": Ignored("workers are processes of the engine"),
    "disable_log_stats": Ignored("Engine.stats() says what is going on"),
    "log_level": Ignored("logging is the program's own"),
    "served_model_name": Ignored("it is a server's"),
}

_HALF: Final = 'float16 is not served: dtype="bfloat16" on nvidia, dtype="fast" on cpu'
_FILE: Final = 'load_format="auto": the format is the file\'s own'
FOREIGN_VALUES: Final[Mapping[tuple[str, str], str]] = {
    ("dtype", "half"): _HALF,
    ("dtype", "float16"): _HALF,
    ("dtype", "float"): 'dtype="float32"',
    ("load_format", "safetensors"): _FILE,
    ("load_format", "gguf"): _FILE,
    ("load_format", "pt"): _FILE,
}
"""Values that others have for a setting of the same name, and what to give instead."""


def rename_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` by our names. Raises `ConfigError`; names that nobody has stay."""
    known = EngineConfig.__struct_fields__
    own = {name: value for name, value in settings.items() if name in known}
    for name, value in settings.items():
        if name in known:
            continue
        if name in SETTING_ALIASES:
            _take_alias(own, name, SETTING_ALIASES[name], value, ConfigError)
        elif name == "speculative_config" and isinstance(value, Mapping):
            _take_speculative_config(own, name, value)
        elif name in FOREIGN_SETTINGS:
            _drop(FOREIGN_SETTINGS[name], name, value, ConfigError)
        else:
            own[name] = value
    for (name, value), advice in FOREIGN_VALUES.items():
        if own.get(name) == value:
            raise ConfigError(name, f"{value!r}: {advice}")
    return own


def _take_speculative_config(own: dict[str, Any], name: str, fields: Mapping[str, Any]) -> None:
    """vLLM's: how many tokens are drafted. Raises `ConfigError` for a drafter that is not the model's own."""
    for field, value in fields.items():
        if field == "num_speculative_tokens":
            _take_alias(own, f"{name}.{field}", "num_drafts", value, ConfigError)
        elif field == "method" and value not in _DRAFT_METHODS:
            raise ConfigError(name, f"method {value!r}: {_OWN_DRAFTS}")
        elif field != "method" and value is not None:
            raise ConfigError(
                name, f"{field!r} is not understood, only num_speculative_tokens and method: {_OWN_DRAFTS}"
            )


# ---- arguments of a request

OWN_OPTIONS: Final = frozenset(
    {
        "prompt",
        "params",
        "messages",
        "thinking",
        "reasoning_effort",
        "tools",
        "tool_choice",
        "request_id",
        "priority",
        "queue_timeout_s",
        "timeout_s",
        "traceparent",
    }
)
OPTION_ALIASES: Final[Mapping[str, str]] = {
    "rid": "request_id",
    "sampling_params": "params",
    "prompts": "prompt",
    "prompt_token_ids": "prompt",
    "input_ids": "prompt",
}
TEMPLATE_KWARGS: Final[Mapping[str, str]] = {
    "thinking": "thinking",
    "enable_thinking": "thinking",
    "reasoning_effort": "reasoning_effort",
}
"""What is understood of vLLM's `chat_template_kwargs`."""
_PARAM_HAS_IT: Final = "it is a field of SamplingParams: logprobs or prompt_logprobs"
FOREIGN_OPTIONS: Final[Table] = {
    "lora_request": Elsewhere("adapters are not served"),
    "lora_path": Elsewhere("adapters are not served"),
    "prompt_adapter_request": Elsewhere("adapters are not served"),
    "tokenization_kwargs": Elsewhere("encode the prompt yourself and give token ids", (None, {})),
    "trace_headers": Elsewhere("give the W3C context as traceparent"),
    "prompt_text": Elsewhere("give the prompt as text or as token ids"),
    "data_parallel_rank": Elsewhere("the scheduler chooses the worker"),
    "routed_dp_rank": Elsewhere("the scheduler chooses the worker"),
    "session_id": Elsewhere("equal prefixes are found by themselves"),
    "cache_salt": Elsewhere("prefixes are shared by everybody on an engine: start another one"),
    "return_logprob": Elsewhere(_PARAM_HAS_IT, (False, None)),
    "top_logprobs_num": Elsewhere(_PARAM_HAS_IT, (0, None)),
    "logprob_start_len": Elsewhere(_PARAM_HAS_IT, (-1, None)),
    "token_ids_logprob": Elsewhere(_PARAM_HAS_IT),
    "return_hidden_states": Elsewhere("they stay with the worker", (False, None)),
    "image_data": Elsewhere("text only is served"),
    "multi_modal_data": Elsewhere("text only is served", (None, {})),
    "mm_processor_kwargs": Elsewhere("text only is served", (None, {})),
    "prompt_embeds": Elsewhere("text and token ids only are served"),
    "chat_template": Elsewhere("the model's own template is used: render the messages yourself and give text"),
    "chat_template_content_format": Elsewhere("content is text", (None, "auto", "string")),
    "add_generation_prompt": Elsewhere("an answer is always asked for", (True, None)),
    "continue_final_message": Elsewhere("render the messages yourself and give text", (False, None)),
    "response_format": Elsewhere(_CONSTRAINED, (None, {"type": "text"})),
}


def rename_options(options: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> dict[str, Any]:
    """`options` of a request, with those of `elsewhere` by our names. Raises `InvalidRequest` and `TypeError`."""
    own = {name: value for name, value in options.items() if value is not None}
    own |= {name: value for name, value in elsewhere.items() if name in OWN_OPTIONS}
    for name, value in elsewhere.items():
        if name in OPTION_ALIASES:
            _take_alias(own, name, OPTION_ALIASES[name], value, InvalidRequest)
        elif name == "chat_template_kwargs":
            _take_template_kwargs(own, value)
        elif name in FOREIGN_OPTIONS:
            _drop(FOREIGN_OPTIONS[name], name, value, InvalidRequest)
        elif name not in OWN_OPTIONS:
            raise TypeError(f"a request has no argument {name!r}")
    return own


def _take_template_kwargs(own: dict[str, Any], kwargs: object) -> None:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidRequest("chat_template_kwargs", f"expected an object, not {type(kwargs).__name__}")
    for name, value in (kwargs or {}).items():
        if name not in TEMPLATE_KWARGS:
            known = ", ".join(TEMPLATE_KWARGS)
            raise InvalidRequest("chat_template_kwargs", f"{name!r} is not understood, only {known}")
        _take_alias(own, name, TEMPLATE_KWARGS[name], value, InvalidRequest)


def plain_prompt(prompt: Mapping[Any, Any]) -> Any:
    """The text or the token ids in a prompt as vLLM's `TextPrompt` and `TokensPrompt` have it.

    Raises `InvalidRequest`.
    """
    for name, value in prompt.items():
        if name in FOREIGN_OPTIONS:
            _drop(FOREIGN_OPTIONS[name], name, value, InvalidRequest)
    for name in ("prompt_token_ids", "prompt"):
        if prompt.get(name) is not None:
            return prompt[name]
    raise InvalidRequest("prompt", "a mapping came, with neither prompt nor prompt_token_ids in it")


def _take_alias(
    own: dict[str, Any], name: str, ours: str, value: Any, refusal: Callable[[str, str], Exception]
) -> None:
    if value is None:
        return  # not given
    if own.get(ours) is not None and own[ours] != value:
        raise refusal(name, f"it is {ours}, which has another value here: give one of them")
    own[ours] = value


def _drop(foreign: Elsewhere | Ignored, name: str, value: Any, refusal: Callable[[str, str], Exception]) -> None:
    if isinstance(foreign, Ignored):
        return
    plain = value.name.lower() if isinstance(value, Enum) else value
    if not any(type(plain) is type(harmless) and plain == harmless for harmless in foreign.harmless):
        raise refusal(name, foreign.advice)
