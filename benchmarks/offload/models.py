"""The checkpoints the contestants run: random weights in a real model's shape, made once and kept in a cache folder."""

import gc
import shutil
from pathlib import Path

import torch
from transformers import OPTConfig

from benchmarks.random_model import save_random

OPT_1_3B = OPTConfig(
    vocab_size=50272,
    hidden_size=2048,
    ffn_dim=8192,
    num_hidden_layers=24,
    num_attention_heads=32,
    word_embed_proj_dim=2048,
    max_position_embeddings=2048,
)
SMALL = OPTConfig(
    vocab_size=8192,
    hidden_size=512,
    ffn_dim=2048,
    num_hidden_layers=12,
    num_attention_heads=8,
    word_embed_proj_dim=512,
    max_position_embeddings=2048,
)
"""93 MB in bf16, for ``--quick``."""


def checkpoint(folder: Path, name: str, config: OPTConfig) -> Path:
    """``folder / name``, made in bf16 if it is not there yet."""
    directory = folder / name
    if not directory.is_dir():
        unfinished = folder / f"{name}.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        save_random(unfinished, config, dtype=torch.bfloat16)
        gc.collect()
        unfinished.rename(directory)
    return directory


def weights_files(directory: Path) -> list[Path]:
    """The files that hold the weights, largest first."""
    return sorted(directory.glob("*.safetensors"), key=lambda file: -file.stat().st_size)


def random_prompts(batch: int, length: int, vocab_size: int, seed: int = 1) -> list[list[int]]:
    """Token ids [batch, length] that every contestant gets; special tokens are left out."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(3, vocab_size, (batch, length), generator=generator).tolist()
    return ids
