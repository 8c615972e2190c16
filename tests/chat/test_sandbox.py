from __future__ import annotations

import re

import pytest

from paceline.chat import budget as chat_budget
from paceline.chat.template import ChatTemplate
from paceline.errors import ModelFileError
from tests.text.vocabularies import byte_level_tokenizer

MESSAGES = [{"role": "user", "content": "x"}]


def render(source: str) -> str:
    return ChatTemplate(byte_level_tokenizer(), source).render(MESSAGES)


DOUBLE = "{% set x = 'aaaaaaaaaaaaaaaa' %}"

# Each would take hours or terabytes.
BOMBS = {
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "long loop": "{% for a in range(10 ** 9) %}{% endfor %}",
    "recursive loop": "{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "string times": "{{ 'a' * 10 ** 10 }}",
    "times string": "{{ 10 ** 10 * 'a' }}",
    "list times": "{{ ([0] * 10 ** 10) | length }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "squares": "{% set x = 9 ** 50 %}" + "{% set x = x * x %}" * 40,
    "doubling by +": DOUBLE + "{% set x = x + x %}" * 50,
    "doubling by ~": DOUBLE + "{% set x = x ~ x %}" * 50,
    "doubling by block": DOUBLE + "{% set x %}{{ x }}{{ x }}{% endset %}" * 50,
    "doubling by macro": "{% macro d(s) %}{{ s }}{{ s }}{% endmacro %}{{ " + "d(" * 50 + "'aaaaaaaa'" + ")" * 50 + "}}",
    "doubling by replace": DOUBLE + "{% set x = x | replace('a', 'aaaaaaaa') %}" * 20,
    "doubling by method": DOUBLE + "{% set x = x.replace('', 'aaaaaaaa') %}" * 20,
    "doubling by join": DOUBLE + "{% set x = x.join(x) %}" * 9,
    "doubling by format": DOUBLE + "{% set x = '{0}{0}'.format(x) %}" * 50,
    "doubling by %": DOUBLE + "{% set x = '%s%s' % (x, x) %}" * 50,
    "join of many": "{{ (['a' * 100000] * 1000000) | join }}",
    "joins of joins": "{{ ([['a' * 100000] * 1000] * 1000) | map('join') | join }}",
    "shared string": "{% set l = ['a' * 100000] %}" + "{% set l = l + l %}" * 18 + "{{ l | upper }}",
    "lists of lists": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "tuples of tuples": "{% set x = 1 %}" + "{% set x = (x, x) %}" * 60 + "{{ x | string }}",
    "dicts of dicts": "{% set x = {} %}" + "{% set x = {'a': x, 'b': x} %}" * 60 + "{{ x | tojson }}",
    "dict() of dict()": "{% set x = 1 %}" + "{% set x = dict(a=x, b=x) %}" * 60 + "{{ x }}",
    "comparing": "{% set x = [1] %}{% set y = [1] %}"
    + "{% set x = [x, x] %}{% set y = [y, y] %}" * 60
    + "{{ x == y }}",
    "text in a loop": "{% set x %}{% for a in range(100000) %}" + "z" * 10000 + "{% endfor %}{% endset %}",
    "idle filters": "{% for i in range(100000) %}{{ range(100000) | select('equalto', -1) | list }}{% endfor %}",
    "slices": "{% set l = range(99999) | list %}{% for i in range(400000) %}{% set m = l[:] %}{% endfor %}",
}


@pytest.mark.unwatched
@pytest.mark.parametrize("name", BOMBS)
def test_work_is_bounded(name: str) -> None:
    with pytest.raises(ModelFileError, match=r"was stopped: (it |maximum recursion)"):
        render(BOMBS[name])


REFUSED = {
    "class": "{{ ''.__class__.mro() }}",
    "attr": "{{ (''|attr('__class__')).mro() }}",
    "globals": "{{ raise_exception.__globals__.keys() }}",
    "append": "{{ messages.append(1) }}",
    "private namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "padding": "{{ 'a'.ljust(10 ** 10) }}",
    "tabs": "{{ '\t'.expandtabs(10 ** 10) }}",
    "bytes": "{{ 'a'.encode() }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "format width": "{{ '{:>9999999999}'.format(1) }}",
    "format nested": "{{ '{0:{1}}'.format(1, 999999999) }}",
    "format attribute": "{{ '{0.__class__}'.format(1) }}",
    "format escape": "{{ '{{{0:9999999999}}}'.format(1) }}",
    "percent width": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "indent": "{{ 'a' | indent(10 ** 10) }}",
    "json indent": "{{ messages | tojson(indent=10 ** 10) }}",
    "round": "{{ 1 | round(10 ** 9, 'ceil') }}",
    "date": "{{ strftime_now('%9999999999d') }}",
    "printing a namespace": "{{ namespace(a=1) }}",
    "printing a function": "{{ range }}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_templates_may_not_do(name: str) -> None:
    with pytest.raises(ModelFileError):
        render(REFUSED[name])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a' * 3 ~ 1 ~ none }}", "aaa1None"),
        ("{{ [1, 'b'] + [2] }}", "[1, 'b', 2]"),
        ("{{ '%s=%d' % ('a', 5) }} {{ '{} {x}'.format(1, x='é') }} {{ '{{}}'.format() }}", "a=5 1 é {}"),
        (
            "{{ ['a', 1] | join(', ') }} {{ messages | join(',', attribute='role') }} {{ '-'.join('abc') }}",
            "a, 1 user a-b-c",
        ),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "x"}]'),
        ("{{ {'é': 1} | tojson(indent=2, ensure_ascii=True) }}", '{\n  "\\u00e9": 1\n}'),
        ("{{ 'a\nb\n\nc' | indent(2) }}", "a\n  b\n\n  c"),
        ("{{ ' x ' | trim }}{{ 'ab' | upper | replace('A', 'c') }}{{ [3, 4] | sum }}{{ 2.55 | round(1) }}", "xcB72.5"),
        (
            "{% for c in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ c }}{{ ',' if not loop.last }}{% endfor %}",
            "1/3a,2/3b,3/3c",
        ),
        ("{% for x in [1, 2, 3] if x != 2 %}{{ x }}{{ loop.previtem }}{% endfor %}", "131"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% break %}{% endfor %}", "1"),
        ("{% for a, b in {'k': 1}.items() %}{{ a }}{{ b }}{% else %}-{% endfor %}", "k1"),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% set ns = namespace(n=0) %}{% for x in range(4) %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}", "6"),
        ("{% macro f(x, y=[1]) %}{{ x }}{{ y[0] }}{{ caller() }}{% endmacro %}{% call f('a') %}b{% endcall %}", "a1b"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{% if 'role' in messages[0] %}\n  yes\n{% endif %}\n", "  yes\n"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}", "['x']"),
        ("{{ nothing }}{{ nothing | default('d') }}{{ messages[0].get('name', '-') }}", "d-"),
        ("{{ 'a,b'.split(',')[1] }}{{ 'abc'[::-1] }}{{ 'Abc'.startswith('A') }}{{ 7 % 4 }}{{ 2 ** 3 }}", "bcbaTrue38"),
        ("{{ 1 if messages | length == 1 else 2 }}{{ (1, 2) | last }}{{ dict(a=1).a }}", "121"),
    ],
)
def test_what_templates_may_do(source: str, expected: str) -> None:
    assert render(source) == expected


def test_dates() -> None:
    assert re.fullmatch(r"\d\d [A-Z][a-z]{2} \d{4}", render("{{ strftime_now('%d %b %Y') }}"))


def test_the_budget_grows_with_the_messages() -> None:
    content = "x" * (chat_budget.MAX_SIZE // 2)
    template = ChatTemplate(byte_level_tokenizer(), "{{ '[' + messages[0].content + ']' + '.' }}")
    assert len(template.render([{"role": "user", "content": content}])) == len(content) + 3
