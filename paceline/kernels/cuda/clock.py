"""Timestamps of the device's own clock between kernels, to time the parts of a graph."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def stamp(stamps: Tensor, index: int, *, pdl: bool = False) -> None:
    """Set stamps[index] to the device's time in nanoseconds, once all kernels before it have finished."""
    _stamp[(1,)](stamps, index, PDL=pdl, num_warps=1, **({"launch_pdl": True} if pdl else {}))


@triton.jit(do_not_specialize=["index"])
def _stamp(stamps, index, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(stamps + index, tl.extra.cuda.globaltimer())
