"""The parser and its help: values of options, their order, and commands that do not exist."""

import json
import re

import pytest

from infini_llama.configs.errors import ExitCode
from infini_llama.flows.cli.commands import COMMANDS, build_parser, overview
from infini_llama.flows.cli.main import main, parse


@pytest.mark.parametrize("option", ["--lengths", "--context"])
def test_lengths_have_units(option):
    parsed = build_parser().parse_args(
        ["evaluate", "run", "--passkey", option, "4096", "128k", "1m", "1.5M"]
    )
    assert parsed.lengths == [4096, 128_000, 1_000_000, 1_500_000]


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "run", "--passkey", "--lengths", "9" * 400],
        ["evaluate", "run", "--passkey", "--lengths", "9" * 400 + "k"],
        ["evaluate", "run", "--passkey", "--segments", "9" * 30],
        ["generate", "run", "--max-new-tokens", "9" * 30],
        ["init", "--files", "x", "--hours", "1e308"],
    ],
)
def test_numbers_that_would_overflow_are_refused(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 64 and f"argument {words[-2]}" in capsys.readouterr().err


def test_an_option_without_effect_is_refused_also_if_it_is_zero(capsys):
    assert main(["evaluate", "run", "--seed", "0"]) == 64
    assert "--seed" in capsys.readouterr().err


def test_overrides_and_options_in_any_order():
    for words in (
        ["run", "a.yaml", "x.y=1", "z=2", "--no-prefect"],
        ["run", "--no-prefect", "a.yaml", "x.y=1", "z=2"],
        ["run", "a.yaml", "--no-prefect", "x.y=1", "--json", "z=2"],
        ["run", "a.yaml", "x.y=1", "--direct", "z=2"],  # its former name
    ):
        parsed = parse(words)
        assert (parsed.config, parsed.overrides, parsed.no_prefect) == (
            "a.yaml",
            ["x.y=1", "z=2"],
            True,
        )
    assert parse(["run", "a.yaml"]).overrides == []


def test_a_key_may_be_written_as_an_option():
    parsed = parse(
        [
            "run",
            "--train.max_steps=5",
            "tiny",
            "--data.tokenizer.vocab_size=300",
            "model.attention=infini",
            "--train.sample_prompts=[a b, c]",
        ]
    )
    assert parsed.config == "tiny"
    assert set(parsed.overrides) == {
        "train.max_steps=5",
        "train.sample_prompts=[a b, c]",
        "data.tokenizer.vocab_size=300",
        "model.attention=infini",
    }


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and re.fullmatch(
        r"infini-llama \d+\.\d+\.\d+\n", capsys.readouterr().out
    )


def test_help_lists_each_command_in_a_group_and_describes_it(capsys):
    assert main(["help"]) == 0
    text = capsys.readouterr().out
    listed = re.findall(r"^  (\w+) ", text, re.MULTILINE)
    assert (
        sorted(COMMANDS) == sorted(listed) and text.count("Example: infini-llama ") == 4
    )
    assert "docs/" not in text and "configs/" not in text, (
        "a path of the repository, which an installation lacks"
    )


def test_help_of_a_command_is_its_options_also_as_json(capsys):
    assert main(["help", "generate"]) == 0
    text = capsys.readouterr().out
    assert "usage: infini-llama generate" in text and "(default: 128)" in text
    assert main(["help", "generate", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["help"].rstrip() == text.rstrip()
    assert main(["help", "generat", "--json"]) == 64
    assert "did you mean generate?" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in (*COMMANDS, "keep-checkpoints"))


@pytest.mark.parametrize(
    "words", [["report", "--json"], ["runs", "--json", "--nonsense"]]
)
def test_refused_arguments_are_an_object_with_json(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == json.loads(capsys.readouterr().out)["exit_code"] == 64


def test_a_segment_longer_than_a_size_of_the_model_is_refused(capsys):
    words = ["import", "folder", "--segment-length", "2147483648", "--json"]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 64
    error = json.loads(capsys.readouterr().out)["error"]
    assert "--segment-length: 2147483648 must be at least 1 and at most" in error


def test_the_help_lists_every_exit_code_in_order():
    listed = [
        int(code)
        for code in re.findall(
            r"^ +(\d+)(?:, \d+)?  ", overview().partition("Exit codes:")[2], re.M
        )
    ]
    assert listed == sorted(listed) and {*map(int, ExitCode)} <= set(listed)
