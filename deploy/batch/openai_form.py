"""Lines in the form of OpenAI's batch API: ``{"custom_id", "method", "url", "body"}``."""

from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidRequestError

from ..openai.fields import shown
from ..openai.protocol import AUTO, ChatRequest, CompletionRequest, parse
from ..openai.sampling import Sampling

KEYS = frozenset({"custom_id", "method", "url", "body"})
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def is_openai_form(line: Mapping[str, Any]) -> bool:
    """Both keys would be fields of the user's own in our form, which needs a prompt beside them."""
    return "url" in line and "body" in line


def fields_of(line: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The checked fields of a line, as ours are named. ``model`` is the one that runs.

    Raises InvalidRequestError naming the field, its value and what is allowed.
    """
    for name in line:
        if name not in KEYS:
            raise InvalidRequestError(f"unknown field {shown(name)} beside {', '.join(sorted(KEYS))}", name)
    if line.get("method", "POST") != "POST":
        raise InvalidRequestError(f"'method' is {shown(line['method'])}; it must be 'POST'", "method")
    match line["url"]:
        case str(url) if url == CHAT:
            return _chat(_of(model, parse(ChatRequest, line["body"])))
        case str(url) if url == COMPLETIONS:
            return _completion(_of(model, parse(CompletionRequest, line["body"])))
    raise InvalidRequestError(f"'url' is {shown(line['url'])}; it must be '{CHAT}' or '{COMPLETIONS}'", "url")


def _of(model: str, request: Any) -> Any:
    """Raises InvalidRequestError for what a batch of one model cannot do, rather than do something else."""
    if request.model not in (AUTO, model):
        raise InvalidRequestError(
            f"'model' is {shown(request.model)} and this batch runs '{model}'; leave it out, or choose it by --model",
            "model",
        )
    if request.stream:
        raise InvalidRequestError("'stream' has no effect in a batch; remove it", "stream")
    return request


def _chat(request: ChatRequest) -> dict[str, Any]:
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    return _sampling(request) | {"messages": request.messages, "logprobs": logprobs, "max_tokens": limit}


def _completion(request: CompletionRequest) -> dict[str, Any]:
    if len(request.prompt) != 1:
        raise InvalidRequestError(f"'prompt' has {len(request.prompt)} prompts; give each a line of its own", "prompt")
    prompt = request.prompt[0]
    given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_ids": list(prompt)}
    return _sampling(request) | given | {"logprobs": request.logprobs}


def _sampling(request: Sampling) -> dict[str, Any]:
    return {name: getattr(request, name) for name in Sampling.model_fields}
