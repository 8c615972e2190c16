"""GPUs by name: what data sheets say, what was measured, and the constants of a pass that follow from both.

Only the H200 was measured. Its constants are a fit to the records in docs/results: every step that `bench engine`
stored there is within 15 % (`tests/plan/test_measured.py`), and so is the reading of prompts. Another GPU gets the
share of its data sheet that the H200 reaches of its own, and the H200's fixed costs: an estimate, and called so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.errors import InvalidRequest

MEASURED_SOURCE = "an estimate from constants measured on one H200, within 15 % of every step in docs/results"
ESTIMATED_SOURCE = (
    "an estimate: the data sheet's figures times the share of its own that the H200 reaches; not measured"
)
LINK_SOURCE = "an estimate: the data sheet's bandwidth, and latencies of NCCL's own tuning table (src/graph/tuning.cc)"


@dataclass(frozen=True, slots=True)
class Link:
    """What joins GPUs of one machine."""

    name: str
    bandwidth: float  # bytes a second, one way
    start: float  # seconds of a collective, whatever its size: NCCL's ring with the protocol LL
    hop: float  # seconds of each of its steps


@dataclass(frozen=True, slots=True)
class Pace:
    """Constants of a pass, in seconds, bytes a second and operations a second."""

    bandwidth: float  # reading weights, keys and values
    products: float  # products with weights of 16 bits
    narrow_products: float  # products of few rows with weights of fewer bits
    attention: float  # attention of prompts
    layer: float = 18.3e-6  # seconds of a layer beside reading and computing
    start: float = 12.8e-6  # seconds of a pass, the same
    sequence: float = 92e-9  # seconds of a layer for each sequence
    row: float = 32e-9  # seconds of a layer for each row
    draft: float = 33e-6  # seconds of a draft pass more: drawing a token, and starting the next pass
    round: float = 30e-6  # seconds of a step with drafts more: accepting them
    overlap: float = 1.73  # x of (reading ^ x + computing ^ x) ^ (1 / x); 1: one after the other, ∞: at once


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet, in bytes and operations a second. A GB there is taken as 10^9 bytes."""

    name: str
    title: str
    memory: int
    bandwidth: float
    products: float  # bf16, dense
    link: Link
    joined: int = 8  # GPUs of one machine
    source: str = "NVIDIA's data sheet"

    @property
    def measured(self) -> bool:
        return self.name == H200.name

    @property
    def pace(self) -> Pace:
        """Return the constants of a pass: those of the H200, scaled by the data sheets."""
        by_bytes, by_products = self.bandwidth / H200.bandwidth, self.products / H200.products
        return replace(
            MEASURED,
            bandwidth=MEASURED.bandwidth * by_bytes,
            products=MEASURED.products * by_products,
            narrow_products=MEASURED.narrow_products * by_products,
            attention=MEASURED.attention * by_products,
        )


NVLINK_4 = Link("NVLink 4", bandwidth=450e9, start=6.6e-6, hop=0.6e-6)
NVLINK_5 = Link("NVLink 5", bandwidth=900e9, start=6.6e-6, hop=0.6e-6)
PCIE_5 = Link("PCIe 5", bandwidth=64e9, start=6.6e-6, hop=1.0e-6)

H200 = Gpu(
    name="h200",
    title="NVIDIA H200 SXM",
    memory=150_109_880_320,  # measured; the data sheet says 141 GB
    bandwidth=4.8e12,
    products=989e12,
    link=NVLINK_4,
    source="NVIDIA's data sheet; memory as torch reports it",
)
# Of the H200, as `python -m peers.plan_fit` finds them.
MEASURED = Pace(bandwidth=4.19e12, products=749e12, narrow_products=228e12, attention=428e12)

GPUS = {
    gpu.name: gpu
    for gpu in (
        H200,
        Gpu("h100", "NVIDIA H100 SXM", 80_000_000_000, 3.35e12, 989e12, NVLINK_4),
        Gpu("h100-pcie", "NVIDIA H100 PCIe", 80_000_000_000, 2.0e12, 756e12, PCIE_5),
        Gpu("b200", "NVIDIA B200 SXM", 180_000_000_000, 8.0e12, 2250e12, NVLINK_5),
    )
}


def read_gpus(text: str) -> tuple[Gpu, int]:
    """Read `h100:8`, or `h100` for one."""
    name, _, number = text.partition(":")
    if name not in GPUS:
        raise InvalidRequest(f"unknown GPU {name!r}: a plan knows {', '.join(GPUS)}; Paceline needs Hopper or newer")
    if number and (not number.isdecimal() or int(number) < 1):
        raise InvalidRequest(f"--gpus {text!r}: write the number of GPUs behind the colon, such as {name}:8")
    return GPUS[name], int(number or 1)
