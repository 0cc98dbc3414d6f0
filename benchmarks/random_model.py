"""Random models of any shape, as Hugging Face directories: for tests, and for speed where weights do not matter."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

TOKENIZER_SIZE = 320
"""Ids the tokenizer uses; a model's vocabulary must be at least as large."""


def save_random(directory: Path, config: PretrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random model of ``config`` and a byte-level tokenizer into ``directory``; returns it.

    Norms and biases are random too, so that none of them can be left out unnoticed.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)  # far enough from uniform logits that argmaxes mean something
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over ``TOKENIZER_SIZE`` ids with <unk>, <bos> and <eos> and a chat template."""
    fast = Tokenizer(models.BPE(unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=["<unk>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 4, "hello world, hello there"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=(
            "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        ),
    )
