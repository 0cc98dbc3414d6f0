"""The command line beside a running server."""

import json

import pytest

from engine.checkpoint.store import DEFAULT_MODEL

pytestmark = [pytest.mark.cluster, pytest.mark.model]


def test_a_second_app_is_refused_and_starts_nothing(server):
    done = server.helios("serve", "--port", "0", "--app", "second")
    assert done.returncode == 1
    assert f"error: the app 'helios' is served at {server.url}, and a Ray serves one app" in done.stderr
    assert "loading" not in done.stderr


def test_a_busy_port_is_said(server):
    port = server.url.rpartition(":")[2]
    done = server.helios("serve", "--port", port)
    assert done.returncode == 1
    assert f"error: 127.0.0.1:{port} cannot be listened on" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_status_shows_the_model(server):
    shown = server.helios("status")
    assert shown.returncode == 0, shown.stderr
    assert DEFAULT_MODEL in shown.stdout
    assert "ready" in shown.stdout
    report = json.loads(server.helios("status", "--json").stdout)
    assert report["models"][0]["replicas"][0]["stats"]["kv_blocks_total"] > 0


def test_generate_asks_a_running_server(server):
    done = server.helios("generate", "The capital of France is", "--url", server.url, "-n", "4", "-t", "0", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["text"].startswith(" Paris")
    assert (record["completion_tokens"], record["finish_reason"]) == (4, "length")


def test_generate_says_what_the_server_refused(server):
    done = server.helios("generate", "hi", "--url", server.url, "--temperature", "-1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: temperature is -1")


def test_chat_finds_the_running_server(server):
    done = server.helios("chat", "-n", "8", "-t", "0", stdin="What is the capital of France?\n/exit\n")
    assert done.returncode == 0, done.stderr
    assert "France" in done.stdout


def test_stopping_an_app_that_does_not_run_names_those_that_do(server):
    done = server.helios("stop", "--app", "second")
    assert done.returncode == 1
    assert "no app 'second' is running here; running: helios" in done.stderr
