import pytest

from actors.config import AppConfig, load_config
from engine.config import EngineConfig
from engine.errors import ConfigError


def _model(**fields):
    return {"models": [{"name": "tiny", **fields}]}


def test_defaults_are_the_engines_own():
    model = load_config(_model()).models[0]
    assert model.engine_config() == EngineConfig(model="tiny")


def test_memory_is_a_size_or_a_number_of_bytes():
    assert load_config(_model(memory="2GiB")).models[0].engine_config().memory_bytes == 2 * 2**30
    assert load_config(_model(memory=1000)).models[0].engine_config().memory_bytes == 1000


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "models is missing"),
        ({"models": []}, "models is an empty list; it must have at least one entry"),
        ({"models": ["a"]}, "models[0] is 'a'; it must be a mapping"),
        ({"models": [{"name": "a b"}]}, "models[0].name is 'a b'; it must be letters, digits"),
        (_model(name=None), "models[0].name is null; it must be a valid string"),
        (_model(memory=-3), "models[0].memory is -3; write it as 2GiB"),
        (_model(memory=True), "models[0].memory is true; write it as 2GiB"),
        (_model(replicas="two"), "models[0].replicas is 'two'; it must be a valid integer"),
        (_model(replica=2), "models[0].replica is not a known key; did you mean replicas?"),
        (_model(memory="2 elephants"), "models[0].memory is '2 elephants'"),
        (_model(dtype="f4"), "dtype is 'f4'; it must be one of"),
        (_model(threads=0), "threads is 0; it must be at least 1"),
        ({"models": [{"name": "auto"}]}, "models[0].name is 'auto'"),
        ({"models": [{"name": "a"}, {"name": "a"}]}, "more than one model is named a"),
        ({**_model(), "http": {"port": 99999}}, "http.port is 99999"),
        ({**_model(), "router": {"objective": "speed"}}, "router.objective is 'speed'"),
        ({**_model(), "http": {"request_timeout_s": 0}}, "http.request_timeout_s is 0"),
    ],
)
def test_a_fault_names_the_key_the_value_and_the_remedy(data, said):
    with pytest.raises(ConfigError) as caught:
        load_config(data)
    assert said in str(caught.value)


def test_every_fault_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config({**_model(replicas=0), "http": {"port": -1}, "htpp": {}})
    assert all(word in str(caught.value) for word in ("replicas", "http.port", "htpp"))


def test_yaml_errors_name_file_and_line(tmp_path):
    path = tmp_path / "app.yaml"
    path.write_text("models:\n  - name: a\n bad: [\n")
    with pytest.raises(ConfigError, match=r"app\.yaml, line 3"):
        load_config(path)


def test_a_key_that_comes_twice_is_refused(tmp_path):
    path = tmp_path / "app.yaml"
    path.write_text("models:\n  - name: a\n    threads: 1\n    threads: 2\n")
    with pytest.raises(ConfigError, match=r"app\.yaml, line 4, column 5: .*'threads' comes twice"):
        load_config(path)


def test_a_directory_is_no_configuration(tmp_path):
    with pytest.raises(ConfigError, match="is a directory; name a YAML file"):
        load_config(tmp_path)


@pytest.mark.parametrize(("text", "said"), [("", "holds nothing"), ("- a\n", "holds a list")])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text, said):
    path = tmp_path / "app.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")


def test_relative_model_paths_start_at_the_files_directory(tmp_path):
    (tmp_path / "weights").mkdir()
    path = tmp_path / "app.yaml"
    path.write_text("models: [{name: a, path: ./weights}]\n")
    assert load_config(path).models[0].path == str(tmp_path / "weights")


def test_yaml_and_python_give_the_same_object(tmp_path):
    path = tmp_path / "app.yaml"
    path.write_text("models: [{name: tiny, memory: 1GiB}]\nhttp: {port: 0}\n")
    assert load_config(path) == load_config({**_model(memory="1GiB"), "http": {"port": 0}})


def test_a_configuration_survives_a_round_trip():
    config = load_config({**_model(memory="1GiB", replicas=2), "app": "lab"})
    assert AppConfig.model_validate(config.model_dump()) == config


def test_fingerprint_tells_configurations_apart_but_not_replica_counts():
    first, more, other = (load_config(_model(**f)).models[0] for f in ({}, {"replicas": 3}, {"context": 64}))
    assert first.fingerprint() == more.fingerprint()
    assert first.fingerprint() != other.fingerprint()
