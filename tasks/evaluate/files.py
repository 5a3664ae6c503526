"""Other files than a run's own, prepared as its held-out text is."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from infini_llama.configs.errors import ConfigError, DataError, disk_full_as, portable
from infini_llama.configs.packing import PACKED
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig
from infini_llama.configs.schema.sources import TextConfig
from infini_llama.tasks.preprocess.corpus import Corpus, OfSource
from infini_llama.tasks.preprocess.rows.tables import build_table, lengths_by_source
from infini_llama.tasks.preprocess.sources.files import File
from infini_llama.tasks.preprocess.sources.patterns import NotText, matching_files
from infini_llama.tasks.preprocess.sources.sources import sections
from infini_llama.tasks.preprocess.stage import log_left_out
from infini_llama.tasks.preprocess.tokens.dataset import (
    SourceUnit,
    select,
    write_content,
    write_splits,
)
from infini_llama.tasks.preprocess.tokens.parts import parts_of
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.shards import save_array
from infini_llama.tasks.preprocess.tokens.targets import targets_of
from infini_llama.tasks.preprocess.tokens.units import open_unit, recipe_for
from infini_llama.tasks.records.manifest import (
    BySplit,
    DatasetMeta,
    RowTableContent,
    RowTableMeta,
)
from infini_llama.tasks.runs.reading import Reading
from infini_llama.tasks.storage.artifacts import (
    ROW_TABLES,
    commit,
    read_dataset,
    staged,
)
from infini_llama.tasks.tokenizers.engines import reference_engine

log = logging.getLogger("infini_llama.evaluate")
KEY = "--files"
SPLIT = "validation"
TABLE = "rows"  # the only one of the dataset of these files


def section_of(reading: Reading, source: str | None) -> TextConfig:
    """The section by which other files are read: that of one of the run's sources.

    Args:
        source: its name in data.sources; None: it is the only one, or all read files alike.

    Raises:
        ConfigError: there is no such source, or it has to be named.
    """
    by_name = sections(reading.data)
    names = ", ".join(by_name)
    if source is None:
        first, *others = by_name.values()
        if any(_manner(other) != _manner(first) for other in others):
            raise ConfigError(
                f"--files: the sources of the run read text in different ways ({names}); "
                "name the one whose way is to be used with --source."
            )
        return first
    if source not in by_name or not source:
        has = (
            f"its sources are {names}"
            if reading.data.sources
            else "it has one source; remove it"
        )
        raise ConfigError(
            f"--source {source}: the run has no source of this name; {has}."
        )
    return by_name[source]


def _manner(section: TextConfig) -> tuple[str, ...]:
    """The settings by which a file is read and its targets are chosen."""
    return (section.text_column, section.format, section.loss_on, section.answer_after)


def with_all_targets(data: DataConfig) -> DataConfig:
    """The same sources, in whose texts every token is a target."""
    everything = {"loss_on": "all", "answer_after": ""}
    if not data.sources:
        return changed(data, **everything)
    return changed(
        data, sources=[changed(source, **everything) for source in data.sources]
    )


@contextmanager
def prepared(
    reading: Reading,
    section: TextConfig,
    patterns: list[str],
    rows: RowTableContent,
    home: Path,
) -> Generator[TokenReader]:
    """The files' text as rows, prepared as held-out text is: filters, duplicates, targets, packing.

    The rows are in a temporary folder while the context lasts.

    Args:
        section: of `section_of`.
        patterns: in the forms of data.files.
        rows: strategy and length of the run's rows.
        home: of runs and datasets, whose files are no text.

    Raises:
        DataError: nothing matches, a file cannot be read, its texts lack what ends their prompt, or
            the tokenizer has no token for too much of it.
    """
    with (
        TemporaryDirectory(prefix="infini-llama-") as folder,
        disk_full_as(f"the text of {KEY} in {folder}"),
    ):
        dataset = Path(folder) / "dataset"
        _write_tokens(reading, section, patterns, dataset, home)
        _write_rows(dataset, rows)
        yield TokenReader(dataset, TABLE, SPLIT)


def _write_tokens(
    reading: Reading,
    section: TextConfig,
    patterns: list[str],
    dataset: Path,
    home: Path,
) -> None:
    """Write the token level of a dataset whose held-out split is the text of the files."""
    encoder = reading.encoder
    tokenizer = encoder.tokenizer
    files = [
        File(path, portable(name), section.text_column, KEY, section.format)
        for path, name in matching_files(patterns, KEY, section.format, NotText(home))
    ]
    source = OfSource(
        name="", training=[], validation=parts_of(files, 1.0, targets_of(section))
    )
    # The folder is on this machine alone.
    corpus = Corpus(changed(reading.data, engine="local"), dataset.parent, [source])
    recipe = recipe_for(
        dataset.parent,
        tokenizer,
        reading.end_of_text,
        reference_engine(),
        encoder.split_special_tokens,
    )
    corpus.prepare(recipe)
    corpus.inexpressible(recipe)
    has_loss_mask = section.loss_on != "all"
    names = corpus.units_by_source()[0].validation
    units = [SourceUnit("", open_unit(recipe, name), has_loss_mask) for name in names]
    selection = select([unit.unit for unit in units], reading.data.deduplicate)
    log_left_out(corpus.left_out(selection.duplicates, selection.also_validation))
    with staged(dataset) as new:
        written = write_splits(
            units, selection, new, tokenizer.get_vocab_size(), has_loss_mask
        )
        if not written[SPLIT].shards:
            raise DataError(
                f"{KEY}: the text has no tokens to predict; use a longer text."
            )
        content = write_content(
            new, units, selection, written, tokenizer, recipe, has_loss_mask
        )
        meta = DatasetMeta(infini_llama=version("infini-llama"))
        checksums = {shard.file: shard.checksum for shard in written[SPLIT].shards}
        commit(new, dataset, "dataset", meta.to_json(), content.to_json(), checksums)


def _write_rows(dataset: Path, rows: RowTableContent) -> None:
    """Write the row table of the files' text.

    Text that is too short for one row of a window strategy is one padded row.
    """
    content = read_dataset(dataset).content
    lengths = lengths_by_source(dataset, content.validation.shards)
    strategy = rows.strategy
    if strategy not in PACKED and content.validation.tokens <= rows.sequence_length:
        log.info(
            "the text has %d tokens, fewer than a sequence of %d has: it is one shorter sequence",
            content.validation.tokens,
            rows.sequence_length,
        )
        strategy = "greedy"
    stride = rows.stride if strategy == rows.strategy else None
    table = build_table(lengths, strategy, rows.sequence_length, stride)
    if not table.rows:
        raise DataError(f"{KEY}: the text has no tokens to predict; use a longer text.")
    facts = RowTableContent(
        strategy=strategy,
        sequence_length=rows.sequence_length,
        rows=BySplit(train=0, validation=table.rows),
        stride=stride,
    )
    target = dataset / ROW_TABLES / TABLE
    with staged(target) as folder:
        for name, array in table.arrays.items():
            save_array(folder / f"{SPLIT}.{name}.npy", array)
        meta = RowTableMeta(infini_llama=version("infini-llama"))
        commit(folder, target, ROW_TABLES, meta.to_json(), facts.to_json())
