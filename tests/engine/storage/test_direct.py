"""Files read past the page cache: the right bytes from any offset to any address, and errors that say what to do."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from engine.errors import CheckpointError
from engine.memory import page_aligned
from engine.storage.direct import ALIGN, PIECE_BYTES, Bounce, SourceFile

SIZE = 5 * ALIGN + 123
"""Of the file that most tests read: it ends inside a block."""


def content(size: int = SIZE) -> bytes:
    return (
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).numpy().tobytes()
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "weights"
    path.write_bytes(content())
    return path


@pytest.fixture(scope="module")
def file(path: Path) -> Iterator[SourceFile]:
    file = SourceFile(path)
    yield file
    file.close()


@pytest.fixture(scope="module")
def bounce() -> Bounce:
    return Bounce()


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without direct I/O."""
    plain = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)


def opened(path: Path, direct: bool) -> SourceFile:
    """The file as a file system with or without direct I/O would open it."""
    file = SourceFile(path)
    if not direct and file.direct:
        file.close()
        file._fd, file.direct = os.open(path, os.O_RDONLY), False
    return file


def read(file: SourceFile, offset: int, count: int, shift: int, bounce: Bounce) -> bytes:
    """``count`` bytes read to an address ``shift`` behind an aligned one; nothing around them may change."""
    memory = page_aligned((shift + count + ALIGN,), torch.uint8).fill_(7)
    into = memory[shift : shift + count]
    file.read(offset, into, bounce)
    assert bool((memory[:shift] == 7).all())
    assert bool((memory[shift + count :] == 7).all())
    return into.numpy().tobytes()


def ranges() -> st.SearchStrategy[tuple[int, int]]:
    """Offset and length of a part of the file, often at a block's edge."""
    edges = [max(0, min(SIZE, block * ALIGN + by)) for block in range(7) for by in (-1, 0, 1)]
    place = st.one_of(st.sampled_from(edges), st.integers(0, SIZE))
    return st.tuples(place, place).map(lambda two: (min(two), abs(two[0] - two[1])))


@settings(deadline=None, max_examples=60)
@given(part=ranges(), shift=st.one_of(st.none(), st.integers(0, ALIGN - 1)), direct=st.booleans())
def test_any_range_is_read_to_any_address(
    path: Path, bounce: Bounce, part: tuple[int, int], shift: int | None, direct: bool
) -> None:
    offset, count = part
    file = opened(path, direct)
    try:
        got = read(file, offset, count, offset % ALIGN if shift is None else shift, bounce)
    finally:
        file.close()
    assert got == content()[offset : offset + count]


@settings(deadline=None, max_examples=60)
@given(parts=st.lists(ranges(), min_size=2, max_size=6))
def test_blocks_kept_from_earlier_reads_hold_what_the_file_does(
    path: Path, bounce: Bounce, parts: list[tuple[int, int]]
) -> None:
    file = SourceFile(path)
    try:
        for offset, count in parts:
            assert read(file, offset, count, offset % ALIGN, bounce) == content()[offset : offset + count]
    finally:
        file.close()


@settings(deadline=None, max_examples=60)
@given(part=ranges())
def test_a_window_shows_any_range(file: SourceFile, bounce: Bounce, part: tuple[int, int]) -> None:
    offset, count = part
    assert file.window(offset, count, bounce).numpy().tobytes() == content()[offset : offset + count]


def test_a_window_takes_a_whole_piece_wherever_it_begins(tmp_path: Path, bounce: Bounce) -> None:
    data = content(PIECE_BYTES + 2 * ALIGN)
    (tmp_path / "large").write_bytes(data)
    file = SourceFile(tmp_path / "large")
    for offset in (0, 1, ALIGN - 1, ALIGN):
        window = file.window(offset, PIECE_BYTES, bounce)
        assert window.numpy().tobytes() == data[offset : offset + PIECE_BYTES]
    file.close()


def test_a_file_is_read_where_the_file_system_has_no_direct_io(path: Path, bounce: Bounce, buffered: None) -> None:
    file = SourceFile(path)
    assert not file.direct
    assert read(file, 5, 2 * ALIGN, 9, bounce) == content()[5 : 5 + 2 * ALIGN]
    assert file.window(SIZE - 3, 3, bounce).numpy().tobytes() == content()[-3:]
    file.close()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no memory file system at /dev/shm")
def test_a_file_is_read_from_a_memory_file_system(bounce: Bounce) -> None:
    path = Path("/dev/shm") / f"helios-test-{os.getpid()}"
    try:
        path.write_bytes(content())
        file = SourceFile(path)
        assert read(file, 5, 2 * ALIGN, 5, bounce) == content()[5 : 5 + 2 * ALIGN]
        assert read(file, SIZE - 77, 77, 0, bounce) == content()[-77:]
        file.close()
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(("direct", "most"), [(True, ALIGN), (True, 3 * ALIGN - 1), (False, 1000), (False, 1)])
def test_a_read_that_returns_less_goes_on(
    path: Path, bounce: Bounce, monkeypatch: pytest.MonkeyPatch, direct: bool, most: int
) -> None:
    file, whole = opened(path, direct), os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: min(most, whole(*args)))
    assert read(file, 10, SIZE - 10, 10, bounce) == content()[10:]
    file.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_failing_read_names_file_byte_reason_and_remedy(
    path: Path, bounce: Bounce, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    file = opened(path, direct)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=rf"{path}.*byte {ALIGN}.*Input/output error.*check the disk"):
        read(file, ALIGN, ALIGN, 0, bounce)
    monkeypatch.undo()
    assert read(file, ALIGN, ALIGN, 0, bounce) == content()[ALIGN : 2 * ALIGN], "a later read that can be done is done"
    file.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [0, 1, ALIGN - 1, ALIGN, 2 * ALIGN + 5, SIZE - 1])
def test_a_file_cut_short_while_open_is_told_with_the_remedy(
    tmp_path: Path, bounce: Bounce, direct: bool, size: int
) -> None:
    path = tmp_path / "cut"
    path.write_bytes(content())
    file = opened(path, direct)
    os.truncate(path, size)
    for shift in (0, 1):
        with pytest.raises(CheckpointError, match=rf"{path} ends at byte {size} .*Get the model again"):
            read(file, 0, SIZE, shift, bounce)
    with pytest.raises(CheckpointError, match="Load it again"):
        file.check()
    file.close()


def test_a_file_written_to_while_open_is_told_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "changed"
    path.write_bytes(content())
    file = SourceFile(path)
    file.check()
    with path.open("r+b") as other:
        other.write(b"other")
    os.utime(path, ns=(1, 1))  # the clock of a file system may be too coarse to show it
    with pytest.raises(CheckpointError, match=rf"{path} was changed.*Load it again"):
        file.check()
    file.close()


def test_a_file_replaced_by_another_while_open_is_still_read(tmp_path: Path, bounce: Bounce) -> None:
    path = tmp_path / "replaced"
    path.write_bytes(content())
    file = SourceFile(path)
    (tmp_path / "new").write_bytes(b"other")
    (tmp_path / "new").rename(path)
    assert read(file, 0, SIZE, 0, bounce) == content()
    file.check()
    file.close()


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent cannot be opened: No such file"):
        SourceFile(tmp_path / "absent")


def test_closing_gives_the_descriptor_back(path: Path) -> None:
    file = SourceFile(path)
    before = len(os.listdir("/proc/self/fd"))
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_memory_for_reading_is_aligned_and_as_large_as_asked() -> None:
    for shape in ((1,), (3, 5), (0,), (2**21 + 1,)):
        memory: Tensor = page_aligned(shape, torch.float32)
        assert memory.shape == shape
        assert memory.data_ptr() % ALIGN == 0
