"""Where the command line gets its text from: a model loaded here, or a running server. Both stream the same pieces."""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from engine.errors import ConfigError, HeliosError
from engine.request import SamplingParams, Usage

if TYPE_CHECKING:
    from engine.llm import LLM

Messages = Sequence[Mapping[str, str]]
_CONNECT_S = 5.0
ANY_VOCABULARY = 2**24
"""The flags name no token ids, so it does not matter how many there are."""


class ServerError(HeliosError):
    """What a server answered instead of text, or that it did not answer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer. The last has the reason it ended for and what it took."""

    text: str
    finish_reason: str | None = None
    usage: Usage | None = None


class Source(Protocol):
    """Text for a prompt (str) or a conversation (messages). Closing the iterator stops the generation."""

    model: str

    def stream(self, prompt: str | Messages, sampling: Mapping[str, Any]) -> Generator[Piece]: ...


class Local:
    """A model in this process."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self.model = llm.engine.config.model

    def stream(self, prompt: str | Messages, sampling: Mapping[str, Any]) -> Generator[Piece]:
        """Raises InvalidRequestError for sampling parameters or a prompt that cannot be served."""
        ids = prompt if isinstance(prompt, str) else self._llm.engine.tokenizer.apply_chat_template(prompt)
        for delta in self._llm.stream(ids, local_params(sampling)):
            if delta.error:
                raise delta.error
            yield Piece(delta.text, delta.finish_reason, delta.usage)


class Server:
    """A running server, by its OpenAI protocol."""

    def __init__(self, url: str, model: str) -> None:
        """Raises ConfigError for what is no address of a server."""
        _must_be_http(url)
        self._url = url.rstrip("/")
        self.model = model

    def stream(self, prompt: str | Messages, sampling: Mapping[str, Any]) -> Generator[Piece]:
        """Raises ServerError with the server's own words."""
        chat = not isinstance(prompt, str)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **sampling}
        body["messages" if chat else "prompt"] = prompt
        reason, usage = None, None
        for chunk in _events(self._url + path, body):
            if chunk.get("usage"):
                usage = Usage(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"])
            for choice in chunk["choices"]:
                reason = choice["finish_reason"] or reason
                text = choice["delta"].get("content") if chat else choice["text"]
                if text:
                    yield Piece(text)
        if reason is None:
            raise ServerError(f"{self._url} ended the answer without a reason; see the server's log")
        yield Piece("", reason, usage)


def local_params(sampling: Mapping[str, Any], defaults: SamplingParams | None = None) -> SamplingParams:
    """Sampling parameters of command-line flags. Raises InvalidRequestError before any model is loaded."""
    from engine.sampling.validate import validate

    from ..openai.sampling import Sampling, validated

    return validate(validated(Sampling, sampling).sampling_params(defaults or SamplingParams()), ANY_VOCABULARY)


def load_llm(model: str, engine: Mapping[str, Any]) -> "LLM":
    """The model, loaded into this process. ``engine`` are flags named as in the configuration file."""
    from actors.config import model_config
    from engine.llm import LLM

    return LLM.of(model_config(model, engine).engine_config())


def get_json(url: str, path: str) -> Any:
    """A JSON answer of a server. Raises ServerError, ConfigError for what is no address of one."""
    _must_be_http(url)
    try:
        response = httpx.get(url.rstrip("/") + path, timeout=30.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unreachable(url, error) from None
    if response.is_error:
        raise ServerError(_words(response))
    return response.json()


def _must_be_http(url: str) -> None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"'{url}' is not the address of a server; write it like http://127.0.0.1:8000")


def _events(url: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    try:
        with httpx.stream("POST", url, json=body, timeout=timeout) as response:
            if response.is_error:
                response.read()
                raise ServerError(_words(response))
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(chunk["error"]["message"])
                yield chunk
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unreachable(url, error) from None


def _words(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.url} answered {response.status_code}: {response.text[:200]}"


def _unreachable(url: str, error: Exception) -> ServerError:
    return ServerError(f"{url} cannot be reached ({error}); start a server with `helios serve`, or check the address")
