"""The link between a GPU and its host, by the slots that weights and KV pass through."""

from ...device import Device
from .timing import Effort, timed, usual_seconds

SLOTS = 3
SLOT_BYTES = 2**26
UPLOADS = 8


def link_rates(device: Device, effort: Effort) -> tuple[float, float]:
    """Bytes a second from pinned host memory to the device, and back."""
    slots = [device.open_slot(SLOT_BYTES) for _ in range(SLOTS)]

    def upload() -> None:
        for i in range(UPLOADS):
            slot = slots[i % SLOTS]
            slot.begin()
            slot.upload(SLOT_BYTES)
            slot.wait()
            slot.retire()

    def download() -> None:
        for i in range(UPLOADS):
            slot = slots[i % SLOTS]
            slot.retire()
            slot.download(0, SLOT_BYTES)

    seconds = usual_seconds({"up": timed(device, upload), "down": timed(device, download)}, effort)
    moved = UPLOADS * SLOT_BYTES
    return moved / seconds["up"], moved / seconds["down"]
