import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import CheckpointError, InvalidRequestError
from engine.spec import ModelSpec
from engine.text.tokenizer import Tokenizer

from .conftest import TEXTS, byte_level, save

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 300,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_are_exact_also_inside_a_character(tokenizer, text):
    joined = b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text, add_special_tokens=False))
    assert joined.decode().removeprefix(" ") == text


def test_token_text_shows_half_a_character_as_a_replacement(bpe):
    halves = [token for token in range(256) if len(bpe.token_bytes(token)) == 1 and bpe.token_bytes(token) >= b"\x80"]
    assert len(halves) == 128
    assert all(bpe.token_text(token) == "\ufffd" for token in halves)


def test_added_and_unknown_tokens_have_bytes(bpe):
    [added] = bpe.encode("two words")
    assert bpe.token_bytes(added) == b"two words"
    assert bpe.token_bytes(bpe.vocab_size + 5) == b""
    assert bpe.decode([bpe.vocab_size + 5]) == ""


def test_special_tokens_are_left_out_unless_asked_for(bpe):
    ids = [*bpe.encode("dog"), *bpe.special_ids]
    assert bpe.decode(ids) == "dog"
    assert "</s>" in bpe.decode(ids, skip_special_tokens=False)


def test_padding_and_truncation_of_the_file_are_off(tmp_path):
    fast = byte_level()
    fast.enable_truncation(4)
    fast.enable_padding(length=64)
    tokenizer = Tokenizer.load(save(fast, tmp_path))
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def test_eos_is_the_models_or_else_the_tokenizers_own(bpe):
    spec = ModelSpec.from_config(CONFIG)
    [own] = bpe.eos_ids(spec)
    assert bpe.token_text(own) == "</s>"
    assert bpe.eos_ids(replace(spec, eos_ids=(5, 6))) == (5, 6)


def test_chat_template_is_applied_with_one_bos(bpe):
    messages = [{"role": "user", "content": "dog"}, {"role": "assistant", "content": "fox"}]
    ids = bpe.apply_chat_template(messages)
    assert all(type(token) is int for token in ids)
    assert bpe.decode(ids, skip_special_tokens=False) == "<s>user: dog\nassistant: fox\n"


def test_the_final_message_can_be_continued(bpe):
    messages = [{"role": "assistant", "content": "fox"}]
    ids = bpe.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert bpe.decode(ids) == "assistant: fox"


def test_a_model_without_chat_template_points_to_completions(sentencepiece):
    with pytest.raises(InvalidRequestError, match="/v1/completions") as caught:
        sentencepiece.apply_chat_template([{"role": "user", "content": "dog"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": [1]}, {"role": None, "content": ""}])
def test_messages_the_template_refuses_are_the_requests_fault(bpe, message):
    with pytest.raises(InvalidRequestError) as caught:
        bpe.apply_chat_template([message])
    assert caught.value.param == "messages"


def test_a_directory_without_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


def test_what_a_tokenizer_lacks_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json lacks 'model' and 'added_tokens'; copy"):
        Tokenizer.load(tmp_path)


def test_a_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


def test_importing_the_module_does_not_import_transformers():
    code = "import sys, engine.text.tokenizer, engine.text.detokenizer; sys.exit('transformers' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@pytest.mark.model
def test_smollm2_chat_starts_with_one_system_turn(smollm2_dir):
    tokenizer = Tokenizer.load(smollm2_dir)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi 😀"}])
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi 😀<|im_end|>\n<|im_start|>assistant\n")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert tokenizer.eos_ids(ModelSpec.from_directory(smollm2_dir)) == (2,)
