"""The command as a user meets it: real processes, their exit codes and their words."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infini_llama.configs.errors import Preempted
from infini_llama.configs.loading import load_config
from infini_llama.flows.cli.commands import COMMANDS
from infini_llama.flows.cli.main import Stopped, explain, main, parse

ROOT = Path(__file__).parents[4]


def command(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    clean = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(cwd),
        "PYTHONPATH": str(ROOT / "src"),
        "INFINI_LLAMA_HOME": str(cwd / "home"),
    }
    return subprocess.run(
        [sys.executable, "-m", "infini_llama", *words],
        cwd=cwd,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def said(result: subprocess.CompletedProcess) -> str:
    """The last line on stderr, after seeing that no traceback is there."""
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


@pytest.fixture
def texts(tmp_path):
    """A corpus of a few small files, and a configuration that reads it."""
    for number in range(40):
        words = " ".join(f"word{number}{letter} = {letter * 3}" for letter in "abcdefghij")
        (tmp_path / f"{number}.txt").write_text(f"{words}\n" * 5)
    (tmp_path / "run.yaml").write_text(
        "data: {files: ['*.txt'], sequence_length: 16, tokenizer: {vocab_size: 300}, validation_fraction: 0.2}\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("run",),
        ("generate",),
        ("inspect",),
        ("doctor",),
        ("export",),
        ("import",),
        ("estimate",),
        ("report",),
        ("compare",),
        ("runs",),
        ("gc",),
        ("config",),
    ],
)
def test_help_imports_nothing_heavy(tmp_path, words):
    heavy = [
        "torch",
        "prefect",
        "datasets",
        "transformers",
        "pydantic",
        "numpy",
        "yaml",
        "rich",
        "tokenizers",
        "pyarrow",
    ]
    check = (
        "import sys; from infini_llama.flows.cli.main import main\n"
        f"try: main([*{words!r}, '--help'])\n"
        "except SystemExit as leave: assert leave.code == 0\n"
        f"loaded = [name for name in {heavy!r} if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", check],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "usage: infini-llama" in result.stdout


def test_help_answers_at_once(tmp_path):
    began = time.perf_counter()
    assert command("--help", cwd=tmp_path).returncode == 0
    print(f"infini-llama --help: {time.perf_counter() - began:.3f} s")  # measured, not asserted


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["run", "missing.yaml"], 64, "missing.yaml does not exist"),
        (["run", "run.yaml", "train.max_stps=3"], 64, "did you mean train.max_steps?"),
        (["preprocess", "run.yaml", "environment.nproc_per_node=0"], 64, "environment.nproc_per_node"),
        (["preprocess", "run.yaml", "data.tokenizer.vocab_size=256"], 64, "data.tokenizer.vocab_size"),
        (["preprocess", "run.yaml", "data.files=[nothing/*.txt]"], 65, "nothing/*.txt"),
        (["preprocess", "run.yaml", "data.sequence_length=100000"], 65, "data.sequence_length=100000"),
        (["train", "run.yaml"], 65, "run 'infini-llama preprocess run.yaml'"),
        (["verify", "nowhere"], 64, "'nowhere' is neither a folder nor the name of one"),
        (["evaluate", ".", "--stream"], 64, "--stream needs --files"),
        (["evaluate", "."], 64, "is no run folder (it has no lineage.json)"),
        (["passkey", "."], 64, "is no run folder (it has no lineage.json)"),
        (["passkey", "x", "--depths", "2"], 64, "2 must be from 0 to 1"),
        (["compare", "."], 64, "compare was given 1 run(s); name between 2 and 8"),
        (["gc", "--keep-checkpoints", "1"], 64, "--keep-checkpoints: 1 must be at least 2"),
        (["report", "."], 64, "is no run folder (it has no lineage.json)"),
        (["inspect", "nowhere"], 64, "'nowhere' is neither a folder nor the name of one"),
        (["generate", "nowhere", "--prompt", "x"], 64, "'nowhere' is neither a folder nor the name of one"),
        (["generate", ".", "--prompt-file", "nowhere.txt"], 64, "--prompt-file nowhere.txt cannot be read"),
        (["generate", "."], 64, "generate has nothing to continue; give --prompt TEXT"),
        (["generate", "x", "--prompt", "x", "--min-p", "0"], 64, "0 must be above 0 and at most 1"),
        (["generate", "x", "--prompt", "x", "--repetition-penalty", "0"], 64, "0 must be above 0"),
        (["generate", "x", "--prompt", "x", "--stop", ""], 64, "an empty one would end every text at once"),
        (["generate", "x", "--prompt", "x", "--top-p", "2"], 64, "2 must be above 0 and at most 1"),
        (["run"], 64, "the following arguments are required: CONFIG"),
        (["run", "run.yaml", "--fast"], 64, "unrecognized arguments: --fast"),
        (["inspect", "x", "a=b"], 64, "unrecognized arguments: a=b"),
        (["nonsense"], 64, "unknown command 'nonsense'"),
    ],
)
def test_wrong_input_gets_a_sentence_and_its_code(texts, words, code, sentence):
    result = command(*words, cwd=texts)
    assert sentence in said(result)
    assert result.returncode == code
    assert result.stdout == ""


def test_three_bad_values_are_reported_at_once(texts):
    result = command(
        "run", "run.yaml", "model.hidden_size=-1", "train.learning_rate=fast", "data.strategy=none", cwd=texts
    )
    assert result.returncode == 64
    for key in ("model.hidden_size", "train.learning_rate", "data.strategy"):
        assert key in result.stderr


def test_a_file_that_is_not_utf8(texts):
    (texts / "latin.txt").write_bytes(b"caf\xe9")
    result = command("preprocess", "run.yaml", cwd=texts)
    assert result.returncode == 65
    assert "latin.txt" in said(result)


def test_no_space_on_the_device(texts):
    """A limit on the size of files stands for a full disk; Python gets EFBIG where it would get ENOSPC."""
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from infini_llama.flows.cli.main import main; sys.exit(main(['preprocess', 'run.yaml']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", limited],
        cwd=texts,
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 70
    assert "no space" in said(result)
    again = command("preprocess", "run.yaml", cwd=texts, INFINI_LLAMA_HOME=str(texts / "workspace"))
    assert again.returncode == 0, again.stderr


def test_errors_as_json(texts):
    result = command("verify", "nowhere", "--json", cwd=texts)
    record = json.loads(result.stdout)
    assert record["exit_code"] == result.returncode == 64
    assert record["error"] in result.stderr


def test_preprocess_verify_inspect(texts):
    built = command("preprocess", "run.yaml", "--json", cwd=texts)
    assert built.returncode == 0, built.stderr
    reference = json.loads(built.stdout.splitlines()[-1])
    assert reference["built"] == ["tokens", "chunks"]
    assert len(built.stdout.splitlines()) == 1  # all else is on stderr
    assert json.loads(command("preprocess", "run.yaml", "--json", cwd=texts).stdout)["built"] == []

    verified = command("verify", "latest", "--deep", "--html", "checks.html", "--json", cwd=texts)
    assert json.loads(verified.stdout)["ok"] is True
    inspected = json.loads(command("inspect", "latest", "--json", cwd=texts).stdout)
    assert inspected["splits"]["train"]["documents"] == reference["train"]["documents"]
    assert "train" in command("inspect", "latest", cwd=texts).stdout

    shard = next((texts / "home" / reference["path"] / "train").glob("*.arrow"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    damaged = command("verify", str(texts / "home" / reference["path"]), cwd=texts)
    assert damaged.returncode == 65
    assert shard.name in said(damaged)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(tmp_path, shell):
    result = command("completion", shell, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for word in ("preprocess", "passkey", "keep-checkpoints", "unused-datasets"):
        assert word in result.stdout


def test_init_writes_what_run_can_read(texts):
    done = command("init", "my.yaml", "--files", "*.txt", "--attention", "infini", "--json", cwd=texts)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["files"] == 40 and record["steps"] == 200
    small = ["data.sequence_length=16", "model.segment_length=4", "data.tokenizer.vocab_size=300"]
    built = command("preprocess", "my.yaml", *small, cwd=texts)
    assert built.returncode == 0, built.stderr
    again = command("init", "my.yaml", "--files", "*.txt", cwd=texts)
    assert again.returncode == 64 and "my.yaml exists already" in said(again)
    silent = command("init", "other.yaml", cwd=texts)
    assert silent.returncode == 64 and "name it with --files PATH" in said(silent)
    assert command("init", "other.yaml", "--files", "nothing", cwd=texts).returncode == 65


def test_a_home_without_runs(texts):
    for words, said_there in ((["runs"], "or set INFINI_LLAMA_HOME"), (["gc"], "nothing to delete")):
        result = command(*words, cwd=texts)
        assert result.returncode == 0 and said_there in result.stdout, result.stderr
    assert json.loads(command("runs", "--json", cwd=texts).stdout)["runs"] == []


def test_unexpected_errors_have_a_traceback_only_when_asked_for(texts):
    (texts / "home").mkdir()
    (texts / "home" / "locks").write_text("a file where a folder should be")
    quiet, verbose = (command("preprocess", "run.yaml", *more, cwd=texts) for more in ([], ["--verbose"]))
    assert quiet.returncode == verbose.returncode == 70
    assert "unexpected FileExistsError" in said(quiet)
    assert "Traceback" in verbose.stderr


def test_overrides_and_options_in_any_order():
    for words in (
        ["run", "a.yaml", "x.y=1", "z=2", "--direct"],
        ["run", "--direct", "a.yaml", "x.y=1", "z=2"],
        ["run", "a.yaml", "--direct", "x.y=1", "--json", "z=2"],
        ["run", "a.yaml", "x.y=1", "--direct", "z=2"],
    ):
        parsed = parse(words)
        assert (parsed.config, parsed.overrides, parsed.direct) == ("a.yaml", ["x.y=1", "z=2"], True)
    assert parse(["run", "a.yaml"]).overrides == []


def test_an_interruption_behind_which_a_checkpoint_was_saved():
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
    assert set(COMMANDS) <= named and text.count("for example: infini-llama ") == 4
    assert all(Path(ROOT, page).is_file() for page in re.findall(r"\((docs/.*\.md)\)", text))
    assert main(["help", "generate"]) == 0
    text = capsys.readouterr().out
    assert "usage: infini-llama generate" in text and "(default: 128)" in text and "docs/evaluation.md" in text


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


def test_config_show_prints_yaml_that_loads_again(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["config", "show", "tiny", "train.max_steps=123", "environment.env.MY_TOKEN=secret"]) == 0
    text = capsys.readouterr().out
    assert "secret" not in text
    Path("again.yaml").write_text(text)
    assert load_config("again.yaml").train == load_config("tiny", ["train.max_steps=123"]).train


def test_a_dry_run_starts_nothing(texts, capsys, monkeypatch):
    monkeypatch.chdir(texts)
    monkeypatch.setenv("INFINI_LLAMA_HOME", str(texts / "home"))
    assert main(["run", "run.yaml", "--dry-run", "--json", "train.max_steps=7", "train.warmup_steps=1"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["config"]["train"]["max_steps"] == 7 and record["plan"]["device"] in ("cpu", "cuda")
    assert record["estimate"]["parameters"]["total"] > 0
    assert record["cached"]["dataset"] is None and record["cached"]["state"] == "new"
    assert not (texts / "home/runs").exists() and not (texts / "home/datasets").exists()
