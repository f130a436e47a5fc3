"""A draft stage for any model: it knows what will be said, and is wrong about it now and then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from unittest import mock

import torch
from torch import Tensor

from deepinfer_workers import model_runner
from deepinfer_workers.batch import Ints
from deepinfer_workers.models.model import Model, ModelOptions
from deepinfer_workers.models.registry import load_model


class ScriptedDrafter:
    """Guesses the `scripts` of slots, and with a probability of `error_rate` another token; so it does without one."""

    hidden_flat = None

    def __init__(self, block_size: int, vocab_size: int, error_rate: float) -> None:
        self.block_size = block_size
        self.scripts: dict[int, Sequence[int]] = {}
        """By slot: all its tokens, the prompt's first."""
        self.num_calls = 0
        self._vocab_size = vocab_size
        self._error_rate = error_rate

    def hidden(self, slots: Ints, positions: Tensor, tokens: Tensor) -> Tensor:
        """[R, block, 2]: the guess at every place, and how sure it is."""
        self.num_calls += 1
        blocks = [
            [self._guess(slot, position + 1 + place) for place in range(self.block_size)]
            for slot, position in zip(slots.tolist(), positions.tolist(), strict=True)
        ]
        return torch.tensor(blocks, device=positions.device)

    def logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        logits = torch.zeros(len(hidden), self._vocab_size, device=hidden.device)
        return logits.scatter_(1, hidden[:, :1].long(), 50.0)

    def confidences(self, hidden: Tensor, previous: Tensor) -> Tensor:
        return hidden[:, 1]

    def _guess(self, slot: int, position: int) -> tuple[float, float]:
        random = Random(1000 * slot + position)
        script = self.scripts.get(slot, ())
        is_right = position < len(script) and random.random() >= self._error_rate
        token = script[position] if is_right else random.randrange(self._vocab_size)
        return float(token), 0.5 + random.random() / 2


@contextmanager
def drafting(block_size: int, vocab_size: int, error_rate: float = 0.3) -> Iterator[ScriptedDrafter]:
    """Models that are loaded inside have this drafter."""
    drafter = ScriptedDrafter(block_size, vocab_size, error_rate)

    def load(*arguments: object) -> Model:
        *others, options, report = arguments
        assert isinstance(options, ModelOptions)
        model = load_model(*others, options._replace(num_drafts=0), report)  # type: ignore[arg-type, call-arg]
        model.drafter = drafter
        return model

    with mock.patch.object(model_runner, "load_model", load):
        yield drafter
