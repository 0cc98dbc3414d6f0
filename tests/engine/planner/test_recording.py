"""The timeline of a real run, and pictures of timelines."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.device import Device
from engine.errors import ConfigError
from engine.llm import LLM
from engine.planner.picture import draw
from engine.planner.recording import Recorder
from engine.planner.simulator.clock import Busy
from engine.request import SamplingParams

NOWHERE = {"disk": ["embedding", "layers.0-2", "head"]}


def test_a_real_run_notes_what_it_reads_and_waits_for(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(Device, "storage", recorder)
    fields = {"kv_tokens": 0, "kv_disk_tokens": 512, "offload_dir": str(tmp_path / "offload")}
    with LLM(str(tiny_model("llama")), dtype="float32", weights=NOWHERE, **fields) as llm:
        recorder.restart()
        llm.generate([[5] * 30], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        timeline = list(recorder.timeline)
    assert {busy.resource for busy in timeline} == {"disk read", "disk write", "waiting"}
    assert all(0 <= busy.start_s <= busy.end_s <= recorder.now_s for busy in timeline)
    draw(timeline, tmp_path / "run.png", "a run")
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    timeline = [Busy("device", 0.0, 1.0, "products"), Busy("disk read", 0.5, 2.0, "load")]
    with pytest.raises(ConfigError, match=r"name a \.png"):
        draw(timeline, tmp_path / "sweep.doc", "a sweep")
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(timeline, tmp_path / "none" / "sweep.png", "a sweep")
