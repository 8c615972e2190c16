"""Moments that a CUDA device notes: the host waits for them, and reads the time between two of them."""

from __future__ import annotations

import itertools

import torch

KEPT_MARKS = 64  # marks after which an event is used again: more than all steps in flight have


class Marks:
    """Events of one stream, made once: a new event, or the search for the stream, takes as long as a launch."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(KEPT_MARKS)]  # type: ignore[no-untyped-call]
        self._events = itertools.cycle(events)

    def __call__(self) -> torch.cuda.Event:
        """Have the device note the time at which it gets here."""
        event = next(self._events)
        event.record(self._stream)
        return event
