"""The Performance History Table on disk: written whole and atomically, refused and set aside when corrupt."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .pht import PerformanceTable, Reading
from .report import Counters

VERSION = 1


class CorruptTableError(Exception):
    """The file cannot be read back. It has been moved aside; the message says where and why."""


def save_table(table: PerformanceTable, path: Path) -> None:
    """Write the table. A reader sees the old file or the new one, never a part. Raises OSError."""
    data = {
        "version": VERSION,
        "fingerprints": table.fingerprints,
        "sums": [{"model": model, "depth": depth, **asdict(sums)} for (model, depth), sums in table.sums.items()],
        "readings": [_reading_to_json(*key, reading) for key, reading in table.readings.items()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_table(path: Path) -> PerformanceTable:
    """The table in ``path``; an empty one if there is no such file.

    Raises CorruptTableError after moving a file that is not a table of this version to ``PATH.corrupt``.
    """
    try:
        return _from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return PerformanceTable()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        aside = path.with_name(path.name + ".corrupt")
        path.replace(aside)
        why = f"{type(error).__name__}: {error}"
        raise CorruptTableError(f"{path} is not a performance table ({why}); moved to {aside}") from None


def _reading_to_json(model: str, replica: int, reading: Reading) -> dict[str, Any]:
    counters = [{"depth": depth, **asdict(sums)} for depth, sums in reading.counters.items()]
    return {"model": model, "replica": replica, "epoch": reading.epoch, "counters": counters}


def _from_json(data: dict[str, Any]) -> PerformanceTable:
    if data["version"] != VERSION:
        raise ValueError(f"version is {data['version']}, this program writes {VERSION}")
    table = PerformanceTable(fingerprints=dict(data["fingerprints"]))
    for row in data["sums"]:
        key = (row.pop("model"), int(row.pop("depth")))
        table.sums[key] = Counters(**row)
    for row in data["readings"]:
        reading = Reading(int(row["epoch"]), {})
        for entry in row["counters"]:
            depth = int(entry.pop("depth"))
            reading.counters[depth] = Counters(**entry)
        table.readings[(row["model"], int(row["replica"]))] = reading
    return table
