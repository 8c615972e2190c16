"""The device's own clock, read between kernels, so that the parts of a graph can be told apart."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def stamp(stamps: Tensor, index: int, *, pdl: bool = False) -> None:
    """stamps[index] = nanoseconds, once all kernels before it are done."""
    _stamp[(1,)](stamps, index, PDL=pdl, num_warps=1, **({"launch_pdl": True} if pdl else {}))


@triton.jit(do_not_specialize=["index"])
def _stamp(stamps, index, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(stamps + index, tl.extra.cuda.globaltimer())
