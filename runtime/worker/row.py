"""What does the worker know of one sequence? Its tokens to feed, how far it may go, and its text on the way to the client.

Lengths are absolute and count committed tokens, prompt and output. The last committed token need not have been fed yet.
"""

from __future__ import annotations

from runtime.engine.engine import RowError, RowStep, Tokenizer
from runtime.protocol.acceptance import num_proposable
from runtime.protocol.commands import PrefillRow
from runtime.protocol.events import FinishReason, StepRow, TokenLogprob, VerifiedRow
from runtime.protocol.tokens import TokenIds
from runtime.worker.lookup import Lookup
from runtime.worker.stops import StopMatcher

_NO_IDS: frozenset[int] = frozenset()


def check(start: PrefillRow, context_length: int) -> None:
    """:raises RowError: these positions cannot be."""
    num_known = len(start.tokens)
    if start.first_index != 0:
        raise RowError("invalid_request", f"first_index {start.first_index}: no earlier positions are held; send all tokens from 0")
    if not 1 <= start.prompt_length <= num_known:
        raise RowError("invalid_request", f"prompt_length {start.prompt_length} must be from 1 to the {num_known} tokens sent")
    if start.prompt_length >= context_length or num_known > context_length:
        raise RowError(
            "context_length_exceeded",
            f"{num_known} tokens and one to generate do not fit in the model's context of {context_length}",
        )


class Row:
    """One sequence from `Prefill` until its end. Whoever holds one after `is_over` ignores what still comes for it."""

    __slots__ = (
        "_bound",
        "_detokenizer",
        "_ending_ids",
        "_matcher",
        "_silent_ids",
        "answer",
        "committed",
        "decode_step",
        "has_failed",
        "is_held",
        "is_over",
        "is_restoring",
        "last_number",
        "length",
        "limit",
        "lookup",
        "max_length",
        "num_fed",
        "num_known",
        "num_pending",
        "num_proven",
        "sequence",
        "start",
        "stops",
        "tokens",
    )

    def __init__(self, start: PrefillRow, tokenizer: Tokenizer, context_length: int) -> None:
        """`start` has passed `check`."""
        self.start = start
        self.sequence = start.sequence
        self.tokens = start.tokens.tolist()
        self.num_known = len(self.tokens)
        self.num_fed = 0
        self.length = self.num_known
        self.num_pending = 0
        """Samples of submitted steps whose results have not been taken."""
        self.limit = start.limit
        self.max_length = min(start.max_length, context_length)
        self._bound = min(self.limit, self.max_length)
        self.is_over = False
        self.has_failed = False
        self.is_held = start.hold
        """It takes no part in decode steps: it waits for `Draft`s, or for `Verify`s."""
        self.last_number = 0
        """Of the last order or round carried out for it."""
        self.answer: VerifiedRow | None = None
        """To that round."""
        self.lookup: Lookup | None = None
        """Its own tokens, once it has been asked to propose from them."""
        self.is_restoring = False
        """Its prefix is being read; nothing of it may be fed."""
        self.num_proven = 0
        """Positions fed by steps whose results came without an error for this row, or restored."""
        self.stops: tuple[int, ...] = ()
        """Positions of its context, ascending, at which a chunk must end."""
        self.committed: list[int] = []
        """Tokens drawn since it began here."""
        self.decode_step = RowStep(self.sequence, None, 1)
        self._ending_ids = _NO_IDS if start.ignore_eos else tokenizer.eos_ids
        self._silent_ids = tokenizer.eos_ids if start.ignore_eos else _NO_IDS
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopMatcher(start.stop)

    def replay(self) -> str | None:
        """Bring text and stop state to where the earlier output ends, showing none of it. Returns the stop string it holds.

        Call once, after the ids have been found to be in the vocabulary. :raises RowError: see `commit`.
        """
        for token in self.tokens[self.start.prompt_length :]:
            _, matched = self._push(token)
            if matched is not None:
                return matched
        return None

    def num_feedable(self, *, in_chunks: bool) -> int:
        """Context tokens that may be fed now. The last one is kept back while its sample would be beyond the limit."""
        left = self.num_known - self.num_fed
        if self.is_restoring:
            return 0
        if self.is_computed_only or self.limit > self.num_known:
            return left
        return left - 1 if in_chunks else 0

    def num_until_stop(self) -> int:
        """The next chunk may be so long; all there is when no stop is left."""
        return next((stop - self.num_fed for stop in self.stops if stop > self.num_fed), self.num_known - self.num_fed)

    def take_chunk(self, width: int) -> RowStep:
        """The step that feeds the next `width` context tokens; the last chunk also samples the first token.

        Where nothing is to be generated that token is dropped: drawing it shows that what was computed is finite.
        """
        begin, self.num_fed = self.num_fed, self.num_fed + width
        is_last = self.num_fed == self.num_known
        step = RowStep(self.sequence, self.tokens[begin : self.num_fed], 1 if is_last else 0)
        if is_last:
            self.num_pending = 1
            self.tokens = []
        return step

    def restored(self, length: int) -> None:
        """So much of its context need not be fed (0: nothing was found); now it may be."""
        self.num_fed = self.num_proven = length
        self.is_restoring = False

    def ids(self, length: int) -> TokenIds:
        """Of its first `length` positions, all of them known or committed."""
        if length <= self.num_known:
            return self.start.tokens[:length]
        drawn = TokenIds(self.committed[: length - self.num_known])
        return TokenIds.from_bytes(self.start.tokens.to_bytes() + drawn.to_bytes())

    @property
    def is_computed_only(self) -> bool:
        """Nothing is generated when its context is computed."""
        return self.start.prefill_only or self.start.hold

    @property
    def is_prefilled(self) -> bool:
        """Its whole context has been submitted."""
        return self.num_fed == self.num_known

    def can_decode(self) -> bool:
        """Another sample is within what is granted, counting those under way."""
        return not self.is_held and self.length + self.num_pending < self._bound

    @property
    def num_proposable(self) -> int:
        """Proposals that can be of use now: one more token is drawn after the last of them."""
        return num_proposable(self.length, max_length=self.max_length, limit=self.limit)

    @property
    def is_bounded(self) -> bool:
        """No token more is granted."""
        return self.length >= self._bound

    def propose(self, num_tokens: int) -> list[int]:
        """What followed the same words before, in its own context and output."""
        if self.lookup is None:
            self.lookup = Lookup(self.start.tokens)
        num_new = self.length - self.lookup.length
        self.lookup.extend(self.committed[len(self.committed) - num_new :])
        return self.lookup.propose(num_tokens)

    def is_parked(self) -> bool:
        return self.length >= self.limit and not self.is_computed_only

    def grant(self, limit: int) -> None:
        """A lower or repeated limit is ignored."""
        if limit > self.limit:
            self.limit = limit
            self._bound = min(limit, self.max_length)

    def commit(self, token: int, logprobs: tuple[TokenLogprob, ...]) -> StepRow:
        """Take the next sampled token. `is_over` afterwards when it ended the sequence.

        :raises RowError: the detokenizer fails on it.
        """
        index = self.length
        if token in self._ending_ids:
            return self.end("stop", index, (), "", ())
        self.length = index + 1
        self.committed.append(token)
        text, matched = self._push(token)
        if matched is not None:
            self.is_over = True
            return StepRow(self.sequence, index, (token,), text, "stop", matched, logprobs)
        if self.length >= self.max_length:
            return self.end("length", index, (token,), text, logprobs)
        return StepRow(self.sequence, index, (token,), text, None, None, logprobs)

    def end(
        self, reason: FinishReason, index: int, tokens: tuple[int, ...], text: str, logprobs: tuple[TokenLogprob, ...]
    ) -> StepRow:
        """End it and let go of the text held back, which may still turn out to be a stop string."""
        self.is_over = True
        tail, matched = self._matcher.push(self._detokenizer.flush())
        if matched is None:
            held, matched = self._matcher.flush()
            tail += held
        return StepRow(self.sequence, index, tokens, text + tail, reason if matched is None else "stop", matched, logprobs)

    def _push(self, token: int) -> tuple[str, str | None]:
        if token in self._silent_ids:
            return "", None
        try:
            text = self._detokenizer.push(token)
        except BaseException as error:  # a checkpoint's tokenizer is foreign code, and a panic in Rust is no Exception
            raise RowError("generation_failed", f"token {token} has no text: {error!r}") from error
        return self._matcher.push(text)
