"""LLM: a model for offline use, in the calling process."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from .config import EngineConfig
from .engine import Engine
from .errors import InvalidRequestError
from .request import Completion, Delta, Request, SamplingParams

Prompt = str | Sequence[int]
"""Text, or token ids."""


class LLM:
    """Generate with one model in this process. Not for use by several threads at once.

    ``LLM("smollm2-135m-instruct", dtype="float32").generate(["Hello"], SamplingParams(max_tokens=8))``
    """

    def __init__(self, model: str, *, progress: Callable[[int], None] | None = None, **config: Any) -> None:
        """``config`` are fields of EngineConfig; ``progress`` is told of weight bytes read. Raises as Engine.load."""
        self.engine = Engine.load(EngineConfig(model=model, **config), progress)
        self._ids = itertools.count()

    @classmethod
    def of(cls, config: EngineConfig) -> "LLM":
        """From a whole configuration."""
        given = {field.name: getattr(config, field.name) for field in fields(config)}
        return cls(given.pop("model"), **given)

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
        each = [params or SamplingParams()] * len(many) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(many):
            raise InvalidRequestError(f"{len(each)} sampling parameters were given for {len(many)} prompts", "params")
        requests = [self.request(prompt, p) for prompt, p in zip(many, each, strict=True)]
        for request in requests:
            self.engine.prepare(request, lambda _: None)
        done = {c.request_id: c for c in self.run(requests)}
        return [done[request.request_id] for request in requests]

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation of {"role", "content"} messages by the model's chat template."""
        return self.generate([self.engine.tokenizer.apply_chat_template(messages)], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Continue one prompt, delta by delta. Closing the iterator cancels the request."""
        request = self.request(prompt, params or SamplingParams())
        deltas: list[Delta] = []
        self.engine.add(self.engine.prepare(request, deltas.append))
        try:
            while self.engine.has_work:
                self.engine.step()
                yield from deltas
                deltas.clear()
        finally:
            self.engine.cancel(request.request_id)

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A request for ``run``, with the next request id."""
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
                    sequence = self.engine.prepare(request, deliver)
                    deltas[request.request_id], begun[request.request_id] = [], request
                    self.engine.add(sequence)
                if not self.engine.step() and not begun:
                    return
                for request_id in finished:
                    yield Completion.gather(begun.pop(request_id), deltas.pop(request_id))
                finished.clear()
        finally:
            for request_id in list(begun):
                self.engine.cancel(request_id)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, as text or as ids, becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    return [ids] if ids else [item for item in prompts if not isinstance(item, int)]
