"""Interrupts that neither cut short what must stay whole nor are taken away by Ray."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Interrupts that come meanwhile are answered at the end."""
    if not _in_main_thread():
        yield
        return
    came: list[int] = []
    usual = {number: signal.getsignal(number) for number in INTERRUPTS}
    for number, handler in usual.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda got, _: came.append(got))
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Give SIGTERM back to whoever answered it before: Ray puts a handler of its own in its place as it connects."""
    if not _in_main_thread():
        yield
        return
    usual = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:  # what Ray's handler raises
        signal.signal(signal.SIGTERM, usual)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, usual)


def _in_main_thread() -> bool:
    """Only there can handlers be set, and only there do they run."""
    return threading.current_thread() is threading.main_thread()
