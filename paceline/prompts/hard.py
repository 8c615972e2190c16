"""Prompts whose answers no drafter guesses well: other scripts, base64, and answers of a word.

They show what speculation costs where it cannot gain. The same seed gives the same prompts. They are made here and not
stored: their texts say nothing worth keeping.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Mapping

from paceline.prompts.files import Prompt

SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "arabic": ("اكتب رسالة قصيرة إلى صديق عن {}.", "اشرح بكلمات بسيطة ما هو {}."),
    "bengali": ("{} সম্পর্কে একটি ছোট গল্প লেখো।", "{} কেন গুরুত্বপূর্ণ, তা ব্যাখ্যা করো।"),
    "chinese": ("请写一个关于{}的小故事。", "用简单的话解释什么是{}。"),
    "cyrillic": ("Напиши короткий рассказ про {}.", "Объясни простыми словами, что такое {}."),
    "georgian": ("დაწერე მოკლე მოთხრობა {}-ზე.", "ახსენი მარტივად, რა არის {}."),
    "greek": ("Γράψε μια σύντομη ιστορία για {}.", "Εξήγησε με απλά λόγια τι είναι {}."),
    "hebrew": ("כתוב סיפור קצר על {}.", "הסבר במילים פשוטות מה זה {}."),
    "hindi": ("{} के बारे में एक छोटी कहानी लिखो।", "सरल शब्दों में समझाओ कि {} क्या है।"),
    "japanese": ("{}についての短い物語を書いてください。", "{}とは何か、簡単に説明してください。"),
    "korean": ("{}에 대한 짧은 이야기를 써 주세요.", "{}이 무엇인지 쉽게 설명해 주세요."),
    "thai": ("เขียนเรื่องสั้นเกี่ยวกับ{}", "อธิบายง่ายๆ ว่า{}คืออะไร"),
}
TOPICS: Mapping[str, tuple[str, ...]] = {
    "arabic": ("البحر", "المطر", "القطار", "الذاكرة"),
    "bengali": ("নদী", "বৃষ্টি", "রেলগাড়ি", "স্মৃতি"),
    "chinese": ("大海", "雨", "火车", "记忆"),
    "cyrillic": ("море", "дождь", "поезд", "память"),
    "georgian": ("ზღვა", "წვიმა", "მატარებელი", "მეხსიერება"),
    "greek": ("τη θάλασσα", "τη βροχή", "το τρένο", "τη μνήμη"),
    "hebrew": ("הים", "הגשם", "הרכבת", "הזיכרון"),
    "hindi": ("समुद्र", "बारिश", "रेलगाड़ी", "स्मृति"),
    "japanese": ("海", "雨", "電車", "記憶"),
    "korean": ("바다", "비", "기차", "기억"),
    "thai": ("ทะเล", "ฝน", "รถไฟ", "ความทรงจำ"),
}
QUESTIONS = (
    "Is {a} larger than {b}? Answer with yes or no alone.",
    "What is {a} plus {b}? Answer with the number alone.",
    "Which of the words {x} and {y} comes first in the alphabet? Answer with the word alone.",
    "Does the word {x} have more letters than {y}? Answer with yes or no alone.",
)
WORDS = (
    "amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "heron", "ivory", "jetty", "karst", "larch",
)  # fmt: skip  # a word a line would hide that they are one list
BASE64_BYTES = (48, 240)  # fewest and most bytes behind the text of a prompt


def hard_prompts(kind: str, *, count: int, seed: int) -> list[Prompt]:
    """Make `count` prompts of one of the kinds `HARD`."""
    made = [(f"{kind}/{i}", HARD[kind](random.Random(f"{kind}/{seed}/{i}"), i)) for i in range(count)]
    return [Prompt(id=id, category=kind, messages=({"role": "user", "content": text},)) for id, text in made]


def _script(rng: random.Random, number: int) -> str:
    """Return a task in one script; the scripts take turns."""
    name = [*SCRIPTS][number % len(SCRIPTS)]
    return rng.choice(SCRIPTS[name]).format(rng.choice(TOPICS[name]))


def _base64(rng: random.Random, number: int) -> str:
    text = base64.b64encode(rng.randbytes(rng.randint(*BASE64_BYTES))).decode()
    return f"Continue this text in base64, with nothing around it:\n\n{text}"


def _short(rng: random.Random, number: int) -> str:
    x, y = rng.sample(WORDS, 2)
    return rng.choice(QUESTIONS).format(a=rng.randint(10, 999), b=rng.randint(10, 999), x=x, y=y)


HARD: Mapping[str, Callable[[random.Random, int], str]] = {"scripts": _script, "base64": _base64, "short": _short}
"""Kinds by name, each as the text of a prompt by its number."""
