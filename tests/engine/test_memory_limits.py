"""What the container leaves is what a process may take."""

from pathlib import Path

import pytest

from engine import memory

MIB = 2**20


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_counts_and_droppable_file_pages_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    limit, usage = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    for folder, size, used in (
        ("", "max", 900),
        ("outer", 500 * MIB, 300 * MIB),
        ("outer/inner", 400 * MIB, 250 * MIB),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / limit).write_text(f"{size}\n")
        (tmp_path / folder / usage).write_text(f"{used}\n")
        (tmp_path / folder / "memory.stat").write_text(f"anon 5\ninactive_file {30 * MIB}\n")
    assert memory._left(tmp_path / "outer", limit, usage) == 230 * MIB
    assert memory._left(tmp_path / "outer/inner", limit, usage) == 180 * MIB
    assert memory._left(tmp_path, limit, usage) == memory.UNLIMITED


def test_there_is_some_memory_left_here() -> None:
    assert 0 < memory.available_bytes() < memory.UNLIMITED


def test_a_container_has_what_its_limit_says(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{300 * MIB}\n")
    assert memory._limit(tmp_path, "memory.max") == 300 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._limit(tmp_path, "memory.max") == memory.UNLIMITED
    assert memory.available_bytes() <= memory.total_bytes() < memory.UNLIMITED
