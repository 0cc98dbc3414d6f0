"""One Ray and one tiny float32 model for all cluster tests; each app is removed by the test that started it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.config import AppConfig, load_config
from actors.lifecycle import list_apps, reconcile, stop_app
from actors.names import NAMESPACE
from engine.config import EngineConfig
from tests.engine.tiny import save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="session")
def engine_config(tiny: Path) -> EngineConfig:
    return tiny_app("any", tiny).models[0].engine_config()


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An in-process Ray, its actors' HELIOS_HOME a temporary directory."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELIOS_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            namespace=NAMESPACE,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
        )
        yield
        for app in list_apps():
            stop_app(app)
        ray.shutdown()


@pytest.fixture(scope="package")
def lab(cluster: None, tiny: Path) -> Iterator[AppConfig]:
    """The app "lab" with two replicas of a model "tiny"."""
    config = tiny_app("lab", tiny, replicas=2)
    reconcile(config, wait_s=60)
    yield config
    stop_app("lab")


def tiny_app(app: str, path: Path, **model: object) -> AppConfig:
    fields = {"name": "tiny", "path": str(path), "dtype": "float32", "threads": 1, "memory": "100MB", **model}
    return load_config({"app": app, "models": [fields]})
