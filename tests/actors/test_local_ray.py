"""What is left of a Ray of our own, with a process that only sleeps in its place."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from actors import local_ray
from actors.local_ray import LocalRay, start_local_ray, stop_local_ray
from actors.signals import interrupts_later, own_sigterm


@pytest.fixture(autouse=True)
def sleeper(tmp_path, monkeypatch):
    """Ray's place is taken by a process that never answers, and temporary directories are the test's own."""
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(local_ray.tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", "import time; time.sleep(100)"]
    monkeypatch.setattr(local_ray, "_command", lambda temp_dir, *_: [*command, str(temp_dir)])


def leave_running(monkeypatch):
    """Start and be killed before Ray answers, as far as that can be done in one process."""
    with monkeypatch.context() as patch:
        patch.setattr(local_ray, "_remove_recorded", lambda: False)
        patch.setattr(local_ray, "_await_address", interrupt)
        with pytest.raises(KeyboardInterrupt):
            start_local_ray()
    return LocalRay(**json.loads(local_ray._record().read_text()))


def interrupt(*_):
    raise KeyboardInterrupt


def test_an_interrupted_start_leaves_nothing(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(local_ray, "_await_address", lambda cluster, _: started.append(cluster) or interrupt())
    with pytest.raises(KeyboardInterrupt):
        start_local_ray()
    assert not started[0].alive
    assert not Path(started[0].temp_dir).exists()
    assert not local_ray._record().exists()


def test_a_start_that_was_killed_is_found_by_stop(monkeypatch):
    left = leave_running(monkeypatch)
    assert left.alive
    assert local_ray.local_ray() is None, "it does not answer yet"
    assert stop_local_ray()
    assert not left.alive
    assert not Path(left.temp_dir).exists()
    assert not stop_local_ray()


def test_a_record_of_what_does_not_answer_is_replaced(monkeypatch):
    left = leave_running(monkeypatch)
    local_ray._write(LocalRay("127.0.0.1:1", left.pid, left.created_s, left.temp_dir))
    monkeypatch.setattr(local_ray, "_await_address", lambda *_: "127.0.0.1:2")
    started = start_local_ray()
    try:
        assert (started.address, left.alive) == ("127.0.0.1:2", False)
        assert not Path(left.temp_dir).exists()
        assert local_ray.local_ray() == started
    finally:
        stop_local_ray()


def test_a_ray_that_ends_as_it_starts_is_reported_at_once(monkeypatch):
    monkeypatch.setattr(local_ray, "_command", lambda *_: [sys.executable, "-c", "print('no room')"])
    with pytest.raises(local_ray.ConfigError, match="no room"):
        start_local_ray()


def test_a_process_of_somebody_else_with_the_recorded_id_is_left_alone(tmp_path):
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        created_s = psutil.Process(other.pid).create_time()
        local_ray._write(LocalRay("127.0.0.1:1", other.pid, created_s - 1000, str(tmp_path / "gone")))
        assert not stop_local_ray()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_an_interrupt_waits_for_what_must_stay_whole():
    done = []

    def work():
        with interrupts_later():
            signal.raise_signal(signal.SIGINT)
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all"]


def test_sigterm_stays_with_who_had_it_before_ray_took_it():
    came = []

    def connect():
        with own_sigterm():
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
            signal.raise_signal(signal.SIGTERM)

    usual = signal.signal(signal.SIGTERM, lambda *_: came.append("ours"))
    try:
        with pytest.raises(SystemExit):
            connect()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert came == ["ours", "ours"]
