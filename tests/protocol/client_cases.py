"""Messages of the client wire at their usual and at their limits, and frames that are none.

What a golden frame holds is decided here; `protocol.client_frames` turns it into lines. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from deepinfer_protocol import SamplingParams, pack_int32
from deepinfer_protocol.client import (
    Bye,
    Cancel,
    ClientMessage,
    Delta,
    Error,
    ErrorCode,
    Finish,
    GoAway,
    Grant,
    Hello,
    Limits,
    Logprob,
    Ping,
    Pong,
    Reject,
    Resume,
    ServerMessage,
    Submit,
    Timings,
    Usage,
    Welcome,
    encode,
)
from deepinfer_protocol.client.limits import MAX_DEPTH, MAX_INT, MAX_ITEMS, MAX_KEY_BYTES
from deepinfer_protocol.limits import INT32_MAX

SESSION: Final = "c0ffee00c0ffee00c0ffee00c0ffee00"
LOWEST: Final = -3.4028234663852886e38
TOOL: Final = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
LIMITS: Final = Limits(
    max_frame_bytes=4_194_304,
    max_streams=256,
    retention_ms=30_000,
    max_unacked_tokens=4096,
    ping_ms=1000,
    idle_ms=10_000,
)
WELCOME: Final = Welcome(
    version=1,
    engine="5f1d0c2ab4e67788",
    server="deepinfer 0.1.0",
    model="smollm2-135m",
    vocab_size=49_152,
    max_length=8192,
    limits=LIMITS,
    has_tokenizer=True,
    has_chat=True,
)
HELLO: Final = Hello(min_version=1, max_version=1, session=SESSION, client="python 0.1.0")
SUBMIT: Final = Submit(id="r1", prompt="The capital of France is", sampling=SamplingParams(max_tokens=8))
DELTA: Final = Delta(id="r1", seq=3, index=3, token_ids=pack_int32([260, 7]), text=" Paris.")
KNOWN: Final = Delta(
    id="r1",
    seq=0,
    token_ids=pack_int32([5]),
    text="a",
    logprobs=[Logprob(5, -0.25, 1, [(5, -0.25), (9, LOWEST)])],
)
FINISH: Final = Finish(
    id="r1",
    reason="stop",
    seq=4,
    usage=Usage(prompt_tokens=5, cached_tokens=4, generated_tokens=8, preemptions=1),
    timings=Timings(first_token_us=1500, total_us=90_000),
)
REJECT: Final = Reject(
    code=2, name="E_VERSION", text="no version of the wire that both ends speak", min_version=1, max_version=1
)
ERROR: Final = Error.of(
    ErrorCode.E_INVALID_PARAM, "r1", field="temperature", detail="temperature: -1.0, 0.0 to 100.0 is allowed"
)


def forced(**into: Any) -> Submit:
    return Submit(id="r4", prompt="x", sampling=SamplingParams(**into))


def from_client() -> dict[str, ClientMessage]:
    """Every kind that a client sends."""
    everything = SamplingParams(
        max_tokens=100,
        min_tokens=2,
        temperature=0.75,
        top_p=0.5,
        top_k=40,
        min_p=0.125,
        repetition_penalty=1.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": 1.5, "7": -100.0},
        allowed_token_ids=[1, 2, 3],
        banned_token_ids=[4],
        bad_words=["bad", [5, 6]],
        n=2,
        stop=["\n\n", "END"],
        stop_token_ids=[2],
        include_stop_str_in_output=True,
        ignore_eos=True,
        logprobs=3,
        seq_seed=2**63 - 1,
        skip_special_tokens=False,
        skip_reading_prefix_cache=True,
        detokenize=False,
    )
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Wie ist das Wetter in Köln?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12 °C"},
    ]
    return {
        "hello": HELLO,
        "hello of many versions": msgspec.structs.replace(HELLO, min_version=1, max_version=65_535),
        "hello with a token": msgspec.structs.replace(HELLO, token="s3cret"),
        "hello with the shortest session": msgspec.structs.replace(HELLO, session="abcDEF-_01234567"),
        "hello with the longest session": msgspec.structs.replace(HELLO, session="s" * 64, client="c" * 256),
        "submit of text": SUBMIT,
        "submit of empty text": Submit(id="r1", prompt=""),
        "submit of text in many scripts": Submit(id="r1", prompt="ошибка 错误 \N{COLLISION SYMBOL} \0 \u200f"),
        "submit of token ids": Submit(id="r2", token_ids=pack_int32([1, 2, 3])),
        "submit of no token ids": Submit(id="r2", token_ids=b""),
        "submit of the largest token id": Submit(id="r2", token_ids=pack_int32([0, INT32_MAX])),
        "submit of 300 token ids": Submit(id="r2", token_ids=pack_int32(list(range(300)))),
        "submit of messages": Submit(id="r3", messages=[{"role": "user", "content": "Hello"}]),
        "submit of messages with tools": Submit(
            id="r3", messages=talk, tools=[TOOL], tool_choice="auto", thinking=True, reasoning_effort="high"
        ),
        "submit with a chosen tool": Submit(
            id="r3",
            messages=talk[:1],
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            thinking=False,
        ),
        "submit with all sampling": Submit(id="r4", prompt="x", sampling=everything),
        "submit greedy": Submit(id="r4", prompt="x", sampling=SamplingParams(temperature=0.0)),
        "submit with one stop string": Submit(id="r4", prompt="x", sampling=SamplingParams(stop="END")),
        "submit with a schema": forced(json_schema='{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        "submit with a schema that all satisfies": forced(json_schema=True),
        "submit with a regex": forced(regex=r"\d{4}-\d{2}"),
        "submit with a choice": forced(choice=["yes", "no", "vielleicht schön"]),
        "submit with a grammar": forced(grammar='start: "a" | "b"'),
        "submit resumable": Submit(id="r5", prompt="x", resumable=True, credit=16),
        "submit without credit": Submit(id="r5", prompt="x", credit=0),
        "submit with deadlines": Submit(id="r5", prompt="x", timeout_ms=60_000, queue_timeout_ms=5000, priority=-3),
        "submit with a trace": Submit(
            id="r5", prompt="x", traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        ),
        "submit at its limits": Submit(
            id="Z" * 64,
            prompt="x",
            priority=1_000_000,
            timeout_ms=INT32_MAX,
            queue_timeout_ms=0,
            resumable=True,
            credit=INT32_MAX,
        ),
        "cancel": Cancel(id="r1"),
        "cancel of the longest id": Cancel(id="-_" * 32),
        "credit": Grant(id="r1", limit=2048),
        "credit with an ack": Grant(id="r1", limit=2048, ack=17),
        "credit of nothing": Grant(id="r1", limit=0),
        "credit at its limits": Grant(id="r1", limit=INT32_MAX, ack=INT32_MAX),
        "resume": Resume(id="r1", next=17, limit=2048),
        "resume from the start": Resume(id="r1", next=0, limit=0),
        "resume at its limits": Resume(id="r1", next=INT32_MAX, limit=INT32_MAX),
        "ping": Ping(),
        "ping with a nonce": Ping(nonce=12_345_678_901),
        "ping at its limits": Ping(nonce=MAX_INT),
        "bye": Bye(),
    }


def from_server() -> dict[str, ServerMessage]:
    """Every kind that a server sends."""
    replace = msgspec.structs.replace
    return {
        "welcome": WELCOME,
        "welcome without a tokenizer": replace(WELCOME, has_tokenizer=False, has_chat=False),
        "welcome at its limits": Welcome(
            version=65_535,
            engine="e" * 256,
            server="s" * 256,
            model="m" * 256,
            vocab_size=INT32_MAX,
            max_length=INT32_MAX,
            limits=Limits(**dict.fromkeys(Limits.__struct_fields__, INT32_MAX)),
        ),
        "reject": REJECT,
        "reject for a while": Reject(
            code=31, name="E_SHUTDOWN", text="the server is shutting down", min_version=1, max_version=3,
            retryable=True, retry_after_ms=5000,
        ),
        "delta": DELTA,
        "delta of one token": Delta(id="r1", seq=0, token_ids=pack_int32([9]), text="x"),
        "delta of a token without text": Delta(id="r1", seq=1, index=1, token_ids=pack_int32([9])),
        "delta of text without a token": Delta(id="r1", seq=2, index=2, text="held back"),
        "delta of nothing but the end": Delta(id="r1", seq=3, index=2, reason="length"),
        "delta of the second sample": Delta(id="r1", seq=4, sample=1, index=7, token_ids=pack_int32([1]), text="é"),
        "delta with logprobs": KNOWN,
        "delta with logprobs and no best": replace(KNOWN, logprobs=[Logprob(5, 0.0, 1, [])]),
        "delta that ends at a stop string": Delta(id="r1", seq=5, index=9, text="x", reason="stop", stop="END"),
        "delta that ends at a stop token": Delta(id="r1", seq=5, index=9, reason="stop", stop=2),
        "delta that ends by the model": Delta(id="r1", seq=5, index=9, token_ids=pack_int32([2]), reason="stop"),
        "delta that was cancelled": Delta(id="r1", seq=5, index=9, reason="abort"),
        "delta at its limits": Delta(
            id="i" * 64, seq=INT32_MAX, sample=127, index=INT32_MAX, token_ids=pack_int32([INT32_MAX]),
            text="\N{COLLISION SYMBOL}", reason="slow_consumer",
        ),
        "delta of 300 tokens": Delta(id="r1", seq=1, token_ids=pack_int32(list(range(300))), text="y" * 300),
        "finish": FINISH,
        **{
            f"finish by {reason}": Finish(id="r1", reason=reason, seq=1)
            for reason in ("length", "abort", "queue_timeout", "timeout", "slow_consumer")
        },
        "finish at its limits": Finish(
            id="r1", reason="stop", seq=INT32_MAX,
            usage=Usage(INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX), timings=Timings(MAX_INT, MAX_INT),
        ),
        "error": ERROR,
        "error of no stream": Error.of(ErrorCode.E_DECODE, field="sampling.top_p"),
        **{f"error {code.name}": Error.of(code, "r1", seq=2) for code in ErrorCode},
        "error that says when": Error.of(ErrorCode.E_OVERLOADED, "r1", retry_after_ms=1500),
        "error of a later version": Error(code=9999, name="E_LATER", text="something new", id="r1"),
        "pong": Pong(nonce=1, steps=123_456, running=3, waiting=0),
        "pong of a start": Pong(),
        "pong at its limits": Pong(nonce=MAX_INT, steps=MAX_INT, running=INT32_MAX, waiting=INT32_MAX),
        "goaway": GoAway(deadline_ms=30_000),
        "goaway at once": GoAway(),
    }  # fmt: skip


class Raw(NamedTuple):
    """A frame that no encoder of ours writes."""

    sender: str
    data: bytes
    verdict: str = "E_DECODE"


NOT_NIL: Final = {
    "client": {
        **dict.fromkeys(("min_version", "max_version", "session", "client", "token"), "hello"),
        **dict.fromkeys(("id", "sampling", "priority", "resumable", "credit"), "submit"),
        "limit": "credit", "ack": "credit", "next": "resume", "nonce": "ping",
    },
    "server": {
        **dict.fromkeys(("version", "engine", "vocab_size", "limits", "has_chat"), "welcome"),
        **dict.fromkeys(("code", "name", "retryable", "retry_after_ms", "field", "detail"), "error"),
        **dict.fromkeys(("id", "seq", "sample", "index", "token_ids", "text"), "delta"),
        "reason": "finish", "usage": "finish", "timings": "finish", "steps": "pong", "deadline_ms": "goaway",
    },
}  # fmt: skip
"""A field that may be left out may still not be nil; with a kind that has it."""


class Wrong(NamedTuple):
    """A valid message with one field changed."""

    name: str
    field: str
    value: Any


WRONG: Final[dict[str, dict[str, list[Any]]]] = {
    "hello": {
        "min_version": [0, -1, 65_536, "1", 1.5, True],
        "max_version": [0, 65_536, b"1"],
        "session": ["", "short", "s" * 65, "not a session at all", "newline-at-end16\n", 7],
        "client": ["c" * 257, 1],
        "token": ["t" * 257, b"token"],
    },
    "submit of text": {
        "id": ["", "i" * 65, "a b", "a.b", "é", "r1\n", 1, b"r1", ["r1"]],
        "prompt": [1, b"text", ["text"], {"prompt": "text"}],
        "messages": [[{"role": "user", "content": "two prompts"}]],
        "sampling": [[], "greedy", 1],
        "thinking": [1, "yes"],
        "reasoning_effort": [3, "e" * 257],
        "tools": ["tool", [1], {}],
        "tool_choice": [1, ["auto"], True],
        "priority": [1_000_001, -1_000_001, 1.5, -3.0, "high"],
        "queue_timeout_ms": [-1, 2**31, 0.5],
        "timeout_ms": [-1, 2**31, "soon"],
        "resumable": [1, "true"],
        "credit": [-1, 2**31, 2**63 - 1, 1.5, "all"],
        "traceparent": [
            "", 0, f"00-{32 * 'A'}-{16 * 'a'}-01", f"00-{32 * 'a'}-{16 * 'a'}-01-", f"00-{32 * 'a'}-{16 * 'a'}-01\n",
            f"00{35 * 'a'}-{16 * 'a'}-01", f"00-{32 * 'a'}-{16 * 'é'}-01", b"00",
        ],
        "unknown": [1],
        "Prompt": ["in capitals"],
    },
    "submit of token ids": {
        "token_ids": ["text", [1, 2, 3], b"abc", pack_int32([1, -1]), pack_int32([-(2**31)]), 5],
        "prompt": ["two prompts"],
    },
    "submit of messages": {
        "messages": [[], "Hello", ["Hello"], {"role": "user"}, [[]], [None]],
        "token_ids": [pack_int32([1])],
    },
    "cancel": {"id": ["", "a/b", None], "limit": [1]},
    "credit": {"limit": [-1, 2**31, "x", None, 1.5], "ack": [-1, 2**31, True], "id": ["", 5]},
    "resume": {"next": [-1, 2**31, "x", None], "limit": [-1, 2**31], "ack": [0]},
    "ping": {"nonce": [-1, 2**53, "x", b"x"], "id": ["r1"]},
    "bye": {"reason": ["tired"]},
    "welcome": {
        "version": [0, 65_536, "1"],
        "engine": ["e" * 257, 5],
        "vocab_size": [-1, 2**31, 1.5],
        "max_length": [-1, "long"],
        "has_chat": [1, "yes"],
        "limits": [[], 5, {}, {"max_frame_bytes": 1}],
    },
    "reject": {"code": [-1, "2", 2**31], "text": ["t" * 513, 5], "min_version": [0], "retryable": [1]},
    "delta": {
        "id": ["", "a b", 5],
        "seq": [-1, 2**31, "3", 1.5, 3.0],
        "sample": [-1, 128, "0", 0.0],
        "index": [-1, 2**31],
        "token_ids": ["text", [260, 7], b"abc", pack_int32([-5])],
        "text": [5, b"bytes", ["x"]],
        "logprobs": [[], {}, "x", [[260, -0.5, 1, []]]],
        "reason": ["tired", 5, ""],
        "stop": [-1, 1.5, 5.0, b"END", ["END"]],
    },
    "delta with logprobs": {
        "logprobs": [
            [[5, -0.25, 1]], [[5, "x", 1, []]], [[-5, -0.25, 1, []]], [[5, -0.25, -1, []]], [[5, -0.25, 1, [[5]]]],
            [[5, -0.25, 1, [[5, -0.25]] * 21]], [{"token_id": 5}], [[5, -0.25, 1, []]] * 2,
            [[5.0, -0.25, 1, []]], [[5, 0.0, 1.0, []]], [[5, 0.0, 1, [[5.0, 0.0]]]],
        ],
    },
    "finish": {
        "id": ["", None],
        "reason": ["done", "STOP", 1, ""],
        "seq": [-1, 2**31],
        "usage": [[], {"prompt_tokens": -1}, {"generated_tokens": "8"}, {"cached_tokens": None}],
        "timings": [5, {"total_us": -1}, {"first_token_us": 2**53}],
    },
    "error": {"id": ["a b", 5, "i" * 65], "code": [-1, "E_DECODE", 2**31], "name": ["n" * 257], "retryable": ["no"]},
    "pong": {"nonce": [-1, 2**53], "steps": [-1, "many"], "running": [2**31], "waiting": [-1]},
    "goaway": {"deadline_ms": [-1, 2**31, "now"]},
}  # fmt: skip

MISSING: Final = {
    "hello": ["min_version", "max_version", "session"],
    "submit of text": ["id", "prompt"],
    "cancel": ["id"],
    "credit": ["id", "limit"],
    "resume": ["id", "next", "limit"],
    "welcome": ["version", "engine", "server", "model", "vocab_size", "max_length", "limits"],
    "reject": ["code", "name", "text", "min_version", "max_version"],
    "delta": ["id", "seq"],
    "finish": ["id", "reason"],
    "error": ["code", "name", "text"],
}


def changed(base: ClientMessage | ServerMessage, **fields: Any) -> bytes:
    """`base` with fields set to anything at all."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode(base)) | fields)


def wrong_fields() -> Iterator[tuple[str, Raw]]:
    """Every field with every value that it may not have, and without it where it must be."""
    for sender, messages in (("client", from_client()), ("server", from_server())):
        for name, fields in WRONG.items():
            for field, values in fields.items() if name in messages else ():
                for place, value in enumerate(values):
                    yield f"{name}: {field} wrong {place}", Raw(sender, changed(messages[name], **{field: value}))
        for name, missing in MISSING.items():
            for field in missing if name in messages else ():
                tree = msgspec.msgpack.decode(encode(messages[name]))
                del tree[field]
                yield f"{name}: without {field}", Raw(sender, msgspec.msgpack.encode(tree))
        for field, kind in NOT_NIL[sender].items():
            base = next(message for name, message in messages.items() if name.split()[0] == kind)
            yield f"{kind}: {field} nil", Raw(sender, changed(base, **{field: None}))


def sampling_wrong() -> Iterator[tuple[str, Raw]]:
    """Types are the decoder's to refuse; what suits the model is the engine's."""
    for place, sampling in enumerate(
        (
            {"max_tokens": "8"}, {"max_tokens": 1.5}, {"max_tokens": 8.0}, {"stop_token_ids": [2.0]},
            {"temperature": "hot"}, {"temperature": True}, {"n": None},
            {"stop": 5}, {"stop": [5]}, {"stop_token_ids": ["x"]}, {"logit_bias": [5]}, {"logit_bias": {"5": "x"}},
            {"bad_words": [1.5]}, {"ignore_eos": 1}, {"seq_seed": "x"}, {"unknown": 1}, {"maxTokens": 5},
            {"stop": b"END"}, {"allowed_token_ids": pack_int32([1])},
            {"json_schema": 5}, {"json_schema": ["x"]}, {"json_schema": b"{}"}, {"json_schema": {"a": b"x"}},
            {"regex": 5}, {"regex": ["x"]}, {"choice": "yes"}, {"choice": [1]}, {"choice": {}}, {"grammar": {}},
        )
    ):  # fmt: skip
        yield f"submit: sampling wrong {place}", Raw("client", changed(SUBMIT, sampling=sampling))


def map_of(*pairs: tuple[bytes, bytes]) -> bytes:
    """A map of encoded keys and values, in this order, whatever they are."""
    return bytes([0x80 + len(pairs)]) + b"".join(key + value for key, value in pairs)


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


KIND: Final = packed("kind")


def broken() -> Iterator[tuple[str, Raw]]:
    """Frames that are not built as every frame must be, from either side."""
    ping, pong = (KIND, packed("ping")), (KIND, packed("pong"))
    nested = packed("x")
    for _ in range(MAX_DEPTH - 3):
        nested = b"\x91" + nested
    submit = (KIND, packed("submit")), (packed("id"), packed("r1"))
    deep = map_of(*submit, (packed("messages"), b"\x91\x81\xa1a" + nested))
    deeper = map_of(*submit, (packed("messages"), b"\x91\x81\xa1a\x91" + nested))
    many = packed({"kind": "pong", "later": [None] * (MAX_ITEMS - 5)})
    too_many = packed({"kind": "pong", "later": [None] * (MAX_ITEMS - 4)})
    yield "as deep as may be", Raw("client", deep, "ok")
    yield "deeper than may be", Raw("client", deeper)
    yield "as many values as may be", Raw("server", many, "ok")
    yield "more values than may be", Raw("server", too_many)
    yield "the longest key", Raw("server", map_of(pong, (packed("k" * MAX_KEY_BYTES), b"\x01")), "ok")
    yield "a key too long", Raw("server", map_of(pong, (packed("k" * (MAX_KEY_BYTES + 1)), b"\x01")))
    for sender, kind in (("client", ping), ("server", pong)):
        nonce = packed("nonce")
        for name, data in {
            "nothing": b"",
            "nil": b"\xc0",
            "an array": b"\x91" + KIND,
            "text": KIND,
            "a number": b"\x07",
            "an empty map": b"\x80",
            "a map without a kind": map_of((nonce, b"\x01")),
            "a kind that is a number": map_of((KIND, b"\x01")),
            "a kind that is nil": map_of((KIND, b"\xc0")),
            "a kind that is bytes": map_of((KIND, b"\xc4\x04ping")),
            "an empty kind": map_of((KIND, b"\xa0")),
            "a key twice": map_of(kind, (nonce, b"\x01"), (nonce, b"\x02")),
            "a key twice with the same value": map_of(kind, (nonce, b"\x01"), (nonce, b"\x01")),
            "a key twice in two encodings": map_of(kind, (nonce, b"\x01"), (b"\xd9\x05nonce", b"\x01")),
            "the kind twice": map_of(kind, kind),
            "a key that is a number": map_of(kind, (b"\x01", b"\x01")),
            "a key that is bytes": map_of(kind, (b"\xc4\x05nonce", b"\x01")),
            "a key that is nil": map_of(kind, (b"\xc0", b"\x01")),
            "text that is no UTF-8": map_of((KIND, b"\xa4p\xffng")),
            "a key that is no UTF-8": map_of(kind, (b"\xa2\xc3\x28", b"\x01")),
            "a surrogate": map_of(kind, (b"\xa3\xed\xa0\x80", b"\x01")),
            "a number that is none": map_of(kind, (nonce, b"\xcb\x7f\xf8\0\0\0\0\0\0")),
            "a short number that is none": map_of(kind, (nonce, b"\xca\x7f\xc0\0\0")),
            "an infinite number": map_of(kind, (nonce, b"\xcb\x7f\xf0\0\0\0\0\0\0")),
            "a number below all": map_of(kind, (nonce, b"\xca\xff\x80\0\0")),
            "a number of 64 bits": map_of(kind, (nonce, b"\xcf" + b"\xff" * 8)),
            "a timestamp": map_of(kind, (nonce, b"\xd6\xff\0\0\0\0")),
            "an extension": map_of(kind, (nonce, b"\xc7\x01\x05\x00")),
            "the byte that msgpack does not have": map_of(kind, (nonce, b"\xc1")),
            "a byte behind it": map_of(kind) + b"\x00",
            "itself twice": map_of(kind) * 2,
            "a map that ends early": b"\x82" + map_of(kind)[1:],
            "a text that ends early": map_of(kind)[:-1],
            "a length that ends early": map_of(kind, (nonce, b"\xda\x00")),
            "a number that ends early": map_of(kind, (nonce, b"\xcd\x01")),
            "a map of many": b"\xdf\xff\xff\xff\xff" + map_of(kind)[1:],
            "an array of many": map_of(kind, (nonce, b"\xdd\xff\xff\xff\xff")),
            "a text of many": map_of(kind, (nonce, b"\xdb\xff\xff\xff\xff")),
            "bytes of many": map_of(kind, (nonce, b"\xc6\xff\xff\xff\xff")),
            "arrays in arrays": map_of(kind, (nonce, b"\x91" * 300 + b"\x01")),
            "maps in maps": map_of(kind, (nonce, b"\x81\xa1a" * 300 + b"\x01")),
        }.items():
            yield f"{name}, from the {sender}", Raw(sender, data)
    for sender, kinds in (("client", ("unknown", "Ping", "delta", "welcome", "pong")), ("server", ("new", "submit"))):
        for kind_name in kinds:
            yield (
                f"a kind {kind_name} from the {sender}",
                Raw(sender, map_of((KIND, packed(kind_name))), "E_UNKNOWN_KIND"),
            )
    yield "bytes in messages", Raw("client", changed(Submit(id="r", messages=[{"a": 1}]), messages=[{"a": b"x"}]))
    yield "a pickle", Raw("client", bytes.fromhex("80049501000000000000008c0a"))
    yield "a line of HTTP", Raw("client", b"GET / HTTP/1.1\r\n\r\n")
    yield "JSON", Raw("client", b'{"kind": "ping"}')


def otherwise() -> Iterator[tuple[str, Raw]]:
    """Other ways to write a valid message, and fields of later versions."""
    yield "kind last", Raw("client", map_of((packed("nonce"), b"\x05"), (KIND, packed("ping"))), "ok")
    yield (
        "wide encodings",
        Raw("client", b"\xdf\0\0\0\2\xdb\0\0\0\4kind\xd9\x04ping\xda\0\5nonce\xd3\0\0\0\0\0\0\0\5", "ok"),
    )
    yield "wide bytes", Raw(
        "server", map_of((KIND, packed("delta")), (b"\xa2id", b"\xa1a"), (b"\xa3seq", b"\xcd\0\1"),
                         (b"\xa9token_ids", b"\xc6\0\0\0\4\5\0\0\0")), "ok",
    )  # fmt: skip
    yield "a default that is written", Raw("client", changed(SUBMIT, resumable=False, credit=1024), "ok")
    yield "nil where it may be", Raw("client", changed(SUBMIT, token_ids=None, thinking=None, timeout_ms=None), "ok")
    yield "a whole number for another", Raw("client", changed(SUBMIT, sampling={"temperature": 1}), "ok")
    yield "a short float", Raw(
        "client", packed({"kind": "submit", "id": "r1", "prompt": "x"})[:0]
        + map_of((KIND, packed("submit")), (packed("id"), packed("r1")), (packed("prompt"), packed("x")),
                 (packed("sampling"), b"\x81" + packed("temperature") + b"\xca\x3f\x00\0\0")), "ok",
    )  # fmt: skip
    yield (
        "a schema as a map",
        Raw(
            "client", changed(SUBMIT, sampling={"json_schema": {"type": "object", "required": ["a"], "b": None}}), "ok"
        ),
    )
    yield (
        "an empty choice and an empty regex",
        Raw("client", changed(SUBMIT, sampling={"choice": [], "regex": ""}), "ok"),
    )
    yield "a hello of a later version", Raw("client", changed(HELLO, max_version=9, features=["later", {"x": 1}]), "ok")
    for name, message in from_server().items():
        if name in ("welcome", "reject", "delta", "finish", "error", "pong", "goaway"):
            yield f"a {name} of a later version", Raw("server", changed(message, later={"a": [1, None, "x"]}), "ok")
    yield (
        "limits of a later version",
        Raw("server", changed(WELCOME, limits=msgspec.structs.asdict(LIMITS) | {"later": 1}), "ok"),
    )
    yield "submit with headers of 16 bits", Raw("client", encode(SUBMIT), "ok")
    yield "versions upside down", Raw("client", changed(HELLO, min_version=3, max_version=2))


def raw() -> dict[str, Raw]:
    """Everything that is no plain encoding of a message."""
    cases = [*wrong_fields(), *sampling_wrong(), *broken(), *otherwise()]
    named = dict(cases)
    assert len(named) == len(cases), "two cases have one name"
    return named
