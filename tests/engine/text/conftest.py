"""Tokenizers made on the spot: byte-level BPE as GPT-2's and byte-fallback BPE as Llama's."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast

from engine.text.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "def add(a, b):\n    return a + b\n\n\n",
    "Grüße aus Köln, naïve café",
    "日本語のテキストと中文文本",
    "😀 👩‍👩‍👧 🏳️‍🌈 ok",
]
CHAT = "{% for m in messages %}{{ '<s>' if loop.first }}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


def byte_level() -> Fast:
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    fast.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    fast.add_tokens([AddedToken("two words", normalized=False)])
    return fast


def byte_fallback() -> Fast:
    """Words carry their leading space as U+2581; what is not in the vocabulary is spelt in bytes."""
    words = ["\u2581", "\u2581the", "\u2581dog", "\u2581quick", "s", "e", "q", "u", "i", "c", "k", "ü", "日"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    fast = Fast(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    return fast


def save(fast: Fast, directory: Path, chat_template: str | None = None) -> Path:
    pretrained = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")
    pretrained.chat_template = chat_template
    pretrained.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save(byte_level(), tmp_path_factory.mktemp("bpe"), CHAT))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save(byte_fallback(), tmp_path_factory.mktemp("sentencepiece")))


@pytest.fixture(params=["bpe", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each of the two in turn."""
    found: Tokenizer = request.getfixturevalue(request.param)
    return found
