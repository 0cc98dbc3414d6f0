"""A GGUF file becomes the model it was made from; what cannot be imported is refused before anything is written."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from engine.checkpoint import gguf as gguf_module
from engine.checkpoint.gguf import import_gguf
from engine.checkpoint.gguf_config import LLAMA3_ROPE
from engine.checkpoint.store import Origin, read_origin
from engine.errors import CheckpointError, HeliosError, UnsupportedModelError
from engine.spec import ModelSpec
from tests.engine.sweeps import Bench

from .gguf_files import EOS, EOT, write_gguf

Q8_ERROR = 0.03
"""Of a normal weight: half a step of a block's largest value over 127."""

LLAMA3_THETA = 500000.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "in" / "tiny.gguf"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, file: Path) -> None:
    file.parent.mkdir()
    (tmp_path / "out").mkdir()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "model"


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("piece_elements", [gguf_module.PIECE_ELEMENTS, 100])
def test_the_weights_are_those_the_file_was_made_from(
    file: Path, target: Path, family: str, piece_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_module, "PIECE_ELEMENTS", piece_elements)
    original = write_gguf(file, family).state_dict()
    import_gguf(file, target, dtype="float32")
    imported = load_file(target / "model.safetensors")
    assert imported.keys() == {name for name in original if name != "lm_head.weight" or family != "llama-tied"}
    for name, tensor in imported.items():
        error = (tensor - original[name]).abs().max()
        assert error <= (Q8_ERROR if "mlp" in name else 0), name


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_imported_model_computes_what_the_original_does(file: Path, target: Path, family: str) -> None:
    original = write_gguf(file, family, quantise=False)
    import_gguf(file, target, dtype="float32")
    tokens = list(range(5, 60))
    with torch.inference_mode():
        expected = original(torch.tensor([tokens])).logits[0]
    assert torch.allclose(Bench(target).logits(tokens), expected, rtol=1e-4, atol=1e-4 * expected.abs().max())


def test_transformers_and_the_engine_read_the_result(file: Path, target: Path) -> None:
    original = write_gguf(file, "qwen3")
    import_gguf(file, target, extra_eos_ids=(EOS, 93))
    spec = ModelSpec.from_directory(target)
    assert spec.eos_ids == (EOS, EOT, 93)
    assert spec.dtype == "bfloat16"
    assert spec.norm_eps == original.config.rms_norm_eps
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert model.config.head_dim == original.config.head_dim
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    assert tokenizer.eos_token_id == EOS
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


def test_progress_counts_every_element(file: Path, target: Path) -> None:
    original = write_gguf(file, "llama")
    seen: list[tuple[int, int]] = []
    import_gguf(file, target, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.numel() for tensor in original.state_dict().values())
    assert seen[-1] == (total, total)


def test_where_it_came_from_is_noted(file: Path, target: Path) -> None:
    write_gguf(file, "llama")
    import_gguf(file, target)
    assert read_origin(target).source == str(file)
    import_gguf(file, target, origin=Origin("hub a/b", "MIT"), replace=True)
    assert read_origin(target) == Origin("hub a/b", "MIT")


def test_a_sliding_window_makes_it_a_mistral(file: Path, target: Path) -> None:
    write_gguf(file, "llama", **{"attention.sliding_window": 16})
    import_gguf(file, target)
    spec = ModelSpec.from_directory(target)
    assert (spec.architecture, spec.windows) == ("mistral", (16, 16))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_kept(file: Path, target: Path, kind: str) -> None:
    scaling = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
    write_gguf(file, "llama", **scaling)
    import_gguf(file, target)
    rope = ModelSpec.from_directory(target).rope
    assert rope is not None
    assert (rope.type, rope.param("factor")) == (kind, 4.0)


def _llama3_factors(factor: float, head_dim: int = 8, theta: float = LLAMA3_THETA) -> np.ndarray:
    """What transformers' own llama3 rope divides the frequencies by."""
    parameters = LLAMA3_ROPE | {"rope_type": "llama3", "rope_theta": theta, "factor": factor}
    shape = {"head_dim": head_dim, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 131072}
    config = transformers.LlamaConfig(**shape, rope_parameters=parameters)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    return (theta ** -(np.arange(0, head_dim, 2) / head_dim) / scaled.numpy()).astype(np.float32)


def test_llama_3_frequency_factors_become_its_rope_parameters(file: Path, target: Path) -> None:
    write_gguf(file, "llama", rope_freqs=_llama3_factors(32.0), **{"rope.freq_base": LLAMA3_THETA})
    import_gguf(file, target)
    rope = ModelSpec.from_directory(target).rope
    assert rope is not None
    assert (rope.type, rope.param("factor")) == ("llama3", 32.0)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"expert_count": 8}, "mixtures of experts"),
        ({"rope.dimension_count": 4}, "only 4 of 8 dimensions"),
        ({"rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"rope_freqs": [1, 5, 2, 8]}, "rope_freqs.weight"),
    ],
)
def test_a_feature_the_engine_lacks_is_refused_by_name(file: Path, target: Path, metadata: dict, says: str) -> None:
    write_gguf(file, "llama", **metadata)
    with pytest.raises(UnsupportedModelError, match=says):
        import_gguf(file, target)
    assert not list(target.parent.iterdir())


def test_an_unsupported_architecture_is_refused_by_name(file: Path, target: Path) -> None:
    write_gguf(file, "llama")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"llama", b"gemma", 1))
    with pytest.raises(UnsupportedModelError, match="architecture 'gemma' is not supported"):
        import_gguf(file, target)
    assert not list(target.parent.iterdir())


@pytest.mark.parametrize("kept", [0, 2, 10, 100, 3000, -1])
def test_a_truncated_file_is_refused(file: Path, target: Path, kept: int) -> None:
    write_gguf(file, "llama")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        import_gguf(file, target)
    assert not list(target.parent.iterdir())


def test_another_format_and_a_missing_file_are_refused(file: Path, target: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_gguf(file, target)
    file.write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(CheckpointError, match="no GGUF file: it starts with"):
        import_gguf(file, target)


def test_an_interrupt_leaves_nothing(file: Path, target: Path) -> None:
    write_gguf(file, "llama")

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_gguf(file, target, progress=interrupt)
    assert not list(target.parent.iterdir())


def test_an_existing_directory_is_not_touched(file: Path, target: Path) -> None:
    write_gguf(file, "llama")
    target.mkdir()
    with pytest.raises(HeliosError, match="there already"):
        import_gguf(file, target)
    assert not list(target.iterdir())


@pytest.mark.model
def test_the_default_model_ends_its_turns(smollm2_dir: Path) -> None:
    assert ModelSpec.from_directory(smollm2_dir).eos_ids == (2,)
    assert json.loads((smollm2_dir / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
