"""LLM: a model for offline use, in the calling process."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from .config import EngineConfig, parse_bytes
from .engine import Engine
from .errors import ConfigError, InvalidRequestError
from .request import Completion, Delta, Request, SamplingParams

Prompt = str | Sequence[int]
"""Text, or token ids."""


class LLM:
    """Generate with one model in this process. Not for use by several threads at once.

    ``LLM("smollm2-135m-instruct", dtype="float32").generate(["Hello"], SamplingParams(max_tokens=8))``
    """

    def __init__(
        self, model: str | os.PathLike[str], *, progress: Callable[[int], None] | None = None, **config: Any
    ) -> None:
        """``config`` are fields of EngineConfig, sizes as text ("2GiB") or bytes; ``progress`` is told of weight bytes
        read. Raises as Engine.load.
        """
        self.engine = Engine.load(_config(model, config), progress)
        self._ids = itertools.count()

    @classmethod
    def of(cls, config: EngineConfig) -> "LLM":
        """From a whole configuration."""
        given = {field.name: getattr(config, field.name) for field in fields(config)}
        return cls(given.pop("model"), **given)

    def change_depth(self, depth: int | None) -> None:
        """Go on with the exit after so many layers, None for the whole model. Raises as Engine.change_depth."""
        self.engine.change_depth(depth)

    def close(self) -> None:
        """Give memory, threads and files back now rather than when the object is collected."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue each prompt; the completions come in the prompts' order. One prompt gives a list of one.

        Raises InvalidRequestError, before anything is generated, if one of them cannot be served.
        """
        many = _as_list(prompts)
        each = [_params(p) for p in params] if isinstance(params, (list, tuple)) else [_params(params)] * len(many)
        if len(each) != len(many):
            raise InvalidRequestError(f"{len(each)} sampling parameters were given for {len(many)} prompts", "params")
        requests = [self.request(prompt, p) for prompt, p in zip(many, each, strict=True)]
        for request in requests:
            self.engine.prepare(request, lambda _: None)
        done = {c.request_id: c for c in self.run(requests)}
        return [done[request.request_id] for request in requests]

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation of {"role", "content"} messages by the model's chat template.

        Raises InvalidRequestError as ``generate``.
        """
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequestError(
                f'messages is {_shown(messages)}; it must be a list like [{{"role": "user", "content": "Hello"}}]',
                "messages",
            )
        return self.generate([self.engine.tokenizer.apply_chat_template(messages)], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Continue one prompt, delta by delta. Closing the iterator cancels the request."""
        request = self.request(prompt, _params(params))
        deltas: list[Delta] = []
        self.engine.add(self.engine.prepare(request, deltas.append))
        try:
            while self.engine.has_work:
                if not self.engine.runs:
                    raise InvalidRequestError("the model is parked; change_depth wakes it up", "depth")
                self.engine.step()
                yield from deltas
                deltas.clear()
        finally:
            self.engine.cancel(request.request_id)

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A request for ``run``, with the next request id. Raises InvalidRequestError for what is no prompt."""
        if not isinstance(prompt, str) and not _is_ids(prompt):
            raise InvalidRequestError(f"a prompt is {_shown(prompt)}; it must be text or a list of token ids", "prompt")
        ids = self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return Request(f"llm-{next(self._ids)}", tuple(ids), params)

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Serve requests as they can be taken in and yield each completion as soon as it is done, in any order.

        Reads ``requests`` only as far as there is room, so the iterable may be endless or a file. Raises
        InvalidRequestError when it meets a request that cannot be served; what was begun is then cancelled.
        """
        source = iter(requests)
        deltas: dict[str, list[Delta]] = {}
        begun: dict[str, Request] = {}
        finished: list[str] = []

        def deliver(delta: Delta) -> None:
            deltas[delta.request_id].append(delta)
            if delta.finish_reason:
                finished.append(delta.request_id)

        try:
            while True:
                for request in itertools.islice(source, self.engine.config.max_sequences - len(begun)):
                    if not isinstance(request, Request):
                        raise InvalidRequestError(
                            f"run was given {_shown(request)}; make requests with request(prompt, params)", "requests"
                        )
                    sequence = self.engine.prepare(request, deliver)
                    deltas[request.request_id], begun[request.request_id] = [], request
                    self.engine.add(sequence)
                if not self.engine.step():
                    if self.engine.depth == 0 and begun:
                        raise InvalidRequestError("the model is parked; change_depth wakes it up", "depth")
                    if not begun:
                        return
                for request_id in finished:
                    yield Completion.gather(begun.pop(request_id), deltas.pop(request_id))
                finished.clear()
        finally:
            for request_id in list(begun):
                self.engine.cancel(request_id)


def _config(model: str | os.PathLike[str], given: Mapping[str, Any]) -> EngineConfig:
    """Raises ConfigError for a model that is no name, a field that is none and a size that cannot be read."""
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(f"model is {_shown(model)}; it must be a name in the model store or a directory")
    known = [field.name for field in fields(EngineConfig) if field.name != "model"]
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            raise ConfigError(
                f"'{name}' is no setting of the engine; " + (f"did you mean {close[0]}?" if close else ", ".join(known))
            )
    sizes = {
        name: parse_bytes(value) for name, value in given.items() if name.endswith("_bytes") and isinstance(value, str)
    }
    return EngineConfig(model=os.fspath(model), **{**given, **sizes})


def _params(given: Any) -> SamplingParams:
    if given is not None and not isinstance(given, SamplingParams):
        raise InvalidRequestError(f"params is {_shown(given)}; give SamplingParams(max_tokens=16, …)", "params")
    return SamplingParams() if given is None else given


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt, as text or as ids, becomes a list of one. Raises InvalidRequestError for what is neither."""
    if isinstance(prompts, str) or (prompts and _is_ids(prompts)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts is {_shown(prompts)}; it must be text, token ids, or a list of such", "prompt"
        )
    return list(prompts)


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and all(isinstance(item, int) for item in prompt)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
