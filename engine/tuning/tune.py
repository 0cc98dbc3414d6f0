"""Heads for a model's exits: text, states, training, and what came of it, each step kept so that it can be resumed."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.index import Checkpoint, parse_file
from ..checkpoint.layout import Naming
from ..checkpoint.reader import read_into
from ..checkpoint.store import resolve
from ..checkpoint.writer import write_mixed
from ..config import EngineConfig
from ..errors import ConfigError, UnsupportedModelError
from ..exits.profile import ExitProfile
from ..exits.save import save_heads
from ..files import write_whole
from ..sizes import Sizes
from ..spec import Exit, ExitKind, ModelSpec
from ..units import Unit
from .head import Head
from .states import States, collect
from .text import kept_windows, split
from .train import Examples, Settings, profiled, train

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
TARGET = 0.95
"""Agreement that an exit's own threshold is calibrated to."""
HELD_OUT = 0.05
"""Of the windows, the share that is not learned from."""
LEAST_WINDOWS = 40
FREQUENT = 8192
"""Tokens that a file of heads lists at most."""
TEXT = "text.jsonl"
"""In the work folder, what is learned from and held out."""
WORTH = 0.05
"""An exit is worth having where at least this share of tokens satisfies its threshold."""
Progress = Callable[[str, int, int], None]
"""Told of a step, of what is done of it, and of all."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one exit's head reached on held-out text."""

    layer: int
    kind: str
    agreement: float
    at_thresholds: dict[str, tuple[float, float]]
    """By confidence: the share of tokens that satisfy it, and their agreement."""
    threshold: float | None
    """The lowest confidence from which on agreement is TARGET."""
    margin_threshold: float | None
    """Likewise, of the lead over the second best."""
    calibration_error: float
    parameters: int
    cost_layers: float
    """Products of the head beside the LM head's, in layers of the trunk."""
    steps: int

    @property
    def recommended(self) -> bool:
        return self.threshold is not None and self.at_thresholds["calibrated"][0] >= WORTH


def tune(
    config: EngineConfig,
    layers: Sequence[int],
    windows: Callable[[], Sequence[list[int]]],
    folder: Path,
    out: Path,
    *,
    kinds: Sequence[ExitKind] = ("adapter",),
    width: int,
    settings: Settings,
    progress: Progress | None = None,
) -> list[Result]:
    """Train heads of some kinds for each exit and write those of the first kind to ``out``. What is found in ``folder``
    is not done again, of text, states and heads; ``windows`` is asked for text only if there is none.

    Raises ConfigError for layers that cannot be exits and for too little text, UnsupportedModelError for a model whose
    norms are not RMS, and as ``collect`` does.
    """
    report = progress or (lambda *_: None)
    directory = resolve(config.model)
    spec, checkpoint = ModelSpec.from_directory(directory), Checkpoint(directory)
    check_layers(spec, layers)
    if spec.norm != "rms":
        raise UnsupportedModelError(f"heads are trained for models with RMS norms; '{config.model}' has layer norms")
    learned, held_out = _states(config, layers, windows, folder, settings.seed, report)
    read = _reader(checkpoint)
    lm_head = read("model.embed_tokens.weight" if spec.tied else "lm_head.weight").bfloat16()
    ranked = [
        part.likeliest(lm_head, lambda done, t=part.count: report("the model's own answers", done, t))  # type: ignore[misc]
        for part in (learned, held_out)
    ]
    results: list[Result] = []
    exits: list[Exit] = []
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        examples = Examples(learned.of(layer), learned.final, ranked[0], learned.lengths)
        unseen = Examples(held_out.of(layer), held_out.final, ranked[1], held_out.lengths)
        for kind in kinds:
            head = Head.start(kind, layer, spec, read, width, settings.seed)
            head, steps = _trained(head, examples, unseen, lm_head, settings, folder, report)
            found = _result(*profiled(head, unseen, lm_head), head, steps)
            results.append(found)
            if kind == kinds[0]:
                adapter = width if kind == "adapter" else 0
                exits.append(Exit(layer, kind, adapter, found.threshold, found.margin_threshold))
                tensors |= head.tensors()
    save_heads(out, checkpoint, spec, exits, tensors, frequent(folder))
    return results


def frequent(folder: Path) -> list[int]:
    """The tokens of the text in a work folder, the most frequent first; none if its text is not there any more."""
    if not (folder / TEXT).is_file():
        return []
    counts = Counter(token for window in kept_windows(folder / TEXT, list) for token in window)
    return sorted(counts, key=lambda token: (-counts[token], token))[:FREQUENT]


def check_layers(spec: ModelSpec, layers: Sequence[int]) -> None:
    """Raises ConfigError unless exits can be at these layers."""
    if not layers or list(layers) != sorted(set(layers)) or not 1 <= layers[0] <= layers[-1] < spec.n_layers:
        raise ConfigError(
            f"exits are at {list(layers)}; give layers from 1 to {spec.n_layers - 1}, each deeper than the one before"
        )


def _states(
    config: EngineConfig,
    layers: Sequence[int],
    windows: Callable[[], Sequence[list[int]]],
    folder: Path,
    seed: int,
    report: Progress,
) -> tuple[States, States]:
    found = [States.open(folder / name) for name in ("learned", "held-out")]
    if all(states is not None and set(layers) <= set(states.layers) for states in found):
        return found[0], found[1]  # type: ignore[return-value]
    given = kept_windows(folder / TEXT, lambda: _enough(windows()))
    made = []
    for name, part in zip(("learned", "held-out"), split(given, HELD_OUT, seed), strict=True):
        total = sum(map(len, part))
        step = f"states, {name}"
        made.append(collect(config, layers, part, folder / name, lambda done, s=step, t=total: report(s, done, t)))  # type: ignore[misc]
    return made[0], made[1]


def _enough(windows: Sequence[list[int]]) -> Sequence[list[int]]:
    if len(windows) < LEAST_WINDOWS:
        raise ConfigError(
            f"there are {len(windows)} windows of text, {sum(map(len, windows))} tokens; training takes "
            f"{LEAST_WINDOWS} windows at least and a few hundred thousand tokens to be worth it: give more text, or "
            "let the model say it"
        )
    return windows


def _trained(
    head: Head,
    learned: Examples,
    held_out: Examples,
    lm_head: Tensor,
    settings: Settings,
    folder: Path,
    report: Progress,
) -> tuple[Head, int]:
    """A head of an exit: as it was kept, or trained and kept."""
    name = f"{head.kind}-{head.layer}"
    about, path = folder / f"{name}.json", folder / f"{name}.safetensors"
    asked = {**asdict(settings), "parameters": head.parameters, "positions": len(learned.states)}
    if about.is_file() and path.is_file():
        kept = json.loads(about.read_text(encoding="utf-8"))
        if kept["asked"] == asked:
            for tensor, info in parse_file(path).items():
                read_into(info, head.weights[tensor])
            return head, kept["steps"]
    if head.kind == "adapter":
        head.fit(learned.states, learned.final)
    trained = train(
        head,
        learned,
        held_out,
        lm_head,
        settings,
        lambda done, total, _: report(f"exit {head.layer}, {head.kind}", done, total),
    )
    weights = trained.head.weights
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
    write_mixed(path, entries, (tensor.contiguous().view(-1) for tensor in weights.values()), {"format": "pt"})
    write_whole(about, json.dumps({"asked": asked, "steps": trained.steps, "agreement": trained.agreement}))
    return trained.head, trained.steps


def _reader(checkpoint: Checkpoint) -> Callable[[str], Tensor]:
    """Reads tensors of a model in float32."""
    naming = Naming.of(checkpoint.names)

    def read(source: str) -> Tensor:
        info = checkpoint.info(naming(source))
        into = torch.empty(info.shape)
        read_into(info, into)
        return into

    return read


def _result(profile: ExitProfile, margins: ExitProfile, head: Head, steps: int) -> Result:
    layer, spec = head.layer, head.spec
    threshold = profile.threshold(layer, TARGET)
    at = {f"{th:g}": (profile.satisfied(layer, th), profile.agreement(layer, th)) for th in THRESHOLDS}
    if threshold is not None:
        at["calibrated"] = (profile.satisfied(layer, threshold), profile.agreement(layer, threshold))
    sizes = Sizes(spec, torch.bfloat16)
    of_a_layer = (sizes.matrices(Unit("attention")) + sizes.matrices(Unit("mlp"))) / 2
    return Result(
        layer=layer,
        kind=head.kind,
        agreement=profile.agreement(layer),
        at_thresholds=at,
        threshold=threshold,
        margin_threshold=margins.threshold(layer, TARGET),
        calibration_error=profile.calibration_error(layer),
        parameters=head.parameters,
        cost_layers=head.parameters / of_a_layer,
        steps=steps,
    )


def figures(results: Sequence[Result]) -> list[dict[str, Any]]:
    """For programs."""
    return [{**asdict(found), "recommended": found.recommended} for found in results]


def default_layers(spec: ModelSpec) -> list[int]:
    """Every third to fifth layer from a third of the depth on: four exits of a usual model."""
    return sorted({max(1, min(spec.n_layers - 1, round(spec.n_layers * share / 6))) for share in (2, 3, 4, 5)})


def work_config(model: str, threads: int | None = None) -> EngineConfig:
    """How the model is run while its states are kept."""
    return replace(EngineConfig(model=model), max_sequences=32, threads=threads)
