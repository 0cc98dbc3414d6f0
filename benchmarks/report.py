"""What every benchmark shares: its arguments, the machine it ran on, targets, and the files it leaves."""

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine.device import usable_cores


@dataclass(frozen=True, slots=True)
class Target:
    """``value`` must be at least ``bound`` (a ratio, usually)."""

    name: str
    value: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.value >= self.bound


@dataclass(slots=True)
class Report:
    """Collects a benchmark's figures and writes ``NAME.json`` beside the picture its author draws."""

    name: str
    args: argparse.Namespace
    figures: dict[str, Any] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    started: float = field(default_factory=time.time)

    def target(self, name: str, value: float, bound: float) -> None:
        self.targets.append(Target(name, round(value, 3), bound))

    @property
    def picture(self) -> Path:
        return Path(self.args.out) / f"{self.name}.png"

    def finish(self) -> None:
        """Print the targets, write the JSON, and exit with 1 under ``--check`` if one does not hold."""
        out = Path(self.args.out)
        out.mkdir(parents=True, exist_ok=True)
        content = {
            "benchmark": self.name,
            "command": "python -m benchmarks." + " ".join([self.name, *sys.argv[1:]]),
            "machine": machine(),
            "seconds": round(time.time() - self.started, 1),
            "figures": self.figures,
            "targets": [{**asdict(target), "holds": target.holds} for target in self.targets],
        }
        (out / f"{self.name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        rows = [[t.name, f"{t.value:.2f}", f"{t.bound:.2f}", "yes" if t.holds else "NO"] for t in self.targets]
        show("Targets", ["target", "value", "at least", "holds"], rows)
        Console().print(f"written: {out / self.name}.json, .png")
        if self.args.check and not all(target.holds for target in self.targets):
            raise SystemExit(1)


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    made.add_argument("--quick", action="store_true", help="fewer and shorter runs, to see that it works")
    made.add_argument("--data", help="folder with prompts (default: HELIOS_DATA, else the project's own prompts)")
    made.add_argument("--out", default="out", help="where NAME.json and NAME.png are written (default: out)")
    made.add_argument("--check", action="store_true", help="exit with 1 if a target does not hold")
    return made


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": cpu,
        "cores": usable_cores(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "ray")},
    }


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on the terminal, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
