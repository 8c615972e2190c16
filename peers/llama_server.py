"""llama.cpp as an OpenAI server on a port of its own choice, until stdin ends. Prints its address when it is ready.

    python -m peers.llama_server MODEL.gguf 2

Runs in the peers' environment, imports nothing of Paceline.
"""

from __future__ import annotations

import sys

from peers.backends import AT_ONCE, CONTEXT
from peers.worker import claim_stdout


def main() -> None:
    import xllamacpp as llama

    out = claim_stdout()
    params = llama.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_parallel, params.n_gpu_layers = AT_ONCE * CONTEXT, AT_ONCE, 0
    params.cache_ram_mib, params.verbosity = 0, 0
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads = int(sys.argv[2])
    server = llama.Server(params)
    print(server.listening_address, file=out)
    sys.stdin.read()


if __name__ == "__main__":
    main()
