"""The memory in which ranks on GPUs meet within a pass: each rank's own, opened by all others over CUDA-IPC.

The driver is asked directly, because torch can share a tensor between processes but cannot open one for another
device. Ranks may be on one GPU, for tests, or on several that reach each other's memory (NVLink or PCIe).
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from paceline.errors import InvalidRequest, OutOfMemory
from paceline.kernels.cuda.exchange import MAX_RANKS, Peers
from paceline.runner.parallel.exchange import Exchange

HANDLE_BYTES = 64
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def meet(exchange: Exchange, *, hidden: int, device: torch.device, seconds: float) -> Peers:
    """Set up the memory of a model's ranks; all of them call this at the same time. `seconds`: after which a rank that
    does not come to a sum is given up."""
    if exchange.size == 1:
        return Peers.alone(hidden, device)
    assert exchange.size <= MAX_RANKS, f"kernels add over {MAX_RANKS} ranks at most"
    slots, counts = Peers.shape(exchange.size, hidden), Peers.shape(exchange.size, hidden)[1:3]
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)  # from now on the driver knows this thread's device
    own = _allocate(4 * (math.prod(slots) + math.prod(counts)))
    handles = exchange.swap(torch.frombuffer(bytearray(_handle_of(own)), dtype=torch.uint8))
    opened = [own if rank == exchange.rank else _open(handle, rank) for rank, handle in enumerate(handles)]
    peers = Peers(
        rank=exchange.rank,
        slots=tuple(_tensor(address, slots, "<f4") for address in opened),
        counts=tuple(_tensor(address + 4 * math.prod(slots), counts, "<i4") for address in opened),
        met=torch.zeros(counts[1], dtype=torch.int32, device=device),
        status=torch.zeros(2, dtype=torch.int32, device=device),
        seconds=seconds,
    )
    peers.counts[peers.rank].zero_()
    peers.slots[peers.rank].zero_()
    torch.cuda.synchronize(device)
    exchange.swap(torch.zeros(1, dtype=torch.uint8))  # nobody counts before all are at 0
    weakref.finalize(peers.met, _release, own, [each for each in opened if each != own])
    return peers


class _Memory:
    """Memory of a device, as torch takes it from other packages."""

    def __init__(self, address: int, shape: Sequence[int], kind: str) -> None:
        self.__cuda_array_interface__ = {"shape": tuple(shape), "typestr": kind, "data": (address, False), "version": 3}


def _tensor(address: int, shape: Sequence[int], kind: str) -> Tensor:
    return torch.as_tensor(_Memory(address, shape, kind))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _allocate(size: int) -> int:
    address = ctypes.c_uint64()
    status = _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
    if status == OUT_OF_MEMORY:
        raise OutOfMemory(f"no memory on the GPU for {size / 2**20:.0f} MiB in which ranks meet: lower kv_memory")
    _check(status, "cuMemAlloc")
    _check(_driver().cuMemsetD8_v2(address, 0, ctypes.c_size_t(size)), "cuMemsetD8")
    return address.value


def _handle_of(address: int) -> bytes:
    handle = Handle()
    _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address)), "cuIpcGetMemHandle")
    return bytes(handle)


def _open(handle: Tensor, rank: int) -> int:
    """Open the memory of another rank on this one's device."""
    address, given = ctypes.c_uint64(), Handle.from_buffer_copy(bytes(handle.tolist()))
    status = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), given, ctypes.c_uint(LAZY_PEER_ACCESS))
    if status:
        raise InvalidRequest(
            f"tensor_parallel: the memory of rank {rank}'s GPU cannot be opened (CUDA error {status}): the GPUs need "
            "peer access to each other, and the processes one host"
        )
    return address.value


def _release(own: int, opened: Sequence[int]) -> None:
    """Give the memory back; a context that has gone with its process has done so itself."""
    for address in opened:
        _driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))
    _driver().cuMemFree_v2(ctypes.c_uint64(own))


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"{call} failed with CUDA error {status}")
