"""The command as a user meets it, called in this process: exit codes, JSON, and which keys and paths an error names."""

import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from infini_llama.configs.errors import Preempted
from infini_llama.configs.loading import load_config
from infini_llama.flows.cli.main import Stopped, explain, main
from infini_llama.tasks.records.machine import Cpu, MachineFacts
from infini_llama.tasks.records.plan import EnvironmentRecord
from infini_llama.tasks.runs.run_folder import RunFolder
from support.damage import flip
from support.records import make_plan


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


@pytest.fixture
def dry_run(command):
    """The record of `run run.yaml --dry-run` with these overrides."""

    def run(*overrides: str) -> dict:
        result = command("run", "run.yaml", "--dry-run", "--json", *overrides)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return run


def test_a_terminal_without_a_character_shows_an_escape(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert main(["help"]) == 0


def output(result: Result) -> str:
    """The last line on stderr, after seeing that no traceback is there."""
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def _texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        words = " ".join(
            f"word{number}{letter} = {letter * 3}" for letter in "abcdefghij"
        )
        (folder / f"{number}.txt").write_text(f"{words}\n" * 5)
    (folder / "run.yaml").write_text(
        "data: {files: ['*.txt'], sequence_length: 16, tokenizer: {vocab_size: 300}, validation_fraction: 0.2}\n"
    )
    return folder


@pytest.fixture
def texts(_texts, tmp_path):
    """A corpus of a few small files, and a configuration that reads it."""
    return shutil.copytree(_texts, tmp_path / "texts")


def test_errors_as_json(command, texts):
    result = command("verify", "nowhere", "--json")
    record = json.loads(result.stdout)
    assert record["exit_code"] == result.returncode == 64
    assert record["error"] in result.stderr


def test_preprocess_verify_report(command, texts):
    built = command("preprocess", "run.yaml", "--json")
    assert built.returncode == 0, built.stderr
    reference = json.loads(built.stdout.splitlines()[-1])
    assert reference["built"] == ["tokens", "row tables"]
    assert len(built.stdout.splitlines()) == 1  # all else is on stderr
    assert json.loads(command("preprocess", "run.yaml", "--json").stdout)["built"] == []

    verified = command("verify", "latest", "--deep", "--html", "checks.html", "--json")
    assert {"tokens", "rows", "text"} < {
        check["name"] for check in json.loads(verified.stdout)["checks"]
    }
    assert json.loads(command("verify", "run.yaml", "--json").stdout)["dataset"] == str(
        texts / "home" / reference["path"]
    )
    inspected = json.loads(
        command("report", "latest", "--html", "dataset.html", "--json").stdout
    )
    assert "<svg" in Path(inspected["report"]).read_text()
    assert inspected["splits"]["train"]["documents"] == reference["train"]["documents"]
    assert "train" in command("report", "latest").stdout

    shard = next((texts / "home" / reference["path"] / "train").glob("*.arrow"))
    flip(shard)
    damaged = command("verify", str(texts / "home" / reference["path"]))
    assert damaged.returncode == 65
    assert shard.name in output(damaged)


def test_init_writes_a_runnable_configuration(command, texts):
    done = command(
        "init", "my.yaml", "--files", "*.txt", "--attention", "infini", "--json"
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["files"] == 40 and record["steps"] >= 20
    small = [
        "data.sequence_length=16",
        "model.segment_length=4",
        "data.tokenizer.vocab_size=300",
    ]
    built = command("preprocess", "my.yaml", *small)
    assert built.returncode == 0, built.stderr
    again = command("init", "my.yaml", "--files", "*.txt")
    assert again.returncode == 64 and "my.yaml already exists" in output(again)
    assert command("init", "other.yaml", "--files", "nothing").returncode == 65


def test_a_home_without_runs(command, texts):
    for words, said_there in (
        (["runs"], "or set INFINI_LLAMA_HOME"),
        (["gc"], "nothing to delete"),
    ):
        result = command(*words)
        assert result.returncode == 0 and said_there in result.stdout, result.stderr
    assert json.loads(command("runs", "--json").stdout)["runs"] == []


def test_errors_show_a_traceback_only_with_verbose(command, texts):
    (texts / "home").mkdir()
    (texts / "home" / "locks").write_text("a file where a folder should be")
    quiet, verbose = (
        command("preprocess", "run.yaml", *more) for more in ([], ["--verbose"])
    )
    assert quiet.returncode == verbose.returncode == 64
    assert str(texts / "home" / "locks") in output(quiet) and "Traceback" not in output(
        quiet
    )
    assert "Traceback" in verbose.stderr
    assert explain(ZeroDivisionError("0"), is_resumed=True)[0] == 70


def test_an_interruption_after_a_saved_checkpoint():
    saved = Preempted("run x was stopped; the newest checkpoint is at step 7.")
    for signal_like in (KeyboardInterrupt(), Stopped()):
        assert explain(signal_like, is_resumed=False)[0] in (130, 143)
        assert explain(signal_like, is_resumed=True)[0] == 75
        signal_like.__context__ = RuntimeError()
        signal_like.__context__.__cause__ = saved
        assert explain(signal_like, is_resumed=True) == (75, str(saved))


def test_a_dry_run_prints_a_configuration_that_loads_again(command):
    overrides = ["train.max_steps=123", "environment.env.MY_TOKEN=secret"]
    text = command("run", "tiny", "--dry-run", "--json", *overrides).stdout
    assert "secret" not in text
    Path("again.json").write_text(json.dumps(json.loads(text)["config"]))
    assert (
        load_config("again.json").train
        == load_config("tiny", ["train.max_steps=123"]).train
    )


def test_a_dry_run_starts_nothing(texts, dry_run):
    record = dry_run("train.max_steps=7", "train.warmup_steps=1")
    assert record["config"]["train"]["max_steps"] == 7 and record["plan"]["device"] in (
        "cpu",
        "cuda",
    )
    assert record["estimate"]["parameters"]["total"] > 0
    assert record["cached"]["dataset"] is None and record["cached"]["state"] == "new"
    assert (
        record["chosen"][0]["setting"] == "data.num_workers"
        and len(record["chosen"]) > 1
    )
    assert not (texts / "home/runs").exists() and not (texts / "home/datasets").exists()


def test_a_dry_run_and_doctor_plan_for_the_vocabulary_of_a_given_tokenizer(
    command, dry_run, texts
):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(
            {token: number for number, token in enumerate([*alphabet, "</s>"])}, []
        )
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(texts / "bytes.json"))
    overrides = [
        "data.tokenizer.path=bytes.json",
        "data.tokenizer.vocab_size=60000",
        "train.loss_chunk=auto",
    ]
    sizes = [
        "data.sequence_length=1024",
        "train.global_batch_size=1",
        "train.micro_batch_size=1",
        "environment.device=cpu",
    ]
    record = dry_run(*overrides, *sizes)
    assert (
        record["plan"]["loss_chunk"] == record["estimate"]["layout"]["loss_chunk"] == 0
    )
    for path, chunk in (
        ("bytes.json", 0),
        ("absent.json", 512),
    ):  # until it is there, that of the configuration
        given = [*overrides, *sizes, f"data.tokenizer.path={path}"]
        report = json.loads(
            command("doctor", "run.yaml", "--json", *given).stdout.splitlines()[-1]
        )
        assert report["plan"]["loss_chunk"] == chunk


@pytest.mark.parametrize("setting", ["threads=4000", "attention_backend=flash2"])
def test_a_dry_run_shows_the_plans_warnings_and_that_this_machine_cannot_run_it(
    command, dry_run, setting
):
    overrides = ["environment.device=cpu", f"environment.{setting}"]
    (finding,) = dry_run(*overrides)["plan"]["findings"]
    shown = command("run", "run.yaml", "--dry-run", *overrides)
    assert shown.returncode == 0 and finding["sentence"] in " ".join(
        shown.stdout.split()
    )


def test_a_dry_run_shows_what_the_first_attempt_has_pinned(texts, dry_run):
    run, plan = RunFolder(texts / "home/runs/run"), make_plan(threads=3)
    facts = MachineFacts(
        python="3.12", cpu=Cpu(model="one"), cores=2, versions={}, gpus=()
    )
    record = EnvironmentRecord(
        plan=plan,
        facts=facts,
        pinned=plan.pinned(),
        pinned_at="2026-01-01T00:00:00+00:00",
    )
    run.path.mkdir(parents=True)
    run.write(run.environment, record)
    assert dry_run("environment.device=cpu")["plan"]["threads"] == 3
