"""The cluster files are what Ray's own autoscaler accepts."""

from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

FILES = sorted((Path(__file__).parents[2] / "cluster").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_ray_accepts_the_file(file: Path) -> None:
    validate_config(prepare_config(yaml.safe_load(file.read_text(encoding="utf-8"))))
