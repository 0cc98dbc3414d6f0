"""Stop strings in text that arrives in pieces."""


class StopMatcher:
    """Passes text on until a stop string is complete, and never passes on what may be the beginning of one.

    The match that is complete first wins, and of those complete at the same character the longest: so the outcome
    depends on the text and not on how it was cut into pieces.
    """

    __slots__ = ("_firsts", "_held", "_include", "_stop", "matched")

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        """``stop`` are non-empty strings; ``include`` passes the matched one on instead of cutting before it."""
        self._stop = stop
        self._include = include
        self._firsts = frozenset(text[0] for text in stop)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text, if one did; whatever is pushed afterwards is dropped."""

    def push(self, text: str) -> str:
        """Take the next piece of text; return what can be released."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            end, self.matched = match
            self._held = ""
            return text[: end if self._include else end - len(self.matched)]
        safe = self._safe_length(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """The text has ended: release what was held."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Where the winning match ends, and its stop string."""
        found = [(start + len(stop), stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0], -len(match[1])), default=None)

    def _safe_length(self, text: str) -> int:
        """Length of ``text`` without the longest suffix that some stop string begins with."""
        longest = max(len(stop) for stop in self._stop) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if text[start] in self._firsts and any(stop.startswith(text[start:]) for stop in self._stop):
                return start
        return len(text)
