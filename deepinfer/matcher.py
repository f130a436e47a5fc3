"""The matcher of one sample: takes the tokens that it has, and says which may come next.

Runs in the masks' thread, one call after another. Knows nothing of plans, of other samples, or of how a grammar was
compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from deepinfer.errors import GrammarError
from deepinfer_protocol import SlotSampling, split_words, unpack_float32, unpack_int32

if TYPE_CHECKING:
    from llguidance import LLMatcher

_STATES_LIMIT: Final = "too many states"
"""In what the library says where a grammar has more than `max_lexer_states`."""


class TokenBits:
    """Sets of a vocabulary's tokens, as masks have them: one bit a token, least significant first."""

    def __init__(self, vocab_size: int) -> None:
        self.num_bytes = 4 * -(-vocab_size // 32)
        self.all = (1 << vocab_size) - 1

    def without(self, tokens: Sequence[int]) -> int:
        """All tokens but these."""
        return self.all & ~_bits_of(tokens)

    def pack(self, tokens: int) -> bytes:
        return tokens.to_bytes(self.num_bytes, "little")


class Bans:
    """What else a sample may not have next: the part of its sampling that could leave a grammar nothing."""

    def __init__(self, sampling: SlotSampling, bits: TokenBits) -> None:
        shaping = sampling.shaping
        self._allowed = bits.all
        self._stops = bits.without(unpack_int32(sampling.stop_ids))
        self._min_length = sampling.min_length if sampling.stop_ids else 0
        self._words: list[list[int]] = []
        if shaping is not None:
            if shaping.allowed_bits:
                self._allowed &= int.from_bytes(shaping.allowed_bits, "little")
            biases = zip(unpack_int32(shaping.bias_ids), unpack_float32(shaping.bias_values), strict=True)
            self._allowed &= bits.without([token for token, bias in biases if bias == float("-inf")])
            self._words = [word.tolist() for word in split_words(shaping.bad_words)]
        self.is_empty = self._allowed == bits.all and not self._min_length and not self._words

    def apply(self, tokens: int, length: int, output: list[int]) -> int:
        """`tokens` that may follow `output`, where the sequence has this length, its prompt included."""
        tokens &= self._allowed
        if length + 1 <= self._min_length:
            tokens &= self._stops
        for word in self._words:
            if output[len(output) + 1 - len(word) :] == word[:-1]:
                tokens &= ~(1 << word[-1])
        return tokens


class Beginning:
    """A grammar before any output. The library's copies of it share the states that output makes one of them find."""

    def __init__(self, make: Callable[[], LLMatcher]) -> None:
        self._make = make
        self._backend = make()
        self.num_renewed = 0

    def copy(self) -> LLMatcher:
        return self._backend.deep_copy()

    def renew(self, num_renewed: int) -> bool:
        """Further copies have none of these states, which count against limits. False: somebody else saw to that."""
        if num_renewed < self.num_renewed:
            return False
        self._backend = self._make()
        self.num_renewed += 1
        return True


class Matcher:
    """What of a grammar a sample has behind it, and where its drafts would lead."""

    def __init__(
        self,
        beginning: Beginning,
        field: str,
        bits: TokenBits,
        sampling: SlotSampling,
        *,
        eos_ids: Sequence[int],
        opening_id: int | None = None,
    ) -> None:
        """The first mask that needs a copy of `beginning` makes it. `field` has the grammar: errors name it.

        The grammar begins behind the first `opening_id`; before it anything may come but an end. `None`: at once.
        """
        self._beginning = beginning
        self._num_renewed = 0  # of the copy's beginning
        self._backend: LLMatcher | None = None  # behind the output; `None`: the next mask walks all of it
        self._field = field
        self._bits = bits
        self._bans = Bans(sampling, bits)
        self._num_prompt = sampling.num_prompt
        self._output: list[int] = []
        self._opening_id = opening_id
        self._first = 0 if opening_id is None else None  # where in the output the grammar begins
        self._eos_ids = frozenset(eos_ids)
        self._unopened = bits.without(eos_ids)
        self.any_token = bits.pack(bits.all)

    def next_masks(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> list[bytes]:
        """What may come behind `tokens`, which are new since the last call, and behind each of `drafts` after them.

        As in a `MaskBatch`. Drafts are guesses: what they do here is undone. There is no mask behind the first that the
        mask before it refuses, nor behind one that ends the output or comes to where nothing may follow.

        Raises `GrammarError`: nothing may follow `tokens`, or a limit is reached.
        """
        masks = [self.next_mask(tokens)]
        num_known = len(self._output)
        try:
            for draft in drafts:
                if draft in self._eos_ids or not is_allowed(masks[-1], draft):
                    break
                masks.append(self._mask_behind((draft,)))
        except GrammarError:
            pass  # that draft's, which may never be taken
        if len(self._output) > num_known:
            self._take_back(num_known)
        return masks

    def next_mask(self, tokens: Sequence[int]) -> bytes:
        """The first of `next_masks`.

        The states that drafts and other samples made the library find count against a limit of it: where that is met,
        it is tried again without them.
        """
        is_new = False
        while True:
            try:
                return self._mask_behind(tokens)
            except GrammarError:
                if is_new or self._backend is None or _STATES_LIMIT not in self._backend.get_error():
                    raise
            self._backend, tokens = None, ()
            is_new = self._beginning.renew(self._num_renewed)

    def _mask_behind(self, tokens: Sequence[int]) -> bytes:
        num_known = len(self._output)
        self._output += tokens
        if self._first is None:
            self._open(num_known)
        if self._first is None:
            return self._restrict(self._unopened)
        if self._backend is None:
            self._backend, num_known = self._beginning.copy(), 0
            self._num_renewed = self._beginning.num_renewed
        backend = self._backend
        tokens = self._output[max(self._first, num_known) :]
        if tokens and not backend.consume_tokens(tokens):
            raise GrammarError(self._field, f"the output left it: {readable_reason(backend.get_error())}")
        mask = backend.compute_bitmask()[: self._bits.num_bytes]
        if backend.is_error():
            raise GrammarError(self._field, readable_reason(backend.get_error()))
        return mask if self._bans.is_empty else self._restrict(int.from_bytes(mask, "little"))

    def _open(self, num_known: int) -> None:
        """The grammar begins, if what is new of the output says so."""
        if self._opening_id in self._output[num_known:]:
            self._first = self._output.index(self._opening_id, num_known) + 1

    def _take_back(self, num_known: int) -> None:
        """All but the first tokens of the output."""
        num_consumed = 0 if self._first is None else len(self._output) - max(self._first, num_known)
        del self._output[num_known:]
        if self._first is not None and self._first > num_known:
            self._first = None
        backend = self._backend
        if backend is not None and (backend.is_error() or not backend.rollback(num_consumed)):
            self._backend = None  # there is no way back from an error

    def _restrict(self, allowed: int) -> bytes:
        left = self._bans.apply(allowed, self._num_prompt + len(self._output), self._output)
        if not left:
            told = "what it allows next is taken out by min_tokens, bad_words, allowed_token_ids or banned_token_ids"
            raise GrammarError(self._field, f"{told}: no token could be sampled")
        return self._bits.pack(left)


def readable_reason(error: str) -> str:
    """What the library says, in one line that is not too long."""
    if error.startswith("NoExtension"):
        return "no output satisfies it"
    return " ".join(error.replace("<non-verbose/>", "").split())[:400]


def is_allowed(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _bits_of(tokens: Sequence[int]) -> int:
    found = 0
    for token in tokens:
        found |= 1 << token
    return found
