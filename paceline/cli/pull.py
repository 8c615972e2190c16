"""Pull: fetch a model from the Hugging Face hub; every command then knows it by the same name.

paceline pull Qwen/Qwen2.5-0.5B-Instruct-GGUF
paceline pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0
paceline pull HuggingFaceTB/SmolLM2-360M-Instruct

Of a repository with GGUF files one is fetched: that of the quantisation after the colon, else Q4_K_M or the nearest
that there is. Others are fetched whole: safetensors, configuration and tokenizer, never pickles. A download that broke
off is continued, every file is checked against the digest that the hub states, and files that are here are kept.

HF_TOKEN opens private and gated models, HF_ENDPOINT is the address of another hub, HF_HUB_OFFLINE=1 forbids the
network. Models lie in ~/.cache/paceline/models; PACELINE_CACHE names another place than ~/.cache/paceline.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from paceline.errors import InvalidRequest
from paceline.progress import progress_bar
from paceline.sizes import format_size


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("models", metavar="MODEL", nargs="+", help="org/name or org/name:QUANT")


def run(args: Namespace) -> int:
    from paceline.models.hub.names import hub_name
    from paceline.models.hub.pull import pull
    from paceline.models.hub.store import find

    names = {text: hub_name(text) for text in args.models}
    for text, name in names.items():
        if name is None:
            raise InvalidRequest(f"{text!r} is no name on the hub; write org/name or org/name:Q4_K_M")
    for name in filter(None, names.values()):
        with progress_bar(f"fetching {name}") as progress:
            files = pull(name, progress)
        print(f"{name}: {format_size(sum(file.size for file in files))} in {find(name)}", flush=True)
    return 0
