"""Probes of an idle engine."""

from __future__ import annotations

import torch

from paceline.kernels.base import PAGE_SIZE
from tests.rig import build

TOKENS = tuple(range(3, 43))


def test_memory_that_is_touched_stays_as_it_is() -> None:
    for backend in ("compiled", "eager"):
        rig = build(backend, max_step_tokens=256)
        probes, kv = rig.engine.probes, rig.forward.kv
        with probes.seated(TOKENS) as lane:
            probes.read(lane, len(TOKENS))
            slots = torch.arange(kv.num_pages * PAGE_SIZE)
            before = kv.read(slots)
            assert before[0].abs().sum() > 0
            moved: list[int] = []
            move = kv.move

            def watched(source: list[int], target: list[int], moved: list[int] = moved, move: object = move) -> None:
                assert source == target
                moved += source
                move(source, target)  # type: ignore[operator]

            kv.move = watched  # type: ignore[method-assign, assignment]
            probes.touch(2 * PAGE_SIZE + 1)
            assert moved == [0, PAGE_SIZE, 2 * PAGE_SIZE]
            moved.clear()
            probes.touch(10**9)
            assert moved == [page * PAGE_SIZE for page in range(kv.num_pages)]
            after = kv.read(slots)
            assert torch.equal(before[0], after[0])
            assert torch.equal(before[1], after[1])
