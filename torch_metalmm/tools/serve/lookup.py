"""Which tokens may come next: those that came when the last ones stood there before."""

from __future__ import annotations

_RUN = 3  # tokens that must have stood there


class Lookup:
    """Of one text, which grows. Guesses become fewer where they were wrong."""

    def __init__(self, most: int) -> None:
        """most: tokens at a time; 0: never any."""
        self._most = self._width = most
        self._behind: dict[tuple[int, ...], int] = {}  # a run of tokens: where its last one ended
        self._known = _RUN  # runs that end before are in it

    def guess(self, tokens: list[int], most: int) -> list[int]:
        """At most `most` tokens that may follow; over and over those behind the run, if few are."""
        if not self._most or most < 1:
            return []
        for end in range(self._known, len(tokens)):
            self._behind[tuple(tokens[end - _RUN : end])] = end
        self._known = max(self._known, len(tokens))
        place = self._behind.get(tuple(tokens[-_RUN:]))
        if place is None:
            return []
        period = len(tokens) - place
        return [tokens[place + i % period] for i in range(min(most, self._width))]

    def learn(self, guessed: int, right: int) -> None:
        self._width = min(self._most, 2 * self._width) if right == guessed else max(1, right)
