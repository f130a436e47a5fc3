"""`deepinfer run`: a chat in the terminal.

Plain and synchronous: Ctrl-C is a `KeyboardInterrupt` wherever this thread is, and the engine runs in another.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated, Any

import msgspec
import typer

from deepinfer.cli.common import (
    FAILED,
    Model,
    Seed,
    Settings,
    Temperature,
    TopP,
    engine_settings,
    in_words,
    sampling_fields,
    say,
    starting,
)
from deepinfer.draft_counts import DraftCounts
from deepinfer.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from deepinfer.prompt_file import read_defaults
from deepinfer.sync import SyncEngine
from deepinfer_protocol import SamplingParams

HELP = """/help   this
/clear  forget the conversation
/exit   leave, as Ctrl-D does
Ctrl-C  stop the answer; at the prompt: leave"""


def run(
    model: Model,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens an answer may have; fewer where the context ends.")
    ] = 1024,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before all else.")] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="For models that can: think before answering.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say after each answer how fast it was.")] = False,
    settings: Settings = None,
) -> None:
    """Chat in the terminal. From a pipe: a prompt a line, as one conversation."""
    with in_words("run"):
        fields = sampling_fields(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seq_seed=seed)
        params = read_defaults(fields)
        is_terminal = sys.stdin.isatty()
        with ExitStack() as stack:
            with starting(is_silent=not is_terminal) as tell:
                engine = stack.enter_context(SyncEngine(model, on_progress=tell, **engine_settings(settings)))
            chat = Chat(engine, params, system, stats, thinking=thinking, is_terminal=is_terminal)
            if is_terminal:
                say(f"{model}. /help lists what can be typed; Ctrl-C stops an answer, Ctrl-D leaves.")
            for line in _lines(is_terminal):
                if not chat.take(line):
                    break
            if chat.num_refused and not is_terminal:
                raise typer.Exit(FAILED)


class Chat:
    """One conversation."""

    def __init__(
        self,
        engine: SyncEngine,
        params: SamplingParams,
        system: str | None,
        has_stats: bool,
        *,
        thinking: bool | None = None,
        is_terminal: bool = True,
    ) -> None:
        """On a terminal Ctrl-C stops an answer; elsewhere it is nobody's key, and passes through."""
        if not engine.limits.has_tokenizer:
            raise ConfigError("tokenizer", "this model has none: give one by --set tokenizer=MODEL")
        if system is not None and not engine.has_chat_template:
            raise ConfigError("system", "this model has no chat template: it can only go on with a text")
        if thinking is not None and not engine.has_chat_template:
            raise ConfigError("thinking", "this model has no chat template: it can only go on with a text")
        self._engine = engine
        self._params = params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)
        self._thinking = thinking
        self._has_stats = has_stats
        self._is_terminal = is_terminal
        self.num_refused = 0

    def take(self, line: str) -> bool:
        """Answer, or do what a command says. False: leave."""
        line = line.strip()
        if line == "/exit":
            return False
        if line == "/clear":
            self._messages = list(self._start)
        elif line == "/help":
            say(HELP)
        elif line.startswith("/"):
            say(f"{line.split()[0]}: there is no such command\n{HELP}")
        elif line:
            self._ask(line)
        return True

    def _ask(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        request: dict[str, Any] = {"prompt": line}
        if self._engine.has_chat_template:
            request = {"messages": self._messages, "thinking": self._thinking}
        try:
            try:
                answer = self._answer(request, self._params)
            except ContextLengthExceeded:  # then as many as fit, if any do
                answer = self._answer(request, msgspec.structs.replace(self._params, max_tokens=None))
        except InvalidRequest as error:  # most of all: the conversation has become too long
            say(f"{error}; /clear forgets the conversation")
            self._messages = self._messages[:-1]
            self.num_refused += 1
            return
        said = answer.rpartition("</think>")[2]  # what was only thought is no part of a conversation
        self._messages.append({"role": "assistant", "content": said})

    def _answer(self, request: dict[str, Any], params: SamplingParams) -> str:
        """Show the answer as it comes; what there is of it after Ctrl-C on a terminal."""
        parts: list[str] = []
        num_tokens, begun_s, first_s = 0, time.perf_counter(), 0.0
        drafts = DraftCounts()
        try:
            with self._engine.stream(params=params, **request) as stream:
                for chunk in stream:
                    first_s = first_s or time.perf_counter()
                    num_tokens += len(chunk.token_ids)
                    parts.append(chunk.text)
                    print(chunk.text, end="", flush=True)
                drafts = stream.drafts
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            say(" (stopped)")
        print(flush=True)
        if self._has_stats and num_tokens:
            _show_speed(num_tokens, first_s - begun_s, time.perf_counter() - first_s, drafts)
        return "".join(parts)


def _show_speed(num_tokens: int, ttft_s: float, decode_s: float, drafts: DraftCounts) -> None:
    rate = f", then {(num_tokens - 1) / decode_s:.1f} tok/s" if num_tokens > 1 and decode_s > 0 else ""
    committed = f"; {drafts.tokens_per_step:.2f} tokens a forward" if drafts.num_verified else ""
    say(f"[{num_tokens} tokens: the first after {1e3 * ttft_s:.0f} ms{rate}{committed}]")


def _lines(is_terminal: bool) -> Iterator[str]:
    """What is typed, until Ctrl-D or Ctrl-C at the prompt; or the lines of a pipe."""
    if is_terminal:
        import readline  # noqa: F401 (gives `input` a history and a line to edit)
    try:
        while True:
            if is_terminal:
                yield input(">>> ")
            elif line := sys.stdin.readline():
                yield line
            else:
                return
    except (EOFError, KeyboardInterrupt):
        if not is_terminal:
            raise
        say("")
