"""The commands of ``helios``. Each imports what it runs when it runs, so that ``--help`` is quick."""

import typer

from ..models.cli import models_app
from .batch import batch
from .chat import chat
from .demo import demo
from .generate import generate
from .group import HeliosGroup
from .plan import plan
from .profile import profile
from .profile_exits import profile_exits
from .quantize import quantize
from .serve import serve
from .status import status
from .stop import stop
from .tune_exits import tune_exits
from .version import version

app = typer.Typer(
    name="helios",
    cls=HeliosGroup,
    help="Serve language models on less hardware than they seem to need.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    demo,
    serve,
    stop,
    status,
    generate,
    chat,
    batch,
    quantize,
    profile,
    plan,
    tune_exits,
    profile_exits,
    version,
):
    app.command()(command)
app.add_typer(models_app, name="models")
