"""Loads that fail and engines that are closed: the reason is said, and no thread or file is left behind."""

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.build import build
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import CheckpointError, OutOfMemoryError
from engine.storage import direct
from tests.engine.serving import ALL_ON_DISK, AMPLE, MANY, Served, failing, with_kv_on_disk


def io_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("helios-io")]


@contextmanager
def nothing_left_behind(directory: Path) -> Iterator[None]:
    """No thread, file descriptor or file more than before."""
    gc.collect()
    threads, files = len(io_threads()), len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(io_threads()) == threads, "threads were left"
    assert len(os.listdir("/proc/self/fd")) == files, "files were left open"
    assert not directory.exists() or not any(directory.iterdir())


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "kv",
    [
        {},
        pytest.param({"kv_host_tokens": 128, "delegate": False, "host_bytes": AMPLE}),
    ],
)
def test_a_full_disk_refuses_the_load_and_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: dict[str, Any]
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full_disk)
    config = EngineConfig(
        str(model), memory_bytes=AMPLE, offload_dir=str(tmp_path / "offload"), kv_disk_tokens=512, threads=1, **kv
    )
    words = rf"asked for on disk and {tmp_path}/offload has .*No space"
    with nothing_left_behind(tmp_path / "offload"), pytest.raises(OutOfMemoryError, match=words):
        build(config)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"weights": {"host": ALL_ON_DISK["disk"]}, "host_bytes": 1000}, OutOfMemoryError),
        pytest.param(
            {"weights": {"host": ALL_ON_DISK["disk"]}, "host_bytes": 100_000, "kv_disk_tokens": 512},
            OutOfMemoryError,
        ),
        ({"memory_bytes": 1000, "kv_disk_tokens": 512}, OutOfMemoryError),
    ],
)
def test_a_load_that_fails_leaves_nothing(
    model: Path, tmp_path: Path, fields: dict[str, Any], error: type[Exception]
) -> None:
    config = EngineConfig(str(model), memory_bytes=AMPLE, offload_dir=str(tmp_path / "offload"), threads=1)
    with nothing_left_behind(tmp_path / "offload"), pytest.raises(error):
        build(replace(config, **fields))


def test_weights_that_cannot_be_read_at_load_refuse_it_and_leave_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct.os, "preadv", failing(os.preadv, lambda offset: offset > 4096))
    config = EngineConfig(str(model), offload_dir=str(tmp_path / "offload"), kv_disk_tokens=512, threads=1)
    with nothing_left_behind(tmp_path / "offload"), pytest.raises(CheckpointError, match="check the disk"):
        build(config)


def test_too_little_for_one_layer_names_every_term(model: Path) -> None:
    words = r"limit is 146.48 KiB; .*weights and the buffers.*workspaces.*KV cache.*Raise the limit.*kv_disk_tokens"
    with pytest.raises(OutOfMemoryError, match=words):
        build(EngineConfig(str(model), dtype="float32", memory_bytes=150_000, weights=None))


def test_closing_in_mid_run_leaves_nothing(model: Path, tmp_path: Path, load: Callable[..., Engine]) -> None:
    with nothing_left_behind(tmp_path / "offload"):
        engine, _ = with_kv_on_disk(load, model)
        Served(engine, MANY)
        for _ in range(3):
            engine.step()
        engine.close()


def test_an_engine_that_nobody_closes_is_closed_when_it_is_collected(model: Path, tmp_path: Path) -> None:
    with nothing_left_behind(tmp_path / "offload"):
        engine = Engine.load(
            EngineConfig(
                str(model), weights=ALL_ON_DISK, kv_disk_tokens=512, offload_dir=str(tmp_path / "offload"), threads=1
            )
        )
        engine.step()
        del engine
