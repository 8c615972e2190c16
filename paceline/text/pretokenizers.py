"""Pre-tokenizers: how byte-level BPE models cut text into words before merging, by their names in GGUF files.

Each entry is a list of patterns, applied one after the other: each pattern cuts the pieces that the previous ones left.
An unknown name (`tokenizer.ggml.pre`) is an error: a wrong cut gives plausible tokens that the model never saw.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from paceline.errors import UnsupportedModel

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_LOWER, _WORD_UPPER = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{a}{_LOWER}{b}" for a, b in (("*", "+"), ("+", "*")))
_TEKKEN = rf"{_WORD_LOWER}|{_WORD_UPPER}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
_O200K = (
    rf"{_WORD_LOWER}{_CONTRACTIONS}?|{_WORD_UPPER}{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)
_CJK_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"


@dataclass(frozen=True)
class PreTokenizer:
    patterns: tuple[str, ...]
    nfc: bool = False  # the model was trained on composed characters
    whole_words: bool = False  # a word that is a token stays whole, whatever the merges say
    adds_bos: bool = False  # default for files without add_bos_token

    def build(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_gpt2 = PreTokenizer((_GPT2,))
_digits = PreTokenizer((r"\p{N}", _GPT2))
_qwen2 = PreTokenizer((_QWEN2,), nfc=True)
_llama3 = PreTokenizer((_CL100K,), whole_words=True, adds_bos=True)

KNOWN: dict[str, PreTokenizer] = {
    "default": PreTokenizer((_PUNCTUATION.replace("`", ""), _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "mpt": _gpt2,
    "olmo": _gpt2,
    "smollm": _digits,
    "starcoder": _digits,
    "refact": _digits,
    "command-r": _digits,
    "codeshell": _digits,
    "exaone": _digits,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "stablelm2": PreTokenizer((_QWEN2,)),
    "llama-bpe": _llama3,
    "llama-v3": _llama3,
    "llama3": _llama3,
    "falcon3": _llama3,
    "pixtral": _llama3,
    "dbrx": PreTokenizer((_CL100K,)),
    "smaug-bpe": PreTokenizer((_CL100K,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_O200K,)),
    "falcon": PreTokenizer((_PUNCTUATION, _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)),
}


def pretokenizer(name: str) -> PreTokenizer:
    if name not in KNOWN:
        raise UnsupportedModel(
            f"the GGUF file cuts words by {name!r} (tokenizer.ggml.pre), which Paceline does not know; "
            f"known: {', '.join(sorted(KNOWN))}. Load the original model directory (tokenizer.json) instead."
        )
    return KNOWN[name]
