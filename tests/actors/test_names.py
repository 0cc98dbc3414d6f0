import pytest

from actors.names import app_of, model_actor_name, parse_actor_name, router_actor_name


@pytest.mark.parametrize("model", ["tiny", "org/name", "router", "x/0"])
def test_a_model_actors_name_can_be_taken_apart(model):
    name = model_actor_name("lab", model, 3)
    assert parse_actor_name(name) == ("lab", model, 3)
    assert app_of(name) == "lab"


def test_the_routers_name_is_not_a_models():
    assert parse_actor_name(router_actor_name("lab")) is None
    assert app_of(router_actor_name("lab")) == "lab"


@pytest.mark.parametrize("name", ["", "lab", "lab/", "/a/0", "lab/a/x", "SERVE_CONTROLLER_ACTOR"])
def test_foreign_names_belong_to_no_app(name):
    assert app_of(name) is None
