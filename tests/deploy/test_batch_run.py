"""Whole batches on a tiny model."""

import json

import pytest

from deploy.batch.output import Output
from deploy.batch.run import BatchRun
from engine.llm import LLM
from engine.request import SamplingParams
from tests.engine.tiny import save_tiny

DEFAULTS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(str(save_tiny(tmp_path_factory.mktemp("llama"), "llama")), dtype="float32", kv_tokens=2048)


@pytest.fixture
def batch(tmp_path, llm):
    """``batch(lines, stop_after=None)`` runs them and returns (progress, records by line)."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def run(lines, stop_after=None, defaults=DEFAULTS):
        source.write_text("".join(item if isinstance(item, str) else json.dumps(item) + "\n" for item in lines))

        def report(progress):
            if stop_after is not None and progress.done >= stop_after:
                raise KeyboardInterrupt

        with Output(target) as out:
            job = BatchRun(llm, source, out, defaults)
            try:
                job.run(report)
            except KeyboardInterrupt:
                assert stop_after is not None
        rows = [json.loads(row) for row in target.read_text().splitlines()]
        assert len({row["line"] for row in rows}) == len(rows), "a line was done twice"
        return job.progress, {row["line"]: row for row in rows}

    return run


def prompts(count):
    return [{"prompt_ids": [5 + i, 6, 7], "id": f"p{i}", "page": i, "max_tokens": 2 + i % 5} for i in range(count)]


def test_every_line_gets_what_it_gets_alone(batch, llm):
    lines = prompts(40)
    progress, rows = batch(lines)
    assert (progress.total, progress.done, progress.failed) == (40, 40, 0)
    for number, sent in enumerate(lines, start=1):
        params = SamplingParams(temperature=0.0, max_tokens=sent["max_tokens"], ignore_eos=True)
        alone = llm.generate([sent["prompt_ids"]], params)[0]
        row = rows[number]
        assert (row["id"], row["custom"]) == (sent["id"], {"page": sent["page"]})
        assert (row["text"], row["finish_reason"]) == (alone.text, alone.finish_reason)
        assert row["usage"] == {"prompt_tokens": 3, "completion_tokens": sent["max_tokens"]}


def test_a_batch_that_was_interrupted_goes_on_where_it_was(batch):
    whole = batch(prompts(12), stop_after=5)[1]
    assert 5 <= len(whole) < 12
    progress, rows = batch(prompts(12))
    assert progress.resumed == len(whole)
    assert (progress.done, len(rows)) == (12, 12)
    assert all(rows[number] == row for number, row in whole.items())
    again, _ = batch(prompts(12))
    assert (again.resumed, again.tokens) == (12, 0)


def test_bad_lines_are_reported_and_the_others_run(batch):
    progress, rows = batch(
        [
            {"prompt_ids": [5]},
            "{oops\n",
            {"prompt_ids": [5], "temperature": -1, "id": "cold"},
            {"prompt_ids": [99999]},
            {"prompt_ids": [], "id": 7},
            {"prompt_ids": [6]},
        ]
    )
    assert (rows[2]["id"], rows[5]["id"]) == (None, 7)
    assert (progress.done, progress.failed) == (6, 4)
    assert [number for number, row in sorted(rows.items()) if "error" in row] == [2, 3, 4, 5]
    assert rows[2]["error"].startswith("line 2: ")
    assert rows[3]["id"] == "cold"
    assert "temperature" in rows[3]["error"]
    assert batch([{"prompt_ids": [5]}, "{oops\n"])[0].failed == 1, "a resumed run still counts what failed"


def test_a_line_that_is_refused_keeps_its_id(batch):
    openai = {"custom_id": "q", "method": "GET", "url": "/v1/completions", "body": {"prompt": "a"}}
    _, rows = batch([{"prompt_ids": [5], "temprature": 1, "id": "t"}, openai, {"prompt": "a", "id": [1]}])
    assert [rows[number]["id"] for number in (1, 2, 3)] == ["t", "q", None]
    assert all("error" in row for row in rows.values())


def test_lines_of_openais_batch_api_run_as_ours_do(batch):
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "auto", "messages": messages, "max_completion_tokens": 3, "logprobs": True}
    _, rows = batch(
        [
            {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body},
            {"messages": messages, "max_tokens": 3, "logprobs": 0},
            {"custom_id": "y", "url": "/v1/completions", "body": {"prompt": [5, 6], "max_tokens": 2}},
            {"prompt_ids": [5, 6], "max_tokens": 2},
            {"custom_id": "z", "url": "/v1/completions", "body": {"prompt": "a", "model": "gpt-9"}},
            {"custom_id": "z", "url": "/v1/embeddings", "body": {}},
        ]
    )
    for theirs, ours in ((1, 2), (3, 4)):
        same = ("text", "usage", "finish_reason")
        assert [rows[theirs][key] for key in same] == [rows[ours][key] for key in same]
    assert (rows[1]["id"], rows[1]["logprobs"]) == ("x", rows[2]["logprobs"])
    assert "choose it by --model" in rows[5]["error"]
    assert "'url' is '/v1/embeddings'; it must be" in rows[6]["error"]


def test_other_defaults_are_refused_before_anything_is_generated(batch):
    batch(prompts(3))
    with pytest.raises(Exception, match="sampling defaults"):
        batch(prompts(3), defaults=SamplingParams(max_tokens=1))


def test_logprobs_come_when_asked_for(batch):
    _, rows = batch([{"prompt_ids": [5], "logprobs": 1, "max_tokens": 2}])
    first = rows[1]["logprobs"][0]
    assert first["top"] == [{"id": first["id"], "logprob": first["logprob"]}]


def test_a_prompt_with_no_room_for_an_answer_is_one_lines_fault(batch):
    _, rows = batch([{"prompt_ids": [5] * 600}, {"prompt_ids": [5]}])
    assert "context" in rows[1]["error"]
    assert "text" in rows[2]
