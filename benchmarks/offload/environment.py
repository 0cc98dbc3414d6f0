"""The peers' own Python environment, from PyPI, in the cache folder. Made once."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.offload.harness import Program

STEPS = (
    ("torch==2.13.0",),  # first: the others would take the CUDA build
    (
        "accelerate==1.15.0",
        "transformers==5.24.0",
        "safetensors==0.8.0",
        "numpy==2.4.6",
        "ninja",
        "setuptools",
        "wheel",
    ),
    ("--no-build-isolation", "deepspeed==0.19.8"),
)
DEEPSPEED = 2
"""The step that only DeepSpeed needs."""
NAMES = ("transformers", "accelerate", "deepspeed")
BUILD_S = 1800
BUILD = """
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.accelerator import get_accelerator
builder = AsyncIOBuilder()
if not builder.is_compatible(verbose=True):
    raise SystemExit("Error: DeepSpeed's async_io cannot be built; is libaio with its headers installed (libaio-dev)?")
builder.load()
for name in ("ShareMemCommBuilder", "PinMemoryBuilder"):
    other = get_accelerator().create_op_builder(name)
    if other is not None:
        other.load()
"""
"""Builds what DeepSpeed would build at first use: that takes minutes and more memory than the contestants have."""


def peers(cache: Path) -> tuple[dict[str, Program], dict[str, str]]:
    """The peers that can run, by name, and for each that cannot the reason."""
    root = cache / "peers"
    python = str(root / "bin" / "python")
    environment = _environment(root)
    problem = _run([sys.executable, "-m", "venv", str(root)], environment) if not Path(python).exists() else ""
    reasons: dict[str, str] = {}
    for number, packages in enumerate(STEPS):
        done = root / f"step-{number}"
        wanted = " ".join(packages)
        if problem or (done.exists() and done.read_text() == wanted):
            continue
        problem = _run([python, "-m", "pip", "install", "--quiet", *packages], environment)
        if not problem:
            done.write_text(wanted)
        elif number == DEEPSPEED:
            reasons["deepspeed"], problem = problem, ""
    if problem:
        return {}, dict.fromkeys(NAMES, problem)
    if "deepspeed" not in reasons and not (root / "built").exists():
        shutil.rmtree(root / "extensions", ignore_errors=True)  # a build that was cut short holds a lock for ever
        if failed := _run([python, "-c", BUILD], environment):
            reasons["deepspeed"] = failed
        else:
            (root / "built").touch()
    programs = {name: Program(name, python, "benchmarks.offload.peers", environment) for name in NAMES}
    return {name: program for name, program in programs.items() if name not in reasons}, reasons


def _environment(root: Path) -> Mapping[str, str]:
    return {
        "PATH": f"{root / 'bin'}:{os.environ.get('PATH', '')}",  # for ninja
        "TORCH_EXTENSIONS_DIR": str(root / "extensions"),
        "DS_ACCELERATOR": "cpu",
        "MAX_JOBS": "2",
    }


def _run(command: list[str], environment: Mapping[str, str]) -> str:
    """What went wrong, in a line; empty if nothing did."""
    print("$", " ".join(command[:5]), "...", flush=True)
    try:
        made = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=BUILD_S, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"{' '.join(command[:4])} took more than {BUILD_S} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    if made.returncode == 0:
        return ""
    lines = [line for line in (made.stdout + made.stderr).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "no reason given")[:300]
