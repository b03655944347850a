"""How old what a replica knows can be: reckoned from beats that it writes and that come back through the store.

Pure; `now_ms` comes in. A beat that comes back proves that everything written before it was sent has been taken in: so
a replica that the store cannot reach, or that cannot reach the store, in either direction, finds out.
Invariant: `age_ms` is never less than the age of the oldest write of another replica that is missing here.
"""

from __future__ import annotations

from typing import Final


class Staleness:
    """Beats on their way, and the newest one that came back."""

    def __init__(self, *, max_ms: int, max_under_way: int) -> None:
        """`max_ms`: what is older may not be answered. `max_under_way`: beats remembered; the oldest goes first."""
        self._max_ms: Final = max_ms
        self._max_under_way: Final = max_under_way
        self._as_of_ms: int | None = None
        self._sent: Final[dict[int, int]] = {}
        self._number = 0

    def send(self, now_ms: int) -> int:
        """The number of a beat that is to be written after this."""
        self._number += 1
        self._sent[self._number] = now_ms
        if len(self._sent) > self._max_under_way:
            del self._sent[next(iter(self._sent))]
        return self._number

    def came_back(self, number: int) -> None:
        """An own beat was read from the store, and everything before it has been taken in."""
        sent_ms = self._sent.get(number)
        if sent_ms is None:
            return
        for earlier in [x for x in self._sent if x <= number]:  # those before it were lost, or say nothing new
            del self._sent[earlier]
        self._as_of_ms = sent_ms if self._as_of_ms is None else max(sent_ms, self._as_of_ms)

    def age_ms(self, now_ms: int) -> int | None:
        """At most so old is what this replica knows; None: it has never been current."""
        return None if self._as_of_ms is None else now_ms - self._as_of_ms

    def unanswered_ms(self, now_ms: int) -> int:
        """For so long the oldest beat that may still come back has been under way; 0 if none is."""
        return now_ms - next(iter(self._sent.values()), now_ms)

    def is_current(self, now_ms: int) -> bool:
        """Whether what is here may be answered."""
        age_ms = self.age_ms(now_ms)
        return age_ms is not None and age_ms <= self._max_ms
