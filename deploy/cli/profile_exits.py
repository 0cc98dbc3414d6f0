"""``helios profile-exits``: what a model's exits make of given text."""

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from engine.errors import ConfigError

from . import options as o
from .terminal import Terminal

if TYPE_CHECKING:
    from engine.exits.reading import JointProfile, Reader

THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95)
WINDOW = 256


def profile_exits(
    model: Annotated[str, typer.Argument(help="A name in the model store, or a directory.")],
    text: Annotated[list[Path], typer.Option(help="Text to read, .txt or .jsonl; may be repeated.")],
    against: Annotated[
        str | None,
        typer.Option(help="Another model of the same tokenizer: is it sure where this one is not?"),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens to read at most; default: all.")] = None,
    pairs: o.Set = None,
    against_pairs: Annotated[
        list[str] | None,
        typer.Option("--against-set", help="A setting of the other model; may be repeated."),
    ] = None,
    as_json: o.AsJson = False,
) -> None:
    """Let a model read text at full depth and say, of every exit and position, how sure it is and whether it agrees.

    Examples:

        helios profile-exits smollm2-135m-instruct --text articles.jsonl

        helios profile-exits big --text chat.jsonl --against small --json
    """
    from actors.config import model_config
    from engine.exits.reading import Reader, read_jointly
    from engine.tuning.text import read_texts, windows

    from ..models.cli import progress

    if tokens is not None and tokens < 2:
        raise ConfigError(f"tokens is {tokens}; it must be at least 2")
    with ExitStack() as opened, progress() as report:
        readers = [
            opened.enter_context(Reader(model_config(name, o.settings(given)).engine_config()))
            for name, given in ((model, pairs), (against, against_pairs))
            if name is not None
        ]
        length = min(WINDOW, *(reader.context for reader in readers))
        texts = _up_to(list(windows(readers[0].tokenizer, read_texts(text), length)), tokens)
        if not texts:
            raise ConfigError(f"{', '.join(map(str, text))} have no text of 16 tokens or more; give more text")
        total, done = sum(map(len, texts)), 0

        def read() -> Any:
            nonlocal done
            for each in texts:
                yield each
                done += len(each)
                report("reading", done, total)

        joint = None
        if len(readers) == 2:
            joint = read_jointly(readers[0], readers[1], read())
        else:
            for each in read():
                readers[0].read(each)
    if as_json:
        profiles = [reader.profile.to_dict() for reader in readers]
        typer.echo(json.dumps({"profiles": profiles, "joint": joint.to_dict() if joint else None}))
        return
    for name, reader in zip((model, against), readers, strict=False):
        _show(str(name), reader)
    if joint:
        _show_joint(joint)


def _up_to(texts: list[list[int]], tokens: int | None) -> list[list[int]]:
    if tokens is None:
        return texts
    kept: list[list[int]] = []
    for text in texts:
        left = tokens - sum(map(len, kept))
        if left < 2:
            break
        kept.append(text[:left])
    return kept


def _show(name: str, reader: "Reader") -> None:
    profile, terminal = reader.profile, Terminal()
    count = profile.positions(reader.n_layers)
    terminal.print(f"{name}: {count} positions; of each confidence how many are so sure, and agree", soft_wrap=True)
    table = Table(
        "layers",
        "agreement",
        "confidence",
        "perplexity",
        *(f"{th:g}" for th in THRESHOLDS),
    )
    for layer in reader.layers:
        table.add_row(
            str(layer),
            f"{profile.agreement(layer):.1%}",
            f"{profile.mean_confidence(layer):.2f}",
            f"{math.exp(min(profile.mean_nll(layer), 50)):.1f}",
            *(f"{profile.satisfied(layer, th):.0%}, {profile.agreement(layer, th):.0%}" for th in THRESHOLDS),
        )
    terminal.print(table)


def _show_joint(joint: "JointProfile") -> None:
    terminal = Terminal()
    terminal.print("Less than 0.8 sure here: share of the text, and of that where the other is sure", soft_wrap=True)
    table = Table(
        "layers",
        "unsure",
        *(f"other at {layer}" for layer in joint.second),
    )
    for one in joint.first:
        rows = [joint.rescued((one, 0.8), (other, 0.8)) for other in joint.second]
        table.add_row(str(one), f"{rows[0][0]:.0%}", *(f"{share:.0%}" for _, share in rows))
    terminal.print(table)
