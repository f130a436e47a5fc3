"""From what a caller gave to a request of the core: every check that needs no queue, and the encoding of text.

Long text is encoded in a thread, so that the caller's loop goes on. Knows nothing of loops, streams or workers.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from deepinfer.admission import (
    ModelLimits,
    admit,
    check_params,
    check_priority,
    check_request_id,
    check_timeout,
    check_token_ids,
)
from deepinfer.core import EngineCore
from deepinfer.errors import InvalidRequest
from deepinfer.request import Request
from deepinfer.stream import Mailbox
from deepinfer.text import TextPipeline
from deepinfer_protocol import SamplingParams

INLINE_CHARACTERS: Final = 1000
"""Longer text is encoded in a thread."""

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class Submission:
    """What a caller gave, on its way to the core, and the mailbox that its stream reads."""

    def __init__(self, prompt: Prompt | None, messages: Messages | None, request_id: str) -> None:
        self.prompt = prompt
        self.messages = messages
        self.request_id = request_id
        self.params = SamplingParams()
        self.mailbox = Mailbox(None)
        self.priority = 0
        self.arrival_s = time.monotonic()
        self.queue_deadline_s = 0.0
        self.deadline_s = 0.0
        self._request: Request | None = None  # the core's, once it is there
        self._is_aborted = False

    # In the core:

    def submit(self, request: Request, core: EngineCore) -> None:
        """Hand `request` over, unless this has been aborted on its way."""
        self.prompt = self.messages = None
        if not self._is_aborted:
            self._request = request
            core.submit(request)

    def abort(self, core: EngineCore) -> None:
        if self._request is not None:
            core.abort(self._request)
        elif not self._is_aborted:
            self._is_aborted = True
            core.end_unsubmitted(self.mailbox, self.params.n)

    def resume(self, core: EngineCore) -> None:
        if self._request is not None:
            core.resume(self._request)


class Intake:
    """Makes requests for one loaded model."""

    def __init__(
        self,
        limits: ModelLimits,
        text: TextPipeline | None,
        executor: ThreadPoolExecutor,
        hand_over: Callable[[Submission, Request], None],
    ) -> None:
        """`hand_over` takes a complete request, in the caller's thread or in the encoder's."""
        self._limits = limits
        self._text = text
        self._executor = executor
        self._hand_over = hand_over

    def take(
        self,
        submission: Submission,
        params: SamplingParams | None,
        *,
        priority: int,
        queue_timeout_s: float | None,
        timeout_s: float | None,
    ) -> None:
        """Check, encode, hand over. Raises `InvalidRequest`; what is found later closes the mailbox with it."""
        check_request_id(submission.request_id)
        submission.params = check_params(params, self._limits)
        submission.mailbox.num_unfinished = submission.params.n
        submission.priority = check_priority(priority)
        submission.queue_deadline_s = submission.arrival_s + check_timeout("queue_timeout_s", queue_timeout_s)
        submission.deadline_s = submission.arrival_s + check_timeout("timeout_s", timeout_s)
        if (submission.prompt is None) == (submission.messages is None):
            raise InvalidRequest("prompt", "give a prompt or messages, and not both")
        num_characters = _num_characters(submission)
        if num_characters <= INLINE_CHARACTERS:
            self._complete(submission, self._encode(submission))
        else:
            self._check_characters(num_characters)
            encoding = self._executor.submit(self._encode, submission)
            encoding.add_done_callback(partial(self._on_encoded, submission))

    def _encode(self, submission: Submission) -> array[int]:
        prompt, messages = submission.prompt, submission.messages
        if messages is None and not isinstance(prompt, str):
            return check_token_ids(prompt, self._limits)
        if self._text is None:
            raise InvalidRequest("prompt", "this engine has no tokenizer: give token ids")
        if messages is not None:
            return check_token_ids(self._text.encode_messages(messages), self._limits)
        assert isinstance(prompt, str)
        return check_token_ids(self._text.encode(prompt), self._limits)

    def _check_characters(self, num_characters: int) -> None:
        """Text that cannot fit, however it is encoded, is not encoded."""
        if self._text is not None:
            limit = self._limits.max_length * self._text.max_token_characters
            if num_characters > limit:
                raise InvalidRequest("prompt", f"{num_characters} characters, at most {limit} can fit the context")

    def _on_encoded(self, submission: Submission, encoding: Future[array[int]]) -> None:
        """In the encoder's thread."""
        try:
            self._complete(submission, encoding.result())
        except Exception as error:  # also one of the tokenizer's own: the reader must hear of it
            submission.mailbox.close_threadsafe(error)

    def _complete(self, submission: Submission, prompt: array[int]) -> None:
        admitted = admit(submission.params, len(prompt), self._limits)
        submission.mailbox.num_prompt_tokens = len(prompt)
        request = Request(
            submission.request_id,
            prompt,
            admitted.sampling,
            max_length=admitted.max_length,
            stop_ids=admitted.stop_ids,
            priority=submission.priority,
            arrival_s=submission.arrival_s,
            queue_deadline_s=submission.queue_deadline_s,
            deadline_s=submission.deadline_s,
            user=submission.mailbox,
        )
        if self._text is not None:
            for seq in request.samples:
                seq.user = self._text.output(submission.params, prompt, admitted.stop_strings)
        self._hand_over(submission, request)


def _num_characters(submission: Submission) -> int:
    """Text to encode. Token ids count as none: checking them is quick."""
    if isinstance(submission.prompt, str):
        return len(submission.prompt)
    if isinstance(submission.messages, Sequence):
        return sum(len(str(m.get("content", ""))) if isinstance(m, Mapping) else 0 for m in submission.messages)
    return 0
