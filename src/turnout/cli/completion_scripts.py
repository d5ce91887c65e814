"""What there is to complete -> scripts for bash, zsh and fish. Pure.

Promises: a script holds all of it and asks nobody; after `--flag ` or `--flag=` come the flag's choices, files
where it may take one, nothing where it takes a number; a word that begins with `-` is an option; any other a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_HEAD = "# Completion of turnout for {0}, made by `turnout completion {0}`: make it anew after an upgrade."


@dataclass(frozen=True)
class Option:
    """`takes`: nothing, choice, number or file (anything else too: files are offered)."""

    flag: str
    text: str
    takes: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Leaf:
    """A command, or one of a command's; `runs`: the options of a run are its as well."""

    path: tuple[str, ...]
    text: str
    options: tuple[Option, ...]
    runs: bool


@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...]
    run_options: tuple[Option, ...]
    parents: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        nested = dict.fromkeys(leaf.path[0] for leaf in self.leaves if len(leaf.path) > 1)
        object.__setattr__(self, "parents", tuple(nested))

    def under(self, *path: str) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.path[:-1] == path]

    @property
    def running(self) -> list[str]:
        return [" ".join(leaf.path) for leaf in self.leaves if leaf.runs]


def bash(tree: Tree) -> str:
    """Needs bash 3.2 and nothing of bash-completion."""
    lines = [
        _HEAD.format("bash"),
        "_turnout() {",
        "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} key=${COMP_WORDS[1]} at=2 "
        "words= takes= choices=",
        "    if [[ $cur == = ]]; then cur=; elif [[ $prev == = ]]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi",
        f'    case $key in {"|".join(tree.parents)}) at=3; ((COMP_CWORD > 2)) && key+=" ${{COMP_WORDS[2]}}";; esac',
        "    if ((COMP_CWORD == 1)); then",
        f"        words='{_names(tree.under())}'",
        "    elif ((COMP_CWORD < at)) && [[ $cur != -* ]]; then",
        "        case $key in",
        *(f"            {p}) words='{_names(tree.under(p))}';;" for p in tree.parents),
        "        esac",
        "    else",
        '        case "$key $prev" in',
        *(f"            {line}" for leaf in tree.leaves for line in _bash_values(leaf)),
        "        esac",
        "        case $key in",
        *(
            f"            '{' '.join(leaf.path)}') words+=' {' '.join(o.flag for o in leaf.options)}';;"
            for leaf in tree.leaves
            if leaf.options
        ),
        "        esac",
        f"        case $key in {'|'.join(map(_quoted, tree.running))})",
        "            case $prev in",
        *(f"                {line}" for line in _bash_cases(tree.run_options, "")),
        "            esac",
        f"            words+=' {' '.join(o.flag for o in tree.run_options)}';;",
        "        esac",
        "        if [[ $takes == choice ]]; then words=$choices",
        "        elif [[ $cur != -* ]]; then words=; [[ $takes == number ]] && compopt +o default 2> /dev/null; fi",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -o default -F _turnout turnout",
    ]
    return "\n".join(lines) + "\n"


def _bash_values(leaf: Leaf) -> list[str]:
    return _bash_cases(leaf.options, " ".join(leaf.path) + " ")


def _cases(options: Iterable[Option], prefix: str, choice: str, number: str) -> list[str]:
    """Branches of a shell's `case` by the word before, for options that take one of few words, or a number."""
    lines = [
        choice.format(f"'{prefix}{option.flag}'", " ".join(option.choices))
        for option in options
        if option.takes == "choice"
    ]
    numbers = [f"'{prefix}{option.flag}'" for option in options if option.takes == "number"]
    return [*lines, *([number.format("|".join(numbers))] if numbers else [])]


def _bash_cases(options: Iterable[Option], prefix: str) -> list[str]:
    return _cases(options, prefix, "{}) takes=choice choices='{}';;", "{}) takes=number;;")


def zsh(tree: Tree) -> str:
    """For `fpath` as `_turnout`, or to be sourced after compinit."""
    lines = [
        "#compdef turnout",
        _HEAD.format("zsh"),
        "_turnout() {",
        "    local key=$words[2] prev=$words[CURRENT-1] at=3",
        "    local -a options runs",
        "    [[ $PREFIX == --*=* ]] && { prev=${PREFIX%%=*}; compset -P '*=' }",
        f'    case $key in ({"|".join(tree.parents)}) at=4; ((CURRENT > 3)) && key+=" $words[3]";; esac',
        "    if ((CURRENT == 2)); then",
        f"        options=({_zsh_leaves(tree.under())})",
        "        _describe command options; return",
        "    elif ((CURRENT < at)) && [[ $PREFIX != -* ]]; then",
        "        case $key in",
        *(f"            ({p}) options=({_zsh_leaves(tree.under(p))});;" for p in tree.parents),
        "        esac",
        "        _describe command options; return",
        "    fi",
        '    case "$key $prev" in',
        *(
            f"        {line}"
            for leaf in tree.leaves
            for line in _zsh_cases(leaf.options, " ".join(leaf.path) + " ")
        ),
        "    esac",
        "    case $key in",
        *(
            f"        ('{' '.join(leaf.path)}') options+=({_zsh_options(leaf.options)});;"
            for leaf in tree.leaves
            if leaf.options
        ),
        "    esac",
        f"    case $key in ({'|'.join(map(_quoted, tree.running))})",
        "        case $prev in",
        *(f"            {line}" for line in _zsh_cases(tree.run_options, "")),
        "        esac",
        f"        runs=({_zsh_options(tree.run_options)}); options+=($runs);;",
        "    esac",
        "    if [[ $PREFIX == -* ]]; then _describe -o option options; else _files; fi",
        "}",
        'if [[ $funcstack[1] == _turnout ]]; then _turnout "$@"; else compdef _turnout turnout; fi',
    ]
    return "\n".join(lines) + "\n"


def _zsh_cases(options: Iterable[Option], prefix: str) -> list[str]:
    return _cases(options, prefix, "({}) compadd -- {}; return;;", "({}) _message number; return;;")


def _zsh_leaves(leaves: Iterable[Leaf]) -> str:
    return " ".join(_quoted(f"{leaf.path[-1]}:{leaf.text}") for leaf in leaves)


def _zsh_options(options: Iterable[Option]) -> str:
    return " ".join(_quoted(f"{option.flag}:{option.text}") for option in options)


def fish(tree: Tree) -> str:
    """For ~/.config/fish/completions."""
    lines = [_HEAD.format("fish")]
    for leaf in tree.leaves:
        *before, name = leaf.path
        if before:
            others = _names(tree.under(*before))
            first = f"__fish_seen_subcommand_from {before[0]}; and not __fish_seen_subcommand_from {others}"
        else:
            first = "__fish_use_subcommand"
        lines.append(f"complete -c turnout -n '{first}' -f -a {name} -d {_fish_quoted(leaf.text)}")
        here = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in leaf.path)
        lines += [_fish_option(option, here) for option in leaf.options]
    here = f"__fish_seen_subcommand_from {' '.join(leaf.path[-1] for leaf in tree.leaves if leaf.runs)}"
    lines += [_fish_option(option, here) for option in tree.run_options]
    return "\n".join(lines) + "\n"


def _fish_option(option: Option, condition: str) -> str:
    takes = {"nothing": "", "number": " -x", "file": " -r"}.get(option.takes)
    if takes is None:
        takes = f" -x -a '{' '.join(option.choices)}'"
    text = _fish_quoted(option.text)
    return f"complete -c turnout -n '{condition}' -l {option.flag[2:]}{takes} -d {text}"


def _names(leaves: Iterable[Leaf]) -> str:
    return " ".join(leaf.path[-1] for leaf in leaves)


def _quoted(text: str) -> str:
    """A word of bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: dict[str, Callable[[Tree], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
