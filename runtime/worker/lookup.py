"""What will a sequence say next, if it repeats itself or its prompt? A drafter without weights.

Prompt-lookup decoding (A. Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding; compare "Inference with
Reference", Yang et al., arXiv 2304.04487): find where the last tokens stood before, and propose what followed them there.
The index is the hash chain of LZ77 compressors (RFC 1951, section 4): the last place of every run of `MIN_MATCH_TOKENS`, and
from each place the one before it with the same run. Only committed tokens are appended, so nothing is ever taken back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

MIN_MATCH_TOKENS: Final = 3
"""Shorter runs recur by chance. Measured on English prose and on Python code, tokens of SmolLM2: of the first tokens proposed
after a match of 1, 2, 3 at least, 20-31 %, 35-47 %, 54-58 % were right, and 6000, 2000, 900 tokens were proposed in vain, each of
which widens a verify step. In text that copies with 5 % of edits the longer minimum costs little, for a copied run is found again
three tokens after an edit: 3.5, 3.3, 3.0 tokens a round of four proposals. So: the least at which a proposal is more often right
than wrong."""

MAX_MATCH_TOKENS: Final = 64
"""Matches at least so long count as equally long. It bounds the comparison, and ends the search in text that goes in circles."""

MAX_CANDIDATES: Final = 256
"""Earlier places looked at, the most recent first: bounds the search for a run that is everywhere, such as a table's rules."""

MAX_TOKENS: Final = 1 << 16
"""Tokens kept; beyond it the older half is forgotten. About 8 MB for a sequence that never repeats itself."""

_NONE: Final = 0
"""No place: a place is the index after a run, so at least `MIN_MATCH_TOKENS`."""

_KEY_MASK: Final = (1 << (32 * MIN_MATCH_TOKENS)) - 1


class Lookup:
    """One sequence's tokens, prompt and output, and where their runs stood. Ids are unsigned and fit in 32 bits.

    `length`: tokens appended in all, forgotten ones included.
    """

    __slots__ = ("_key", "_last", "_num_forgotten", "_previous", "_tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens = array("I")
        self._previous = array("I")  # by index of a run's last token: the place before with the same run
        self._last: dict[int, int] = {}  # run, packed into an integer → its last place
        self._key = 0
        self._num_forgotten = 0
        self.extend(tokens)

    @property
    def length(self) -> int:
        return self._num_forgotten + len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens. Constant time for each, on average.

        :raises OverflowError: an id is negative or does not fit in 32 bits; those before it are appended.
        """
        for token in tokens:
            if len(self._tokens) == MAX_TOKENS:
                self._forget_older_half()
            self._append(token)

    def _append(self, token: int) -> None:
        kept = self._tokens
        kept.append(token)
        place = len(kept)
        self._key = key = (self._key << 32 | token) & _KEY_MASK
        if place < MIN_MATCH_TOKENS:
            self._previous.append(_NONE)
            return
        self._previous.append(self._last.get(key, _NONE))
        self._last[key] = place

    def _forget_older_half(self) -> None:
        kept = self._tokens[MAX_TOKENS // 2 :]
        self._num_forgotten += MAX_TOKENS // 2
        self._tokens, self._previous = array("I"), array("I")
        self._last.clear()
        for token in kept:
            self._append(token)

    def propose(self, num_tokens: int) -> list[int]:
        """The next `num_tokens` tokens if the text goes on as after the longest match, of equally long ones the most recent.

        Empty when the last `MIN_MATCH_TOKENS` tokens never stood together before. A match that reaches into the end of the
        text is continued in circles, as the text would be. Of more than `MAX_CANDIDATES` matches the most recent are compared.
        """
        place = self._longest_match()
        if place == _NONE:
            return []
        tokens = self._tokens
        num_known = len(tokens) - place
        return [tokens[place + number % num_known] for number in range(num_tokens)]

    def _longest_match(self) -> int:
        """The place after the best match, or `_NONE`."""
        tokens, previous = self._tokens, self._previous
        end = len(tokens)
        best_place, best_length = _NONE, 0
        place = previous[end - 1] if end else _NONE
        for _ in range(MAX_CANDIDATES):
            if place == _NONE or best_length == MAX_MATCH_TOKENS:
                break
            if place > best_length and tokens[place - 1 - best_length] == tokens[end - 1 - best_length]:  # else it cannot be longer
                length = self._match_length(place)
                if length > best_length:
                    best_place, best_length = place, length
            place = previous[place - 1]
        return best_place

    def _match_length(self, place: int) -> int:
        tokens = self._tokens
        end = len(tokens)
        longest = min(place, MAX_MATCH_TOKENS)
        length = MIN_MATCH_TOKENS
        while length < longest and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length
