"""`helios batch` with weights and KV on disk, ended in mid-sweep: it can go on, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.engine.tiny import save_tiny

LINES = 80
START_S = 60


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def job(tmp_path, tiny):
    """(command, input, output, offload directory, environment) of a batch on a tiny model that lives on disk."""
    source, target, offload = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "offload"
    lines = [{"id": i, "prompt_ids": [5 + i, 6, 7] * (1 + i % 9), "max_tokens": 20 + i % 40} for i in range(LINES)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    keys = {
        "weights": "{disk: [embedding, layers.0-2, head]}",
        "kv_tokens": 0,
        "kv_disk_tokens": 4000,
        "offload_dir": offload,
    }
    options = ["--model", tiny, "--dtype", "float32", "--memory", "50MB", "-t", "0", "--ignore-eos", "--threads", "1"]
    sets = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-c", "from deploy.cli import main; main()", "batch", source, "-o", target, *options]
    return [str(part) for part in command + sets], source, target, offload, {**os.environ, "HELIOS_HOME": str(tmp_path)}


def results(target):
    return {record["id"]: record for record in map(json.loads, target.read_text().splitlines())}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_batch_that_was_ended_goes_on_and_leaves_nothing_behind(job, number, status):
    command, _, target, offload, env = job
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + START_S
    while not target.exists() or target.read_bytes().count(b"\n") < 5:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline_s, "no line was done"
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == status, said
    assert "Traceback" not in said
    assert list(offload.iterdir()) == []
    if number != signal.SIGKILL:
        assert target.read_text().endswith("\n")
    done = results(target)
    assert 5 <= len(done) < LINES, "it was ended in the middle"
    again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert list(offload.iterdir()) == []
    whole = results(target)
    assert sorted(whole) == list(range(LINES))
    assert not any("error" in record for record in whole.values())
    assert all(whole[name] == record for name, record in done.items()), "what was done is kept"
    assert len(target.read_text().splitlines()) == LINES, "nothing was done twice"
