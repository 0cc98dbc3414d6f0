"""A mistake in a config is named with the entry, its value and what is allowed, whatever would have tripped over it."""

import pytest

from engine.errors import CheckpointError, UnsupportedModelError
from engine.spec import ModelSpec
from tests.engine.tiny import CONFIGS

LLAMA = CONFIGS["llama"].to_dict() | {"rope_parameters": None, "dtype": "float32"}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_s_own_config_passes(name):
    assert ModelSpec.from_config(CONFIGS[name].to_dict() | {"dtype": "float32"}).n_layers == 3


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("rms_norm_eps", "q", "a number above 0"),
        ("rms_norm_eps", float("nan"), "a number above 0"),
        ("max_position_embeddings", 0, "an integer from 1"),
        ("rope_parameters", "x", "an object"),
        ("num_hidden_layers", -1, "an integer from 1 to 4096"),
        ("num_hidden_layers", 10**9, "an integer from 1 to 4096"),
        ("num_hidden_layers", True, "an integer from 1 to 4096"),
        ("num_attention_heads", 0, "an integer from 1"),
        ("num_attention_heads", 7, "a divisor of hidden_size, 64"),
        ("num_key_value_heads", 3, "a divisor of num_attention_heads, 4"),
        ("hidden_size", "576", "an integer from 1"),
        ("hidden_size", 64.0, "an integer from 1"),
        ("eos_token_id", "x", "an integer from 0 to 319"),
        ("eos_token_id", 999999, "an integer from 0 to 319"),
        ("eos_token_id", [2, -1], "an integer from 0 to 319"),
        ("rope_theta", -5, "a number above 0"),
        ("tie_word_embeddings", "no", "true or false"),
        ("hidden_act", 3, "a string"),
        ("layer_types", 3, "a list"),
        ("quantization_config", "gptq", "an object"),
    ],
)
def test_an_entry_of_the_wrong_kind_or_size_is_named(key, value, wanted):
    head_dim = None if key == "num_attention_heads" else LLAMA["head_dim"]
    with pytest.raises(CheckpointError) as caught:
        ModelSpec.from_config(LLAMA | {"head_dim": head_dim, key: value})
    assert str(caught.value).startswith(f"config.json: {key} is {value!r}; it must be {wanted}")


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "yarn"}, "lacks 'factor', which the type 'yarn' needs"),
        ({"rope_type": "linear", "factor": "x"}, ".factor is 'x'; it must be a number of at least 1"),
        ({"type": "linear", "factor": 0}, ".factor is 0; it must be a number of at least 1"),
        ({"rope_type": "llama3", "factor": 8.0}, "lacks 'low_freq_factor'"),
        ({"rope_theta": -5.0}, ".rope_theta is -5.0; it must be a number above 0"),
        ({"rope_type": 5}, ".rope_type is 5; it must be a string"),
    ],
)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_mistake_in_the_positions_is_named(key, rope, said):
    with pytest.raises(CheckpointError) as caught:
        ModelSpec.from_config(LLAMA | {key: rope})
    assert str(caught.value).startswith(f"config.json: {key}")
    assert said in str(caught.value)


def test_two_scalings_that_differ_are_refused_and_the_same_twice_is_not():
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    scaling = {"type": "linear", "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="both rope_parameters"):
        ModelSpec.from_config(LLAMA | {"rope_parameters": parameters, "rope_scaling": scaling})
    both = LLAMA | {"rope_parameters": scaling | {"rope_theta": 500.0}, "rope_scaling": scaling}
    assert ModelSpec.from_config(both).rope.param("factor") == 2.0


def test_an_end_of_sequence_in_the_generation_config_is_checked_too():
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is 320"):
        ModelSpec.from_config(LLAMA, {"eos_token_id": 320})


def test_the_model_whose_config_is_wrong_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UnsupportedModelError, match=f"{tmp_path}: model_type 'mamba' is not supported"):
        ModelSpec.from_directory(tmp_path)
