"""llama.cpp as an OpenAI server on a free port, until stdin ends. Prints its address when it is ready.

    python -m peers.llama_server MODEL.gguf 2

It runs in the peers' environment and imports nothing of Paceline.
"""

from __future__ import annotations

import sys

from peers.backends import CONTEXT_TOKENS, MAX_AT_ONCE
from peers.worker import claim_stdout


def main() -> None:
    import xllamacpp as llama

    out = claim_stdout()
    params = llama.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_parallel, params.n_gpu_layers = MAX_AT_ONCE * CONTEXT_TOKENS, MAX_AT_ONCE, 0
    params.cache_ram_mib, params.verbosity = 0, 0
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads = int(sys.argv[2])
    server = llama.Server(params)
    print(server.listening_address, file=out)
    sys.stdin.read()


if __name__ == "__main__":
    main()
