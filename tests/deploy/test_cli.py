"""The command line without a server: how it parses, refuses and fails."""

import json
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import torch
import typer
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.cli.chat import Conversation
from deploy.cli.group import HeliosGroup, Terminated
from deploy.cli.serve import configuration
from deploy.cli.sources import Piece
from deploy.state import Running, read_record, record_path, running_url, write_record
from engine.errors import ConfigError, InvalidRequestError
from engine.request import Usage
from tests.engine.tiny import save_tiny

COMMANDS = ("serve", "stop", "status", "generate", "chat", "batch", "plan", "version")


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("HELIOS_URL", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("llama"), "llama"))


def helios(*args, stdin=""):
    return CliRunner().invoke(app, list(args), input=stdin)


@pytest.mark.parametrize("command", [*COMMANDS, "models"])
def test_every_command_has_help(command):
    assert helios(command, "--help").exit_code == 0


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "version"])
def test_the_help_has_an_example(command):
    assert f"helios {command}" in helios(command, "--help").output


def test_help_loads_neither_torch_nor_ray():
    check = (
        "import sys; from deploy.cli.app import app; app(['--help'], standalone_mode=False); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'ray')))"
    )
    assert subprocess.run([sys.executable, "-c", check], capture_output=True).returncode == 0


def test_wrong_usage_exits_with_2():
    assert helios("serve", "--prot", "1").exit_code == 2
    assert helios("batch").exit_code == 2
    assert helios("nonsense").exit_code == 2


def test_the_version_names_what_it_runs_on():
    assert set(json.loads(helios("version", "--json").output)) >= {"helios-llm", "ray", "torch", "python"}


def failing(error):
    sample = typer.Typer(cls=HeliosGroup)

    @sample.command()
    def fail():
        raise error

    @sample.command()
    def other(): ...

    return CliRunner().invoke(sample, ["fail"])


def test_an_error_is_one_sentence_on_stderr():
    result = failing(ConfigError("port is 70000; it must be at most 65535"))
    assert result.exit_code == 1
    assert result.stderr == "error: port is 70000; it must be at most 65535\n"


def test_a_fault_is_said_without_a_traceback():
    result = failing(ZeroDivisionError("oops"))
    assert result.exit_code == 1
    assert "ZeroDivisionError: oops" in result.stderr
    assert "Traceback" not in result.output


def test_a_traceback_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("HELIOS_TRACEBACK", "1")
    assert isinstance(failing(ConfigError("x")).exception, ConfigError)


def test_an_interrupt_exits_with_130():
    assert failing(KeyboardInterrupt()).exit_code == 130


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_a_command_as_an_interrupt_does(number, status):
    assert failing(Terminated(number)).exit_code == status


def test_an_interrupt_of_an_import_waits_for_its_end(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    print('cut')\n"
    )
    code = (
        "import sys, time; from deploy.cli.group import heed_signals; heed_signals(); "
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "try:\n    import slow; print('whole', flush=True); time.sleep(10)\n"
        "except KeyboardInterrupt:\n    print('ended')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "whole\nended\n"


def test_an_output_that_nobody_reads_ends_a_command_silently(tiny):
    command = [sys.executable, "-c", "from deploy.cli import main; main()", "generate", "a", "-m", tiny, "-n", "300"]
    with subprocess.Popen([*command, "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(3)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_flags_override_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("models: [{name: a, dtype: bfloat16, threads: 2}]\nhttp: {port: 1234, host: 127.0.0.2}\n")
    config = configuration(path, None, {"dtype": "float32"}, {"port": 0}, {"app": "mine"})
    assert (config.models[0].dtype, config.models[0].threads) == ("float32", 2)
    assert (config.http.port, config.http.host, config.app) == (0, "127.0.0.2", "mine")


def test_without_a_file_one_model_is_served(tiny):
    config = configuration(None, tiny, {"memory": "1GiB"}, {}, {})
    assert (config.models[0].path, config.models[0].engine_config().memory_bytes) == (tiny, 2**30)
    assert "/" not in config.models[0].name


def test_a_model_beside_a_file_is_wrong_usage(tmp_path):
    assert helios("serve", str(tmp_path / "c.yaml"), "--model", "a").exit_code == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["serve", "missing.yaml"], "missing.yaml does not exist"),
        (["serve", "--model", "no-such-model"], "no model 'no-such-model'"),
        (["serve", "--dtype", "int3"], "dtype"),
        (["serve", "--port", "70000"], "port"),
        (["generate", "hi", "--model", "no-such-model"], "no model 'no-such-model'"),
        (["status"], "helios serve"),
        (["status", "--url", "http://127.0.0.1:9"], "cannot be reached"),
        (["generate", "hi", "--url", "http://127.0.0.1:9"], "cannot be reached"),
        (["generate", "hi", "--url", "banana"], "'banana' is not the address of a server; write it like http://"),
        (["generate", "hi", "--url", "http://"], "is not the address of a server"),
        (["generate", "hi", "-m", "no-such-model", "-t", "-1"], "temperature is -1"),
        (["chat", "--offline", "-m", "no-such-model", "-t", "-1"], "temperature is -1"),
        (["status", "--url", "banana"], "is not the address of a server"),
        (["serve", "/tmp"], "/tmp is a directory; name a YAML file"),
        (["chat"], "--offline"),
        (["batch", "missing.jsonl", "-o", "out.jsonl"], "missing.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_started(args, said):
    result = helios(*args)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert said in result.stderr


def test_stopping_nothing_is_no_error():
    result = helios("stop")
    assert (result.exit_code, result.output) == (0, "nothing to stop: no app is running\n")


def test_stopping_an_app_that_does_not_run_is_one():
    result = helios("stop", "--app", "nosuch")
    assert result.exit_code == 1
    assert "no app 'nosuch' is running here; start one" in result.stderr


@pytest.fixture
def other_app():
    """An app "other" that answers, as far as anybody can tell."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer_all, args=(server,), daemon=True).start()
        write_record(Running("other", "127.0.0.1", server.getsockname()[1], None))
        yield
        server.shutdown(socket.SHUT_RDWR)


def answer_all(server):
    with suppress(OSError):
        while True:
            peer, _ = server.accept()
            peer.recv(1000)
            peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            peer.close()


@pytest.mark.parametrize("command", ["stop", "status"])
def test_the_apps_that_run_are_named(other_app, command):
    result = helios(command)
    assert result.exit_code == 1
    assert "no app 'helios' is running here; running: other; name one with --app" in result.stderr


def test_a_second_app_is_refused_before_anything_is_loaded(other_app, tiny):
    result = helios("serve", "--model", tiny, "--app", "second", "--port", "0")
    assert result.exit_code == 1
    assert "the app 'other' is served at http://127.0.0.1:" in result.stderr
    assert "helios stop --app other" in result.stderr
    assert "loading" not in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_this_machine_lacks_is_said_before_anything_is_started(tiny):
    served = helios("serve", "--model", tiny, "--device", "cuda")
    generated = helios("generate", "hi", "--model", tiny, "--device", "cuda")
    assert served.exit_code == 1
    assert served.stderr == generated.stderr
    assert "sees 0 CUDA devices" in served.stderr


def test_generate_prints_the_text(tiny):
    greedy = ["-m", tiny, "-n", "5", "-t", "0", "--ignore-eos", "--dtype", "float32"]
    text = helios("generate", "Hello", *greedy)
    assert text.exit_code == 0, text.output
    record = json.loads(helios("generate", "-", "--json", *greedy, stdin="Hello").output)
    assert record["text"] + "\n" == text.stdout
    assert (record["completion_tokens"], record["finish_reason"]) == (5, "length")


def test_generate_says_which_parameter_is_wrong(tiny):
    result = helios("generate", "Hello", "-m", tiny, "--top-p", "7")
    assert result.exit_code == 1
    assert "top_p is 7" in result.stderr


def test_engine_flags_are_refused_beside_a_url():
    assert helios("generate", "hi", "--url", "http://127.0.0.1:9", "--dtype", "float32").exit_code == 2


def test_a_batch_runs_and_resumes(tiny, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "id": 1}\n{"prompt": "b"}\n')
    args = ["batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "-m", tiny, "-n", "3", "--json"]
    first = helios(*args)
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["done"] == 2
    assert json.loads(helios(*args).stdout)["resumed"] == 2
    assert helios(*args[:-1]).stdout.startswith("nothing to do: ")
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "id": 1}\n')
    assert "of all 1 lines of" in helios(*args[:-1]).stdout
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_a_batch_with_a_bad_line_exits_with_1(tiny, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    result = helios("batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "-m", tiny, "-n", "2")
    assert result.exit_code == 1
    assert "1 of 2 lines failed" in result.stderr


def test_a_batch_does_not_write_over_its_input(tiny, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n')
    result = helios("batch", str(path), "-o", str(path), "-m", tiny)
    assert result.exit_code == 1
    assert path.read_text() == '{"prompt": "a"}\n'


class Replies:
    """A source that says what it was asked, or raises."""

    model = "m"

    def __init__(self, failure=None):
        self.asked = []
        self.failure = failure

    def stream(self, prompt, sampling):
        self.asked.append([message["content"] for message in prompt])
        if self.failure:
            raise self.failure
        yield Piece("an")
        yield Piece("swer", "stop", Usage(1, 1))


def test_a_conversation_grows_by_its_answers():
    source = Replies()
    conversation = Conversation(source, {}, system="be brief")
    conversation.say("one")
    conversation.say("two")
    assert source.asked == [["be brief", "one"], ["be brief", "one", "answer", "two"]]


def test_a_turn_that_fails_is_forgotten():
    conversation = Conversation(Replies(InvalidRequestError("no")), {}, None)
    conversation.say("one")
    assert conversation.messages == []


def test_the_record_of_an_app_is_read_back():
    assert read_record("helios") is None
    record = Running("helios", "0.0.0.0", 9, 5)
    write_record(record)
    assert read_record("helios") == record
    assert record.address.url == "http://127.0.0.1:9"
    assert running_url("helios") is None, "nothing answers there"


def test_a_damaged_record_is_named():
    write_record(Running("helios", "::", 8000, None))
    record_path("helios").write_text("{")
    with pytest.raises(ConfigError, match=r"serve\.json"):
        read_record("helios")
