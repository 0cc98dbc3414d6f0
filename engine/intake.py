"""From a request to a sequence that the engine can take in."""

import random
from dataclasses import replace

from .errors import InvalidRequestError
from .kv import LayerLengths
from .request import Deliver, Request
from .sequence import Sequence
from .spec import ModelSpec
from .text.detokenizer import TextStream
from .text.stop import StopMatcher
from .text.tokenizer import Tokenizer


class Intake:
    """Checks requests against the limits of one model. Has no state, so any thread may use it."""

    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer, context: int, n_layers: int) -> None:
        """``context`` is the longest sequence admitted, ``n_layers`` the most that it may ever pass."""
        self._spec, self._tokenizer = spec, tokenizer
        self._context, self._n_layers = context, n_layers

    def sequence(self, request: Request, deliver: Deliver) -> Sequence:
        """The sequence of a request whose parameters are valid in themselves.

        Raises InvalidRequestError that names the field, the value and the limit.
        """
        params = request.params
        n_prompt, n_done = len(request.prompt_ids), len(request.generated)
        if n_prompt == 0:
            raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
        if n_prompt >= self._context:
            raise InvalidRequestError(
                f"the prompt has {n_prompt} tokens; this model is served with a context of {self._context} tokens, "
                "prompt and output together. Shorten the prompt",
                "prompt",
            )
        if not all(0 <= token < self._spec.vocab_size for token in request.prompt_ids):
            raise InvalidRequestError(
                f"the prompt has a token id outside [0, {self._spec.vocab_size}), the model's vocabulary", "prompt"
            )
        room = self._context - n_prompt
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidRequestError(
                f"max_tokens is {params.max_tokens} after a prompt of {n_prompt} tokens; the context of "
                f"{self._context} leaves {room}",
                "max_tokens",
            )
        seed = random.getrandbits(63) if params.seed is None else params.seed
        params = replace(params, seed=seed, max_tokens=params.max_tokens or room)
        if n_done >= (params.max_tokens or 0):
            raise InvalidRequestError(f"the {n_done} generated tokens already reach max_tokens", "generated")
        return self._sequence(replace(request, params=params), deliver)

    def _sequence(self, request: Request, deliver: Deliver) -> Sequence:
        params = request.params
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._spec.eos_ids))
        text = TextStream(self._tokenizer, request.prompt_ids, params.skip_special_tokens)
        stop = StopMatcher(params.stop, params.include_stop_str_in_output)
        for i, token in enumerate(request.generated, 1):  # what this releases was delivered when the stream began
            piece = text.push((token,))
            if i >= params.min_tokens:
                stop.push(piece)
        return Sequence(
            request=request,
            params=params,
            deliver=deliver,
            kv=LayerLengths(self._n_layers),
            text=text,
            stop=stop,
            tokens=[*request.prompt_ids, *request.generated],
            output=list(request.generated),
            stop_ids=frozenset(stop_ids),
        )
