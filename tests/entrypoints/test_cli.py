"""The command `vllm-blend`: it lists its commands, and hands everything after one on to it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from vllm_blend import __version__
from vllm_blend.entrypoints import cli


def test_every_command_is_listed_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    for name, (_, text) in cli.COMMANDS.items():
        assert name in out and text in out
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0 and f"usage: vllm-blend {name}" in capsys.readouterr().out


def test_the_options_of_check_model_are_under_headings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["check-model", "--help"])
    sections = capsys.readouterr().out.split("\n\n")
    [ungrouped] = [section for section in sections if section.startswith("options:")]
    assert "--help" in ungrouped and ungrouped.count("  -") == 1
    assert max(section.count("\n  -") for section in sections) <= 5


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"vllm-blend {__version__}\n"


def test_a_command_gets_what_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    command = ModuleType("a_command")
    monkeypatch.setattr(command, "main", lambda argv: asked.append(argv), raising=False)
    monkeypatch.setitem(sys.modules, "a_command", command)
    monkeypatch.setitem(cli.COMMANDS, "do", ("a_command", "does"))
    assert cli.main(["do", "--this", "-x"]) == 0 and asked == [["--this", "-x"]]
    monkeypatch.setattr(command, "main", lambda argv: 3)
    assert cli.main(["do"]) == 3


@pytest.mark.parametrize("argv", [[], ["chek-model"]])
def test_anything_else_is_an_error_that_names_the_commands(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and "COMMAND" in printed
    assert not argv or "there is no command 'chek-model': did you mean 'check-model'?" in printed


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["serve", "m", "--port", "abc"], "serve: error: --port: 'abc' is not a whole number"),
        (["serve", "m", "--request-timeout", "1s"], "serve: error: --request-timeout: '1s' is not a number"),
        (["serve", "m", "--log-format", "xml"], "serve: error: --log-format: invalid choice: 'xml' (choose from"),
        (["serve", "m", "--port"], "serve: error: --port: expected one argument"),
        (["check-model", "m", "--data", "a", "--batch", "4.5"], "check-model: error: --batch: '4.5' is not a whole"),
        (["check-model", "m"], "check-model: error: the following arguments are required: --data/--dataset"),
        (["finetune", "m", "--minutes", "soon"], "finetune: error: --minutes: 'soon' is not a number"),
    ],
)
def test_a_wrong_argument_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    [printed] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert printed.startswith(f"vllm-blend {line}") and printed.endswith(f"; see vllm-blend {argv[0]} --help")
