"""Names of the detached actors: whoever knows the app, the model and the replica can find the actor.

All live in one Ray namespace. An app's router is ``app/router``; a model's replicas are ``app/model/0``,
``app/model/1`` and so on. The app's name holds no slash and the replica is a number, so a model's name may
hold slashes ("org/name") and the three parts can still be told apart.
"""

NAMESPACE = "helios"


def router_actor_name(app: str) -> str:
    return f"{app}/router"


def model_actor_name(app: str, model: str, replica: int) -> str:
    return f"{app}/{model}/{replica}"


def parse_actor_name(name: str) -> tuple[str, str, int] | None:
    """(app, model, replica) of a model actor's name; None for any other name, a router's among them."""
    app, _, rest = name.partition("/")
    model, _, replica = rest.rpartition("/")
    if not app or not model or not replica.isdecimal():
        return None
    return app, model, int(replica)


def app_of(name: str) -> str | None:
    """The app an actor's name belongs to; None when it is not a name of ours."""
    app, _, rest = name.partition("/")
    return app if app and (rest == "router" or parse_actor_name(name)) else None
