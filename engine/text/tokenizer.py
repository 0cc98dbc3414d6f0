"""A model's tokenizer: text to ids and back, the chat template, and the bytes of single tokens."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, InvalidRequestError
from ..spec import ModelSpec, read_json

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Any one of these makes a directory one with a tokenizer."""


class Tokenizer:
    """A loaded tokenizer. transformers reads the directory and renders chat templates; ``tokenizers`` does the rest."""

    def __init__(self, pretrained: Any) -> None:
        """``pretrained`` is a transformers tokenizer with a fast backend."""
        self._pretrained = pretrained
        self._fast = pretrained.backend_tokenizer
        # Some files ask for truncation or padding, meant for training batches; a prompt must arrive whole.
        self._fast.no_truncation()
        self._fast.no_padding()

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read the tokenizer of a Hugging Face directory. Raises CheckpointError that names what is missing."""
        if not any((directory / name).is_file() for name in FILES):
            raise CheckpointError(f"{directory} has no tokenizer; copy the model's {FILES[0]} there")
        from transformers import AutoTokenizer  # takes seconds, so only who loads a tokenizer pays

        try:
            pretrained = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # whatever the reader of a damaged file trips over
            raise CheckpointError(_unreadable(directory, error)) from error
        if not pretrained.is_fast:
            raise CheckpointError(
                f"the tokenizer in {directory} is a {type(pretrained).__name__} without {FILES[0]}; "
                "save it once with transformers as a fast tokenizer"
            )
        return cls(pretrained)

    @property
    def vocab_size(self) -> int:
        """Tokens known, added ones included. The model's own vocabulary may be padded beyond this."""
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Every token's id."""
        return dict(self._fast.get_vocab(with_added_tokens=True))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``decode`` leaves out when told to skip special tokens."""
        added = self._fast.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def eos_ids(self, spec: ModelSpec) -> tuple[int, ...]:
        """Ids that end a sequence: the model's, or the tokenizer's own where the model's config names none."""
        own = self._pretrained.eos_token_id
        return spec.eos_ids or (() if own is None else (int(own),))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD, ids without a token become nothing."""
        return str(self._fast.decode(ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation as the model was trained to see it, beginning-of-sequence included once.

        Raises InvalidRequestError when the model has no chat template or the template refuses the messages.
        """
        if self._pretrained.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions, or a model tuned for chat", "messages"
            )
        try:
            text = self._pretrained.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        except Exception as error:  # a template is the model's own program, and raises what it likes
            raise InvalidRequestError(f"the model's chat template refused the messages: {error}", "messages") from error
        # The template writes the special tokens itself; adding them again would double the first one.
        return self.encode(text, add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token stands for, which may be part of a character. Empty for an id without a token."""
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoders:
            try:
                return bytes(self._byte_of[char] for char in token)
            except KeyError:  # an added token, which is kept as it is written
                return str(token).encode()
        if "ByteFallback" in self._decoders and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("\u2581", " ").encode()  # SentencePiece writes a space as a low line

    def token_text(self, token_id: int) -> str:
        """A token by itself as text, U+FFFD where it holds part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """Types of the steps that turn tokens into text, such as ByteLevel or ByteFallback."""
        decoder = self._fast.decoder
        if decoder is None:
            return frozenset()
        state = json.loads(decoder.__getstate__())
        return frozenset(step["type"] for step in state.get("decoders", [state]))

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """Byte-level BPE's alphabet (Radford et al., GPT-2, 2019): a printable character for each byte.

        Bytes that print as themselves in Latin-1 are themselves; the others follow from U+0100 in rising order.
        """
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _unreadable(directory: Path, error: Exception) -> str:
    """What is wrong with a tokenizer: the file's own fault where it can be told, else the reader's words."""
    path = directory / FILES[0]
    if path.is_file():
        content = read_json(path)
        lacking = [key for key in ("model", "added_tokens") if key not in content]
        if lacking:
            return f"{path} lacks {' and '.join(map(repr, lacking))}; copy the model's own {FILES[0]} there"
    return f"the tokenizer in {directory} cannot be read: {error}; copy the model's own {FILES[0]} there"
