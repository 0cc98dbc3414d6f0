"""The budget against the operating system's own count of the memory that a process holds."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.random_model import save_random
from engine.config import format_bytes

TinyModel = Callable[[str], Path]
MARGIN = 1.05
LENGTHS = (100, 200, 30, 5, 300, 77, 500, 500, 900, 40, 60, 1, 1, 1, 1, 20)


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Path]:
    """About 53 million weights: 212 MB in float32."""
    made: dict[torch.dtype, Path] = {}

    def get(dtype: torch.dtype) -> Path:
        if dtype not in made:
            config = LlamaConfig(
                vocab_size=8000,
                hidden_size=512,
                intermediate_size=2048,
                num_hidden_layers=12,
                num_attention_heads=8,
                num_key_value_heads=4,
                max_position_embeddings=1024,
                pad_token_id=0,
            )
            made[dtype] = save_random(tmp_path_factory.mktemp("large"), config, dtype=dtype)
        return made[dtype]

    return get


def measure(
    model: Path, warm: Path, offload_dir: Path, lengths: Sequence[int] = LENGTHS, max_tokens: int = 4, **config: Any
) -> dict[str, dict[str, int]]:
    fields = {"model": str(model), "threads": 2, "max_sequences": 16, "offload_dir": str(offload_dir), **config}
    job = json.dumps({"config": fields, "lengths": lengths, "max_tokens": max_tokens})
    command = [sys.executable, "-m", "tests.engine.peak", str(warm), job]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    measured: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return measured


def check(measured: dict[str, dict[str, int]], limit: int) -> None:
    shown = {use: format_bytes(size) for use, size in measured["ledger"].items()}
    assert sum(measured["ledger"].values()) <= limit
    for phase, peak in measured["peaks"].items():
        assert peak <= MARGIN * limit, (
            f"{phase}: {format_bytes(peak)} of {format_bytes(limit)}; the ledger says {shown}"
        )


KV_ON_DISK = {"kv_tokens": 0, "kv_disk_tokens": 16384}


@pytest.mark.parametrize(
    ("stored", "fields"),
    [
        (torch.float32, {"dtype": "float32", "memory_bytes": 160_000_000}),
        (torch.float32, {"dtype": "float32", "memory_bytes": 160_000_000, **KV_ON_DISK}),
        (torch.bfloat16, {"dtype": "bfloat16", "memory_bytes": 100_000_000}),
    ],
)
def test_the_process_holds_no_more_than_the_budget(
    large_model: Callable[[torch.dtype], Path],
    tiny_model: TinyModel,
    tmp_path: Path,
    stored: torch.dtype,
    fields: dict[str, Any],
) -> None:
    measured = measure(large_model(stored), tiny_model("llama"), tmp_path, **fields)
    check(measured, fields["memory_bytes"])


def test_sweeps_of_ever_other_sizes_hold_no_more_than_the_budget(
    large_model: Callable[[torch.dtype], Path], tiny_model: TinyModel, tmp_path: Path
) -> None:
    # Each number of rows has kernels of its own, and frees blocks of other sizes.
    fields = {"dtype": "bfloat16", "memory_bytes": 100_000_000, "max_sequences": 64, **KV_ON_DISK}
    lengths = [100 + i % 7 for i in range(64)]
    measured = measure(large_model(torch.bfloat16), tiny_model("llama"), tmp_path, lengths, max_tokens=24, **fields)
    check(measured, 100_000_000)


@pytest.mark.model
def test_the_process_of_a_real_model_holds_no_more_than_the_budget(
    smollm2_dir: Path, tiny_model: TinyModel, tmp_path: Path
) -> None:
    fields = {"dtype": "bfloat16", "memory_bytes": 150_000_000, "context": 2048}
    check(measure(smollm2_dir, tiny_model("llama"), tmp_path, **fields), 150_000_000)
