"""Inspect: what a model is, what it needs, what will run and why; or what a server's governor does now.

paceline inspect smollm2
paceline inspect ./model.gguf --drafter ./small.gguf
paceline inspect ./model.gguf --drafter ./small.gguf --pair
paceline inspect ./model --format int4 --errors
paceline inspect --live http://127.0.0.1:8000

On a CPU only the headers of files are read, and passes in several formats are timed with constant weights. On a GPU the
model is loaded as the other commands would load it, because the memory that is left decides on the rest.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.cli.live import read, watch
from paceline.cli.options import add_model_options, drafters_of, engine_config
from paceline.cli.pair import pair_lines, pairs_of
from paceline.cli.style import Style
from paceline.errors import InvalidRequest
from paceline.progress import progress_bar
from paceline.sizes import format_size

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.drafters.registry import Recipe
    from paceline.engine.memory_share import Memory
    from paceline.models.weights import Format, Weight
    from paceline.runner.loading.models import ReadyModel

    Weights = Iterator[tuple[str, Weight]]

Facts = dict[str, Any]


def add_arguments(parser: ArgumentParser) -> None:
    add_model_options(parser, optional=True)
    group = parser.add_argument_group("a running server, instead of a model")
    group.add_argument("--live", metavar="URL", help="show its governor as a table that refreshes")
    group.add_argument("--once", action="store_true", help="print the table once, as without a terminal")
    group.add_argument("--api-key", metavar="KEY", help="(default: $OPENAI_API_KEY)")
    parser.add_argument(
        "--errors", action="store_true", help="how far --format moves the weights, by kind of matrix (reads them again)"
    )
    parser.add_argument(
        "--pair", action="store_true", help="load the drafters, and say whether each will help; takes a minute or more"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: Namespace) -> int:
    if (args.target is None) == (args.live is None):
        raise InvalidRequest("name a MODEL to inspect, or a server with --live URL: one of the two")
    if args.live is not None and args.json:
        print(json.dumps(read(args.live, key=args.api_key)))
        return 0
    if args.live is not None:
        return watch(args.live, key=args.api_key, once=args.once)
    facts = _facts(args)
    if args.pair:
        facts["pairs"] = pairs_of(args)
    if args.json:
        print(json.dumps(facts))
    else:
        _print(facts)
    return 0


def _facts(args: Namespace) -> Facts:
    from paceline.drafters.registry import check_split, recipe
    from paceline.engine.assemble import read_target, split_as_asked
    from paceline.engine.memory_share import share_memory
    from paceline.runner.loading.models import choose_device

    device = choose_device(args.device)
    config = engine_config(args, device=device)
    with progress_bar(f"loading {args.target}") as progress:
        target = read_target(args.target, format=args.format, device=device, config=config, progress=progress)
    target = split_as_asked(target, config, threads=args.threads)
    named, recipes = drafters_of(args), []
    check_split(named, config.drafter_tensor_parallel)
    for words in named:
        with progress_bar(f"loading {words}") as progress:
            recipes.append(recipe(words, target, progress=progress))
    weights = [asdict(part) for part in target.parts]
    drafters = [_drafter(made, target) for made in recipes]
    errors = {"errors": _errors(args.target, args.format, device)} if args.errors else {}
    memory = share_memory(target, recipes, config)
    return {
        "model": _model(target, weights),
        "weights": weights,
        "runs": _runs(target, memory, args.threads),
        "formats": _formats(target),  # milliseconds of a pass over one token
        "memory": _memory(target, memory, weights, drafters),
        "tokenizer": _tokenizer(target),
        "drafters": drafters,
        "sampling": dict(target.model.generation.values),
        "sampling_source": target.model.generation.source,
        **errors,
    }


def _errors(name: str, format: Format, device: str) -> list[Facts]:
    """Errors of the weights in a format, relative to the file's own. Quantisation of the file itself is not counted.
    Both are read again, because the loaded weights are packed for the device."""
    from paceline.models.load import open_model
    from paceline.models.precision import quantisation_report
    from paceline.models.weights import iterate_weights

    model = open_model(name)
    kept: dict[str, Weight] = {}
    with progress_bar(f"comparing {name}") as progress:
        floats = iterate_weights(model.source, model.config, format="fp32", device=device, progress=progress)
        rounded = iterate_weights(model.source, model.config, format=format, device=device)
        return [asdict(error) for error in quantisation_report(_beside(floats, rounded, kept), kept)]


def _beside(floats: Weights, rounded: Weights, kept: dict[str, Weight]) -> Iterator[tuple[str, Tensor]]:
    """Yield the original tensors, each while `kept` has its rounded one. The first of each kind stays in `kept`."""
    from torch import Tensor

    from paceline.models.precision import kind_of

    kinds: set[str] = set()
    for (name, original), (_, weight) in zip(floats, rounded, strict=True):
        assert isinstance(original, Tensor), f"{name} as floats is not"
        kept[name] = weight
        yield name, original
        if kind_of(name) in kinds:
            del kept[name]
        kinds.add(kind_of(name))


def _model(ready: ReadyModel, weights: Sequence[Facts]) -> Facts:
    config = ready.model.config
    return {
        "name": ready.name,
        "path": str(ready.model.path),
        "kind": ready.model.kind,
        "architecture": config.architecture,
        "parameters": sum(part["parameters"] for part in weights),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context": config.max_context,
        "windows": sorted({window for window in config.windows if window}),
    }


def _runs(ready: ReadyModel, memory: Memory, threads: int | None) -> Facts:
    """Collect facts about the forward pass. On a GPU it is built, because only then is known whether it is bitwise."""
    bitwise = ready.bitwise
    if bitwise is None:
        bitwise = ready.forward(num_pages=memory.num_pages, threads=threads, max_context=memory.max_context).bitwise
    choice = None if ready.decoder else ready.known_threads(threads)
    return {
        "device": ready.device,
        "compiled": ready.compiled,
        "why": ready.why,
        "threads": None if choice is None else choice.threads,
        "threads_why": None if choice is None else choice.why,
        "bitwise": bitwise,
    }


def _formats(ready: ReadyModel) -> Facts | None:
    """Time a pass over one token in each format, that of the target first. None: a GPU, no kernels, or
    several ranks. Empty: the machine is too busy."""
    from paceline.runner.loading.format_speed import FORMATS, format_times

    if not ready.has_whole_program or ready.stored is None:
        return None
    own = ready.stored.format
    times = format_times(ready, [own, *(format for format in FORMATS if format != own)])
    return {format: round(seconds * 1e3, 3) for format, seconds in (times or {}).items()}


def _memory(ready: ReadyModel, memory: Memory, weights: Sequence[Facts], drafters: Sequence[Facts]) -> Facts:
    from paceline.kernels.base import PAGE_SIZE

    weight_bytes = sum(part["bytes"] for part in weights) + sum(made["weight_bytes"] for made in drafters)
    kv_bytes = memory.num_pages * memory.page_bytes
    return {
        "weight_bytes": weight_bytes,
        "kv_bytes": kv_bytes,
        "bytes": weight_bytes + kv_bytes,
        "kv_bytes_per_token": memory.page_bytes // PAGE_SIZE,
        "target_kv_bytes_per_token": ready.page_bytes // PAGE_SIZE,
        "kv_tokens": memory.num_pages * PAGE_SIZE,
        "max_context": memory.max_context,
    }


def _tokenizer(ready: ReadyModel) -> Facts:
    tokenizer = ready.tokenizer
    assert tokenizer is not None, "only shapes have none, and they are not inspected"
    ends = sorted({*ready.model.config.eos_ids, *tokenizer.eos_ids})
    return {
        "vocab_size": tokenizer.vocab_size,
        "bos": None if tokenizer.bos_id is None else tokenizer.id_to_token(tokenizer.bos_id),
        "eos": [tokenizer.id_to_token(token) for token in ends],
        "chat_template": tokenizer.chat_template is not None,
        "fingerprint": tokenizer.vocabulary_fingerprint(),
    }


def _drafter(made: Recipe, target: ReadyModel) -> Facts:
    from paceline.tune.candidates import vocabulary_share

    parts = made.model.parts if made.model else ()
    return {
        "name": made.name,
        "model": made.model.name if made.model else None,
        "why": made.how,
        "vocabulary": vocabulary_share(made, target),
        "parameters": sum(part.parameters for part in parts),
        "weight_bytes": made.own_bytes,
    }


def _print(facts: Facts) -> None:
    style = Style(sys.stdout)
    model, memory, runs, tokenizer = facts["model"], facts["memory"], facts["runs"], facts["tokenizer"]
    for title, lines in (
        ("model", _model_lines(model)),
        (
            "weights",
            [
                f"{part['format']:<22} {format_size(part['bytes']):>9}  in {part['tensors']} tensors"
                for part in facts["weights"]
            ],
        ),
        ("runs", [*_runs_lines(runs), *_format_lines(facts["formats"])]),
        ("memory", _memory_lines(memory)),
        ("tokenizer", _tokenizer_lines(tokenizer)),
        ("drafters", [_drafter_line(made) for made in facts["drafters"]]),
        *([("pairs", [line for pair in facts["pairs"] for line in pair_lines(pair)])] if "pairs" in facts else []),
        ("sampling", _sampling_lines(facts)),
        *([("errors", _error_lines(facts["errors"]))] if "errors" in facts else []),
    ):
        print(style.bold(title))
        for line in lines:
            print(f"  {line}")


def _drafter_line(made: Facts) -> str:
    share = "" if made["vocabulary"] == 1 else f", {made['vocabulary']:.0%} of the target's vocabulary"
    return f"{made['name']}: {made['model'] or ''} {made['why']}{share}".replace(":  ", ": ")


def _model_lines(model: Facts) -> list[str]:
    windows = f", sliding window {', '.join(map(str, model['windows']))}" if model["windows"] else ""
    return [
        f"{model['name']} ({model['path']})",
        f"{model['architecture']}, {model['parameters'] / 1e6:.1f} M parameters, {model['layers']} layers",
        f"hidden {model['hidden_size']}, MLP {model['intermediate_size']}, vocabulary {model['vocab_size']}",
        f"{model['heads']} heads of {model['head_dim']} on {model['kv_heads']} key/value heads{windows}",
        f"context {model['context']} tokens",
    ]


def _runs_lines(runs: Facts) -> list[str]:
    exact = (
        "bitwise: the same bits for a token whatever rides along, so speculation cannot change the text"
        if runs["bitwise"]
        else "not bitwise: rounding may differ with the batch and flip a near-tie between two tokens"
    )
    threads = [] if runs["threads"] is None else [f"{runs['threads']} threads, {runs['threads_why']}"]
    return [runs["why"], *threads, exact]


def _format_lines(formats: Facts | None) -> list[str]:
    """Say which format would be faster here. The choice is the user's: it changes the text."""
    from paceline.runner.forwards.measuring import best_of

    if formats is None:
        return []
    if not formats:
        return ["other formats not timed: other processes have the CPUs"]
    own, best = next(iter(formats)), best_of(formats)
    speeds = ", ".join(f"{format} {milliseconds:.2f}" for format, milliseconds in formats.items())
    faster = f"--format {best} would be {formats[own] / formats[best]:.2f} times as fast here, and gives another text"
    return [
        f"ms a token by format: {speeds}",
        faster if best != own else f"no format is clearly faster here than {own}",
    ]


def _memory_lines(memory: Facts) -> list[str]:
    token, target = memory["kv_bytes_per_token"], memory["target_kv_bytes_per_token"]
    return [
        f"weights {format_size(memory['weight_bytes'])}",
        f"KV cache {format_size(memory['kv_bytes'])} at most, for {memory['kv_tokens']} tokens",
        f"{token} bytes of KV a token" + (f", {target} of them the target's" if token != target else ""),
        f"longest sequence {memory['max_context']} tokens",
    ]


def _tokenizer_lines(tokenizer: Facts) -> list[str]:
    return [
        f"{tokenizer['vocab_size']} tokens, {'with' if tokenizer['chat_template'] else 'no'} chat template",
        f"bos {tokenizer['bos'] or 'none'}, eos {', '.join(map(str, tokenizer['eos'])) or 'none'}",
    ]


def _sampling_lines(facts: Facts) -> list[str]:
    from paceline.models.advice import Advice

    advice = Advice(facts["sampling"], facts["sampling_source"])
    return [f"{advice} where nothing else is asked for", f"source: {advice.source}"]


def _error_lines(errors: Sequence[Facts]) -> list[str]:
    lines = ["relative Frobenius error of the matrices", f"{'':<6} {'mean':>9} {'max':>9}"]
    return lines + [
        f"{error['kind']:<6} {error['mean']:>9.3%} {error['max']:>9.3%}  {error['format']}, worst in {error['worst']}"
        for error in errors
    ]
