"""Several sources in one dataset: each document's source is known, no row holds two, and the bytes depend on nothing else."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from xxhash import xxh3_128_digest

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.packing import PACKED
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig, PipelineConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.preprocess.corpus import Corpus
from infini_llama.tasks.preprocess.learning import training_texts
from infini_llama.tasks.preprocess.sources.held_out import is_held_out
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.order import representative_rows
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.shards import map_shard
from infini_llama.tasks.report.dataset import describe
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.artifacts import read_dataset
from infini_llama.tasks.train.binding import bind_run
from infini_llama.tasks.train.worker.data.loader import (
    BatchPlan,
    TrainBatches,
    curriculum_stages,
    to_batch,
)
from infini_llama.tasks.verify_data.checks import verify
from support.made_up_runs import add_checkpoint, add_result
from support.one_rank import single_rank
from support.records import make_plan
from support.stages import survey
from support.texts import write_files, write_lines

CPU = torch.device("cpu")


@pytest.fixture
def sources(tmp_path) -> dict[str, dict]:
    """Two sources in different formats: letters only, and digits only."""
    text = tmp_path / "text"
    prose = ("abc-de-fgh-" * (number + 3) + "z" * number for number in range(40))
    write_files(text / "prose", prose)
    lines = (f"{number} 1234 5678 " * (number % 9 + 5) for number in range(60))
    numbers = {
        "files": [write_lines(text / "numbers", lines, "body")],
        "format": "jsonl",
        "text_column": "body",
        "weight": 1,
    }
    return {
        "prose": {
            "name": "prose",
            "files": [str(text / "prose")],
            "weight": 3,
            "license": "CC0-1.0",
        },
        "numbers": {"name": "numbers"} | numbers,
    }


@pytest.fixture
def mixture(data, sources) -> Callable[..., DataConfig]:
    """mixture(*sources, **changes): a `data` section of these sources, by default of both."""
    return lambda *given, **changes: data(
        files=[],
        sources=list(given or sources.values()),
        tokenizer={"vocab_size": 257},
        **changes,
    )


def is_digits(tokens: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.array(
        [set(bytes(table[row[row > 0]])) <= set(b"0123456789 ") for row in tokens]
    )


def bytes_of_tokens(dataset: Path) -> np.ndarray:
    """The byte of each token of a tokenizer of 256 bytes and the end of text."""
    tokenizer = Tokenizer.from_file(str(dataset / "tokenizer.json"))
    return np.array(
        [(tokenizer.decode([number]) or "\0").encode()[0] for number in range(257)],
        dtype=np.uint8,
    )


@pytest.mark.parametrize("strategy", ["concat", "window", *PACKED])
def test_each_row_is_of_one_source_which_the_reader_knows(mixture, tmp_path, strategy):
    settings = mixture(packing=strategy, stride=5 if strategy == "window" else None)
    reference = preprocess(settings, tmp_path)
    folder = tmp_path / reference.path
    assert folder.name.startswith("mixture-")
    table = bytes_of_tokens(folder)
    for split in ("train", "validation"):
        reader = TokenReader(folder, reference.row_table, split)
        assert [source.name for source in reader.sources] == ["numbers", "prose"]
        assert (
            sum(source.rows for source in reader.sources)
            == len(reader)
            == getattr(reference, split).rows
        )
        digits = is_digits(reader.gather(np.arange(len(reader))), table)
        assert (
            digits.tolist()
            == [True] * reader.sources[0].rows + [False] * reader.sources[1].rows
        )
    verify(reference, tmp_path, "deep")


def test_every_document_has_its_source_on_record(mixture, sources, tmp_path):
    reference = preprocess(mixture(), tmp_path)
    folder = tmp_path / reference.path
    manifest = read_dataset(folder)
    table = bytes_of_tokens(folder)
    for split in ("train", "validation"):
        content = manifest.content[split]
        for shard in content.shards:
            values = map_shard(folder / shard.file)[1]
            assert is_digits(values[None], table)[0] == (shard.source == "numbers")
        assert [source.name for source in content.sources] == ["numbers", "prose"]
        assert sum(source.bytes for source in content.sources) == content.bytes
    assert [
        (source.name, source.weight, source.license)
        for source in manifest.meta.provenance.sources
    ] == [
        ("numbers", 1, "not stated"),
        ("prose", 3, "CC0-1.0"),
    ]
    seen = describe(folder)
    assert (
        seen.sources["prose"].license == "CC0-1.0"
        and seen.license == "CC0-1.0; not stated"
    )
    written = seen.to_json()["sources"].values()
    assert (
        sum(source["documents"] + source["validation documents"] for source in written)
        == 100
    )


def test_order_and_weights_of_sources_do_not_change_the_bytes(
    mixture, sources, tmp_path, digests
):
    first = preprocess(mixture(), tmp_path / "one")
    other = [
        sources["numbers"] | {"weight": 9},
        sources["prose"] | {"weight": 0.5, "license": "MIT"},
    ]
    again = preprocess(mixture(*other), tmp_path / "one")
    assert (
        again == changed(first, built=[], text=again.text)
        and again.text.license != first.text.license
    )
    second = preprocess(mixture(*other), tmp_path / "two")
    assert digests(tmp_path / "one" / "datasets") == digests(
        tmp_path / "two" / "datasets"
    )
    renamed = [sources["numbers"], sources["prose"] | {"name": "novels"}]
    assert preprocess(mixture(*renamed), tmp_path / "two").digest != second.digest


def test_batches_have_the_shares_of_the_weights(mixture, tmp_path):
    reference = preprocess(mixture(), tmp_path)
    reader = TokenReader(tmp_path / reference.path, reference.row_table, "train")
    numbers = reader.sources[0].rows
    batches = TrainBatches(
        curriculum_stages(reader, weights={"prose": 3, "numbers": 1}),
        BatchPlan(3, 64, 8, 0, 1),
    )
    for step in range(5):
        assert (batches.rows(64 * step) < numbers).sum() == 16
    first = next(batches.micro_batches(0, torch.device("cpu")))
    assert first.inputs.shape == (8, 16)
    even = TrainBatches(curriculum_stages(reader), BatchPlan(3, len(reader), 1, 0, 1))
    assert sorted(even.rows(0)) == list(range(len(reader)))


def test_text_that_one_source_holds_out_is_in_no_other_ones_training(
    mixture, sources, tmp_path
):
    own = tmp_path / "own.txt"
    own.write_text("held out")
    texts = sorted((tmp_path / "text/prose").iterdir())
    copy = [str(path) for path in texts]
    copied = {
        "name": "copy",
        "files": copy,
        "validation_files": [str(own)],
        "weight": 1,
    }
    corpus = survey(mixture(sources["prose"], copied))
    training, held_out = set(corpus.train), set(corpus.validation)
    assert (
        not training & held_out
        and len(held_out) > 3
        and corpus.report.also_validation == len(held_out) - 1
    )


def test_a_source_too_short_for_a_row_is_named(mixture, sources, tmp_path):
    files = write_files(tmp_path / "short", map(str, range(30)))
    short = {"name": "short", "files": [files], "weight": 1}
    with pytest.raises(DataError, match=r"data\.sources\.short"):
        preprocess(mixture(sources["prose"], short, sequence_length=100), tmp_path)
    missing = {"name": "gone", "files": [str(tmp_path / "gone/*")], "weight": 1}
    with pytest.raises(DataError, match=r"data\.sources\.gone\.files"):
        preprocess(mixture(sources["prose"], missing), tmp_path)


def test_a_source_of_documents_without_a_token_is_named(mixture, sources, tmp_path):
    """Packed, it has no row to draw from, although it has an end of text for each document."""
    tokenizer = Tokenizer(
        models.WordLevel({"</s>": 0, "[UNK]": 1, "abc": 2}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ends = [" " * number for number in range(1, 61)]
    words, blanks = (
        {"name": name, "files": [write_lines(tmp_path / f"{name}.jsonl", lines)]}
        for name, lines in (
            ("words", [f"abc abc{end}" for end in ends]),
            ("blanks", ends),
        )
    )
    given = {
        "tokenizer": {"path": str(tmp_path / "tokenizer.json")},
        "packing": "greedy",
    }
    with pytest.raises(
        DataError,
        match=r"the train text of data\.sources\.blanks has \d+ document\(s\), of which none",
    ):
        preprocess(changed(mixture(words, blanks), **given), tmp_path / "home")
    rows = preprocess(
        changed(mixture(words, blanks), **given | {"packing": "concat"}),
        tmp_path / "home",
    )
    assert rows.train.rows


def test_a_source_whose_held_out_text_has_no_row_is_named(
    mixture, sources, tmp_path, caplog
):
    short = [str(number) for number in range(99)]
    table = np.frombuffer(
        b"".join(xxh3_128_digest(text.encode()) for text in short), np.uint8
    ).reshape(-1, 16)
    by_side = dict(zip(is_held_out(table, 0.1).tolist(), short, strict=True))
    (tmp_path / "held-out.txt").write_text(by_side[True])
    (tmp_path / "trained.txt").write_text(f"{by_side[False]} {'word ' * 99}")
    files = [str(tmp_path / "held-out.txt"), str(tmp_path / "trained.txt")]
    book = {"name": "book", "files": files, "weight": 1}
    settings = mixture(sources["prose"], book, validation_fraction=0.1)
    preprocess(settings, tmp_path / "home")
    warnings = [
        record.message for record in caplog.records if record.levelname == "WARNING"
    ]
    (warning,) = [line for line in warnings if "data.sources." in line]
    assert "data.sources.book" in warning


def test_a_source_without_training_text_is_named(mixture, sources, tmp_path):
    """It may be without held-out text, as any source of few documents is."""
    texts = [f"a book, the {number}th edition" for number in range(99)]
    table = np.frombuffer(
        b"".join(xxh3_128_digest(text.encode()) for text in texts), np.uint8
    ).reshape(-1, 16)
    by_side = dict(zip(is_held_out(table, 0.1).tolist(), texts, strict=True))
    book = {"name": "book", "files": [str(tmp_path / "book.txt")], "weight": 1}
    for text, message in (
        (by_side[True], "held out: 1; copies of others: 0"),
        ("", "held out: 0; copies of others: 0"),
    ):
        (tmp_path / "book.txt").write_text(text)
        with pytest.raises(
            DataError,
            match=rf"data\.sources\.book has no document to train on \({message}\)",
        ):
            preprocess(
                mixture(sources["prose"], book, validation_fraction=0.1),
                tmp_path / "home",
            )
    copy = sources["numbers"] | {"name": "z"}
    with pytest.raises(
        DataError, match=r"data\.sources\.z .*\(held out: 0; copies of others: 60\)"
    ):
        preprocess(
            mixture(sources["numbers"], copy, deduplicate=True), tmp_path / "home"
        )
    (tmp_path / "book.txt").write_text(by_side[False])
    reference = preprocess(
        mixture(sources["prose"], book, validation_fraction=0.1), tmp_path / "home"
    )
    assert (
        describe(tmp_path / "home" / reference.path)
        .sources["book"]
        .validation_documents
        == 0
    )


def test_a_copy_of_held_out_text_of_another_source_does_not_teach_the_tokenizer(
    data, tmp_path
):
    """Of a source that holds out a share; the source with the copies has validation files, and comes before."""
    texts = [f"text number {number} " * 20 for number in range(60)]
    table = np.frombuffer(
        b"".join(xxh3_128_digest(text.encode()) for text in texts), np.uint8
    ).reshape(-1, 16)
    held_out = {
        text
        for text, is_out in zip(texts, is_held_out(table, 0.2), strict=True)
        if is_out
    }
    of_files = {
        "copies": [*texts, "its own"],
        "shared": texts,
        "named": ["held out by its file"],
    }
    files = {
        name: [write_lines(tmp_path / f"{name}.jsonl", lines)]
        for name, lines in of_files.items()
    }
    copies = {
        "name": "copies",
        "files": files["copies"],
        "validation_files": files["named"],
    }
    settings = data(
        files=[],
        sources=[copies, {"name": "shared", "files": files["shared"]}],
        validation_fraction=0.2,
    )
    read = training_texts(Corpus(settings, tmp_path / "home"), [])
    taught = [text.decode() for text in read]
    assert held_out and sorted(taught) == sorted(
        [*(set(texts) - held_out), *(set(texts) - held_out), "its own"]
    )


def test_a_length_in_tokens_counts_the_sources_by_their_weights(
    mixture, sources, tmp_path
):
    """One source's sequences are full of targets, most of the other's have none."""
    few = {"loss_on": "answer", "answer_after": "1234", "weight": 1}
    data = mixture(
        sources["prose"] | {"weight": 9}, sources["numbers"] | few, packing="padded"
    )
    reference = preprocess(data, tmp_path)
    train = {
        "max_tokens": 50_000,
        "warmup_steps": 0,
        "global_batch_size": 10,
        "micro_batch_size": 2,
    }
    config = PipelineConfig.model_validate(
        {"data": data, "train": train, "runtime": {"home": str(tmp_path)}}
    )
    lineage = bind_run(config, reference, make_plan())
    reader = TokenReader(tmp_path / reference.path, reference.row_table, "train")
    batches = TrainBatches(
        curriculum_stages(reader, weights=lineage.dataset.weights),
        BatchPlan(7, 10, 2, 0, 1),
    )
    trained = sum(batches.targets(10 * step) for step in range(lineage.max_steps))
    assert 49_500 < trained < 50_500


@pytest.fixture
def weighted(mixture, sources, tmp_path) -> Callable[..., PipelineConfig]:
    """weighted(prose=, numbers=): a run on both sources, whose sequences have padding."""

    def config(prose: float = 1.0, numbers: float = 1.0, **train) -> PipelineConfig:
        data = mixture(
            sources["prose"] | {"loss_weight": prose},
            sources["numbers"] | {"loss_weight": numbers},
            packing="padded",
            curriculum=[{"sequence_length": 8, "until": 2}],
        )
        train = {"global_batch_size": 8, "max_steps": 20, "warmup_steps": 5} | train
        return PipelineConfig.model_validate(
            {
                "data": data,
                "train": train,
                "runtime": {"home": str(tmp_path), "name": "weighted"},
            }
        )

    return config


@pytest.mark.parametrize("samples", [0, 24])
@pytest.mark.parametrize(("world", "micro"), [(1, 3), (2, 2), (4, 1)])
def test_the_gradient_is_that_of_the_weighted_mean_over_the_targets(
    weighted, tmp_path, world, micro, samples
):
    """In a stage of the curriculum and after it, against the mean over the targets one by one (fp64)."""
    config = weighted(prose=0.5, numbers=6.0)
    reference = preprocess(config.data, tmp_path)

    def reader(row_table: str) -> TokenReader:
        return TokenReader(tmp_path / reference.path, row_table, "train")

    stages = curriculum_stages(
        reader(reference.row_table),
        [(reader(reference.curriculum[0].row_table), 16)],
        {"prose": 3, "numbers": 1},
        bind_run(config, reference, make_plan()).loss_weights,
    )
    of_ranks = [
        TrainBatches(stages, BatchPlan(3, 8, micro, rank, world))
        for rank in range(world)
    ]
    model = Llama(LlamaConfig(257, 16, 32, 1, 2, 1, 16)).double()
    stage = of_ranks[0].stage(samples)
    losses, weights = [], []
    for row in of_ranks[0].rows(samples):
        tokens, mask = stage.reader.gather(row[None]), stage.reader.targets(row[None])
        inputs, labels, *_ = to_batch(tokens, mask, CPU)
        is_target = labels[0] != -100
        logits = model(inputs)[0, is_target]
        losses.append(cross_entropy(logits, labels[0, is_target], reduction="none"))
        loss_weight = 6.0 if row < stage.reader.sources[0].rows else 0.5
        weights.append(torch.full_like(losses[-1], loss_weight))
    losses, weights = torch.cat(losses), torch.cat(weights)
    assert set(weights.tolist()) == {6.0, 0.5}
    ((losses * weights).sum() / weights.sum()).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    strategy, summed = single_rank(model), 0.0
    for batches in of_ranks:
        micro_batches = list(batches.micro_batches(samples, CPU))
        summed += strategy.accumulate(micro_batches, batches.targets(samples)).item()
    assert summed == pytest.approx(losses.sum().item(), rel=1e-6), "which is reported"
    for parameter, other in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, other, rtol=1e-9, atol=1e-12)


def test_loss_weights_that_are_alike_are_none(weighted, tmp_path):
    reference = preprocess(weighted().data, tmp_path)
    for weights in ({}, {"prose": 3.0, "numbers": 3.0}):
        assert (
            bind_run(weighted(**weights), reference, make_plan()).loss_weights is None
        )
    assert preprocess(weighted(prose=2.0).data, tmp_path).digest == reference.digest


@pytest.mark.parametrize("weights", [{"weight": 3}, {"loss_weight": 2}])
def test_weights_for_sources_that_a_named_dataset_lacks_leave_no_run(
    mixture, sources, tmp_path, weights
):
    """With the right dataset, the same `train --dataset` is no other run's."""
    prose, numbers = (
        {key: value for key, value in source.items() if key != "weight"}
        for source in sources.values()
    )
    alike = {"weight": 1} if "weight" in weights else {}
    other = preprocess(mixture(prose), tmp_path)
    config = PipelineConfig.model_validate(
        {
            "data": mixture(prose | weights, numbers | alike),
            "runtime": {"home": str(tmp_path)},
        }
    )
    with pytest.raises(ConfigError, match=r"gives weights to .*'s sources are prose"):
        bind_run(config, other, make_plan())
    assert not RunFolder.of(config.runtime).lineage.exists()


def test_changed_loss_weights_are_logged_and_of_a_finished_run_refused(
    weighted, tmp_path, caplog
):
    reference = preprocess(weighted().data, tmp_path)
    bind_run(weighted(), reference, make_plan())
    assert not caplog.text
    assert bind_run(weighted(prose=2.0), reference, make_plan()).loss_weights == {
        "prose": 2.0,
        "numbers": 1.0,
    }
    line = "data.sources.loss_weight: None before, {'prose': 2.0, 'numbers': 1.0} now"
    assert f"{line}: from here on, the run is no longer bitwise" in caplog.text
    run = RunFolder(tmp_path / "runs" / "weighted")
    add_checkpoint(run.checkpoints, 20)
    add_result(run, 20)
    with pytest.raises(
        ConfigError, match=r"finished at step 20.*\n.*data\.sources\.loss_weight"
    ):
        bind_run(weighted(), reference, make_plan())


def test_a_length_in_tokens_without_targets_is_refused(mixture, tmp_path, monkeypatch):
    data = mixture()
    reference = preprocess(data, tmp_path)
    # Each prompt is longer than a row.
    monkeypatch.setattr(TokenReader, "count_targets", lambda self, rows: 0)
    train = {"max_tokens": 1000, "warmup_steps": 0}
    config = PipelineConfig.model_validate(
        {"data": data, "train": train, "runtime": {"home": str(tmp_path)}}
    )
    with pytest.raises(
        ConfigError,
        match=r"train\.max_tokens=1000 .* no train sequence .* data\.sequence_length",
    ):
        bind_run(config, reference, make_plan())


def test_few_representative_rows_are_of_all_files(data, tmp_path):
    for letter in "abcd":
        lines = (f"{letter * 3} {number} " * 20 for number in range(200))
        write_lines(tmp_path / f"{letter}.jsonl", lines)
    reference = preprocess(
        data(files=[str(tmp_path / "*.jsonl")], validation_fraction=0.5),
        tmp_path / "home",
    )
    reader = TokenReader(
        tmp_path / "home" / reference.path, reference.row_table, "validation"
    )
    rows = representative_rows(reader, len(reader))
    assert sorted(rows.tolist()) == list(range(len(reader))) and len(reader) > 200
    quarters = representative_rows(reader, 40) * 4 // len(reader)
    assert np.bincount(quarters, minlength=4).min() >= 4
    assert representative_rows(reader, 40).tolist() == rows[:40].tolist()


def test_few_representative_rows_are_of_all_sources_in_their_shares(mixture, tmp_path):
    reference = preprocess(mixture(), tmp_path)
    reader = TokenReader(tmp_path / reference.path, reference.row_table, "validation")
    rows, (first, _) = representative_rows(reader, len(reader)), reader.sources
    assert sorted(rows.tolist()) == list(range(len(reader)))
    share = first.rows / len(reader)
    assert 0.1 < share < 0.9
    for number in range(1, len(reader)):
        chosen = representative_rows(reader, number)
        assert chosen.tolist() == rows[:number].tolist()
        assert abs((chosen < first.rows).sum() - share * number) <= 1
