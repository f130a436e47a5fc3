"""The messages between a client and a server: msgpack maps, `kind` first.

Knows nothing of sockets, of sessions, or of what a request does.

What a client sends is read strictly: a field that is not known is refused, so that nothing that was asked is left out
in silence. What a server sends, and `Hello`, may have fields of later versions; whoever does not know them skips them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

from deepinfer_protocol.client.codes import RETRYABLE, TEXTS, ErrorCode
from deepinfer_protocol.client.limits import (
    MAX_CREDIT,
    MAX_DETAIL_CHARACTERS,
    MAX_FRAME_BYTES,
    MAX_ID_CHARACTERS,
    MAX_INT,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_NAME_CHARACTERS,
    MAX_PRIORITY,
    MAX_SAMPLES,
    MAX_TIMEOUT_MS,
    MAX_TOOLS,
)
from deepinfer_protocol.limits import INT32_MAX
from deepinfer_protocol.sampling import SamplingParams

CLIENT_VERSION: Final = 1
"""Of the wire. Rises when a message changes so that the other end must know; both ends may speak several."""

Id = Annotated[str, Meta(pattern=rf"^[A-Za-z0-9_-]{{1,{MAX_ID_CHARACTERS}}}\Z")]
SessionId = Annotated[str, Meta(pattern=rf"^[A-Za-z0-9_-]{{16,{MAX_ID_CHARACTERS}}}\Z")]
Version = Annotated[int, Meta(ge=1, le=65_535)]
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Int = Annotated[int, Meta(ge=0, le=MAX_INT)]
Millis = Annotated[int, Meta(ge=0, le=MAX_TIMEOUT_MS)]
Credit = Annotated[int, Meta(ge=0, le=MAX_CREDIT)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
Detail = Annotated[str, Meta(max_length=MAX_DETAIL_CHARACTERS)]
TraceParent = Annotated[str, Meta(pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")]
TokenIds = Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]
Sample = Annotated[int, Meta(ge=0, lt=MAX_SAMPLES)]

Reason = Literal["stop", "length", "abort", "queue_timeout", "timeout", "slow_consumer"]


class FromClient(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="kind", gc=False):
    """Base of what a client sends."""


class FromServer(Struct, frozen=True, omit_defaults=True, tag_field="kind", gc=False):
    """Base of what a server sends."""


# ---- from a client


class Hello(FromClient, frozen=True, tag="hello", forbid_unknown_fields=False):
    """The first message of a connection."""

    min_version: Version
    max_version: Version
    session: SessionId
    """Random, the client's own secret; the same again after a cut: its streams can be resumed by it."""
    client: Name = ""
    """Name and version, for people."""
    token: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)] = ""
    """Where a server asks for one."""


class Submit(FromClient, frozen=True, tag="submit"):
    """A request. Exactly one of `prompt`, `token_ids` and `messages` is given."""

    id: Id
    """The client's, unique in its session."""
    prompt: str | None = None
    token_ids: TokenIds | None = None
    """int32 LE."""
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    """Each with `role` and `content`, as OpenAI's clients have them."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    thinking: bool | None = None
    reasoning_effort: Name | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Name | dict[str, Any] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Lower goes first."""
    queue_timeout_ms: Millis | None = None
    timeout_ms: Millis | None = None
    """From arrival to end."""
    resumable: bool = False
    """Keep the stream when the connection is lost, for the time that `Welcome` says."""
    credit: Credit = 1024
    """Tokens that may be sent before the first `Credit`."""
    traceparent: TraceParent | None = None
    """What the client's own trace calls this request: W3C Trace Context."""


class Cancel(FromClient, frozen=True, tag="cancel"):
    """End a stream. Always answered by a `Finish`."""

    id: Id


class Grant(FromClient, frozen=True, tag="credit"):
    """How far a stream may go, and how far it has been received. Both only ever grow; lower ones change nothing."""

    id: Id
    limit: Credit
    """Tokens of all samples since the start of the stream."""
    ack: Count = 0
    """Every `Delta` with a lower `seq` has been received."""


class Resume(FromClient, frozen=True, tag="resume"):
    """Send again what was not received, and go on."""

    id: Id
    next: Count
    """`seq` of the first message that is missing."""
    limit: Credit
    """As in `Grant`."""


class Ping(FromClient, frozen=True, tag="ping"):
    """Answered by a `Pong` with the same `nonce`."""

    nonce: Int = 0


class Bye(FromClient, frozen=True, tag="bye"):
    """The session is over: its streams are ended and forgotten."""


# ---- from a server


class Limits(Struct, frozen=True, omit_defaults=True, gc=False):
    """What a server holds its clients to."""

    max_frame_bytes: Count
    max_streams: Count
    """Open at once, in a session."""
    retention_ms: Millis
    """How long a resumable stream outlives its connection, and any stream its end."""
    max_unacked_tokens: Count
    """Beyond them a resumable stream pauses, whatever its credit."""
    ping_ms: Millis
    """How often a client that says nothing else should ping."""
    idle_ms: Millis
    """A connection that was silent for so long is lost."""


class Welcome(FromServer, frozen=True, tag="welcome"):
    """A connection may be used from here on."""

    version: Version
    """The one that both ends speak from here on."""
    engine: Name
    """Other than before: this engine knows nothing of earlier streams."""
    server: Name
    """Name and version, for people."""
    model: Name
    vocab_size: Count
    max_length: Count
    """Tokens of a prompt and its answer together."""
    limits: Limits
    has_tokenizer: bool = False
    """Without one only `token_ids` can be given."""
    has_chat: bool = False
    """`messages` can be given."""


class Reject(FromServer, frozen=True, tag="reject"):
    """The answer to a `Hello` that cannot be welcomed."""

    code: Count
    name: Name
    text: Detail
    min_version: Version
    max_version: Version
    retryable: bool = False
    retry_after_ms: Millis = 0


class Logprob(Struct, frozen=True, array_like=True, gc=False):
    """What was known of one token: an array. Minus infinity is the lowest float32."""

    token_id: Count
    logprob: float
    rank: Count
    """1 is the most probable."""
    top: Annotated[list[tuple[Count, float]], Meta(max_length=MAX_LOGPROBS)]
    """Best first."""


class Delta(FromServer, frozen=True, tag="delta"):
    """What is new of one sample."""

    id: Id
    seq: Count
    """Counts the deltas of a stream from 0."""
    sample: Sample = 0
    index: Count = 0
    """Place of the first of `token_ids` among the sample's tokens."""
    token_ids: TokenIds = b""
    """int32 LE."""
    text: str = ""
    logprobs: list[Logprob] | None = None
    """One a token, if they were asked for."""
    reason: Reason | None = None
    """On the last delta of a sample."""
    stop: Count | str | None = None
    """With the reason `stop`: the stop string or token; nil for the model's own end."""


class Usage(Struct, frozen=True, omit_defaults=True, gc=False):
    """What a request took."""

    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    """Of the prompt, that a prefix hit spared."""
    generated_tokens: Count = 0
    preemptions: Count = 0


class Timings(Struct, frozen=True, omit_defaults=True, gc=False):
    """Since the request arrived, in microseconds."""

    first_token_us: Int = 0
    total_us: Int = 0


class Finish(FromServer, frozen=True, tag="finish"):
    """The last message of a stream that did not fail."""

    id: Id
    reason: Reason
    """Of the first sample."""
    seq: Count = 0
    """How many deltas there were."""
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)


class Error(FromServer, frozen=True, tag="error"):
    """With an `id`: the last message of that stream. Without: a message was not understood, and changed nothing."""

    code: Count
    name: Name
    text: Detail
    id: Annotated[str, Meta(pattern=rf"^[A-Za-z0-9_-]{{0,{MAX_ID_CHARACTERS}}}\Z")] = ""
    seq: Count = 0
    retryable: bool = False
    retry_after_ms: Millis = 0
    field: Name = ""
    """The parameter at fault."""
    detail: Detail = ""
    """What came and what is allowed."""

    @classmethod
    def of(cls, code: ErrorCode, id: str = "", **more: Any) -> Error:
        """The error with this code, in its own words."""
        return cls(id=id, code=int(code), name=code.name, text=TEXTS[code], retryable=code in RETRYABLE, **more)


class Pong(FromServer, frozen=True, tag="pong"):
    """The server's loop lives; a growing `steps` says that its engine does, too."""

    nonce: Int = 0
    steps: Int = 0
    """Of the engine since its start."""
    running: Count = 0
    waiting: Count = 0
    """Requests."""


class GoAway(FromServer, frozen=True, tag="goaway"):
    """No further request is taken. Open streams have so long to end."""

    deadline_ms: Millis = 0


ClientMessage = Hello | Submit | Cancel | Grant | Resume | Ping | Bye
ServerMessage = Welcome | Reject | Delta | Finish | Error | Pong | GoAway
