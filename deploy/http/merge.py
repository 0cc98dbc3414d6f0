"""Several streams read as one, each item with the index of its stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

from ..openai.errors import timed_out

Item = TypeVar("Item")


async def merge(
    streams: Sequence[AsyncGenerator[Item]], deadline_s: float, limit_s: float
) -> AsyncGenerator[tuple[int, Item]]:
    """Items as they come, until all streams ended. Closing it closes all streams, whether read from or not.

    ``deadline_s`` is on the event loop's clock. Raises RequestTimeoutError at the deadline, naming ``limit_s``, and
    what a stream raises.
    """
    queue: asyncio.Queue[tuple[int, Item] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[Item]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:  # raised again where the reader is
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        ended = 0
        while ended < len(streams):
            try:
                async with asyncio.timeout_at(deadline_s):
                    item = await queue.get()
            except TimeoutError:
                raise timed_out(limit_s) from None
            if isinstance(item, BaseException):
                raise item
            if item is None:
                ended += 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
