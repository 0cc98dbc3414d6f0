"""What each idea is worth, as in FlexGen's Table 4: helios with one of them switched off at a time."""

from collections.abc import Iterator
from typing import Any

from benchmarks.offload.contest import Setting, attempt, helios_options
from benchmarks.offload.harness import HELIOS, Harness, Outcome
from engine.kv import BLOCK

ROW_BY_ROW = 4
"""Row by row, the block is done in so many batches, one to its end after another."""


def variants(setting: Setting, batch: int, n_tokens: int) -> dict[str, dict[str, Any]]:
    """By name, the engine's settings. "all on" is what the contest uses; two pairs have one row apart from it each."""
    everything = helios_options(setting, batch, n_tokens)
    positions = batch * -(-everything["context"] // BLOCK) * BLOCK
    kv_bytes = positions * setting.shape.kv_token_bytes
    host = everything | {"kv_tokens": 0, "kv_disk_tokens": 0, "kv_host_tokens": positions, "host_bytes": kv_bytes}
    rows = max(1, batch // ROW_BY_ROW)
    row_by_row = helios_options(setting, rows, n_tokens) | {"max_queued": batch, "schedule": "zigzag"}
    nowhere = {"disk": ["embedding", f"layers.0-{setting.shape.n_layers - 1}", "head"]}
    return {
        "all on": everything,
        "no overlap": everything | {"read_ahead": False},
        "KV in another tier, delegated": host,
        "the same, not delegated": host | {"delegate": False},
        f"row by row ({rows} at a time)": row_by_row,
        "nothing resident": everything | {"weights": nowhere},
    }


def run(setting: Setting, harness: Harness, batch: int, n_tokens: int) -> Iterator[tuple[str, Outcome]]:
    for name, options in variants(setting, batch, n_tokens).items():
        yield name, attempt(setting, harness, HELIOS, batch, n_tokens, options)
