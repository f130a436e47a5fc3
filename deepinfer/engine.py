"""Engine: the user's handle. Checks what is asked, hands it to the core, gives back streams.

Knows nothing of devices or wires. Any number of engines may live in one process: nothing here is global, no signal
handler is installed, no loop policy is touched.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from deepinfer.admission import SEED_BITS, ModelLimits, check_request_id
from deepinfer.catalog import resolve
from deepinfer.chat import chat_options
from deepinfer.config import EngineConfig, resolve_config
from deepinfer.core import CoreConfig, CoreStats, EngineCore
from deepinfer.costs import CostTable
from deepinfer.deep_thread import deep_thread
from deepinfer.deepseek_chat import deepseek_family
from deepinfer.draft_settings import check_drafts, cost_table, draft_policy
from deepinfer.errors import ConfigError, DeepInferError, EngineClosed, ForkedEngine, InvalidRequest, WrongLoop
from deepinfer.fit import check_fit
from deepinfer.grammar_compiler import GrammarCompiler
from deepinfer.group import ProgressReport, WorkerGroup
from deepinfer.home import CallerLoop, OwnThread, call_threadsafe
from deepinfer.intake import Intake, Messages, Prompt
from deepinfer.many import generate_many, num_at_once
from deepinfer.mask_thread import MaskThread
from deepinfer.metrics import EngineMetrics, Metric
from deepinfer.migrating import rename_options, rename_settings
from deepinfer.observer import Observer
from deepinfer.rank import CacheShape
from deepinfer.result import Completion
from deepinfer.scheduler import Scheduler, SchedulerConfig, SchedulerStats
from deepinfer.stream import Mailbox, PromptLogprobs, TokenChunk, TokenLogprob, TokenStream
from deepinfer.text import TextPipeline
from deepinfer_protocol import Ready, SamplingParams, wire_version

FAKE_MODEL: Final = "fake"
CHUNKS_AT_ONCE: Final = 256
"""Of a stream, that become part of its completion at once."""
PROMPT_LOGPROBS_A_TURN: Final = 128
"""Entries that are made readable in one turn of the loop: a few milliseconds."""


class CacheSizes(NamedTuple):
    """What a worker's caches take, in bytes, as the worker says."""

    global_bytes_per_token: float
    """Paged rows of a token, which equal prefixes share."""
    block_bytes: int
    slot_bytes: int
    """What a running sequence keeps for itself."""


class EngineStats(NamedTuple):
    """What an engine is doing and has done."""

    scheduler: SchedulerStats
    core: CoreStats
    num_strange_frames: int
    """Frames on the engine's socket that came from none of its workers; they were not read."""
    cache: CacheSizes


class Health(NamedTuple):
    """Whether an engine serves."""

    failure: str | None
    """The code of the error that every request ends with; `None`: none does."""
    stalled_s: float
    """How long the workers have owed the answer to the step that is due next; 0 while nothing runs."""


class Engine:
    """Serves one model as streams of tokens.

    `async with Engine("smollm2-135m") as engine`, or `engine = await Engine.start(...)` and `await engine.aclose()`.
    Settings are the fields of `EngineConfig`; what is not given here comes from the environment, else is a default.
    """

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, observers: Sequence[Observer] = (), **settings: Any
    ) -> None:
        """Checks the settings; nothing is started or read. Raises `ConfigError`, which names the setting.

        `observers` (a `Trace`, for instance) hear of every step, on the core's thread.
        """
        if model is not None:
            settings["model"] = os.fspath(model)
        self.config: EngineConfig = resolve_config(rename_settings(settings))
        if not self.config.model:
            raise ConfigError("model", "no model: give a name or a path, or set DEEPINFER_HF_MODEL_DIR")
        self._metrics = EngineMetrics(has_prefix_cache=self.config.prefix_cache)
        self._observers: list[Observer] = [self._metrics, *observers]
        self._pid = os.getpid()
        self._state = _State.NEW
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    # ---- life

    @classmethod
    async def start(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        on_progress: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> Self:
        """A running engine; the caller owes it an `aclose()`. Raises `ConfigError`, `ModelError`, `EngineError`.

        `on_progress` hears a line of text now and then, on the caller's loop.
        """
        engine = cls(model, **settings)
        await engine.open(on_progress)
        return engine

    async def open(self, on_progress: Callable[[str], None] | None = None) -> None:
        """Find the model, start the workers, wait until they are ready.

        Raises `ModelError`, `EngineError`, and `ConfigError` for a setting that the model cannot have.
        """
        if self._state is not _State.NEW:
            raise EngineClosed(f"an engine is opened once; this one is {self._state}")
        self._start_threads()
        self._state = _State.STARTING
        self._starting = asyncio.create_task(self._open(_on_this_loop(on_progress)))
        try:
            await self._starting
        except BaseException as error:
            was_closed = self._state is _State.CLOSED
            self._state = _State.CLOSED
            self._release()
            is_cancelled = (task := asyncio.current_task()) is not None and task.cancelling() > 0
            if was_closed and isinstance(error, asyncio.CancelledError) and not is_cancelled:
                raise EngineClosed("the engine was closed while it started") from None
            raise

    def _start_threads(self) -> None:
        """All of them, or none."""
        with ExitStack() as undo:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="deepinfer-text")
            self._grammar_executor = deep_thread("deepinfer-grammar")
            undo.callback(self._grammar_executor.shutdown, wait=False)
            self._home: CallerLoop | OwnThread = OwnThread() if self.config.own_thread else CallerLoop()
            undo.callback(self._home.close)
            self._mask_thread = MaskThread(self._home.loop)
            undo.pop_all()

    async def _open(self, tell: Callable[[str], None]) -> None:
        run = partial(asyncio.get_running_loop().run_in_executor, self._executor)
        path = await run(self._find_model, tell)
        await run(self._check_fit, path)
        self._text = await run(self._load_text, path)
        await self._home.run(self._start_core(str(path or ""), tell))
        self._state = _State.RUNNING

    def _find_model(self, tell: Callable[[str], None]) -> Path | None:
        if self.config.model == FAKE_MODEL:
            return None
        return resolve(self.config.model, cache_dir=self.config.model_cache_dir, report=tell).path

    def _check_fit(self, path: Path | None) -> None:
        """Before anything is started, for models that may be larger than the machine. A GPU's memory is a worker's."""
        check_drafts(self.config, path)
        has_weights = path is not None and path.is_dir() and self.config.load_format != "dummy"
        if path is not None and has_weights and deepseek_family(path) is not None:
            check_fit(path, self.config.num_workers, counts_memory=self.config.accelerator == "cpu")

    def _load_text(self, path: Path | None) -> TextPipeline | None:
        if self.config.tokenizer:
            own = resolve(self.config.tokenizer, cache_dir=self.config.model_cache_dir, report=lambda _: None).path
            return TextPipeline(own, path)
        if self.config.load_format == "dummy" and path is not None and not (path / "tokenizer.json").is_file():
            return None  # random weights have nothing to say: token ids will do
        return None if path is None else TextPipeline(path)

    async def _start_core(self, path: str, tell: Callable[[str], None]) -> None:
        """On the core's loop."""
        config = self.config
        self._group = WorkerGroup(config, path, wire_version())
        ready = await self._group.wait_ready(config.start_timeout_s, _in_words(tell))
        self._limits = _limits(ready, self._text)
        self._device = ready[0].device
        self._cache = CacheSizes(ready[0].global_bytes_per_token, ready[0].block_bytes, ready[0].slot_bytes)
        shapes = [_shape(rank, config) for rank in ready]
        drafts = [draft_policy(config, rank.num_drafts, rank.costs) for rank in ready]
        self._costs = cost_table(config, ready[0].costs) if ready[0].num_drafts else None
        scheduler = Scheduler(_scheduler_config(config), shapes, epoch=self._group.epoch, drafts=drafts)
        self._core = EngineCore(
            scheduler,
            self._group.link,
            self._home.loop,
            _core_config(config),
            self._observers,
            fill_masks=self._mask_thread.fill,
        )
        self._core.on_failure = self._group.supervisor.kill
        next_seed = None if config.seed < 0 else partial(random.Random(config.seed).getrandbits, SEED_BITS)
        read_tokenizer = None if self._text is None else self._text.tokenizer.to_json
        self._grammars = GrammarCompiler(read_tokenizer, self._limits.vocab_size, self._limits.eos_token_ids)
        self._intake = Intake(
            self._limits,
            self._text,
            self._executor,
            self._grammars,
            self._grammar_executor,
            self._core,
            self._post,
            next_seed,
        )

    async def prepare_grammars(self) -> None:
        """Make now what else the first request with a grammar makes, and keeps everybody waiting with.

        With a vocabulary of 100,000 tokens that is a second, and 140 MB from then on. Raises `EngineClosed`.
        """
        self._check_usable()
        await asyncio.get_running_loop().run_in_executor(self._grammar_executor, self._grammars.prepare)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End every open stream with `EngineClosed`, then the workers. Callable twice, from any task, during start."""
        if os.getpid() != self._pid or self._state is _State.NEW:
            return  # in a forked child: the workers are the parent's
        if not self.config.own_thread and asyncio.get_running_loop() is not self._home.loop:
            self._close_from_elsewhere()
            return
        if self._state is _State.STARTING and self._starting is not None:
            self._state = _State.CLOSED
            self._starting.cancel()
            await asyncio.wait([self._starting])
            self._release()
        if self._state is _State.RUNNING:
            self._state = _State.CLOSED
            self._closing = asyncio.create_task(self._close())
        if self._closing is not None:
            await asyncio.shield(self._closing)

    def _close_from_elsewhere(self) -> None:
        """On another loop than the one that opened the engine: fine if that one is over."""
        if not self._home.loop.is_closed():
            raise WrongLoop("this engine belongs to the loop that opened it: close it there")
        if self._state is _State.RUNNING:
            self._state = _State.CLOSED
            self._release()

    async def _close(self) -> None:
        try:
            await self._home.run(self._stop_core())
        finally:
            self._release()

    async def _stop_core(self) -> None:
        self._core.close()
        await self._group.stop()

    def _release(self) -> None:
        """Whatever is left of an engine that did not open, or has closed."""
        for executor in (self._executor, self._grammar_executor):
            executor.shutdown(wait=False, cancel_futures=True)
        self._mask_thread.close()
        self._home.call(self._kill_group)
        self._home.close()

    def _kill_group(self) -> None:
        """On the core's loop. The group may not have come to be."""
        group: WorkerGroup | None = getattr(self, "_group", None)
        if group is not None:
            group.kill()

    def __del__(self) -> None:
        if getattr(self, "_state", None) is _State.RUNNING and os.getpid() == self._pid:
            warnings.warn(f"{self.config.model}: an engine was not closed", ResourceWarning, source=self, stacklevel=1)
            self._mask_thread.close()
            self._home.call(self._group.kill)
            self._home.close(wait=False)

    # ---- requests

    def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        queue_timeout_s: float | None = None,
        timeout_s: float | None = None,
        traceparent: str | None = None,
        **elsewhere: Any,
    ) -> TokenStream:
        """Submit a request, now, and return its stream at once; refusals are raised at the first read.

        `prompt` is text or token ids; `messages` (role and content) go through the model's own chat format instead.
        `thinking`, `reasoning_effort`, `tools` and `tool_choice` (as OpenAI's clients have them) belong to messages. A
        model without such a choice refuses them; `None` is its default. A model that thinks streams its reasoning,
        `</think>` and its answer, with tool calls as it spells them. `params` stay as they are given.
        Lower `priority` goes first. A request that has not started after `queue_timeout_s`, or not ended after
        `timeout_s`, ends with that as its finish reason. Chunks are deltas, never the text so far. `traceparent` (W3C
        Trace Context) is what the caller's own trace calls the request; a `Trace` names it.

        `elsewhere`: arguments by the names that other engines have for them (docs/migrating.md).
        """
        if elsewhere:
            return self._stream_renamed(
                elsewhere,
                prompt=prompt,
                params=params,
                messages=messages,
                thinking=thinking,
                reasoning_effort=reasoning_effort,
                tools=tools,
                tool_choice=tool_choice,
                request_id=request_id,
                priority=priority,
                queue_timeout_s=queue_timeout_s,
                timeout_s=timeout_s,
                traceparent=traceparent,
            )
        request_id = secrets.token_hex(8) if request_id is None else request_id
        mailbox = Mailbox(None)
        abort: Callable[[], None] = _do_nothing
        resume: Callable[[], None] = _do_nothing
        try:
            self._check_usable()
            mailbox.loop = self._reader_loop()
            request = self._intake.take(
                mailbox,
                request_id,
                prompt,
                messages,
                params,
                chat=chat_options(
                    thinking=thinking, reasoning_effort=reasoning_effort, tools=tools, tool_choice=tool_choice
                ),
                priority=priority,
                queue_timeout_s=queue_timeout_s,
                timeout_s=timeout_s,
                traceparent=traceparent,
            )
            abort = partial(self._post_threadsafe, self._core.abort, request)
            resume = partial(self._post_threadsafe, self._core.resume, request)
        except DeepInferError as error:
            mailbox.close(error)
            if isinstance(error, InvalidRequest):  # the rest is no matter of what was asked
                self._post_threadsafe(self._observe_refusal, error.code)
        return TokenStream(request_id, mailbox, abort, resume, self.config.max_unread_tokens // 2)

    def _stream_renamed(self, elsewhere: dict[str, Any], **options: Any) -> TokenStream:
        """`stream` with what came by the names of other engines. Raises `TypeError` for a name that none has."""
        try:
            return self.stream(**rename_options(options, elsewhere))
        except InvalidRequest as error:
            mailbox = Mailbox(None)
            mailbox.close(error)
            self._post_threadsafe(self._observe_refusal, error.code)
            return TokenStream(options["request_id"] or "", mailbox, _do_nothing, _do_nothing, 0)

    async def generate(
        self, prompt: Prompt | None = None, params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """All samples of one request, whole. Takes what `stream` takes and raises what reading it raises."""
        async with self.stream(prompt, params, **options) as stream:
            completion = Completion(stream.request_id)
            chunks: list[TokenChunk] = []
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == CHUNKS_AT_ONCE:
                    completion.add(*chunks)
                    chunks.clear()
            completion.add(*chunks)
            completion.num_prompt_tokens = stream.num_prompt_tokens
            completion.num_cached_tokens = stream.num_cached_tokens
            completion.num_preemptions = stream.num_preemptions
            completion.drafts = stream.drafts
            completion.prompt_token_logprobs = await _whole(stream.prompt_logprobs)
            completion.attach(stream.source)
            return completion

    async def generate_many(
        self,
        prompts: Sequence[Prompt | Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **options: Any,
    ) -> list[Completion]:
        """One completion a prompt, in their order, with a progress bar. A list of messages counts as a prompt.

        Never queues more than the engine admits. Raises the first refusal or failure, and then ends the rest.
        """
        return await generate_many(
            self, prompts, params, at_once=num_at_once(self.config), progress=progress, options=options
        )

    async def abort(self, request_id: str) -> None:
        """End the open request of this id, if there is one. Its reader gets a last chunk, `abort`.

        Raises `InvalidRequest` for what can be no id.
        """
        self._check_usable()
        self._post(self._core.abort_id, check_request_id(request_id))

    def stats(self) -> EngineStats:
        """A snapshot. Raises `EngineClosed` before the engine is open."""
        self._check_opened()
        strange = self._group.link.num_strange_frames
        return EngineStats(self._core.scheduler.stats(), self._core.stats, strange, self._cache)

    def metrics(self) -> dict[str, Metric]:
        """Counters, gauges and histograms so far, by name; from any thread. Raises `EngineClosed` before it is open."""
        self._check_opened()
        return self._metrics.snapshot(self._core.scheduler.stats(), self._core.stats.drafts)

    def health(self) -> Health:
        """As the core sees it, without asking the workers; from any thread."""
        if self._state is not _State.RUNNING:
            return Health(EngineClosed.code, 0.0)
        failure = self._core.failure
        return Health(None if failure is None else failure.code, self._core.stalled_s)

    @property
    def text(self) -> TextPipeline | None:
        """The model's tokenizer and its way with messages; `None` where there is no tokenizer.

        Raises `EngineClosed` before the engine is open.
        """
        self._check_opened()
        return self._text

    @property
    def limits(self) -> ModelLimits:
        """What the model and its caches allow. Raises `EngineClosed` before the engine is open."""
        self._check_opened()
        return self._limits

    @property
    def costs(self) -> CostTable | None:
        """What steps cost, as the first rank has measured it or the settings' file says; `None` where nobody asked.

        Raises `EngineClosed` before the engine is open.
        """
        self._check_opened()
        return self._costs

    @property
    def device(self) -> str:
        """What the model runs on, in the worker's words. Raises `EngineClosed` before the engine is open."""
        self._check_opened()
        return self._device

    @property
    def has_chat_template(self) -> bool:
        """Messages can be given in place of a prompt. Raises `EngineClosed` before the engine is open."""
        self._check_opened()
        return self._text is not None and self._text.has_chat_template

    @property
    def worker_pids(self) -> list[int]:
        """Processes of the workers that live; none before they are started."""
        group: WorkerGroup | None = getattr(self, "_group", None)
        return [] if group is None else group.supervisor.pids

    def check_integrity(self) -> None:
        """The core's books agree. Raises `AssertionError`. Only on the core's own loop."""
        self._check_opened()
        self._core.check_integrity()

    # ---- from a call to a request

    def _check_opened(self) -> None:
        if not hasattr(self, "_core"):
            raise EngineClosed(f"the engine is {self._state}")

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedEngine("this engine was made before a fork; make one in the child")
        if self._state is not _State.RUNNING:
            raise EngineClosed(f"the engine is {self._state}")

    def _observe_refusal(self, code: str) -> None:
        """In the core."""
        self._core.observer.request_refused(code)

    def _reader_loop(self) -> asyncio.AbstractEventLoop:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongLoop("stream() needs a running event loop; scripts without one use SyncEngine") from None
        if not self.config.own_thread and loop is not self._home.loop:
            raise WrongLoop("this engine belongs to the loop that opened it; Engine(own_thread=True) serves any loop")
        return loop

    def _post(self, action: Callable[[Any], None], argument: Any) -> None:
        """Run `action(argument)` in the core, from any thread."""
        self._core.post(action, argument)
        if self._home.is_here():
            self._core.wake()
        elif not call_threadsafe(self._home.loop, self._core.wake):
            raise EngineClosed("the engine is closed")

    def _post_threadsafe(self, action: Callable[[Any], None], argument: Any) -> None:
        """As `_post`, for streams: also from a finalizer, in any thread, and after the engine's end."""
        if self._state is _State.RUNNING:
            self._core.post(action, argument)
            call_threadsafe(self._home.loop, self._core.wake)


def _on_this_loop(on_progress: Callable[[str], None] | None) -> Callable[[str], None]:
    """`on_progress` as a function for any thread; an error in it is the loop's, and does not stop the start."""
    loop = asyncio.get_running_loop()

    def tell(text: str) -> None:
        if on_progress is not None:
            call_threadsafe(loop, partial(on_progress, text))

    return tell


async def _whole(logprobs: PromptLogprobs | None) -> tuple[TokenLogprob | None, ...] | None:
    """Every entry, a few of them in a turn of the loop."""
    if logprobs is None:
        return None
    entries: list[TokenLogprob | None] = []
    for start in range(0, len(logprobs), PROMPT_LOGPROBS_A_TURN):
        entries += logprobs[start : start + PROMPT_LOGPROBS_A_TURN]
        await asyncio.sleep(0)
    return tuple(entries)


def _do_nothing() -> None:
    """For a stream whose request was refused."""


class _State:
    """Words, for messages."""

    NEW: Final = "not opened"
    STARTING: Final = "starting"
    RUNNING: Final = "running"
    CLOSED: Final = "closed"


def _limits(ready: list[Ready], text: TextPipeline | None) -> ModelLimits:
    return ModelLimits(
        vocab_size=ready[0].vocab_size,
        max_model_len=min(rank.max_model_len for rank in ready),
        max_cached_tokens=min(rank.num_blocks * rank.block_size for rank in ready),
        eos_token_ids=() if text is None else text.tokenizer.eos_token_ids,
        has_tokenizer=text is not None,
    )


def _shape(ready: Ready, config: EngineConfig) -> CacheShape:
    is_bounded = config.has_bounded_hits and ready.bounded_replay_tokens < ready.exact_replay_tokens
    return CacheShape(
        ready.num_slots,
        ready.num_blocks,
        ready.block_size,
        ready.weights_version,
        replay_tokens=ready.bounded_replay_tokens if is_bounded else ready.exact_replay_tokens,
        is_replay_bounded=is_bounded,
    )


def _scheduler_config(config: EngineConfig) -> SchedulerConfig:
    return SchedulerConfig(
        max_batch_tokens=config.max_batch_tokens,
        prefill_chunk=config.prefill_chunk,
        prefix_cache=config.prefix_cache,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        ageing_s=config.ageing_s,
    )


def _core_config(config: EngineConfig) -> CoreConfig:
    return CoreConfig(
        overlap=config.overlap,
        max_unread_tokens=config.max_unread_tokens,
        slow_consumer_s=config.slow_consumer_s,
        step_timeout_s=config.step_timeout_s,
    )


def _in_words(tell: Callable[[str], None]) -> ProgressReport:
    """Bytes to a line of text, a tenth at a time."""
    told = 0

    def report(done: int, total: int) -> None:
        nonlocal told
        tenths = 10 * done // max(total, 1)
        if tenths > told:
            told = tenths
            tell(f"loading weights: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    return report
