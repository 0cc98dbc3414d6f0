"""``helios generate``: one prompt, its text to the terminal as it comes."""

import json
import sys
import time
from contextlib import closing
from typing import Annotated, Any

import typer

from . import options as o
from .sources import Local, Messages, Server, Source, load_llm, local_params

MAX_TOKENS = 256
"""A base model seldom ends by itself, so the command line sets a limit where the API has none."""


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    model: o.Model = None,
    url: o.Url = None,
    chat: Annotated[bool, typer.Option("--chat", help="Answer the prompt by the model's chat template.")] = False,
    as_json: o.AsJson = False,
    max_tokens: o.MaxTokens = MAX_TOKENS,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    seed: o.Seed = None,
    stop: o.Stop = None,
    repetition_penalty: o.RepetitionPenalty = None,
    ignore_eos: o.IgnoreEos = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    memory: o.Memory = None,
    context: o.Context = None,
    threads: o.Threads = None,
    pairs: o.Set = None,
) -> None:
    """Continue a prompt. Loads the model here, or asks a running server with --url.

    Examples:

        helios generate "The capital of France is" -n 8 -t 0

        helios generate --chat "Write a haiku about disks"

        helios generate "Hello" --memory 100MB --set context=512 --set kv_tokens=512

        helios generate - --url http://127.0.0.1:8000 --json < prompt.txt
    """
    sampling = o.given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        repetition_penalty=repetition_penalty,
        ignore_eos=ignore_eos,
    )
    engine = o.settings(pairs, device=device, dtype=dtype, memory=memory, context=context, threads=threads)
    if url is None:
        local_params(sampling)
    text = sys.stdin.read() if prompt == "-" else prompt
    source = _source(model, url, engine)
    request: str | Messages = [{"role": "user", "content": text}] if chat else text
    _print(source, request, sampling, as_json)


def _source(model: str | None, url: str | None, engine: dict[str, Any]) -> Source:
    if url is None:
        from engine.checkpoint.store import DEFAULT_MODEL

        return Local(load_llm(model or DEFAULT_MODEL, engine))
    if engine:
        raise typer.BadParameter(f"--{next(iter(engine))} is for a model loaded here; a server has its own: drop --url")
    from ..openai.protocol import AUTO

    return Server(url, model or AUTO)


def _print(source: Source, prompt: str | Messages, sampling: dict[str, Any], as_json: bool) -> None:
    started = time.perf_counter()
    texts: list[str] = []
    last = None
    with closing(source.stream(prompt, sampling)) as pieces:
        for last in pieces:
            texts.append(last.text)
            if not as_json:
                typer.echo(last.text, nl=False)
    if not as_json:
        typer.echo()
        return
    usage = last.usage if last else None
    record = {
        "model": source.model,
        "text": "".join(texts),
        "finish_reason": last.finish_reason if last else None,
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "completion_tokens": usage.completion_tokens if usage else None,
        "seconds": round(time.perf_counter() - started, 3),
    }
    typer.echo(json.dumps(record, ensure_ascii=False))
