"""``helios chat``: a conversation in the terminal."""

from contextlib import closing
from typing import Annotated, Any

import typer

from engine.errors import ConfigError, HeliosError

from ..state import DEFAULT_APP, running_url
from . import options as o
from .sources import Local, Server, Source, load_llm, local_params

HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(
    model: o.Model = None,
    url: o.Url = None,
    offline: Annotated[bool, typer.Option("--offline", help="Load the model here; no server is needed.")] = False,
    system: Annotated[str | None, typer.Option(help="Instructions that come before the conversation.")] = None,
    max_tokens: o.MaxTokens = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    seed: o.Seed = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    memory: o.Memory = None,
    pairs: o.Set = None,
) -> None:
    """Talk with a model: on the running server if there is one, or with --offline on one loaded here.

    Examples:

        helios chat

        helios chat --offline --model smollm2-135m-instruct -t 0.7
    """
    sampling = o.given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    engine = o.settings(pairs, device=device, dtype=dtype, memory=memory)
    if offline:
        local_params(sampling)
    source = _source(model, url, offline, engine)
    typer.echo(f"{source.model}: {HELP}")
    Conversation(source, sampling, system).run()


class Conversation:
    """What was said so far, and the loop that adds to it."""

    def __init__(self, source: Source, sampling: dict[str, Any], system: str | None) -> None:
        self._source = source
        self._sampling = sampling
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def run(self) -> None:
        """Until /exit or the end of input."""
        while (line := _ask()) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/clear":
                    self.messages = list(self._opening)
                case command if command.startswith("/"):
                    typer.echo(HELP)
                case text:
                    self.say(text)

    def say(self, text: str) -> None:
        """One turn. A turn that fails is said and forgotten, so that the conversation can go on."""
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            with closing(self._source.stream(self.messages, self._sampling)) as pieces:
                for piece in pieces:
                    answer.append(piece.text)
                    typer.echo(piece.text, nl=False)
        except KeyboardInterrupt:
            typer.echo(" [stopped]", nl=False)
        except HeliosError as error:
            typer.echo(f"\nerror: {error}", err=True)
            self.messages = before
            return
        typer.echo()
        self.messages.append({"role": "assistant", "content": "".join(answer)})


def _ask() -> str | None:
    import readline  # noqa: F401 (gives input() its line editing)

    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        typer.echo()
        return None


def _source(model: str | None, url: str | None, offline: bool, engine: dict[str, Any]) -> Source:
    if offline:
        if url:
            raise typer.BadParameter("--offline loads the model here; drop it to use --url")
        from engine.checkpoint.store import DEFAULT_MODEL

        return Local(load_llm(model or DEFAULT_MODEL, engine))
    if engine:
        raise typer.BadParameter(f"--{next(iter(engine))} is for a model loaded here; add --offline")
    found = url or running_url(DEFAULT_APP)
    if found is None:
        raise ConfigError("no server is running here; start one with `helios serve`, or add --offline to load a model")
    from ..openai.protocol import AUTO

    return Server(found, model or AUTO)
