"""A real `helios serve` for these tests: its own process, port, state directory and Ray; the shared model store."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from engine.checkpoint.store import DEFAULT_MODEL

START_S = 180
MAX_QUEUED = 40
"""Over the 32 sequences of a sweep, so that some wait."""


@dataclass
class Server:
    """A running server and ways to look at it."""

    url: str
    env: dict[str, str]
    process: subprocess.Popen[str]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def replica(self) -> dict[str, Any]:
        """The one replica's part of /status."""
        return httpx.get(f"{self.url}/status", timeout=30).json()["models"][0]["replicas"][0]

    def stats(self) -> dict[str, Any]:
        return self.replica()["stats"]

    def await_idle(self, within_s: float = 10) -> dict[str, Any]:
        """The stats once no sequence runs or waits and no KV block is held."""
        deadline_s = time.monotonic() + within_s
        while True:
            stats = self.stats()
            if stats["running"] == stats["waiting"] == stats["kv_blocks_used"] == 0:
                return stats
            assert time.monotonic() < deadline_s, f"not idle after {within_s} s: {stats}"
            time.sleep(0.05)

    def helios(self, *args: str, stdin: str = "", timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command of the command line beside the server."""
        command = [sys.executable, "-c", "from deploy.cli import main; main()", *args]
        return subprocess.run(command, input=stdin, env=self.env, capture_output=True, text=True, timeout=timeout_s)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("helios")
    (root / "models").symlink_to(smollm2_dir.parent)
    config = {
        "models": [{"name": DEFAULT_MODEL, "dtype": "float32", "memory": "1500MB", "threads": 1}],
        "http": {"port": free_port(), "max_queued": MAX_QUEUED, "max_body_bytes": 100_000},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    env = {**os.environ, "HELIOS_HOME": str(root), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-c", "from deploy.cli import main; main()", "serve", str(root / "config.yaml")]
    log = root / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)
    server = Server(f"http://127.0.0.1:{config['http']['port']}", env, process)
    try:
        _await_start(process, log)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
        assert not (root / "run" / "ray.json").exists(), "its Ray was left behind"


def _await_start(process: "subprocess.Popen[str]", log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while "Helios serves at" not in log.read_text():
        assert process.poll() is None, f"the server ended:\n{log.read_text()}"
        assert time.monotonic() < deadline_s, f"the server did not start within {START_S} s:\n{log.read_text()}"
        time.sleep(0.1)
