"""The builder that `serve run` and a KubeRay `serveConfigV2` call."""

import pytest

from deploy.app import SPARE_REQUESTS, build
from engine.errors import ConfigError

INLINE = {"models": [{"name": "small"}], "http": {"max_queued": 7}}


def deployment(application):
    return application._bound_deployment


def test_args_are_the_configurations_own_keys():
    built = deployment(build(INLINE))
    assert built.max_ongoing_requests == 7 + SPARE_REQUESTS
    assert built.init_args[0]["models"][0]["name"] == "small"


def test_args_may_name_a_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("models: [{name: small}]\nhttp: {max_queued: 7}\n")
    assert deployment(build({"config": str(path)})).init_args == deployment(build(INLINE)).init_args


def test_a_file_and_keys_beside_it_are_refused():
    with pytest.raises(ConfigError, match="also http, models"):
        build({"config": "c.yaml", **INLINE})


def test_an_unknown_key_is_refused():
    with pytest.raises(ConfigError, match="modles"):
        build({"modles": []})
