"""Headers: sound ones are read to the byte, others are refused with what is wrong."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.checkpoint.index import Checkpoint, parse_file
from engine.errors import CheckpointError

from .files import entry, raw


def test_a_single_file_gives_type_shape_and_place(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "b": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    assert sorted(checkpoint.names) == ["a", "b"]
    for name, tensor in tensors.items():
        info = checkpoint.info(name)
        assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape))
        stored = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
        assert stored == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    _shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.info("a").file.name == "one.safetensors"
    assert checkpoint.info("b").file.name == "two.safetensors"


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"a": "three.safetensors"}, "three.safetensors is missing"),
        ({"b": "one.safetensors"}, "'b' is in one.safetensors, which has no such tensor"),
        ({"a": "../one.safetensors"}, "own directory"),
        ({"a": 1}, "weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path, weight_map: dict, says: str) -> None:
    _shards(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint(tmp_path)


def _shards(directory: Path, weight_map: dict) -> None:
    save_file({"a": torch.zeros(2)}, directory / "one.safetensors")
    save_file({"b": torch.zeros(3)}, directory / "two.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a directory"):
        Checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("pytorch_model.bin", "convert it to safetensors"),
        ("model.Q4_1.gguf", "helios models import"),
        ("adapter.safetensors", "rename it"),
        ("README.md", "needs one of them"),
    ],
)
def test_a_directory_without_weights_says_what_to_do(tmp_path: Path, file: str, remedy: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match=remedy):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"{not json", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([1], "not an object"),
        ({"a": 1}, "no object"),
        ({"a": entry(dtype="F8_E4M3")}, "type F8_E4M3"),
        ({"a": entry(shape=(3,))}, "takes 8 bytes; F32 of shape .3. takes 12"),
        ({"a": entry(shape=(-2,))}, "shape"),
        ({"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}}, "shape"),
        ({"a": entry(begin=8, end=0)}, "data_offsets"),
        ({"a": entry(), "b": entry(begin=4, end=12)}, "'a' and 'b' overlap"),
        ({"a": entry(begin=8, end=16)}, "truncated: its header needs 86 bytes, there are 78"),
    ],
)
def test_a_bad_header_is_refused_with_what_is_wrong(tmp_path: Path, header: object, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        parse_file(raw(tmp_path / "model.safetensors", header, bytes(8)))


@pytest.mark.parametrize("content", [b"", b"abc", (2**40).to_bytes(8, "little"), b"garbage all through the file"])
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        parse_file(path)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_entries = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "BF16", "X"]) | _json, "shape": _json, "data_offsets": _json}
)


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=64) | st.dictionaries(st.text(max_size=3), _entries | _json, max_size=3))
def test_no_content_raises_anything_but_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes | dict
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        raw(path, content, bytes(16))
    with contextlib.suppress(CheckpointError):
        parse_file(path)
