"""Choosing tokens: parameters checked, logits adjusted, one token drawn per row."""

from .sampler import Sampler, SamplingRow
from .validate import validate

__all__ = ["Sampler", "SamplingRow", "validate"]
