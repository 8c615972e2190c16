from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from paceline.cli import train as command
from paceline.cli.main import build_parsers, main
from paceline.train.options import CPU_BATCH_TOKENS, DRAFT_VOCAB, TargetOptions, TrainOptions
from tests.train.toy_training import write_prompts


def _default(name: str) -> object:
    return (TrainOptions.__dataclass_fields__ | TargetOptions.__dataclass_fields__)[name].default


def parse(*words: str) -> Namespace:
    return build_parsers()[0].parse_args(["train", *words])


def test_arguments_become_options() -> None:
    args = parse(
        "eagle", "m", "--prompts", "p.jsonl", "--out", "o", "--eval", "a=b.jsonl", "--unroll", "6", "--device", "cpu"
    )
    options = command._train_options(args, kind=args.train)
    assert (options.kind, options.target.model, options.unroll, options.draft_vocab) == ("eagle", "m", 6, None)
    assert options.evals == {"a": Path("b.jsonl")}
    assert options.work == Path("o.work")


def test_help_tells_the_defaults_that_hold() -> None:
    """Where the command line leaves an option out, the default of the options counts; its help must not say another."""
    for kind, names in {
        "eagle": ("unroll",),
        "mtp": ("unroll",),
        "medusa": ("heads",),
        "small": ("hidden", "layers"),
    }.items():
        actions = {action.dest: action for action in parse_kind(kind)._actions}
        for name in names:
            assert actions[name].default is None
            assert f"(default: {_default(name)})" in str(actions[name].help)
        for name in ("minutes", "learning_rate", "max_new", "max_length", "evaluations"):
            assert actions[name].default == _default(name)
            assert f"(default: {_default(name):g})" in str(actions[name].help)


@pytest.mark.parametrize(
    ("words", "device", "expected"), [([], "cuda", 16384), ([], "cpu", 2048), (["--batch-tokens", "64"], "cpu", 64)]
)
def test_a_step_on_a_cpu_is_smaller(
    words: list[str], device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.runner.loading.models.choose_device", lambda name: device)
    args = parse("eagle", "m", "--prompts", "p", "--out", "o", *words)
    assert command._train_options(args, kind="eagle").batch_tokens == expected
    [help] = [action.help for action in parse_kind("eagle")._actions if action.dest == "batch_tokens"]
    assert help == f"per step (default: {_default('batch_tokens')}, on a CPU {CPU_BATCH_TOKENS})"


def test_the_shape_is_that_of_the_head_it_begins_with() -> None:
    """Where nothing is said of it; so nothing is filled in before the head is read."""
    args = parse("eagle", "m", "--prompts", "p", "--out", "o", "--begin", "there/head", "--device", "cpu")
    options = command._train_options(args, kind="eagle")
    assert (options.initial_head, options.draft_vocab, options.intermediate) == ("there/head", None, None)
    actions = {action.dest: action for action in parse_kind("eagle")._actions}
    assert f"(default: {DRAFT_VOCAB}, or HEAD's)" in str(actions["draft_vocab"].help)


def parse_kind(kind: str) -> ArgumentParser:
    args = parse(kind, "m", "--prompts", "p", "--out", "o")
    parser: ArgumentParser = args.parser
    return parser


@pytest.mark.parametrize(("kind", "option"), [("medusa", "heads"), ("small", "layers"), ("small", "hidden")])
def test_kinds_have_shapes_of_their_own(kind: str, option: str) -> None:
    args = parse(kind, "m", "--prompts", "p", "--out", "o", f"--{option}", "96", "--device", "cpu")
    assert getattr(command._train_options(args, kind=kind), option) == 96


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--eval", "file.jsonl"], "NAME=FILE or a set"),
        (["--eval", "train=file.jsonl"], "NAME=FILE or a set"),
        (["--sampled", "1.5"], "a share from 0 to 1"),
        (["--unroll", "9"], "at most 8 steps"),
        (["--minutes", "0"], "a number above 0"),
        (["--learning-rate", "nan"], "a number above 0"),
        (["--heads", "4"], "unknown option '--heads'"),
        (["--device", "cuda"], "no CUDA device"),
    ],
)
def test_bad_options_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "eagle", "m", "--prompts", "p", "--out", "o", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_broken_prompt_stops_it_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    words = [
        "train",
        "eagle",
        "m",
        "--prompts",
        str(tmp_path / "p.jsonl"),
        "--out",
        str(tmp_path / "o"),
        "--device",
        "cpu",
    ]
    assert main(words) == 2
    assert "p.jsonl:2: not JSON" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


def test_a_whole_training_from_the_command_line(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drafter"
    small = ["--held-out", "4", "--max-length", "96", "--max-new", "8", "--max-prompts", "16", "--max-steps", "2"]
    small += ["--batch-tokens", "512", "--draft-vocab", "40", "--evaluations", "1", "--threads", "1", "--device", "cpu"]
    assert main(["train", "eagle", str(target), "--prompts", str(prompts), "--out", str(out), *small]) == 0
    assert f"written: {out}" in capsys.readouterr().err
    answers = ["--max-length", "96", "--max-new", "8", "--threads", "1", "--device", "cpu"]
    few = write_prompts(tmp_path / "few.jsonl", count=3, seed=4)
    assert main(["train", "eval", str(target), str(out), "--eval", f"toy={few}", *answers]) == 0
    assert "toy: 1." in capsys.readouterr().out
