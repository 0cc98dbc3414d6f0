"""Streamed text against decoding everything at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import WINDOW, TextStream
from engine.text.tokenizer import Tokenizer

from .conftest import TEXTS

TOKENS = st.lists(st.integers(0, 10_000), max_size=80)


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    """The pieces, one per token and the rest."""
    text = TextStream(tokenizer, prompt, skip)
    return [*(text.push([token]) for token in output), text.finish()]


@pytest.mark.parametrize("text", [*TEXTS, " ".join(TEXTS) * 5])
def test_pieces_add_up_to_the_text(tokenizer, text):
    prompt = tokenizer.encode("the quick dog")
    output = tokenizer.encode(f"the quick dog {text}")[len(prompt) :]
    assert tokenizer.decode([*prompt, *output]) == f"the quick dog {text}"
    assert "".join(stream(tokenizer, prompt, output)) == f" {text}"


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_half_a_character(tokenizer, text):
    assert not any("\ufffd" in piece for piece in stream(tokenizer, [], tokenizer.encode(text)))


@settings(deadline=None, max_examples=300)
@given(ids=TOKENS, skip=st.booleans())
def test_any_tokens_of_byte_level_bpe_stream_as_they_decode(bpe, ids, skip):
    ids = [token % bpe.vocab_size for token in ids]
    prompt = bpe.encode("the dog")
    pieces = stream(bpe, prompt, ids, skip)
    assert "the dog" + "".join(pieces) == bpe.decode([*prompt, *ids], skip)


@settings(deadline=None, max_examples=300)
@given(ids=TOKENS)
def test_words_and_whole_characters_of_sentencepiece_stream_as_they_decode(sentencepiece, ids):
    spelt = [sentencepiece.encode("€", add_special_tokens=False)[-3:], sentencepiece.encode("😀")[-4:]]
    choices = [[token] for token in range(259, sentencepiece.vocab_size)] + spelt * 5 + [[1]]
    output = [token for choice in ids for token in choices[choice % len(choices)]]
    prompt = sentencepiece.encode("the dog")
    pieces = stream(sentencepiece, prompt, output)
    assert "the dog" + "".join(pieces) == sentencepiece.decode([*prompt, *output])


@settings(deadline=None, max_examples=200)
@given(ids=TOKENS)
def test_what_was_released_of_any_sentencepiece_bytes_is_the_beginning_of_the_valid_text(sentencepiece, ids):
    """Invalid bytes may not undo a character that is out, nor lose the words behind them."""
    output = [3 + token % 256 for token in ids] + sentencepiece.encode("the dogs", add_special_tokens=False)
    text = "".join(stream(sentencepiece, sentencepiece.encode("dog"), output))
    assert text.endswith(" the dogs")


def test_skipped_tokens_do_not_eat_the_space_behind_them(sentencepiece):
    prompt = [*sentencepiece.encode("the"), *[1] * 3 * WINDOW]
    output = [*[2] * 3 * WINDOW, *sentencepiece.encode("dog")]
    assert "".join(stream(sentencepiece, prompt, output)) == " dog"


def test_the_first_word_of_a_sequence_has_no_space(sentencepiece):
    assert "".join(stream(sentencepiece, [1], sentencepiece.encode("dog"))) == "dog"


def test_a_character_begun_in_the_prompt_is_completed_in_the_output(tokenizer):
    ids = tokenizer.encode("dogs🏴")
    assert "".join(stream(tokenizer, ids[:-1], ids[-1:])) == "🏴"


def test_a_finished_half_character_is_a_replacement(tokenizer):
    ids = tokenizer.encode("dogs🏴")
    pieces = stream(tokenizer, [], ids[:-1])
    assert "".join(pieces[:-1]) == "dogs"
    assert set(pieces[-1]) == {"\ufffd"}


def test_invalid_bytes_are_not_held_for_ever(tokenizer):
    [bad] = {tokenizer.encode("dogs🏴")[-1]}
    pieces = stream(tokenizer, tokenizer.encode("dog"), [bad] * 50)
    assert len("".join(pieces[:10])) >= 7
    assert "".join(pieces) == "\ufffd" * 50


def test_nothing_pushed_is_nothing_finished(tokenizer):
    ids = tokenizer.encode("dogs🏴")
    assert TextStream(tokenizer, ids[:-1]).finish() == ""
    assert TextStream(tokenizer, []).finish() == ""


def test_several_tokens_at_once_give_the_same_text(tokenizer):
    ids = tokenizer.encode(TEXTS[-1])
    text = TextStream(tokenizer, [], True)
    assert text.push(ids) + text.finish() == TEXTS[-1]


@pytest.mark.model
@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=60))
def test_smollm2_streams_any_text(smollm2, text):
    prompt = smollm2.encode("Once")
    ids = smollm2.encode(text)
    pieces = stream(smollm2, prompt, ids, skip=False)
    assert "".join(pieces) == smollm2.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir) -> Tokenizer:
    return Tokenizer.load(smollm2_dir)
