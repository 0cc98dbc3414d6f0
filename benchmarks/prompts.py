"""Prompts for tests and benchmarks: the data folder's where ``HELIOS_DATA`` names it, else the project's own."""

import json
import os
from pathlib import Path

FILES = ("chat.jsonl", "math.jsonl", "code.jsonl", "summarise.jsonl")
OWN = Path(__file__).parent / "prompts.txt"


def prompts(count: int, data: str | None = None) -> list[str]:
    """So many prompts, of every kind in turn, from ``data`` (default: HELIOS_DATA, else the project's own)."""
    data = data or os.environ.get("HELIOS_DATA")
    if data is None:
        own = OWN.read_text(encoding="utf-8").split("\n---\n")
        return [own[i % len(own)].strip() for i in range(count)]
    kinds = [(Path(data) / name).read_text(encoding="utf-8").splitlines() for name in FILES]
    return [json.loads(kinds[i % len(kinds)][i // len(kinds)])["prompt"] for i in range(count)]
