"""Parts of docs/benchmarks.md: each is a function from result files to Markdown, with the source of each file (command,
commit, machine) under every table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.bench.offline_record import tokens_per_step
from paceline.bench.program import text as program_text
from peers import agree_report, reading
from peers.page_gpu import GPU_PARTS
from peers.page_operating import OPERATING_PARTS
from peers.page_source import Paths, Record, load, machine_text, source, with_sources
from peers.ranks import ranks
from peers.results import read_results
from peers.tables import best_ratios, best_table, disturbed, failed, markdown, whole_table


def peers(paths: Paths) -> str:
    """Speeds of every mode of every system, and the modes that could not be measured."""
    [path] = paths
    results = read_results(path)
    plan, machine = results.about["plan"], results.about["machine"]
    versions = ", ".join(f"{kind} ({version})" for kind, version in results.about["versions"].items())
    text = [
        f"`{results.about['command']}`, {results.about['date']}, commit {machine['commit']}, {machine_text(machine)}; "
        f"{versions}.",
        "",
        f"{plan['rounds']} rounds, answers of at most {plan['tokens']} tokens, greedy. A round has "
        f"{plan['counts']['1']} prompts one at a time ({plan['slow_counts']['1']} for the slow systems, transformers "
        f"and vLLM) and {plan['counts']['8']} at once. Every round has its own prompts.",
    ]
    for at_once in map(int, plan["counts"]):
        title = "One prompt at a time" if at_once == 1 else f"{at_once} prompts at once"
        text += [
            "",
            f"{title}, tokens/s: median over rounds (lowest–highest)",
            "",
            whole_table(results, at_once=at_once),
        ]
    text += ["", "Best against best, within a round:", "", best_ratios(results)]
    notes = [f"- {line}" for line in (*failed(results), *disturbed(results))]
    return "\n".join([*text, "", *notes] if notes else text)


def peers_best(paths: Paths) -> str:
    [path] = paths
    results = read_results(path)
    machine = results.about["machine"]
    above = (
        f"SmolLM2-135M on {machine['cpu']}, {machine['cores']} cores, greedy, tokens/s from question to whole answer:"
    )
    return f"{above}\n\n{best_table(results)}"


def steps(paths: Paths) -> str:
    speeds = ["batch 1", "batch 16", "ratio"]
    header = ["format", "1 row", "8 rows", "ratio", *speeds, "host, batch 1", "host, batch 16", "step by pass"]
    return with_sources(markdown(header, [_steps_row(load(path)) for path in paths]), paths)


def _steps_row(record: Record) -> list[str]:
    rows, one, many = record["rows_ms"], record["batches"]["1"], record["batches"]["16"]
    name = {"auto": "native (4 and 8 bits)"}.get(record["command"]["format"], record["command"]["format"])
    name += f", {record['variant']}" if "variant" in record else ""
    speeds = [f"{one['tok_s']:.1f}", f"{many['tok_s']:.1f}", f"{record['batch_16_over_1']:.2f}"]
    shares = [f"{one['host_share']:.1%}", f"{many['host_share']:.1%}"]
    shares.append(f"{record['step_over_pass']:.3f}" if "step_over_pass" in record else "")
    return [name, f"{rows['1']:.2f}", f"{rows['8']:.2f}", f"{record['rows_8_over_1']:.2f}", *speeds, *shares]


def speculation(paths: Paths) -> str:
    header = [
        "target",
        "drafter",
        "prompts",
        "T",
        "plain tok/s",
        "speculative tok/s",
        "ratio",
        "tokens per step",
        "identical",
    ]
    rows = [row for path in paths for row in _speculation_rows(load(path))]
    return with_sources(markdown(header, rows), paths)


def speedups(paths: Paths) -> str:
    """Speeds with and without speculation, in few columns, for the README."""
    rows = [row for path in paths for row in _speculation_rows(load(path))]
    kept = [[f"{target}, {drafter}, {what}, T={t}", plain, fast] for target, drafter, what, t, plain, fast, *_ in rows]
    return markdown(["Paceline with and without speculation, two cores", "plain tok/s", "speculative tok/s"], kept)


def _speculation_rows(record: Record) -> list[list[str]]:
    """A row per cell of `paceline bench offline`, or one row of a file by the older script."""
    if record.get("benchmark") == "offline":
        what = f"{', '.join(record['sources'])} × {record['max_tokens']}"
        return [
            [record["target"], cell["drafter"], f"{cell['prompts']} {what}", f"{cell['temperature']:g}", *_pair(cell)]
            for cell in record["cells"]
        ]
    asked = record["command"]
    name = {"auto": "native"}.get(asked["format"], asked["format"])
    what = f"{record['prompts']} {asked.get('category', asked['set'])} × {asked['max_tokens']}"
    return [[f"{asked['target']} {name}", asked["drafter"], what, f"{float(asked['temperature']):g}", *_pair(record)]]


def _pair(found: Record) -> list[str]:
    void = " (answers loop)" if found.get("claim_is_void") else ""
    return [
        f"{found['plain_tok_s']:.1f}",
        f"{found['speculative_tok_s']:.1f}{void}",
        f"{found['ratio']:.3f}",
        f"{tokens_per_step(found):.2f}",
        f"{found['identical']}/{found['prompts']}",
    ]


def identical_line(paths: Paths) -> str:
    found = [load(path) for path in paths]
    same, asked = sum(record["identical"] for record in found), sum(record["prompts"] for record in found)
    return f"{same} of {asked} speculative answers, greedy and at temperature 1, equal the plain ones token by token."


def load_table(paths: Paths) -> str:
    """Tokens per second by load and temperature, from `paceline bench serve`."""
    [path] = paths
    record = load(path)
    rows = [
        [f"c{run['max_concurrency']}", f"{run['temperature']:g}", run["arm"], f"{run['output_throughput']:.1f}",
         f"{run['median_ttft_ms']:.0f}", f"{run['median_tpot_ms']:.2f}", f"{run['completed']}"]
        for run in record["runs"]
    ]  # fmt: skip  # a field a line would hide what belongs together
    header = ["requests open", "T", "speculation", "tokens/s", "TTFT ms", "TPOT ms", "answers"]
    same = [
        f"- c{pair['max_concurrency']}, T={pair['temperature']:g}: "
        f"{pair['identical_texts']} of {pair['pairs']} texts the same."
        for pair in record.get("comparisons", ())
    ]
    text = (
        "## A server under load\n\nOne request open and many, greedy and at temperature 1, with and without "
        "speculation, interleaved. Latencies are medians."
    )
    return "\n".join([text, "", markdown(header, rows), "", *same, source(path, record)])


def agree(paths: Paths) -> str:
    [path] = paths
    record = load(path)
    text = (
        "## The same numbers by another tool\n\n`paceline bench serve` and `vllm bench serve` load two servers in "
        "turns with the same requests. The table has medians over rounds (lowest–highest) of what each tool reports."
    )
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return "\n".join([text, "", agree_report.text(record), "", f"{source(path, record)}, {versions}"])


def reading_table(paths: Paths) -> str:
    """Speeds of reading prompts, beside the peers."""
    [path] = paths
    record = load(path)
    best = [f"{ratio:.2f} at {length:,} tokens" for length, ratio in reading.ratios(record).items()]
    versions = ", ".join(f"{kind} ({version})" for kind, version in record["versions"].items())
    ratio = [f"Best of Paceline over the best peer, within a round: {', '.join(best)}.", ""] if best else []
    failures = [f"- {name}: not measured ({why})" for name, why in record["failures"].items()]
    return "\n".join([reading.table(record), "", *ratio, f"{source(path, record)}; {versions}", *failures])


def program(paths: Paths) -> str:
    """A program at once and call by call."""
    [path] = paths
    record = load(path)
    return "\n".join([program_text(record) + ".", "", source(path, record)])


PARTS: Mapping[str, Callable[[Paths], str]] = {
    "peers": peers,
    "peers-best": peers_best,
    "steps": steps,
    "speculation": speculation,
    "speedups": speedups,
    "identical-line": identical_line,
    "load": load_table,
    "agree": agree,
    "peers-reading": reading_table,
    "program": program,
    "ranks": ranks,
    **GPU_PARTS,
    **OPERATING_PARTS,
}
