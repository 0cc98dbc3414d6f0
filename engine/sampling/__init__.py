"""Choosing tokens: parameters checked, logits adjusted, one token drawn per row."""

from .sampler import MAX_ROWS, Sampler, SamplingRow
from .validate import validate

__all__ = ["MAX_ROWS", "Sampler", "SamplingRow", "validate"]
