import asyncio
import os
import shutil

import pytest
from safetensors.torch import load_file, save_file

from actors.directory import actor_names
from actors.failures import StoppingError
from actors.lifecycle import check_app, drain_app, list_apps, reconcile, stop_app
from actors.session import Session
from engine.errors import ConfigError, HeliosError, ModelNotFoundError
from tests.actors.conftest import tiny_app

pytestmark = pytest.mark.cluster
WAIT_S = 60.0


@pytest.fixture
def app(cluster):
    name = "life"
    yield name
    stop_app(name)


def test_actors_are_created_adopted_replaced_and_stopped(app, tiny):
    first = reconcile(tiny_app(app, tiny), WAIT_S)
    assert first.created == ("life/router", "life/tiny/0")
    again = reconcile(tiny_app(app, tiny), WAIT_S)
    assert (again.created, again.adopted) == ((), ("life/tiny/0",))
    assert again.models == first.models

    changed = reconcile(tiny_app(app, tiny, context=128), WAIT_S)
    assert (changed.adopted, changed.replaced) == ((), ("life/tiny/0",))
    assert changed.models[0].context == 128

    renamed = reconcile(tiny_app(app, tiny, name="other"), WAIT_S)
    assert renamed.stopped == ("life/tiny/0",)
    assert actor_names(app) == ["life/other/0", "life/router"]

    assert app in list_apps()
    assert stop_app(app) == ("life/other/0", "life/router")
    assert app not in list_apps()


def test_a_model_that_cannot_be_loaded_raises_its_own_error_and_leaves_nothing(app):
    with pytest.raises(ModelNotFoundError, match="/no/such/model") as caught:
        reconcile(tiny_app(app, "/no/such/model"), WAIT_S)
    assert type(caught.value) is ModelNotFoundError
    assert actor_names(app) == []


def test_a_resource_the_cluster_lacks_is_named_within_the_wait(app, tiny):
    with pytest.raises(ConfigError, match="needs 1 GPU and the cluster has 0"):
        reconcile(tiny_app(app, tiny, num_gpus=1.0), wait_s=1.0)
    assert actor_names(app) == []


def test_a_model_that_loads_and_does_not_generate_is_found(app, tiny, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny, damaged)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    config = tiny_app(app, damaged)
    reconcile(config, WAIT_S)
    with pytest.raises(HeliosError, match=r"'life/tiny/0' does not generate: .*logits of row 0 are not finite"):
        check_app(config, WAIT_S)


def test_an_app_that_is_being_stopped_takes_on_nothing_and_ends_what_runs(app, tiny):
    reconcile(tiny_app(app, tiny, context=512), WAIT_S)

    async def lifetime():
        session = Session(app)
        stream = session.stream("hello", {"ignore_eos": True}, model="tiny")
        await anext(stream)
        await anext(stream)
        drain = asyncio.create_task(asyncio.to_thread(drain_app, app, 0.0))
        deltas = [delta async for delta in stream]
        await drain
        with pytest.raises(StoppingError):
            await anext(session.stream("hello", model="tiny"))
        return deltas[-1]

    last = asyncio.run(lifetime())
    assert last.finish_reason == "error"
    assert "being stopped" in str(last.error)


def test_a_model_lives_in_a_process_of_its_own(lab):
    models = reconcile(lab, WAIT_S).models
    assert len({model.pid for model in models} | {os.getpid()}) == 3
