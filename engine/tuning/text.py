"""Text that heads are made with: files, or what the model itself says."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from ..config import EngineConfig
from ..errors import CheckpointError, ConfigError, InvalidRequestError, said
from ..files import check_target, write_whole
from ..llm import LLM
from ..request import SamplingParams
from ..text.tokenizer import Tokenizer

WINDOW = 256
"""Positions of a window: a text of its own."""
LEAST = 16
"""Shorter ones are left out."""
TEMPERATURES = (1.0, 0.7)
"""In turn: what the model might say, and what it is likely to."""
FREE_SHARE = 0.4
"""Of what the model says by itself, the share that begins with any token; the rest begins as a conversation does."""
FOLDER_REMEDY = "choose another work folder"
MARK = "MARK"
"""Stands for what a user says while a conversation's beginning is cut off before it."""


def read_texts(paths: Iterable[Path]) -> Iterator[str]:
    """Texts of files: a .txt is one, of a .jsonl each line's "text" or "prompt" (or the line, if it is a string).

    Raises ConfigError for a file that cannot be read or a line that has none.
    """
    for path in paths:
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read ({said(error)}); give .txt or .jsonl files in UTF-8") from None
        if path.suffix != ".jsonl":
            yield content
            continue
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                yield _text(path, number, line)


def windows(tokenizer: Tokenizer, texts: Iterable[str], length: int = WINDOW) -> Iterator[list[int]]:
    """The texts' tokens in windows of ``length``."""
    for text in texts:
        tokens = tokenizer.encode(text)
        for start in range(0, len(tokens), length):
            window = tokens[start : start + length]
            if len(window) >= LEAST:
                yield window


def own_windows(
    config: EngineConfig,
    n_tokens: int,
    *,
    length: int = WINDOW,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """What the model says by itself, about so many tokens of it: conversations, if it has a template for them, with the
    user's part of its own making, and texts from any first token. ``progress`` is told of the tokens made.

    Raises as ``LLM``.
    """
    generator = torch.Generator().manual_seed(seed)
    with LLM.of(config) as llm:
        opening = _opening(llm.engine.tokenizer)
        count = max(1, n_tokens // length)
        requests = []
        for number in range(count):
            free = not opening or float(torch.rand((), generator=generator)) < FREE_SHARE
            first = int(torch.randint(llm.engine.spec.vocab_size, (), generator=generator))
            prompt = [first] if free else opening
            params = SamplingParams(
                temperature=TEMPERATURES[number % len(TEMPERATURES)],
                max_tokens=length - len(prompt),
                seed=seed + number,
                ignore_eos=True,
            )
            requests.append(llm.request(prompt, params))
        prompts = {request.request_id: list(request.prompt_ids) for request in requests}
        made: dict[str, list[int]] = {}
        done = 0
        for completion in llm.run(requests):
            if completion.error is not None:
                raise completion.error
            made[completion.request_id] = prompts[completion.request_id] + [token.id for token in completion.tokens]
            done += len(completion.tokens)
            if progress:
                progress(done)
    return [made[request.request_id] for request in requests]


def kept_windows(path: Path, make: Callable[[], Sequence[list[int]]]) -> Sequence[list[int]]:
    """The windows in a file, a line each; if it is not there, they are made and written to it.

    Raises CheckpointError for a file that is damaged.
    """
    if not path.is_file():
        check_target(path, FOLDER_REMEDY)
        windows = make()
        write_whole(path, "".join(f"{json.dumps(window)}\n" for window in windows), FOLDER_REMEDY)
        return windows
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError:
        found = [None]
    if not all(isinstance(window, list) and all(type(token) is int for token in window) for window in found):
        raise CheckpointError(f"{path} is damaged; remove it, and the text is made again")
    return found


def split(windows: Sequence[list[int]], share: float, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Windows to learn from and held out ones. Raises ConfigError if that leaves either without any."""
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()
    held = max(1, round(share * len(windows)))
    if len(windows) - held < 1:
        raise ConfigError(
            f"{len(windows)} windows of text are too few to learn from and to hold some out; give more text"
        )
    return [windows[i] for i in order[held:]], [windows[i] for i in order[:held]]


def _text(path: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        raise ConfigError(f"{path}, line {number} is no JSON") from None
    found = value if isinstance(value, str) else None
    if isinstance(value, dict):
        found = next((value[key] for key in ("text", "prompt") if isinstance(value.get(key), str)), None)
    if found is None:
        raise ConfigError(f'{path}, line {number} has no text; write {{"text": "…"}}')
    return found


def _opening(tokenizer: Tokenizer) -> list[int]:
    """How a conversation begins, up to what the user says; nothing if the model has no template."""
    try:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": MARK}])
    except InvalidRequestError:
        return []
    before, mark, _ = tokenizer.decode(ids, skip_special_tokens=False).partition(MARK)
    return tokenizer.encode(before, add_special_tokens=False) if mark else []
