"""Files that the suffix drafter reads at the start: good ones, bad ones, and who may give them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.config import EngineConfig
from paceline.drafters import registry
from paceline.drafters.base import Ask
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.suffix import drafter as module
from paceline.drafters.suffix.corpus import index_corpus, read_corpus
from paceline.engine.assemble import assemble
from paceline.errors import InvalidRequest, NoCompiler, UnknownOption
from paceline.kernels.cpu.build import load_library
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams
from tests.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TEXT = "the quick brown fox jumps over the lazy dog\n"


def target(**changes: Any) -> Any:
    return SimpleNamespace(**{"name": "target", "tokenizer": TOKENIZER, "device": "cpu", **changes})


def built(words: str, paths: list[str], **changes: Any) -> SuffixDrafter:
    made = registry.recipe(words, target(**changes)).build(SimpleNamespace(corpus=paths))  # type: ignore[arg-type]
    assert isinstance(made, SuffixDrafter)
    return made


def first_draft(drafter: SuffixDrafter, tokens: list[int], salt: str = "") -> tuple[int, ...]:
    sampler = Sampler(SamplingParams(), seed=0, vocab_size=4096, eos_ids=())
    drafter.start(0, 0, np.array(tokens[:1], dtype=np.int32))
    (draft,) = drafter.propose([Ask(0, 0, np.array(tokens, dtype=np.int32), 3, sampler, salt=salt)])
    drafter.stop(0)
    return draft.tokens


def test_every_salt_drafts_from_the_corpus(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(TEXT, encoding="utf-8")
    tokens = TOKENIZER.encode(TEXT, add_bos=False)
    with_it, without = built("suffix", [str(file)]), built("suffix", [])
    for salt in ("", "mine"):
        assert first_draft(with_it, tokens[:6], salt)[:1] == (tokens[6],)
        assert first_draft(without, tokens[:6], salt)[:1] != (tokens[6],)


def test_texts_of_two_files_do_not_run_together(tmp_path: Path) -> None:
    for name, text in (("a", "xyz"), ("b", "uvw")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    made = index_corpus([str(tmp_path / "a"), str(tmp_path / "b")], TOKENIZER, load_library(), memory=1 << 20)
    drafter = SuffixDrafter(load_library(), corpus=made)
    assert first_draft(drafter, [1, *TOKENIZER.encode("xyz", add_bos=False)]) == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"corpus file '.*bad' cannot be read: No such file or directory; give a text file"),
        (b"abc\xff\xfe", r"corpus file '.*bad' is no text: byte 3 is not UTF-8; give files of UTF-8 text"),
        (b"", r"corpus file '.*bad' holds no text; leave it out"),
        (b" \n\t\n", r"corpus file '.*bad' holds no text; leave it out"),
    ],
)
def test_bad_files(content: bytes | None, message: str, tmp_path: Path) -> None:
    """They are found before any weights are read: the target does not exist."""
    bad = tmp_path / "bad"
    if content is not None:
        bad.write_bytes(content)
    with pytest.raises(InvalidRequest, match=message):
        list(read_corpus([str(bad)]))
    with pytest.raises(InvalidRequest, match=message):
        assemble("no/such-model", drafters=["ngram", "suffix"], config=EngineConfig(corpus=(str(bad),)))


def test_a_folder_is_no_text_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: Is a directory; give a text file"):
        list(read_corpus([str(tmp_path)]))


def test_a_corpus_that_nobody_reads() -> None:
    with pytest.raises(InvalidRequest, match=r"the corpus 'a\.txt' has no reader: add the drafter suffix, or leave"):
        assemble("no/such-model", drafters=["ngram"], config=EngineConfig(corpus=("a.txt",)))


def test_a_corpus_that_is_too_large(tmp_path: Path) -> None:
    file = tmp_path / "large.txt"
    words = np.random.default_rng(0).integers(0, 10**6, 40_000)
    file.write_text(" ".join(map(str, words)), encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"takes more than 1\.0 MiB, from token \d+ of .*give less text, or more"):
        built("suffix:memory=1M", [str(file)])


def test_corpus_and_past_answers_share_the_memory(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(TEXT * 50, encoding="utf-8")
    corpus = index_corpus([str(file)], TOKENIZER, load_library(), memory=1 << 20)
    assert built("suffix:memory=1M", [str(file)]).past._memory == (1 << 20) - corpus.bytes


def test_a_target_without_a_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(TEXT, encoding="utf-8")
    assert built("suffix", [], tokenizer=None).past.bytes == 0
    with pytest.raises(InvalidRequest, match="target has random weights and no tokenizer: leave the corpus out"):
        built("suffix", [str(file)], tokenizer=None)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("suffix:memory=x", InvalidRequest, "suffix:memory must be a size of at least 1M, such as 64M, not 'x'"),
        ("suffix:memory=", InvalidRequest, "suffix:memory must be a size of at least 1M, such as 64M, not ''"),
        ("suffix:memory=1000", InvalidRequest, "suffix:memory must be a size of at least 1M"),
        ("suffix:mem=1M", UnknownOption, "unknown option of the suffix drafter 'mem'; did you mean 'memory'"),
    ],
)
def test_bad_options(words: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        registry.recipe(words, target())


@pytest.mark.parametrize("given", ["a.txt", [3], 5])
def test_a_corpus_is_a_list_of_paths(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"corpus must be a list"):
        EngineConfig.of(corpus=given)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NoCompiler("no C compiler found")

    monkeypatch.setattr(module, "load_library", fail)
    with pytest.raises(NoCompiler, match="drafter 'suffix' runs in C: no C compiler found; or take ngram"):
        registry.recipe("suffix", target())


def test_chains_beside_a_gpu() -> None:
    """A device verifies the likeliest path of an offer alone."""
    drafter = built("suffix", [], device="cuda")
    assert drafter._drafting._order.width == 1
    assert built("suffix", [])._drafting._order.width > 1
