"""Completion: print a script that lets a shell complete commands and options.

paceline completion bash > ~/.local/share/bash-completion/completions/paceline
paceline completion zsh > ~/.zfunc/_paceline
paceline completion fish > ~/.config/fish/completions/paceline.fish

The script is made from the commands themselves, and starts no program when Tab is pressed. zsh reads ~/.zfunc after
`fpath+=~/.zfunc; autoload -Uz compinit; compinit` in ~/.zshrc.
"""

from __future__ import annotations

import argparse
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    help: str
    takes_value: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A point of a command line: the commands so far, and what may follow."""

    at: str  # such as "bench offline"; empty for the program itself
    commands: dict[str, str]  # name → help; choices of an argument, too
    options: list[Option]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SCRIPTS, help=", ".join(SCRIPTS))


def run(args: Namespace) -> int:
    from paceline.cli.main import build_parsers

    print(SCRIPTS[args.shell](list(places(build_parsers()[0]))), end="")
    return 0


def places(parser: ArgumentParser, at: str = "") -> Iterator[Place]:
    """Yield the place of a parser, and those of its subcommands."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {choice.dest: choice.help or "" for action in inner for choice in action._choices_actions}
    for action in parser._actions:
        if not action.option_strings and action not in inner:
            helps |= dict.fromkeys(map(str, action.choices or ()), "")
    yield Place(at, helps, [option for action in parser._actions for option in _options(parser, action)])
    for action in inner:
        for name, below in action.choices.items():
            yield from places(below, f"{at} {name}".strip())


def _options(parser: ArgumentParser, action: argparse.Action) -> Iterator[Option]:
    help = " ".join(parser._get_formatter()._expand_help(action).split()) if action.help else ""
    for name in action.option_strings:
        if name.startswith("--"):
            yield Option(name, help, action.nargs != 0, tuple(map(str, action.choices or ())))


def bash(found: Sequence[Place]) -> str:
    choices = [
        f'        "{place.at} {option.name}") words="{" ".join(option.choices)}";;'
        for place in found
        for option in place.options
        if option.choices
    ]
    names = [f'            "{place.at}") words="{" ".join(place.commands)}";;' for place in found if place.commands]
    flags = [f'            "{p.at}") words="{" ".join(option.name for option in p.options)}";;' for p in found]
    return f"""_paceline() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" at="" words="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$at ${{COMP_WORDS[i]}}" in
            {_steps(found)}) at="${{at:+$at }}${{COMP_WORDS[i]}}";;
        esac
    done
    case "$at ${{COMP_WORDS[COMP_CWORD - 1]}}" in
{_lines(choices)}
        *) if [[ $word == -* ]]; then case "$at" in
{_lines(flags)}
        esac; else case "$at" in
{_lines(names)}
        esac; fi;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _paceline paceline
"""


def zsh(found: Sequence[Place]) -> str:
    cases = [
        f'        ("{place.at}")\n'
        f"            commands=({_described(place.commands)})\n"
        f"            options=({_described({option.name: option.help for option in place.options})});;"
        for place in found
    ]
    return f"""#compdef paceline
_paceline() {{
    local at="" word
    for word in "${{(@)words[2,CURRENT-1]}}"; do
        case "$at $word" in
            ({_steps(found)}) at="${{at:+$at }}$word";;
        esac
    done
    local -a commands options
    case "$at" in
{_lines(cases)}
    esac
    if [[ $PREFIX == -* ]]; then
        _describe -o option options
    elif (( $#commands )); then
        _describe command commands
    else
        _files
    fi
}}
if [[ $funcstack[1] == _paceline ]]; then _paceline "$@"; else compdef _paceline paceline; fi
"""


def fish(found: Sequence[Place]) -> str:
    steps = " ".join(shlex.quote(place.at) for place in found if place.at)
    lines = [line for place in found for line in _fish_lines(place)]
    return f"""function __paceline_at
    set -l at
    for word in (commandline -opc)[2..]
        if contains -- (string join -- ' ' $at $word) {steps}
            set -a at $word
        end
    end
    test "$at" = "$argv"
end
{_lines(lines)}
"""


def _fish_lines(place: Place) -> Iterator[str]:
    here = f"complete -c paceline -n {_fish(f'__paceline_at {place.at}'.strip())}"
    for name, help in place.commands.items():
        yield f"{here} -f -a {name} -d {_fish(help)}"
    for option in place.options:
        value = f" -x -a {_fish(' '.join(option.choices))}" if option.choices else " -r" if option.takes_value else ""
        yield f"{here} -l {option.name.removeprefix('--')}{value} -d {_fish(option.help)}"


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _steps(found: Sequence[Place]) -> str:
    """Patterns of the commands so far, a space and the next word, for every place below the program itself."""
    return "|".join(f'"{place.at if " " in place.at else " " + place.at}"' for place in found if place.at)


def _described(words: dict[str, str]) -> str:
    return " ".join(shlex.quote(f"{name}:{help.replace(':', '')}") for name, help in words.items())


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(lines)


SCRIPTS: dict[str, Callable[[Sequence[Place]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
