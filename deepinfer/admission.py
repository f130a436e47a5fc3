"""What may become a request: every field checked against the model and its limits before the core hears of it.

Pure. A refusal is `InvalidRequest` (or `ContextLengthExceeded`): it names the field, what came and what is allowed.
"""

from __future__ import annotations

import math
import random
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from deepinfer.errors import ContextLengthExceeded, InvalidRequest
from deepinfer_protocol import LogitShaping, SamplingParams, SlotSampling, pack_float32, pack_int32
from deepinfer_protocol.limits import (
    MAX_BAD_WORD_IDS,
    MAX_BIAS,
    MAX_BIAS_IDS,
    MAX_LOGPROBS,
    MAX_MASK_BYTES,
    MAX_STOP_IDS,
)

MAX_SAMPLES: Final = 128
MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARACTERS: Final = 1024
MAX_PRIORITY: Final = 1_000_000
MAX_TEMPERATURE: Final = 100.0
MAX_ADDED_PENALTY: Final = 2.0
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 100.0
MAX_BAD_WORDS: Final = 1024
MAX_TIMEOUT_S: Final = 1e9
MAX_QUICK_IDS: Final = 1024
"""More tokens than these, in lists and bad words, are made ready in a thread."""
MAX_QUICK_CHARACTERS: Final = 1024
"""Of stop strings, likewise."""
SEED_BITS: Final = 63
MAX_SHOWN: Final = 40
MAX_SHOWN_BITS: Final = 128  # 39 digits
_FLAGS: Final = (
    "ignore_eos",
    "skip_special_tokens",
    "detokenize",
    "include_stop_str_in_output",
)
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_SAMPLE_STRIDE: Final = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads the samples of one seed


class ModelLimits(Struct, frozen=True):
    """What the loaded model and its caches allow; the same on every rank."""

    vocab_size: int
    max_model_len: int
    """Tokens of a sequence, prompt included."""
    max_cached_tokens: int
    """Tokens that the KV cache of a rank can hold."""
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool

    @property
    def max_length(self) -> int:
        return min(self.max_model_len, self.max_cached_tokens)


class Admitted(Struct, frozen=True):
    """Checked sampling parameters, in the words of the scheduler and the device."""

    max_length: int
    sampling: list[SlotSampling]
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    told_stop_ids: frozenset[int] = frozenset()
    """Of `stop_ids` the ones that the user named: they are a stop reason."""


def check_params(params: Any, limits: ModelLimits) -> SamplingParams:
    """`params` with every field in its bounds, whatever the prompt. Raises `InvalidRequest`.

    What the output is forced into is checked as it becomes text: see `grammar_source`.
    """
    if params is None:
        params = SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequest("params", f"a {type(params).__name__} came, SamplingParams is expected")
    if params.max_tokens is not None:
        _check_int("max_tokens", params.max_tokens, 1, 2**31 - 1)
    _check_int("min_tokens", params.min_tokens, 0, limits.max_length)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest("min_tokens", f"{params.min_tokens}, more than max_tokens {params.max_tokens}")
    _check_float("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    _check_float("top_p", params.top_p, 0.0, 1.0)
    if params.top_p == 0:
        raise InvalidRequest("top_p", "0.0, more than 0 is expected")
    _check_int("top_k", params.top_k, -1, 2**31 - 1)
    _check_float("min_p", params.min_p, 0.0, 1.0)
    _check_float("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    for field in ("presence_penalty", "frequency_penalty"):
        _check_float(field, getattr(params, field), -MAX_ADDED_PENALTY, MAX_ADDED_PENALTY)
    _check_int("n", params.n, 1, MAX_SAMPLES)
    for field in ("logprobs", "prompt_logprobs"):
        if getattr(params, field) is not None:
            _check_int(field, getattr(params, field), 0, min(MAX_LOGPROBS, limits.vocab_size))
    if params.seq_seed is not None:
        _check_int("seq_seed", params.seq_seed, 0, 2**SEED_BITS - 1)
    for field in _FLAGS:
        _check_flag(field, getattr(params, field))
    _check_stop_ids(params.stop_token_ids, limits.vocab_size)
    if params.skip_reading_prefix_cache is not None:
        _check_flag("skip_reading_prefix_cache", params.skip_reading_prefix_cache)
    _check_stop_strings(params, limits)
    _check_token_lists(params, limits.vocab_size)
    _check_bad_words(params.bad_words, limits)
    return params


def freeze_params(params: SamplingParams) -> SamplingParams:
    """Checked `params` with lists and mappings of its own: the caller's may change before they are read again."""
    words = params.bad_words
    return replace(
        params,
        logit_bias=None if params.logit_bias is None else dict(params.logit_bias),
        allowed_token_ids=None if params.allowed_token_ids is None else array("i", params.allowed_token_ids),
        banned_token_ids=None if params.banned_token_ids is None else array("i", params.banned_token_ids),
        bad_words=None if words is None else [word if isinstance(word, str) else array("i", word) for word in words],
        stop=params.stop if isinstance(params.stop, str) else tuple(params.stop or ()),
        stop_token_ids=tuple(params.stop_token_ids or ()),
    )


def is_long(params: SamplingParams) -> bool:
    """Whether making it ready for the device is work that should not keep the loop: text to encode, a long list."""
    words, stops = params.bad_words or (), (params.stop,) if isinstance(params.stop, str) else params.stop or ()
    if any(isinstance(word, str) for word in words):
        return True
    num_ids = sum(map(len, (params.allowed_token_ids or (), params.banned_token_ids or (), *words)))
    num_characters = params.n * len(stops) + sum(map(len, stops))
    return num_ids > MAX_QUICK_IDS or num_characters > MAX_QUICK_CHARACTERS


def check_token_ids(prompt: Any, limits: ModelLimits) -> array[int]:
    """The prompt's ids as int32. Raises `InvalidRequest` for ids that the model does not have."""
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, (Sequence, array)):
        raise InvalidRequest("prompt", f"a {type(prompt).__name__} came, text or a sequence of token ids is expected")
    if _length("prompt", prompt) >= limits.max_length:
        raise _too_long(len(prompt), limits)
    return _ids("prompt", prompt, limits.vocab_size)


def check_characters(field: str, num_characters: int, limits: ModelLimits, max_token_characters: int) -> None:
    """Text that cannot fit the context, however it is encoded, is not encoded. Raises `ContextLengthExceeded`."""
    limit = limits.max_length * max_token_characters
    if num_characters > limit:
        raise ContextLengthExceeded(field, f"{num_characters} characters, at most {limit} can fit the context")


def admit(
    params: SamplingParams,
    num_prompt: int,
    limits: ModelLimits,
    bad_words: Sequence[Sequence[int]] = (),
) -> Admitted:
    """Checked `params` for a prompt of this many tokens. Raises `InvalidRequest`, `ContextLengthExceeded`.

    `bad_words` are those of `params` as token ids. Numbers of the user's own classes become plain ones: the wire has no
    others.
    """
    if num_prompt == 0:
        raise InvalidRequest("prompt", "is empty, at least one token is expected")
    if num_prompt >= limits.max_length:
        raise _too_long(num_prompt, limits)
    wanted = limits.max_length if params.max_tokens is None else num_prompt + int(params.max_tokens)
    if wanted > limits.max_length:
        raise ContextLengthExceeded(
            "max_tokens",
            f"{num_prompt} prompt tokens and {params.max_tokens} new ones make {wanted}, {limits.max_length} fit",
        )
    eos_ids = frozenset(() if params.ignore_eos else limits.eos_token_ids)
    named_ids = frozenset(map(int, params.stop_token_ids or ()))
    stop_ids = named_ids | eos_ids
    sampling = SlotSampling(
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=max(int(params.top_k), 0),
        min_length=num_prompt + int(params.min_tokens) if params.min_tokens else 0,
        stop_ids=pack_int32(sorted(stop_ids)) if params.min_tokens else b"",
        num_logprobs=-1 if params.logprobs is None else int(params.logprobs),
        num_prompt=num_prompt,
        min_p=float(params.min_p),
        shaping=_shaping(params, bad_words, stop_ids, limits.vocab_size),
        rejects=params.temperature > 0 and params.seq_seed is None,  # with a seed the tokens are those without drafts
    )
    samplings = [replace(sampling, seed=seed) for seed in _sample_seeds(params)]
    if params.prompt_logprobs is not None:  # the samples have one prompt: the first computes it
        samplings[0] = replace(samplings[0], num_prompt_logprobs=int(params.prompt_logprobs))
    return Admitted(
        max_length=wanted,
        sampling=samplings,
        stop_ids=stop_ids,
        told_stop_ids=named_ids - eos_ids,
        stop_strings=(params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ()),
    )


def check_request_id(request_id: Any) -> str:
    """The id, as a plain string. Raises `InvalidRequest`."""
    found = _REQUEST_ID.fullmatch(request_id) if isinstance(request_id, str) else None
    if found is None:
        raise InvalidRequest(
            "request_id", f"{_shown(request_id)}, 1 to 128 characters of A-Z a-z 0-9 _ . : - are expected"
        )
    return found[0]


def check_traceparent(traceparent: Any) -> str | None:
    """As it is. Raises `InvalidRequest` for what is none of W3C Trace Context."""
    if traceparent is None or (isinstance(traceparent, str) and _TRACEPARENT.fullmatch(traceparent)):
        return traceparent
    raise InvalidRequest("traceparent", f"{_shown(traceparent)}, such as 00-{32 * '1'}-{16 * '2'}-01 is expected")


def check_priority(priority: Any) -> int:
    _check_int("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    return int(priority)


def check_timeout(field: str, timeout_s: Any) -> float:
    """Seconds; `None` is for ever."""
    if timeout_s is None:
        return math.inf
    _check_float(field, timeout_s, 0.0, MAX_TIMEOUT_S)
    return float(timeout_s)


def _check_int(field: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(field, f"{_shown(value)}, an integer of {low} to {high} is expected")


def _check_flag(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(field, f"{_shown(value)}, True or False is expected")


def _check_float(field: str, value: Any, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(field, f"{_shown(value)}, a number of {low} to {high} is expected")


def _shown(value: Any) -> str:
    """What came, in at most `MAX_SHOWN` characters: a constant cost, and no code of the value's own class."""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int):
        bits = int.bit_length(value)
        return int.__repr__(value) if bits <= MAX_SHOWN_BITS else f"an integer of {bits} bits"
    if isinstance(value, float):
        return float.__repr__(value)
    if type(value) is str or type(value) is bytes:
        return repr(value[:MAX_SHOWN])[:MAX_SHOWN]
    return f"a {type(value).__name__}"[:MAX_SHOWN]


def _check_stop_ids(stop_ids: Any, vocab_size: int) -> None:
    field = "stop_token_ids"
    if stop_ids is None:
        return
    if isinstance(stop_ids, (str, bytes)) or not isinstance(stop_ids, Sequence):
        raise InvalidRequest(field, f"a {type(stop_ids).__name__} came, a list of token ids is expected")
    if _length(field, stop_ids) > MAX_STOP_IDS // 2:
        raise InvalidRequest(field, f"{len(stop_ids)} ids, at most {MAX_STOP_IDS // 2} are expected")
    for token in stop_ids:
        _check_int(field, token, 0, vocab_size - 1)


def _check_stop_strings(params: SamplingParams, limits: ModelLimits) -> None:
    stops = () if params.stop is None else (params.stop,) if isinstance(params.stop, str) else params.stop
    if not isinstance(stops, (list, tuple)):
        raise InvalidRequest("stop", f"a {type(stops).__name__} came, a string or a list of strings is expected")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"{len(stops)} strings, at most {MAX_STOP_STRINGS} are expected")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                "stop", f"{_shown(stop)}, a string of 1 to {MAX_STOP_CHARACTERS} characters is expected"
            )
    if stops and not (params.detokenize and limits.has_tokenizer):
        raise InvalidRequest("stop", "stop strings need text: a tokenizer, and detokenize=True")


def _too_long(num_prompt: int, limits: ModelLimits) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        "prompt", f"{num_prompt} tokens, at most {limits.max_length - 1} leave room for one more of {limits.max_length}"
    )


def _check_token_lists(params: SamplingParams, vocab_size: int) -> None:
    for field in ("allowed_token_ids", "banned_token_ids"):
        ids = getattr(params, field)
        if ids is not None:
            _check_list(field, ids, vocab_size)
            _ids(field, ids, vocab_size)
    if params.allowed_token_ids is not None and not len(params.allowed_token_ids):
        raise InvalidRequest("allowed_token_ids", "is empty: no token could be sampled")
    if params.logit_bias is not None:
        _check_bias(params.logit_bias, vocab_size)


def _check_list(field: str, ids: Any, max_ids: int) -> None:
    """A list of at most `max_ids` token ids."""
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence | array):
        raise InvalidRequest(field, f"{_shown(ids)}, a list of token ids is expected")
    if _length(field, ids) > max_ids:
        raise InvalidRequest(field, f"{len(ids)} ids, at most {max_ids} are expected")


def _length(field: str, items: Any) -> int:
    """How many `items` there are. A range may have more than `len` can say."""
    try:
        return len(items)
    except OverflowError:
        raise InvalidRequest(field, f"a {type(items).__name__} of too many items came") from None


def _ids(field: str, ids: Any, vocab_size: int) -> array[int]:
    """`ids` as int32. A few milliseconds for as many as a vocabulary has: three passes, none of them in Python."""
    try:
        column = array("i", ids)
    except (TypeError, OverflowError):
        column = None
    if column is None or (not isinstance(ids, array) and bool in set(map(type, ids))):
        raise InvalidRequest(field, f"every token id must be an integer of 0 to {vocab_size - 1}")
    if column and max(memoryview(column).cast("B").cast("I")) >= vocab_size:  # unsigned: one below 0 is large, too
        wrong = next(token for token in column if not 0 <= token < vocab_size)
        raise InvalidRequest(field, f"token id {wrong} is not in the vocabulary of 0 to {vocab_size - 1}")
    return column


def _check_bias(bias: Any, vocab_size: int) -> None:
    field = "logit_bias"
    if not isinstance(bias, Mapping):
        raise InvalidRequest(field, f"{_shown(bias)}, a mapping of token ids to biases is expected")
    if len(bias) > MAX_BIAS_IDS // 2:
        raise InvalidRequest(field, f"{len(bias)} ids, at most {MAX_BIAS_IDS // 2} are expected")
    for token, value in bias.items():
        # JSON has text for keys.
        is_text = isinstance(token, str) and len(token) <= MAX_SHOWN and token.isascii() and token.isdigit()
        _check_int(field, int(token) if is_text else token, 0, vocab_size - 1)
        _check_float(field, value, -MAX_BIAS, MAX_BIAS)
    if len({int(token) for token in bias}) < len(bias):
        raise InvalidRequest(field, "a token has two biases")


def _check_bad_words(words: Any, limits: ModelLimits) -> None:
    field = "bad_words"
    if words is None:
        return
    if not isinstance(words, (list, tuple)):
        raise InvalidRequest(field, f"{_shown(words)}, a list of words is expected")
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(field, f"{len(words)} words, at most {MAX_BAD_WORDS} are expected")
    num_ids = 0
    for word in words:
        if isinstance(word, str):
            if not 1 <= len(word) <= MAX_STOP_CHARACTERS or not word.strip():
                expected = f"a word of 1 to {MAX_STOP_CHARACTERS} characters is expected"
                raise InvalidRequest(field, f"{_shown(word)}, {expected}")
            if not limits.has_tokenizer:
                raise InvalidRequest(field, "words as text need a tokenizer: give token ids")
        else:
            _check_list(field, word, MAX_STOP_CHARACTERS)
            num_ids += 1 + len(word) if len(word) != 1 else 0
            _check_num_bad_word_ids(num_ids)
            _ids(field, word, limits.vocab_size)
            if not len(word):
                raise InvalidRequest(field, "a word without tokens")


def _check_num_bad_word_ids(num_ids: int) -> None:
    if num_ids > MAX_BAD_WORD_IDS:
        raise InvalidRequest("bad_words", f"{num_ids} token ids and lengths, at most {MAX_BAD_WORD_IDS} are expected")


def _shaping(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], stop_ids: frozenset[int], vocab_size: int
) -> LogitShaping | None:
    """`None` if there is nothing to do. Raises `InvalidRequest`."""
    bias_ids, bias_values, allowed_bits = _choices(params, bad_words, stop_ids, vocab_size)
    shaping = LogitShaping(
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        bias_ids=bias_ids,
        bias_values=bias_values,
        allowed_bits=allowed_bits,
        bad_words=_pack_words([word for word in bad_words if len(word) > 1]),
    )
    return None if shaping == LogitShaping() else shaping


def _choices(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], stop_ids: frozenset[int], vocab_size: int
) -> tuple[bytes, bytes, bytes]:
    """Which tokens may be sampled, for the device: ids with a bias, their biases, one bit a token that is allowed.

    Bans travel as biases, or as bits where there are many or some tokens only are allowed. Raises `InvalidRequest`
    where nothing is left.
    """
    banned = {int(token) for token in params.banned_token_ids or ()} | {word[0] for word in bad_words if len(word) == 1}
    allowed = None if params.allowed_token_ids is None else set(map(int, params.allowed_token_ids)) - banned
    if allowed is not None and not allowed:
        raise InvalidRequest("allowed_token_ids", "every token of it is banned: no token could be sampled")
    if len(banned) >= vocab_size:
        raise InvalidRequest("banned_token_ids", "every token is banned: no token could be sampled")
    if params.min_tokens and allowed is not None and allowed <= stop_ids:
        raise InvalidRequest("min_tokens", f"{params.min_tokens}, every allowed token ends the sample")
    bits = b""
    if allowed is not None or len(banned) > MAX_BIAS_IDS // 2:
        bits = _bits(allowed if allowed is not None else set(range(vocab_size)) - banned, vocab_size)
        banned = set()
    biases = {int(token): float(value) for token, value in (params.logit_bias or {}).items()}
    biases |= dict.fromkeys(banned, -math.inf)
    ids = sorted(biases)
    return pack_int32(ids), pack_float32([biases[token] for token in ids]), bits


def _bits(tokens: Iterable[int], vocab_size: int) -> bytes:
    """One bit a token, least significant first, in whole words of 32."""
    num_bytes = 4 * -(-vocab_size // 32)
    if num_bytes > MAX_MASK_BYTES:
        raise InvalidRequest("allowed_token_ids", f"a vocabulary of {vocab_size} tokens is too large for it")
    digits = bytearray(b"0") * vocab_size
    for token in tokens:
        digits[token] = 0x31
    digits.reverse()
    return int(digits, 2).to_bytes(num_bytes, "little")


def _pack_words(words: Sequence[Sequence[int]]) -> bytes:
    flat = [number for word in words for number in (len(word), *word)]
    _check_num_bad_word_ids(len(flat))
    return pack_int32(flat)


def _sample_seeds(params: SamplingParams) -> list[int]:
    """63 bits a sample: of the request's seed, or of the operating system's generator."""
    mask = 2**SEED_BITS - 1
    if params.seq_seed is not None:
        return [(int(params.seq_seed) + index * _SAMPLE_STRIDE) & mask for index in range(params.n)]
    if not params.temperature:
        return [0] * params.n
    return [random.SystemRandom().getrandbits(SEED_BITS) for _ in range(params.n)]
