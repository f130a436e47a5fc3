"""The HTTP server as an ASGI app over an engine that is open: OpenAI's and Anthropic's APIs, health, metrics, tokens.

    async with Engine("v41-nano") as engine:
        await uvicorn.Server(uvicorn.Config(http_app(engine), lifespan="off")).serve()

Listens nowhere by itself, and the engine stays its owner's. Needs the `server` extra.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deepinfer.admission import check_token_ids
from deepinfer.engine import Engine
from deepinfer.errors import ContextLengthExceeded, InvalidRequest
from deepinfer.http.answer import Answer, BatchAnswer
from deepinfer.http.body import BodyReader
from deepinfer.http.codec import CHAT, MESSAGES, RESPONSES, Api, Codec
from deepinfer.http.completions import AskedCompletion, CompletionExchange, CompletionPrompt, ask_completion
from deepinfer.http.config import HttpConfig
from deepinfer.http.exchange import ConversationExchange
from deepinfer.http.fault import HttpFault
from deepinfer.http.fields import MAX_IDS, DetokenizeFields, TokenizeFields, decode_fields
from deepinfer.http.gate import Gate
from deepinfer.http.metrics import HttpMetrics
from deepinfer.http.note import Asked, Note
from deepinfer.http.page import figures, page_endpoints
from deepinfer.http.threads import BodyThreads
from deepinfer.intake import Prompt
from deepinfer.metrics import Metric
from deepinfer.stream import TokenStream
from deepinfer.text import TextPipeline
from deepinfer_protocol import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from deepinfer.http.tracing import Spans

PROMPTS_A_TURN: Final = 4
"""Of a completion with several, that are submitted in one turn of the loop."""


def http_app(
    engine: Engine,
    config: HttpConfig | None = None,
    *,
    tracer_provider: TracerProvider | None = None,
    more_metrics: Callable[[], Mapping[str, Metric]] = dict,
) -> Starlette:
    """An app over `engine`, which is open and runs on the loop that the app will run on, or on its own thread.

    With OpenTelemetry's `tracer_provider` every POST becomes a span of it; that needs the `tracing` extra. `/metrics`
    has what `more_metrics` returns, too: a `WireServer`'s, for one.
    Raises `EngineClosed` for an engine that is not open, `ModelError` where deepseek-recipe is not installed.
    """
    return _Server(engine, config or HttpConfig(), more_metrics).app(_spans(tracer_provider))


def _spans(provider: TracerProvider | None) -> Spans | None:
    if provider is None:
        return None
    from deepinfer.http.tracing import Spans

    return Spans(provider)


class _Server:
    """The endpoints."""

    def __init__(self, engine: Engine, config: HttpConfig, more_metrics: Callable[[], Mapping[str, Metric]]) -> None:
        self._engine = engine
        self._config = config
        self._more_metrics = more_metrics
        self._names = config.served_names or (served_name(engine.config.model),)
        self._codec = Codec(engine.text, engine.limits, self._names)
        self._bodies = BodyReader(config)
        self._threads = BodyThreads()
        self._created = int(time.time())

    def app(self, spans: Spans | None) -> Starlette:
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/chat/completions": self._conversation(CHAT),
            "/v1/responses": self._conversation(RESPONSES),
            "/v1/messages": self._conversation(MESSAGES),
            "/v1/messages/count_tokens": self._count_tokens,
            "/v1/completions": self._complete,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
            **page_endpoints(),
            "/stats": self._stats,
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._model,
            "/health": self._health,
            "/metrics": self._scrape,
        }
        routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
        routes += [Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()]
        self._metrics = HttpMetrics([*posts, *gets])
        gate = Middleware(Gate, config=self._config, metrics=self._metrics, spans=spans)
        return Starlette(routes=routes, middleware=[gate], exception_handlers={HTTPException: _leave_to_gate})

    # ---- conversations and completions

    def _conversation(self, api: Api) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            async with self._bodies.read(request) as body:
                asked = await self._threads.run(partial(self._codec.ask, api), body)
            note, fields = _note(request), asked.converted.fields
            response_id = api.id_prefix + note.request_id
            note.asked = Asked("chat", fields.model, asked.params, bool(fields.stream), response_id)
            exchange = ConversationExchange(self._codec, asked, response_id)
            stream = self._stream(note.request_id, asked.prompt, asked.params, fields.priority or 0)
            return Answer(stream, exchange, self._config, is_stream=bool(fields.stream))

        return answer

    async def _complete(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            asked, prompts = await self._threads.run(self._ask_completion, body)
        note, fields, priority = _note(request), asked.fields, asked.fields.priority or 0
        response_id = f"cmpl-{note.request_id}"
        note.asked = Asked("text_completion", fields.model, asked.params, bool(fields.stream), response_id)
        exchanges = [
            CompletionExchange(asked, prompt.text, response_id, place * asked.params.n)
            for place, prompt in enumerate(prompts)
        ]
        streams: list[TokenStream] = []
        for place, prompt in enumerate(prompts):
            streams.append(self._stream(f"{note.request_id}-{place}", prompt.token_ids, asked.params, priority))
            if len(streams) % PROMPTS_A_TURN == 0:
                await asyncio.sleep(0)
        if len(streams) > 1:
            return BatchAnswer(streams, exchanges)
        return Answer(streams[0], exchanges[0], self._config, is_stream=bool(fields.stream))

    def _ask_completion(self, body: bytes) -> tuple[AskedCompletion, list[CompletionPrompt]]:
        asked = ask_completion(body, self._engine.limits.max_length)
        self._codec.check_model(asked.fields.model)
        echoes = bool(asked.fields.echo)
        return asked, [self._completion_prompt(prompt, echoes=echoes) for prompt in asked.prompts]

    def _completion_prompt(self, prompt: str | list[int], *, echoes: bool) -> CompletionPrompt:
        """Special tokens that text spells out are read as such. Raises `InvalidRequest`."""
        text, limits = self._engine.text, self._engine.limits
        if not isinstance(prompt, str):
            ids = check_token_ids(prompt, limits)
            return CompletionPrompt(ids, _echo_of(ids, text) if echoes else "")
        if text is None:
            raise InvalidRequest("prompt", "this engine has no tokenizer: give token ids")
        self._codec.check_characters("prompt", len(prompt))
        ids = check_token_ids(text.encode(prompt, add_special_tokens=True), limits)
        return CompletionPrompt(ids, prompt if echoes else "")

    def _stream(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int) -> TokenStream:
        config = self._config
        limits: dict[str, Any] = {"queue_timeout_s": config.queue_timeout_s, "timeout_s": config.timeout_s}
        return self._engine.stream(prompt, params, request_id=request_id, priority=priority, **limits)

    # ---- tokens

    async def _count_tokens(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            ids = await self._threads.run(partial(self._count, MESSAGES), body)
        return _json({"input_tokens": len(ids)})

    def _count(self, api: Api, body: bytes) -> list[int]:
        return self._codec.encode(self._codec.convert(api, body).request)

    async def _tokenize(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            return await self._threads.run(self._tokens, body)

    def _tokens(self, body: bytes) -> Response:
        text, fields = self._text(), decode_fields(body, TokenizeFields)
        if fields.model is not None:
            self._codec.check_model(fields.model)
        if (fields.prompt is None) == (not bytes(fields.messages)):
            raise InvalidRequest("prompt", "give a prompt or messages, and not both")
        if fields.prompt is not None:
            self._codec.check_characters("prompt", len(fields.prompt))
            ids = text.encode(fields.prompt, add_special_tokens=fields.add_special_tokens)
        else:
            chat = {"model": self._names[0], "messages": fields.messages}
            ids = self._count(CHAT, msgspec.json.encode(chat))
        max_length = self._engine.limits.max_length
        if len(ids) > (limit := max(max_length, MAX_IDS)):
            field = "messages" if fields.prompt is None else "prompt"
            raise ContextLengthExceeded(field, f"{len(ids)} tokens, at most {limit} are listed")
        found = {"count": len(ids), "max_model_len": max_length, "tokens": ids}
        return _json(found | ({"token_strs": list(map(text.spell, ids))} if fields.return_token_strs else {}))

    async def _detokenize(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            return await self._threads.run(self._spelt, body)

    def _spelt(self, body: bytes) -> Response:
        fields = decode_fields(body, DetokenizeFields)
        if fields.model is not None:
            self._codec.check_model(fields.model)
        limits = self._engine.limits
        vocab_size, ids = limits.vocab_size, fields.ids(limits.max_length)
        if max(ids, default=0) >= vocab_size:
            raise InvalidRequest("tokens", f"{max(ids)}, ids of 0 to {vocab_size - 1} are expected")
        spelt = self._text().tokenizer.decode(ids, skip_special_tokens=fields.skip_special_tokens)
        return _json({"prompt": spelt})

    def _text(self) -> TextPipeline:
        text = self._engine.text
        if text is None:
            raise HttpFault(501, "no_tokenizer", "this model has no tokenizer")
        return text

    # ---- what is served, and how it does

    async def _models(self, request: Request) -> Response:
        found = [self._described(name) for name in self._names]
        ends = {"has_more": False, "first_id": self._names[0], "last_id": self._names[-1]}
        return _json({"object": "list", "data": found, **ends})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._codec.check_model(name)
        return _json(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        """As OpenAI has it, and as Anthropic has it."""
        openai = {"id": name, "object": "model", "created": self._created, "owned_by": "deepinfer"}
        created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))
        anthropic = {"type": "model", "display_name": name, "created_at": created_at}
        return openai | anthropic | {"max_model_len": self._engine.limits.max_length}

    async def _health(self, request: Request) -> Response:
        """Good while every step comes back in time, or none is due; a process that answers is not enough."""
        status, stalled_s = self._status()
        return _json({"status": status, "stalled_s": stalled_s}, 200 if status == "ok" else 503)

    def _status(self) -> tuple[str, float]:
        """In a word, and for how long a step has been due."""
        health = self._engine.health()
        is_stalled = health.stalled_s > self._config.stall_s
        return health.failure or ("stalled" if is_stalled else "ok"), round(health.stalled_s, 3)

    async def _stats(self, request: Request) -> Response:
        return _json({"status": self._status()[0], "time_s": time.monotonic(), **figures(self._engine)})

    async def _scrape(self, request: Request) -> Response:
        try:
            from deepinfer.prometheus import CONTENT_TYPE, exposition
        except ImportError:
            raise HttpFault(501, "no_metrics", "metrics need prometheus-client: the `metrics` extra") from None
        body = exposition(self._engine, handlers=self._metrics.snapshots(), others=self._more_metrics())
        return Response(body, headers={"content-type": CONTENT_TYPE})


def served_name(model: str) -> str:
    """What a model is called by those who ask for it: its name, or that of its folder or file."""
    return model.rstrip("/").rpartition("/")[2].removesuffix(".gguf") or model


def _echo_of(ids: Sequence[int], text: TextPipeline | None) -> str:
    """All of them at once: a character may be several tokens."""
    if text is None:
        return "".join(f"token_id:{token_id}" for token_id in ids)
    return text.tokenizer.decode(ids, skip_special_tokens=False)


def _note(request: Request) -> Note:
    note: Note = request.scope["state"]["note"]
    return note


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _leave_to_gate(request: Request, error: Exception) -> Response:
    raise error
