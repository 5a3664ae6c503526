"""The command as a user meets it, called in this process: exit codes, JSON, and which keys and paths an error names."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from infini_llama.configs.errors import Preempted
from infini_llama.configs.loading import load_config
from infini_llama.flows.cli.main import Stopped, commands, explain, main, parse
from infini_llama.flows.cli.parser import GROUPS, REPLACED

ROOT = Path(__file__).parents[4]


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(texts, monkeypatch, capsys):
    """Runs a command in the folder of the texts."""
    monkeypatch.chdir(texts)
    monkeypatch.setenv("INFINI_LLAMA_HOME", str(texts / "home"))

    def run(*words: str) -> Result:
        capsys.readouterr()
        code = main([*words])
        return Result(code, *capsys.readouterr())

    return run


def output(result: Result) -> str:
    """The last line on stderr, after seeing that no traceback is there."""
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def _texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        words = " ".join(f"word{number}{letter} = {letter * 3}" for letter in "abcdefghij")
        (folder / f"{number}.txt").write_text(f"{words}\n" * 5)
    (folder / "run.yaml").write_text(
        "data: {files: ['*.txt'], sequence_length: 16, tokenizer: {vocab_size: 300}, validation_fraction: 0.2}\n"
    )
    return folder


@pytest.fixture
def texts(_texts, tmp_path):
    """A corpus of a few small files, and a configuration that reads it."""
    return shutil.copytree(_texts, tmp_path / "texts")


def test_three_bad_values_are_reported_at_once(command, texts):
    result = command("run", "run.yaml", "model.hidden_size=-1", "train.learning_rate=fast", "data.packing=none")
    assert result.returncode == 64
    for key in ("model.hidden_size", "train.learning_rate", "data.packing"):
        assert key in result.stderr


def test_a_file_that_is_not_utf8(command, texts):
    (texts / "latin.txt").write_bytes(b"caf\xe9")
    result = command("preprocess", "run.yaml")
    assert result.returncode == 65
    assert "latin.txt" in output(result)


def test_errors_as_json(command, texts):
    result = command("verify", "nowhere", "--json")
    record = json.loads(result.stdout)
    assert record["exit_code"] == result.returncode == 64
    assert record["error"] in result.stderr


def test_preprocess_verify_report(command, texts):
    built = command("preprocess", "run.yaml", "--json")
    assert built.returncode == 0, built.stderr
    reference = json.loads(built.stdout.splitlines()[-1])
    assert reference["built"] == ["tokens", "chunks"]
    assert len(built.stdout.splitlines()) == 1  # all else is on stderr
    assert json.loads(command("preprocess", "run.yaml", "--json").stdout)["built"] == []

    verified = command("verify", "latest", "--deep", "--html", "checks.html", "--json")
    assert json.loads(verified.stdout)["ok"] is True
    inspected = json.loads(command("report", "latest", "--html", "dataset.html", "--json").stdout)
    assert "<svg" in Path(inspected["report"]).read_text()
    assert inspected["splits"]["train"]["documents"] == reference["train"]["documents"]
    assert "train" in command("report", "latest").stdout

    shard = next((texts / "home" / reference["path"] / "train").glob("*.arrow"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    damaged = command("verify", str(texts / "home" / reference["path"]))
    assert damaged.returncode == 65
    assert shard.name in output(damaged)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(command, shell):
    result = command("completion", shell)
    assert result.returncode == 0, result.stderr
    for word in ("preprocess", "passkey", "keep-checkpoints", "unused-datasets"):
        assert word in result.stdout


def test_init_writes_a_runnable_configuration(command, texts):
    done = command("init", "my.yaml", "--files", "*.txt", "--attention", "infini", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["files"] == 40 and record["steps"] >= 20
    small = ["data.sequence_length=16", "model.segment_length=4", "data.tokenizer.vocab_size=300"]
    built = command("preprocess", "my.yaml", *small)
    assert built.returncode == 0, built.stderr
    again = command("init", "my.yaml", "--files", "*.txt")
    assert again.returncode == 64 and "my.yaml already exists" in output(again)
    silent = command("init", "other.yaml")
    assert silent.returncode == 64 and "name it with --files PATH" in output(silent)
    assert command("init", "other.yaml", "--files", "nothing").returncode == 65


def test_a_home_without_runs(command, texts):
    for words, said_there in ((["runs"], "or set INFINI_LLAMA_HOME"), (["gc"], "nothing to delete")):
        result = command(*words)
        assert result.returncode == 0 and said_there in result.stdout, result.stderr
    assert json.loads(command("runs", "--json").stdout)["runs"] == []


def test_unexpected_errors_show_a_traceback_only_with_verbose(command, texts):
    (texts / "home").mkdir()
    (texts / "home" / "locks").write_text("a file where a folder should be")
    quiet, verbose = (command("preprocess", "run.yaml", *more) for more in ([], ["--verbose"]))
    assert quiet.returncode == verbose.returncode == 70
    assert "unexpected FileExistsError" in output(quiet)
    assert "Traceback" in verbose.stderr


def test_overrides_and_options_in_any_order():
    for words in (
        ["run", "a.yaml", "x.y=1", "z=2", "--no-prefect"],
        ["run", "--no-prefect", "a.yaml", "x.y=1", "z=2"],
        ["run", "a.yaml", "--no-prefect", "x.y=1", "--json", "z=2"],
        ["run", "a.yaml", "x.y=1", "--direct", "z=2"],  # its former name
    ):
        parsed = parse(words)
        assert (parsed.config, parsed.overrides, parsed.no_prefect) == ("a.yaml", ["x.y=1", "z=2"], True)
    assert parse(["run", "a.yaml"]).overrides == []


def test_an_interruption_after_a_saved_checkpoint():
    saved = Preempted("run x was stopped; the newest checkpoint is at step 7.")
    for signal_like in (KeyboardInterrupt(), Stopped()):
        assert explain(signal_like)[0] in (130, 143)
        signal_like.__context__ = RuntimeError()
        signal_like.__context__.__cause__ = saved
        assert explain(signal_like) == (75, str(saved))


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and re.fullmatch(r"infini-llama \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_help_lists_each_command_in_a_group_and_describes_it(capsys):
    assert main(["help"]) == 0
    text = capsys.readouterr().out
    named = set(re.findall(r"^  (\w+) ", text, re.MULTILINE))
    assert set(commands()) == named and text.count("Example: infini-llama ") == 4
    assert "docs/" not in text and "configs/" not in text, "a path of the repository, which an installation lacks"
    assert main(["help", "generate"]) == 0
    text = capsys.readouterr().out
    assert "usage: infini-llama generate" in text and "(default: 128)" in text


@pytest.mark.parametrize(("name", "instead"), REPLACED.items())
def test_a_former_command_is_answered_with_its_replacement(name, instead, capsys):
    with pytest.raises(SystemExit) as left:
        main([name, "x"])
    assert left.value.code == 64 and f"'infini-llama {instead}'" in capsys.readouterr().err
    assert parse(instead.replace("RUN_OR_DATASET", "x").split()).command in commands()


def test_each_page_that_help_names_is_a_page_of_the_documentation():
    titles = set(re.findall(r"^ +- (.+): \S+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {page for *_, group in GROUPS for _, page in group.values()} <= titles


@pytest.mark.parametrize("words", [["trian", "run.yaml"], ["help", "trian"]])
def test_an_unknown_command_is_answered_with_the_most_similar_one(words, capsys):
    try:
        code = main(words)
    except SystemExit as left:
        code = left.code
    assert code == 64 and "did you mean train?" in capsys.readouterr().err


def test_a_key_may_be_written_as_an_option():
    parsed = parse(["run", "--train.max_steps=5", "tiny", "--data.tokenizer.vocab_size=300", "model.attention=infini"])
    assert parsed.config == "tiny"
    assert set(parsed.overrides) == {"train.max_steps=5", "data.tokenizer.vocab_size=300", "model.attention=infini"}


def test_a_dry_run_prints_a_configuration_that_loads_again(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "tiny", "--dry-run", "--json", "train.max_steps=123", "environment.env.MY_TOKEN=secret"]) == 0
    text = capsys.readouterr().out
    assert "secret" not in text
    Path("again.json").write_text(json.dumps(json.loads(text)["config"]))
    assert load_config("again.json").train == load_config("tiny", ["train.max_steps=123"]).train


def test_a_dry_run_starts_nothing(texts, capsys, monkeypatch):
    monkeypatch.chdir(texts)
    monkeypatch.setenv("INFINI_LLAMA_HOME", str(texts / "home"))
    assert main(["run", "run.yaml", "--dry-run", "--json", "train.max_steps=7", "train.warmup_steps=1"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["config"]["train"]["max_steps"] == 7 and record["plan"]["device"] in ("cpu", "cuda")
    assert record["estimate"]["parameters"]["total"] > 0
    assert record["cached"]["dataset"] is None and record["cached"]["state"] == "new"
    assert not (texts / "home/runs").exists() and not (texts / "home/datasets").exists()
