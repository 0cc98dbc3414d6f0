"""Tokenizers by model, for the texts of single tokens. Everything else that needs one happens in the model's actor."""

import asyncio
from collections.abc import Mapping

from engine.checkpoint.store import resolve
from engine.text.tokenizer import Tokenizer


class Vocabularies:
    """Loads a tokenizer when log-probabilities are first asked for: it takes seconds, and few requests need it."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        """``paths``: where each model is, by its name."""
        self._paths = paths
        self._loading: dict[str, asyncio.Task[Tokenizer]] = {}

    async def of(self, model: str) -> Tokenizer:
        """Raises CheckpointError, ModelNotFoundError if this machine has no such tokenizer."""
        if model not in self._loading or _failed(self._loading[model]):
            path = self._paths[model]
            self._loading[model] = asyncio.create_task(asyncio.to_thread(lambda: Tokenizer.load(resolve(path))))
        # Shielded: the client that asked first may hang up while others wait.
        return await asyncio.shield(self._loading[model])


def _failed(task: asyncio.Task[Tokenizer]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
