import json
import os
from pathlib import Path

import pytest

from deploy.batch import lines, output
from deploy.batch.lines import Line, parse_line, read_lines
from deploy.batch.output import Output
from engine.errors import ConfigError, InvalidRequestError
from engine.request import SamplingParams

CONTEXT = "model and defaults"


def line(text, number=1):
    return Line(number, text if isinstance(text, bytes) else json.dumps(text).encode())


def records(path):
    return [json.loads(row) for row in path.read_text().splitlines()]


def test_lines_are_numbered_as_an_editor_does(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "b"}')
    found = list(read_lines(path))
    assert [item.number for item in found] == [1, 4]
    assert parse_line(found[0]).fields.prompt == "a"


def test_an_input_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        list(read_lines(tmp_path / "none.jsonl"))


@pytest.mark.parametrize("path", ["/dev/zero", "/tmp"])
def test_an_input_that_is_no_file_is_refused_unread(path):
    with pytest.raises(ConfigError, match="no regular file"):
        list(read_lines(Path(path)))


def test_an_input_without_line_breaks_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    (tmp_path / "in").write_text("\n" + "x" * 3000)
    with pytest.raises(ConfigError, match="line 2 is longer"):
        list(read_lines(tmp_path / "in"))


def test_a_line_overrides_the_defaults_and_hands_its_own_fields_through():
    task = parse_line(line({"prompt": "a", "id": 7, "temperature": 0.5, "logprobs": 2, "source": {"page": 3}}))
    assert (task.id, task.custom) == (7, {"source": {"page": 3}})
    params = task.fields.params(SamplingParams(temperature=1.0, max_tokens=9))
    assert params == SamplingParams(temperature=0.5, max_tokens=9, logprobs=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "not valid JSON"),
        ([1], "must be a JSON object"),
        ({}, "no prompt"),
        ({"prompt": "a", "prompt_ids": [1]}, "prompt and prompt_ids"),
        ({"prompt": 5}, "'prompt' is 5"),
        ({"prompt_ids": [-1]}, "prompt_ids"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"prompt": "a", "temprature": 1}, "did you mean temperature"),
        ({"prompt": "a", "tools": []}, "no effect in a batch"),
        ({"prompt": "a", "stream": True}, "no effect in a batch"),
        ({"prompt": "a", "id": [1]}, "'id' is"),
    ],
)
def test_a_line_that_cannot_be_run_says_why(text, said):
    with pytest.raises(InvalidRequestError, match=said):
        parse_line(line(text))


def test_what_was_written_is_known_to_the_next_run(tmp_path):
    with Output(tmp_path / "o") as out:
        out.append(line("a", 3), CONTEXT, {"text": "x"})
        out.append(line("b", 1), CONTEXT, {"error": "bad"})
    with Output(tmp_path / "o") as out:
        assert not out.done(line("a", 3), CONTEXT).failed
        assert out.done(line("b", 1), CONTEXT).failed
        assert out.done(line("c", 2), CONTEXT) is None


@pytest.mark.parametrize("cut", [1, 5, 20, 60])
def test_a_torn_last_line_is_dropped_and_done_again(tmp_path, cut):
    path = tmp_path / "o"
    with Output(path) as out:
        out.append(line("a", 1), CONTEXT, {"text": "x"})
        whole = path.read_bytes()
        out.append(line("b", 2), CONTEXT, {"text": "y" * 100})
    path.write_bytes(path.read_bytes()[: len(whole) + cut])
    with Output(path) as out:
        assert path.read_bytes() == whole
        assert out.done(line("b", 2), CONTEXT) is None


def test_a_record_longer_than_a_read_is_dropped_whole(tmp_path):
    path = tmp_path / "o"
    with Output(path) as out:
        out.append(line("a", 1), CONTEXT, {"text": "y" * (3 << 20)})
    os.truncate(path, path.stat().st_size - 1)
    with Output(path):
        assert path.stat().st_size == 0


@pytest.mark.parametrize("content", ["my thesis", "my thesis\n", '{"a": 1}\n', "[]\n", '{"line": 1}\n'])
def test_a_file_that_no_batch_wrote_is_left_alone(tmp_path, content):
    path = tmp_path / "o"
    path.write_text(content)
    with pytest.raises(ConfigError, match="choose another output file"):
        Output(path)
    assert path.read_text() == content


@pytest.mark.parametrize("path", ["/dev/full", "/dev/zero", "/dev/null"])
def test_an_output_that_is_no_file_is_refused_unread(path):
    with pytest.raises(ConfigError, match="no regular file"):
        Output(Path(path))


def test_a_pipe_is_no_output(tmp_path):
    os.mkfifo(tmp_path / "o")
    with pytest.raises(ConfigError, match="no regular file"):
        Output(tmp_path / "o")


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_line_that_is_longer_than_any_record_is_not_read_to_its_end(tmp_path, monkeypatch, end):
    monkeypatch.setattr(output, "MAX_RECORD_BYTES", 1 << 20)
    (tmp_path / "o").write_text('{"line": ' + "1" * (5 << 20) + end)
    with pytest.raises(ConfigError, match="a line over 1 MiB"):
        Output(tmp_path / "o")


def test_two_runs_cannot_write_one_file(tmp_path):
    with Output(tmp_path / "o"), pytest.raises(ConfigError, match="another run"):
        Output(tmp_path / "o")


@pytest.mark.parametrize(("text", "context"), [("other", CONTEXT), ("a", "another model")])
def test_an_output_of_something_else_is_not_resumed(tmp_path, text, context):
    with Output(tmp_path / "o") as out:
        out.append(line("a"), CONTEXT, {"text": "x"})
    with Output(tmp_path / "o") as out, pytest.raises(ConfigError, match="line 1 of another input"):
        out.done(line(text), context)


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        Output(tmp_path / "no" / "o")
