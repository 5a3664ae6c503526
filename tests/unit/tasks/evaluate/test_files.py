"""Other files are prepared as a run's held-out text is, and measured as its split."""

import json
from random import Random

import pytest

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.flows.cli.main import main
from infini_llama.tasks.evaluate.stage import evaluate, evaluate_files
from infini_llama.tasks.preprocess.stage import preprocess
from support.texts import write_lines
from support.tokenizer_kinds import TEXTS, of_kind
from support.trained_runs import trained_run

WORDS = " ".join(TEXTS[:3]).split()
PACKINGS = ("concat", "window", "greedy", "first_fit", "best_fit", "padded")
ANSWER = {"loss_on": "answer", "answer_after": "cat"}
INFINI = {"attention": "infini", "segment_length": 4}


def write_texts(path, count, seed, column="text"):
    choose = Random(seed)

    def words(most):
        return " ".join(choose.choices(WORDS, k=choose.randint(1, most)))

    return write_lines(
        path, (f"{words(30)} cat {words(9)}" for _ in range(count)), column
    )


@pytest.fixture
def make_run(data, tmp_path, ranks):
    """make(model, **changes): the folder of a run on texts with held-out files of their own."""
    training = write_texts(tmp_path / "training.jsonl", 60, seed=1)
    held_out = write_texts(tmp_path / "held.jsonl", 12, seed=2)

    def make(model=None, **changes):
        name = f"run-{len(list(tmp_path.glob('home/runs/*')))}"
        section = data(
            **({"files": [training], "validation_files": [held_out]} | changes)
        )
        reference = preprocess(section, tmp_path / "home")
        return trained_run(
            tmp_path / "home", reference, section, name, **(model or {})
        )[0]

    return make


@pytest.mark.parametrize("kind", ["byte-level bpe", "llama2", "bert"])
@pytest.mark.parametrize("targets", [{}, ANSWER], ids=["all", "answer"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_runs_own_held_out_files_are_measured_as_its_split(
    make_run, tmp_path, packing, targets, kind
):
    of_kind(kind).save(str(tmp_path / "tokenizer.json"))
    changes = {"stride": 7} if packing == "window" else {}
    tokenizer = {"path": str(tmp_path / "tokenizer.json")}
    run = make_run(packing=packing, tokenizer=tokenizer, **targets, **changes)
    own = evaluate(run)
    files = evaluate_files(run, [str(tmp_path / "held.jsonl")])
    assert files.model == own.model and files.text != own.text
    assert own.model.tokens > 20 and own.model.bytes > 20


def test_filters_duplicates_and_columns_are_those_of_the_run(
    make_run, tmp_path, caplog
):
    held_out = write_texts(tmp_path / "body.jsonl", 12, seed=2, column="body")
    lines = (tmp_path / "body.jsonl").read_text()
    (tmp_path / "body.jsonl").write_text(
        f"{lines}\n{lines}\n" + '{"body": "short"}\n{"body": 3}\n'
    )
    training = write_texts(tmp_path / "training-body.jsonl", 60, seed=3, column="body")
    run = make_run(
        files=[training],
        validation_files=[held_out],
        text_column="body",
        min_length=7,
        deduplicate=True,
        on_bad_input="skip",
    )
    own = evaluate(run).model
    caplog.clear()
    with caplog.at_level("INFO"):
        assert evaluate_files(run, [held_out]).model == own
    (counts,) = [line for line in caplog.messages if "records read" in line]
    assert "body.jsonl" in counts, "what was left out is said, and where"
    with pytest.raises(DataError, match="no tokens"):
        evaluate_files(run, [str(tmp_path / "held.jsonl")])


def test_a_stream_has_the_targets_of_the_documents(make_run, tmp_path):
    run = make_run(model=INFINI, packing="padded", sequence_length=64, **ANSWER)
    held_out = [str(tmp_path / "held.jsonl")]
    in_rows = evaluate_files(run, held_out).memory
    streamed = evaluate_files(run, held_out, stream=True).memory
    assert (streamed.tokens, streamed.bytes) == (in_rows.tokens, in_rows.bytes)
    assert streamed.loss != in_rows.loss, (
        "a document in a row does not follow an end of text"
    )


def test_a_text_shorter_than_a_sequence_is_measured(make_run, tmp_path):
    run = make_run(sequence_length=64)
    (tmp_path / "note.txt").write_text("the cat sat")
    found = evaluate_files(run, [str(tmp_path / "note.txt")]).model
    assert 1 < found.tokens < 12 and 0 < found.bytes <= len("the cat sat")


def test_sources_that_read_otherwise_have_to_be_named(make_run, tmp_path, capsys):
    files = {
        "body": write_texts(tmp_path / "body.jsonl", 60, seed=4, column="body"),
        "plain": write_texts(tmp_path / "plain.jsonl", 60, seed=5),
    }
    body = {"name": "body", "files": [files["body"]], "text_column": "body"} | ANSWER
    plain = {"name": "plain", "files": [files["plain"]]}
    mixed = {"files": [], "validation_files": []}
    run = make_run(sources=[body, plain], packing="padded", **mixed)
    counts = {
        name: evaluate_files(run, [files[name]], source=name).model.tokens
        for name in files
    }
    assert 0 < 2 * counts["body"] < counts["plain"]
    with pytest.raises(ConfigError, match=r"body, plain.*--source"):
        evaluate_files(run, [files["plain"]])
    with pytest.raises(ConfigError, match=r"--source other: .*body, plain"):
        evaluate_files(run, [files["plain"]], source="other")
    arguments = [
        "evaluate",
        str(run),
        "--files",
        files["body"],
        "--source",
        "body",
        "--json",
    ]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["model"]["tokens"] == counts["body"]
    alike = [
        {"name": "a", "files": [files["plain"]]},
        {"name": "b", "files": [str(tmp_path / "training.jsonl")]},
    ]
    run = make_run(sources=alike, packing="padded", **mixed)
    assert evaluate_files(run, [files["plain"]]).model.tokens > counts["body"]
    with pytest.raises(ConfigError, match=r"--source a: .*no source"):
        evaluate_files(make_run(), [files["plain"]], source="a")
