"""Searches along rows as wide as a vocabulary, in two steps: blocks first, then inside the blocks that matter.

A row-wise ``argmax``, ``cumsum`` or ``topk`` walks a row element by element (on a CPU 0.5 to 1 ns each); ``amax`` and
``sum`` over short blocks are vectorised and ten times as fast. The results are exact, ties included.
"""

import torch
from torch import Tensor

BLOCK = 128
"""Columns in a block; the width of every row here is a multiple of it."""


def argmax(x: Tensor) -> Tensor:
    """Index of each row's largest element, the first one of equals. [R, W] -> [R]."""
    blocks = x.view(len(x), -1, BLOCK)  # [R, B, BLOCK]
    block = blocks.amax(-1).argmax(-1)  # [R]
    inner = _pick(blocks, block).argmax(-1)  # [R]
    return block * BLOCK + inner


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw an index of each row with probability proportional to its weight. Weights of 0 are never drawn.

    ``weights`` [R, W] >= 0 with a positive sum, ``uniforms`` [R] float64 in [0, 1 - 2^-52] -> [R].
    """
    blocks = weights.view(len(weights), -1, BLOCK)  # [R, B, BLOCK]
    outer = blocks.sum(-1).double().cumsum(-1)  # [R, B]
    target = uniforms[:, None] * outer[:, -1:]  # [R, 1]
    block = torch.searchsorted(outer, target, right=True)  # first block whose sum so far exceeds the target
    before = torch.where(block > 0, outer.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inner = _pick(blocks, block[:, 0]).double().cumsum(-1)  # [R, BLOCK]
    # The two sums of one block are rounded differently; the rest must stay below the one searched.
    last = inner[:, -1:]
    rest = torch.minimum(target - before, torch.nextafter(last, torch.zeros_like(last)))
    return (block * BLOCK + torch.searchsorted(inner, rest, right=True))[:, 0]


def candidates(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` largest elements of each row and their indices, [R, width] each: falling, equals by index.

    Everything strictly larger than the last value is among them. Of the elements equal to the last, only some may be.
    """
    rows, columns = x.shape
    n_blocks = columns // BLOCK
    if width * 2 > n_blocks:
        values, ids = x.topk(width, -1)
    else:
        # A block without one of the `width` largest block maxima holds nothing larger than the last of them.
        blocks = x.view(rows, n_blocks, BLOCK)
        best = blocks.amax(-1).topk(width, -1, sorted=False).indices  # [R, width]
        inside = blocks[torch.arange(rows, device=x.device)[:, None], best]  # [R, width, BLOCK]
        values, flat = inside.view(rows, -1).topk(width, -1)
        ids = best.gather(1, flat // BLOCK) * BLOCK + flat % BLOCK
    # topk leaves the order of equals open, so it is settled here: by index, then stably by value.
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _pick(blocks: Tensor, block: Tensor) -> Tensor:
    """One block of each row: [R, B, BLOCK] and [R] -> [R, BLOCK]."""
    return blocks[torch.arange(len(blocks), device=blocks.device), block]
