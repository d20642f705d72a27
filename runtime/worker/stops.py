"""When does a sequence's text reach one of its stop strings, and how much of it may be shown by now?

The rule over the whole text: the stop string that begins earliest wins, the longest of those beginning there; text from
there on is never shown. Streaming keeps it: text is held back as long as it may belong to a stop string, and a match
waits while one that begins earlier, or a longer one at the same place, is still possible.
Matching is Aho and Corasick's automaton (Efficient string matching, CACM 18(6), 1975): the work is linear in the new text.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Final


class StopAutomaton:
    """All stop strings of one request as one automaton; immutable, shared between its sequences.

    A node stands for the longest end of the text that begins some stop string. Empty strings and runs of spaces are no
    stop strings: they would end nearly every answer at once.
    """

    __slots__ = ("children", "failure", "open_depth", "stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.failure = [0]
        self.stops: list[str | None] = [None]
        """Of each node: the longest stop string that the text ends with."""
        self.open_depth = [0]
        """Of each node: length of the longest end of the text that may still grow into a stop string."""
        for stop in stops:
            if stop.strip(" "):
                self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for depth, character in enumerate(stop, start=1):
            child = self.children[node].get(character)
            if child is None:
                child = len(self.children)
                self.children[node][character] = child
                self.children.append({})
                self.failure.append(0)
                self.stops.append(None)
                self.open_depth.append(depth)
            node = child
        self.stops[node] = stop

    def _link(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            fallback = self.failure[node]
            if self.stops[node] is None:
                self.stops[node] = self.stops[fallback]
            if not self.children[node]:
                self.open_depth[node] = self.open_depth[fallback]
            for character, child in self.children[node].items():
                if node:
                    self.failure[child] = self.next_node(fallback, character)
                queue.append(child)

    def next_node(self, node: int, character: str) -> int:
        while True:
            child = self.children[node].get(character)
            if child is not None:
                return child
            if node == 0:
                return 0
            node = self.failure[node]


_automaton = lru_cache(maxsize=256)(StopAutomaton)
_NOTHING: Final = ("", None)


class StopMatcher:
    """One sequence's text on its way to the client. After a match nothing more may be pushed."""

    __slots__ = ("_automaton", "_found", "_found_at", "_held", "_node")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = _automaton(stops)
        self._node = 0
        self._held = ""
        self._found: str | None = None
        self._found_at = 0  # where in the held text it begins

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string once one is decided (then the rest is dropped)."""
        automaton = self._automaton
        if not automaton.children[0]:
            return text, None
        if not text:
            return _NOTHING
        node = self._node
        position = len(self._held)
        self._held += text
        for character in text:
            node = automaton.next_node(node, character)
            position += 1
            stop = automaton.stops[node]
            if stop is not None:
                begin = position - len(stop)
                if self._found is None or begin <= self._found_at:
                    self._found, self._found_at = stop, begin
            if self._found is not None and position - automaton.open_depth[node] > self._found_at:
                return self._held[: self._found_at], self._found
        self._node = node
        shown = position - automaton.open_depth[node]
        if self._found is not None:
            shown = min(shown, self._found_at)
            self._found_at -= shown
        text, self._held = self._held[:shown], self._held[shown:]
        return text, None

    def flush(self) -> tuple[str, str | None]:
        """At the end of generation: a match still waiting for a longer one, else the text held back."""
        if self._found is not None:
            return self._held[: self._found_at], self._found
        return self._held, None
