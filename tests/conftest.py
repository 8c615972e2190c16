from __future__ import annotations

import os
from contextlib import suppress

if "PACELINE_GPU" not in os.environ:  # before anything imports Triton: kernels then run as Python, on the CPU
    os.environ["TRITON_INTERPRET"] = "1"

import torch

torch.set_num_threads(1)  # tiny models: a second thread only costs

with suppress(ModuleNotFoundError):  # on a GPU's machine, whose tests do without
    import hypothesis

    # The same examples on every run: a failure is one of the code, not of the day.
    hypothesis.settings.register_profile("paceline", derandomize=True, deadline=None, database=None)
    hypothesis.settings.load_profile("paceline")
