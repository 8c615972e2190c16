"""Parts of docs/benchmarks.md about GPUs, from the records of `paceline bench engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from peers.page_source import Paths, Record, load, with_sources
from peers.tables import markdown

SHAPES = {
    "llama-3.1-8b": "Llama-3.1-8B",
    "qwen3-32b": "Qwen3-32B",
    "llama-3.2-1b": "Llama-3.2-1B",
    "smollm2": "SmolLM2",
    "smollm2-135m": "SmolLM2",
}
DRAFTERS = {
    "llama-3.2-1b": "3.2-1B",
    "qwen3-1.7b": "1.7B",
    "eagle-shape": "an EAGLE-3-shaped head",
    "eagle:smollm2": "its shipped head",
    "eagle:smollm2,branches=3": "its shipped head, trees",
}
USUAL_PROMPT = 128  # tokens


def engine(paths: Paths) -> str:
    """Tabulate speeds of the engine beside another system's, which the last file has."""
    *mine, other = paths
    theirs = load(other)
    header = ["work", "batch", "vLLM plain", "Paceline plain", "of the bandwidth limit", "vLLM speculative"]
    header += ["Paceline speculative (synthetic)", "× own plain"]
    rows = [_engine_row(load(path), batch, theirs) for path in mine for batch in load(path)["batches"]]
    return with_sources(markdown(header, rows), mine) + f"\n- `{other.name}`: {theirs['source']}"


def _work(record: Record) -> str:
    setup = record["setup"]
    target = SHAPES[setup["target"]]
    if _has_own_prompts(record):
        target += f", {setup['prompt_tokens']} tokens in"
    if setup["drafter"] is None:
        return target
    with_drafter = f"{target} + {DRAFTERS.get(setup['drafter'], setup['drafter'])}"
    return f"{with_drafter}, {setup['draft']} drafted, {setup['acceptance']:g}" if setup["acceptance"] else with_drafter


def _has_own_prompts(record: Record) -> bool:
    """Tell whether the random prompts are of another length than those of most records."""
    setup = record["setup"]
    return not setup.get("prompts") and setup.get("prompt_tokens", USUAL_PROMPT) != USUAL_PROMPT


def _engine_row(record: Record, batch: Record, theirs: Record) -> list[str]:
    other, size = theirs[record["setup"]["target"]], str(batch["batch"])
    plain, drafting = batch["plain"], batch.get("synthetic_speculative")
    theirs_plain = "" if _has_own_prompts(record) else other["plain"].get(size, "")
    row = [_work(record), size, f"{theirs_plain}", f"{plain['tok_s']:.1f}"]
    same = record["setup"]["drafter"] == other.get("drafter")
    row += [f"{plain['bandwidth_fraction']:.0%}", f"{other['speculative'].get(size, '') if same else ''}"]
    if drafting is None:
        return [*row, "", ""]
    return [*row, f"{drafting['tok_s']:.1f} ({drafting['to_the_end_tok_s']:.1f})", f"{batch['synthetic_ratio']:.2f}"]


def rounds(paths: Paths) -> str:
    header = [
        "work",
        "batch",
        "draft",
        "verify",
        "accept",
        "round",
        "host",
        "device idle",
        "configured but off, × plain",
    ]
    rows = [_round_row(load(path), batch) for path in paths for batch in load(path)["batches"]]
    return with_sources(markdown(header, rows), paths)


def _round_row(record: Record, batch: Record) -> list[str]:
    mode = batch["synthetic_speculative"]
    parts = mode["parts_ms"]
    times = [f"{parts['draft']:.2f}", f"{parts['verify']:.2f}", f"{parts['accept']:.3f}", f"{mode['step_ms']:.2f}"]
    off = f"{batch['off_ratio']:.3f}" if "off_ratio" in batch else ""
    return [_work(record), str(batch["batch"]), *times, f"{parts['host']:.2f}", f"{mode['gpu_idle']:.1%}", off]


def gpu_line(paths: Paths) -> str:
    """Write a sentence about GPU speeds, for the README."""
    mine, other = map(load, paths)
    batch, theirs = mine["batches"][0], other[mine["setup"]["target"]]
    return (
        f"One {mine['machine']['gpu']}, the shape of {SHAPES[mine['setup']['target']]} in bf16, one sequence: plain "
        f"{batch['plain']['tok_s']:.0f} tokens/s (vLLM 0.24: {theirs['plain']['1']}). With a drafter of the shape of "
        f"{SHAPES[mine['setup']['drafter']]} and a synthetic acceptance of {mine['setup']['acceptance']:g}: "
        f"{batch['synthetic_speculative']['tok_s']:.0f} (vLLM: {theirs['speculative']['1']})."
    )


def mixes(paths: Paths) -> str:
    """Tabulate batches in which some requests ask for more, by the speed of the same mode without them."""
    header = ["work", "batch", "of them", "mode", "alone tok/s", "mixed tok/s", "mixed / alone"]
    rows = [
        _mix_row(load(path), batch, mix) for path in paths for batch in load(path)["batches"] for mix in batch["mixes"]
    ]
    return with_sources(markdown(header, rows), paths)


def _mix_row(record: Record, batch: Record, mix: Record) -> list[str]:
    mode = mix["mode"] if mix["mode"] in batch else f"synthetic_{mix['mode']}"
    kind, _, count = mix["mix"].partition(":")
    what = [_work(record), str(batch["batch"]), f"{count} with {kind}", mode.replace("_", " ")]
    return [*what, f"{batch[mode]['tok_s']:.0f}", f"{mix['tok_s']:.0f}", f"{mix['ratio']:.3f}"]


def reading(paths: Paths) -> str:
    """Tabulate the reading of prompts beside another system's, which the last file has."""
    *mine, other = paths
    rows = [_reading_row(load(path), one, load(other)) for path in mine for one in load(path)["prompts"]]
    table = markdown(["model", "prompts", "vLLM tok/s", "Paceline tok/s"], rows)
    return "\n".join([with_sources(table, mine), f"- `{other.name}`: {load(other)['source']}", *_waits(mine)])


def _reading_row(record: Record, prompts: Record, theirs: Record) -> list[str]:
    target, name = record["setup"]["target"], f"{prompts['count']}x{prompts['length']}"
    said = theirs[target].get("prompts", {}).get(name, "")
    return [SHAPES[target], f"{prompts['count']} × {prompts['length']}", str(said), f"{prompts['tok_s']:.0f}"]


def _waits(paths: Paths) -> list[str]:
    found = [beside for path in paths if (beside := load(path)["beside"])]
    return [line for beside in found for line in ("", _wait(beside))]


def _wait(beside: Record) -> str:
    """Say how long decoding sequences waited while a long prompt was read."""
    median, p99, longest = (f"{1e3 * beside['gaps'][name]:.1f}" for name in ("median", "p99", "max"))
    return (
        f"While a prompt of {beside['length']} tokens is read, {beside['sequences']} sequences decode. Milliseconds "
        f"between two of their tokens: median {median}, p99 {p99}, longest {longest}. The prompt is read at "
        f"{beside['tok_s']:.0f} tokens/s meanwhile."
    )


def real_text(paths: Paths) -> str:
    """Tabulate speeds with real weights and real prompts, and how many texts are the same."""
    header = ["work", "prompts", "batch", "plain tok/s", "speculative tok/s", "× plain", "tokens per step", "same text"]
    rows = [_real_row(load(path), batch) for path in paths for batch in load(path)["batches"]]
    return with_sources(markdown(header, rows), paths)


def _real_row(record: Record, batch: Record) -> list[str]:
    speculative = batch["speculative"]
    what = [_work(record), ", ".join(record["setup"]["prompts"]), str(batch["batch"])]
    speeds = [f"{batch['plain']['tok_s']:.0f}", f"{speculative['tok_s']:.0f}", f"{batch['ratio']:.2f}"]
    return [*what, *speeds, f"{speculative['tokens_per_step']:.2f}", batch["same_tokens"]]


def trees(paths: Paths) -> str:
    """Tabulate the cost of trees by that of a chain of as many tokens."""
    rows = [_tree_row(load(path), batch) for path in paths for batch in load(path)["setup"]["batch"]]
    shapes = ["chain, ms", "the chain again", "tree of 4 leaves", "tree of 6 leaves"]
    return with_sources(markdown(["target", "batch", *shapes], rows), paths)


def _tree_row(record: Record, batch: int) -> list[str]:
    found = record[f"batch {batch}"]
    ratios = [found[name]["ratio"] for name in ("chain again", "tree", "wide tree")]
    cells = [f"{one['ratio']:.3f} [{one['interval'][0]:.3f}, {one['interval'][1]:.3f}]" for one in ratios]
    return [SHAPES[record["setup"]["target"]], str(batch), f"{found['chain']['ms']:.2f}", *cells]


def split_cost(paths: Paths) -> str:
    """Tabulate what the same bits across degrees cost on one GPU."""
    rows = [[what, *_cost_cells(load(path)[what])] for path in paths for what in load(path) if " " in what]
    return with_sources(markdown(["work", "tok/s", "with the mode", "mode / without"], rows), paths)


def _cost_cells(found: Record) -> list[str]:
    low, high = found["ratio"]["interval"]
    ratio = f"{found['ratio']['ratio']:.3f} [{low:.3f}, {high:.3f}]"
    return [f"{found['without_tok_s']:.0f}", f"{found['mode_tok_s']:.0f}", ratio]


GPU_PARTS: Mapping[str, Callable[[Paths], str]] = {
    "engine": engine,
    "rounds": rounds,
    "mixes": mixes,
    "reading": reading,
    "real-text": real_text,
    "trees": trees,
    "split-cost": split_cost,
    "gpu-line": gpu_line,
}
