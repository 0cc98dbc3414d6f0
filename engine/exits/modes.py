"""What a configuration asks of a model's exits, beside a depth: to be scored, to let tokens leave, or to draft."""

from ..config import EngineConfig
from ..errors import ConfigError
from ..quant.format import Quantisation
from ..sizes import Beside
from ..spec import ModelSpec
from .heads import Heads

MODES = ("score_exits", "early_exit", "draft_depth")
MAKE_HEADS = "make heads with `helios tune-exits`"


def beside(config: EngineConfig, heads: Heads, spec: ModelSpec, quantisation: Quantisation | None) -> Beside:
    """What is needed beside the layers. Raises ConfigError for modes that exclude each other, and for lacking exits."""
    asked = [name for name in MODES if getattr(config, name)]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} are set; each is a way of its own to use exits: choose one")
    _check_companions(config, asked, spec)
    if not asked:
        whole = config.depth in (None, spec.n_layers)
        return Beside() if whole else kept_at(config, config.depth)
    if config.draft_depth is not None:
        if config.draft_depth == spec.n_layers:
            raise ConfigError(f"draft_depth is {config.draft_depth}, all layers of this model; draft at an exit below")
        found = heads.at(config.draft_depth, "draft_depth")
        return Beside((found,), (found.layer,), config.draft_tokens + 2)
    if not heads.exits:
        raise ConfigError(f"{asked[0]} is set and this model has no exits; {MAKE_HEADS}")
    if config.score_exits:
        return Beside(heads.exits, answers=1 + len(heads.exits))
    layers = tuple(end.layer for end in heads.exits)
    return Beside(heads.exits, layers, answers=2, frequent=_frequent(config, heads, quantisation))


def kept_at(config: EngineConfig, depth: int | None) -> Beside:
    """What a model that ends at an exit needs beside its layers; None is the whole model."""
    return Beside(kept=(depth,)) if config.keep_states and depth is not None else Beside()


def _check_companions(config: EngineConfig, asked: list[str], spec: ModelSpec) -> None:
    if asked and config.depth not in (None, spec.n_layers):
        raise ConfigError(f"{asked[0]} is set and depth is {config.depth}; it needs the whole model: leave depth out")
    if asked in (["early_exit"], ["draft_depth"]) and config.value_share < 1:
        raise ConfigError(
            f"{asked[0]} is set and value_share is {config.value_share:g}; what was skipped or drafted is computed "
            "exactly later: leave value_share at 1"
        )
    if config.check_vocabulary is not None and not config.early_exit:
        raise ConfigError("check_vocabulary is set, and early_exit, whose checks it is for, is not")
    if config.exit_threshold is not None and asked not in (["early_exit"], ["draft_depth"]) and config.depth is None:
        raise ConfigError(
            "exit_threshold is set, and nothing that has a threshold: set early_exit, draft_depth or depth"
        )


def _frequent(config: EngineConfig, heads: Heads, quantisation: Quantisation | None) -> int:
    if config.check_vocabulary is None:
        return 0
    if quantisation is not None and quantisation.lm_head:
        raise ConfigError("check_vocabulary is set and this model's LM head is quantised; leave it out")
    if config.check_vocabulary > len(heads.frequent):
        raise ConfigError(
            f"check_vocabulary is {config.check_vocabulary}; these exits list {len(heads.frequent)} frequent tokens. "
            "Lower it, or leave it out"
        )
    return config.check_vocabulary
