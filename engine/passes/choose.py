"""Which pass an engine's configuration stands for, over the parts that were built for it."""

from ..build import Parts
from ..exits.scored import ScoredHead
from ..sweep import EmbedTokens, ExitHead
from .base import Pass
from .check import Check
from .early_exit import EarlyExitPass
from .lossless import LosslessPass
from .parked import ParkedPass
from .plain import PlainPass
from .trunk import Trunk


def source(parts: Parts) -> EmbedTokens:
    """Hidden states of a sweep from the first layer on."""
    return EmbedTokens(parts.weights.embedding)


def sink(parts: Parts) -> ExitHead:
    """The head after the last layer that is served."""
    if parts.exit_profile is None:
        return ExitHead(parts.spec, parts.device, parts.weights)
    margin = parts.config.confidence == "margin"
    return ScoredHead(parts.spec, parts.device, parts.weights, parts.exit_heads, parts.exit_profile, margin=margin)


def trunk(parts: Parts) -> Trunk:
    """The layers in segments that end where states are kept."""
    config = parts.config
    rows = config.prefill_rows + config.max_sequences
    return Trunk(parts.executor, source(parts), parts.kept, parts.spec.n_layers, rows, config.tile_rows)


def choose(parts: Parts) -> Pass:
    """How tokens pass the model."""
    if parts.depth == 0:
        return ParkedPass()
    if parts.config.early_exit:
        return _early_exit(parts)
    if parts.config.draft_depth is not None:
        return _lossless(parts)
    return _plain(parts)


def _plain(parts: Parts) -> PlainPass:
    config, end = parts.config, parts.end
    threshold = None
    if end is not None:
        threshold = config.exit_threshold
        threshold = end.calibrated(config.confidence) or 0.0 if threshold is None else threshold
    return PlainPass(
        parts.executor,
        range(parts.spec.n_layers),
        source(parts),
        sink(parts),
        parts.sampler,
        depth=end.layer if end else parts.spec.n_layers,
        threshold=threshold,
        keep=parts.kept.get(end.layer) if end else None,
        behind=parts.behind,
    )


def _early_exit(parts: Parts) -> EarlyExitPass:
    config, spec, margin = parts.config, parts.spec, parts.config.confidence == "margin"
    checks = {
        layer: Check(spec, parts.device, parts.weights, head, margin=margin, frequent=parts.frequent)
        for layer, head in parts.exit_heads.items()
    }
    thresholds = {
        end.layer: end.calibrated(config.confidence) if config.exit_threshold is None else config.exit_threshold
        for end in spec.exits
    }
    return EarlyExitPass(trunk(parts), checks, sink(parts), parts.sampler, thresholds)


def _lossless(parts: Parts) -> LosslessPass:
    config = parts.config
    assert config.draft_depth is not None, "chosen by it"
    drafting = ExitHead(parts.spec, parts.device, parts.weights, parts.exit_heads[config.draft_depth])
    return LosslessPass(
        trunk(parts),
        drafting,
        sink(parts),
        parts.sampler,
        draft_tokens=config.draft_tokens,
        least=config.exit_threshold or 0.0,
    )
