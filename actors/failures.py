"""Ray's failures told apart: an error of ours that crossed a process, and an actor that is not there any more."""

from ray.exceptions import RayError, RayTaskError

from engine.errors import EngineDeadError, HeliosError


class ReplicaLostError(HeliosError):
    """The replica that ran a sequence died, restarted or cannot be reached. The sequence can be resumed elsewhere."""


class StoppingError(HeliosError):
    """The app is being stopped: nothing is taken on, and what is not finished in time ends with this."""


def told_apart(error: Exception) -> Exception:
    """The HeliosError an actor raised, without Ray's traceback around it; ReplicaLostError when there is no actor.

    Anything else, such as a fault in an actor's own code, comes back as it is.
    """
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, EngineDeadError):
            return ReplicaLostError(str(cause))
        return cause if isinstance(cause, HeliosError) else error
    if isinstance(error, EngineDeadError):
        return ReplicaLostError(str(error))
    if isinstance(error, RayError):
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return ReplicaLostError(f"{type(error).__name__}: {first_line}")
    return error
