"""`turnout completion`: the scripts, asked in the shells themselves."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from turnout.cli import main as cli
from turnout.cli.completion import options_in, tree
from turnout.cli.completion_scripts import SCRIPTS
from turnout.config.run_config import specs

# Words before the cursor (the last is what TAB is pressed in) -> what is offered at least, and what is not.
CASES = [
    (["tra"], {"train"}, {"check"}),
    (["weights", "ver"], {"verify"}, {"ls"}),
    (["weights", "compact", "--en"], {"--encoding"}, {"--lr"}),
    (["train", "run.yaml", "--sched"], {"--schedule"}, {"--seed"}),
    (["train", "run.yaml", "--schedule", ""], {"sync", "pipelined", "async"}, {"--schedule"}),
    (["check", "run.yaml", "--staleness-policy", "r"], {"replay"}, {"drop"}),
    (["train", "run.yaml", "--no-rollout-shuf"], {"--no-rollout-shuffle"}, set()),
    (["train", "--help", "sch"], {"schedule"}, {"router"}),
    (["simulate", "--schedule", "p"], {"pipelined"}, {"async"}),
    (["engines", "add", "--co"], {"--count"}, {"--deadline"}),
    (["eval", "run.yaml", "--engine-u"], {"--engine-url"}, set()),
]  # fmt: skip
ZSH_STUBS = """
_describe() { local name=${@[-1]}; print -l -- ${${(P)name}%%:*} }
compadd() { shift; print -l -- $@ }
_files() { : }
_message() { : }
compdef() { : }
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    whole = tree()
    return {shell: script(whole) for shell, script in SCRIPTS.items()}


def in_shell(shell: str, program: str, *flags: str) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, *flags, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def named(words) -> str:
    return " ".join(sorted(words) if isinstance(words, set) else words)


@pytest.mark.parametrize(("words", "offered", "others"), CASES, ids=named)
def test_bash(words, offered, others, scripts):
    line = " ".join(shlex.quote(word) for word in ["turnout", *words])
    program = (
        f"{scripts['bash']}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}\n_turnout\nprintf '%s\\n' "
        '"${COMPREPLY[@]}"'
    )
    found = set(in_shell("bash", program, "--norc").split("\n"))
    assert offered <= found and not others & found


@pytest.mark.parametrize(("words", "offered", "others"), CASES, ids=named)
def test_zsh(words, offered, others, scripts):
    line = " ".join(shlex.quote(word) for word in ["turnout", *words])
    state = f"words=({line}); CURRENT={len(words) + 1}; PREFIX={shlex.quote(words[-1])}"
    found = set(in_shell("zsh", f"{ZSH_STUBS}\n{scripts['zsh']}\n{state}\n_turnout", "-f").split("\n"))
    assert offered <= found


@pytest.mark.parametrize(("words", "offered", "others"), CASES, ids=named)
def test_fish(words, offered, others, scripts, tmp_path):
    script = tmp_path / "turnout.fish"
    script.write_text(scripts["fish"])
    line = " ".join(["turnout", *words])
    out = in_shell("fish", f"source {script}; complete -C {shlex.quote(line)}", "--no-config")
    found = {row.split("\t")[0] for row in out.split("\n")}
    assert offered <= found and not others & found


def test_bash_offers_files_elsewhere_and_nothing_for_a_number(scripts):
    for words, expected in ((["train", "exam"], ""), (["train", "a.yaml", "--lr", ""], "")):
        line = " ".join(shlex.quote(word) for word in ["turnout", *words])
        state = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}"
        program = f'{scripts["bash"]}\n{state}\n_turnout\necho "${{COMPREPLY[*]}}"'
        assert in_shell("bash", program, "--norc").strip() == expected
    assert "complete -o default -F _turnout turnout" in scripts["bash"]
    lr = next(option for option in tree().run_options if option.flag == "--lr")
    assert lr.takes == "number"


def test_every_command_and_every_option_of_a_run_is_there(scripts):
    for shell, script in scripts.items():
        assert [name for name in cli.COMMANDS if name not in script] == [], shell
        assert [spec.flag for spec in specs().values() if spec.flag.lstrip("-") not in script] == [], shell


def test_options_are_read_from_a_help_text():
    text = (
        "usage: x\n\noptions:\n  -h, --help      show\n  --kind {a,b}  of two\n  --seed N    a number\n"
        "  --a-very-long-name-of-it FILE\n                        below it\n  --list   print"
    )
    found = {option.flag: option for option in options_in(text)}
    assert found["--kind"].choices == ("a", "b") and found["--kind"].takes == "choice"
    assert found["--seed"].takes == "number" and found["--list"].takes == "nothing"
    assert found["--a-very-long-name-of-it"].text == "below it"
    assert found["--a-very-long-name-of-it"].takes == "file"


def test_the_command(capsys):
    assert cli.main(["completion", "fish"]) == 0
    assert capsys.readouterr().out.startswith("# Completion of turnout for fish")
    with pytest.raises(SystemExit) as end:
        cli.main(["completion", "tcsh"])
    assert end.value.code == 2
