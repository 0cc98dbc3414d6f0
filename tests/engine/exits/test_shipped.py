"""Heads that come with Helios: found by the model's trunk, whole, and within their size."""

import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from engine.checkpoint.index import parse_file
from engine.exits.cut import SHIPPED
from engine.exits.heads import FILE, trunk_of
from engine.llm import LLM
from engine.request import SamplingParams

LIMIT_BYTES = 60_000_000
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_they_are_package_data_within_their_size_and_for_different_trunks() -> None:
    folders = [folder for folder in files("engine").joinpath("heads").iterdir() if folder.is_dir()]
    assert {folder.name for folder in folders} == {path.parent.name for path in SHIPPED.glob(f"*/{FILE}")} != set()
    paths = [SHIPPED / folder.name / FILE for folder in folders]
    assert sum(path.stat().st_size for path in paths) <= LIMIT_BYTES
    assert len({trunk_of(path) for path in paths}) == len(paths)
    for path in paths:
        assert all(info.dtype.itemsize == 2 for info in parse_file(path).values())


@pytest.mark.model
def test_the_default_model_has_its_exits_without_a_word(smollm2_dir: Path, tmp_path: Path) -> None:
    with LLM(smollm2_dir, kv_tokens=256, context=128) as whole:
        exits = whole.engine.spec.exits
        (expected,) = whole.generate("The capital of France is", GREEDY)
    assert [at.layer for at in exits] == [10, 15, 20, 25]
    assert all(at.threshold is not None and at.margin_threshold is not None for at in exits)
    for at in exits:
        with LLM(smollm2_dir, kv_tokens=256, context=128, depth=at.layer) as cut:
            assert cut.generate("The capital of France is", GREEDY)[0].usage.depth == at.layer
    with LLM(smollm2_dir, kv_tokens=256, context=128, draft_depth=25, dtype="float32") as lossless:
        drafted = lossless.generate("The capital of France is", GREEDY)[0]
        assert lossless.engine.stats().accepted_tokens > 0
    with LLM(smollm2_dir, kv_tokens=256, context=128, dtype="float32") as whole:
        assert whole.generate("The capital of France is", GREEDY)[0].text == drafted.text
    assert expected.usage.depth == 30
    early = {"early_exit": True, "check_vocabulary": 4096, "kv_tokens": 256, "context": 128}
    with LLM(smollm2_dir, **early) as engine:
        (done,) = engine.generate("The capital of France is", GREEDY)
        assert {token.depth for token in done.tokens} <= {10, 15, 20, 25, 30}
    own = shutil.copytree(smollm2_dir, tmp_path / "own")
    shutil.copy(SHIPPED / "smollm2-135m-instruct" / FILE, own / FILE)
    with LLM(own, kv_tokens=256, context=128) as beside:
        assert beside.engine.spec.exits == exits
