"""Text of a sequence while its tokens arrive.

A token's text depends on its neighbours: a character may be spread over tokens, and SentencePiece drops the space of
the first word. So each token is decoded together with a few before it, and what is new is released once it can no
longer change. (``tokenizers``' own DecodeStream raises on a prompt that ends inside a character, and says nothing while
invalid bytes last.)
"""

from collections.abc import Iterable, Sequence

from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT = 8
"""Tokens kept before the newest, so that it is decoded as in the middle of text."""
WINDOW = 24
"""Tokens after which the window is cut back to the context: what decoding one token costs at most."""
PARTIAL = 3
"""Bytes of a character that is not complete: each may show as one U+FFFD."""


class TextStream:
    """The text of one sequence's output, released piece by piece.

    All pieces together are ``decode(prompt + output)`` behind ``decode(prompt)``. A character that the prompt began
    counts as output. Where a SentencePiece tokenizer's byte tokens turn invalid behind a complete character, that
    character stays, while ``decode`` would turn the whole run of bytes into U+FFFD.
    """

    __slots__ = ("_complete", "_released", "_skipped", "_started", "_text", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        # Skipped tokens leave no trace in the text, so they take no room in the window either.
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window = self._tail(prompt_ids)
        self._text = self._decode(self._window)
        self._released = len(_settled(self._text))
        """Characters of ``_text`` that are out."""
        self._complete = len(self._window)
        """Tokens of the window whose text is out."""
        self._started = False

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens; return the text that became final with them, which may be empty."""
        return "".join([self._push(token) for token in ids if token not in self._skipped])

    def finish(self) -> str:
        """The rest. What is still half a character is U+FFFD now."""
        if not self._started:
            return ""
        text = self._decode(self._window)
        if not text.startswith(self._text[: self._released]):
            text = self._restart()
        rest = text[self._released :]
        self._text, self._released = text, len(text)
        return rest

    def _push(self, token: int) -> str:
        self._started = True
        self._window.append(token)
        text = self._decode(self._window)
        if not text.startswith(self._text[: self._released]):
            # Bytes that do not continue a character undo the one before them in the same run of byte tokens.
            if len(self._window) - self._complete <= PARTIAL:
                return ""  # they may yet become one
            text = self._restart()
        settled = _settled(text)
        piece = settled[self._released :]
        self._text, self._released = text, max(self._released, len(settled))
        if self._released == len(text):
            self._complete = len(self._window)
            if self._complete >= WINDOW:
                self._slide()
        return piece

    def _restart(self) -> str:
        """Go on without the tokens whose text is out; the text of the others by themselves."""
        self._window = self._window[self._complete :]
        self._released = self._complete = 0
        return self._decode(self._window)

    def _slide(self) -> None:
        kept = self._window[-CONTEXT:]
        text = self._decode(kept)
        # A cut inside a character, or before nothing but a space, would change how the next token is decoded.
        if text and self._text.endswith(text):
            self._window, self._text = kept, text
            self._released, self._complete = len(text), len(kept)

    def _tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens that are not skipped, from the beginning of a character if possible."""
        tail: list[int] = []
        for token in reversed(prompt_ids):
            if token not in self._skipped:
                tail.append(token)
                if len(tail) >= CONTEXT and not self._decode(tail[::-1]).startswith(REPLACEMENT):
                    break
            if len(tail) == WINDOW:
                break
        return tail[::-1]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _settled(text: str) -> str:
    """``text`` without U+FFFD at its end that further bytes may turn into a character."""
    if not text.endswith(REPLACEMENT):
        return text
    held = min(PARTIAL, len(text) - len(text.rstrip(REPLACEMENT)))
    return text[:-held]
