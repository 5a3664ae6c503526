"""The preprocess stage: text becomes units, and units become the dataset that other stages take.

The text is listed in parts (corpus, tokens/parts). Each part is read into units (tokens/units),
which are kept in a store. A selection of their documents is the dataset artifact (tokens/dataset),
over whose tokens the row tables (rows/tables) are computed.
"""

import logging
import multiprocessing
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers as tokenizers_library
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError, disk_full_as
from infini_llama.configs.packing import ON_A_GPU
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.corpus import Corpus, tokens_key
from infini_llama.tasks.preprocess.learning import load_or_learn
from infini_llama.tasks.preprocess.rows.references import dataset_ref
from infini_llama.tasks.preprocess.rows.tables import (
    require_device,
    row_table_key,
    with_curriculum,
    write_table,
)
from infini_llama.tasks.preprocess.sources.sources import describe, sections
from infini_llama.tasks.preprocess.spelled import spelled_special_tokens
from infini_llama.tasks.preprocess.tokens.dataset import (
    Selection,
    SourceUnit,
    WrittenSplit,
    select,
    write_content,
    write_splits,
)
from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.preprocess.tokens.units import Recipe, open_unit, recipe_for
from infini_llama.tasks.records.dataset import (
    DatasetPlan,
    DatasetRef,
    PlannedTable,
    TextSummary,
)
from infini_llama.tasks.records.decision import Decision
from infini_llama.tasks.records.manifest import (
    SPLITS,
    DatasetMeta,
    EngineChoice,
    LeftOut,
)
from infini_llama.tasks.storage.artifacts import (
    ROW_TABLES,
    Damaged,
    check,
    commit,
    file_checksum,
    has_all_files,
    move_aside,
    read_dataset,
    read_row_table,
    row_tables,
    set_pointer,
    staged,
)
from infini_llama.tasks.storage.dataset_files import repairable
from infini_llama.tasks.storage.files import mark_used
from infini_llama.tasks.storage.filesystem import (
    require_folder,
    require_temporary_folder,
)
from infini_llama.tasks.storage.locks import FOREVER, Busy, Lock
from infini_llama.tasks.tokenizers.engines import (
    REFERENCE,
    WORTH_A_FAST_ENGINE,
    EngineDiffers,
    choose_engine,
    reference_engine,
    remember_comparison,
)
from infini_llama.tasks.tokenizers.tokenizer import end_of_text

log = logging.getLogger("infini_llama.preprocess")
SHOWN_TOKENS = 5  # in a message


def preprocess(data: DataConfig, home: Path, repair: bool = False) -> DatasetRef:
    """Build the dataset of a text where it is missing; see `Preparation.build`."""
    return Preparation(data, home).build(repair)


@dataclass(frozen=True)
class _Tokenization:
    """The means by which the text was tokenized.

    Attributes:
        workers: how many were chosen; None: none were needed, or data.num_workers says it.
    """

    tokenizer: Tokenizer
    recipe: Recipe
    engine: EngineChoice
    workers: Decision | None


class Preparation:
    """The dataset of a text.

    Attributes:
        of_run: the dataset of a run that has begun, to use instead of today's text.
        aside: where `build` has moved a damaged dataset, whose row tables may be whole.
    """

    def __init__(self, data: DataConfig, home: Path) -> None:
        self.data = data
        self.home = home
        self.of_run: DatasetRef | None = None
        self.aside: Path | None = None

    @cached_property
    def corpus(self) -> Corpus:
        """Today's text, listed when it is first used.

        Raises:
            DataError: no text.
        """
        return Corpus(self.data, self.home)

    def plan(self) -> DatasetPlan:
        """The dataset that `build` would build. Text that is not known is read, and not tokenized.

        Raises:
            DataError: no text, or unreadable text.
        """
        self.corpus.read()
        return self._planned()

    def lookup(self) -> DatasetRef | None:
        """The reference of the complete dataset. No text is read.

        None if the dataset is incomplete, or if only reading the text would show it.
        """
        if self.of_run is not None:
            return self.of_run
        if not self.corpus.recall():
            return None
        planned = self._planned()
        return (
            self._reference(planned, built=[]) if self._is_complete(planned) else None
        )

    def build(self, repair: bool = False) -> DatasetRef:
        """Build the token level and the row tables where they are missing.

        The same input gives the same bytes.

        Two builders of the same text and settings: one builds, the other waits for it. Others share
        the store of units, and wait for each other only where they build the same dataset. What a
        killed build has finished is in the store, and the next one does the rest.

        Args:
            repair: verify every checksum of the dataset, and of its units if it is damaged. Only
                damaged units are encoded again; a damaged dataset is assembled from its units, and
                its row tables are rebuilt if one of its shards is damaged.

        Returns:
            the reference that the other stages take: path below home, digests, and the facts of
            both splits.

        Raises:
            ConfigError: the filesystem of the home folder lacks what a dataset needs.
            DataError: unreadable text, or too little for one row.
            PipelineError: no space left; nothing half-written is used.
        """
        require_folder(self.home)
        require_temporary_folder()
        datasets = self.home / "datasets"
        with disk_full_as(f"the dataset in {datasets}"):
            reference = self.of_run or self._build(repair)
            set_pointer(datasets, "latest", reference.name)
            mark_used(self.home / reference.path)
        log_left_out(reference.text.left_out)
        meta = read_dataset(self.home / reference.path).meta
        if meta.inexpressible.files:
            log.warning("%s; a tokenizer over bytes loses none", meta.inexpressible)
        if meta.spelled_special_tokens:
            log.warning(
                "documents spell special tokens of the tokenizer (%s), which are encoded as text, "
                "also in prompts; where they are control tokens, set "
                "data.tokenizer.split_special_tokens=false",
                ", ".join(meta.spelled_special_tokens[:SHOWN_TOKENS]),
            )
        warn_of_rows_without_targets(self.home / reference.path, reference)
        built = reference.built
        log.info(
            "dataset %s: %s",
            reference.name,
            "built " + " and ".join(built) if built else "complete, nothing to do",
        )
        return reference

    def _build(self, repair: bool) -> DatasetRef:
        """The dataset of today's text, complete."""
        locks = self.home / "locks"
        with (
            _locked(locks / f"prepare-{self.corpus.listing_key()[:12]}.lock"),
            # `gc` deletes no unit meanwhile, also none that another preparation reads.
            Lock(locks / "units.lock", wait=FOREVER, shared=True),
        ):
            self.corpus.read_unreachable_again()
            if repair:
                planned = self.plan()
                with self._locked_dataset(planned):
                    self._set_damaged_aside(planned)
            reference = self.lookup()
            if reference is not None:
                return reference
            if self.data.packing in ON_A_GPU:
                require_device(self.data.device)  # before the work
            tokenized = self._tokenize(repair)
            planned = self._planned()
            with self._locked_dataset(planned):
                built = self._build_missing(planned, tokenized)
                return self._reference(planned, built)

    def _locked_dataset(self, planned: DatasetPlan) -> AbstractContextManager[None]:
        """The lock of the dataset's folder.

        The same text at other places has the same dataset, and another lock around its preparation.
        """
        return _locked(self.home / "locks" / f"dataset-{planned.key[:12]}.lock")

    def _planned(self) -> DatasetPlan:
        corpus = self.corpus
        if not any(report.units for report in corpus.used_reports().values()):
            log_left_out(corpus.left_out())
            raise DataError(
                "all of the text is empty or skipped (data.min_length, data.on_bad_input), "
                "so there is none to train on; name other text."
            )
        key = tokens_key(self.data, corpus.units_by_source())
        first, *stages = [
            PlannedTable(row_table_key=row_table_key(section, key))
            for section in with_curriculum(self.data)
        ]
        return DatasetPlan(
            key=key,
            table=first,
            curriculum=tuple(stages),
            name=f"{'mixture' if self.data.sources else self.data.source}-{key[:12]}",
        )

    def _folder(self, planned: DatasetPlan) -> Path:
        return self.home / "datasets" / planned.name

    def _is_complete(self, planned: DatasetPlan) -> bool:
        folder = self._folder(planned)
        return has_all_files(folder, "dataset", planned.key) and all(
            has_all_files(
                folder / ROW_TABLES / table.row_table, ROW_TABLES, table.row_table_key
            )
            for table in planned.row_tables
        )

    def _reference(self, planned: DatasetPlan, built: list[str]) -> DatasetRef:
        folder = self._folder(planned)
        tables = folder / ROW_TABLES
        stages = [tables / stage.row_table for stage in planned.curriculum]
        reference = dataset_ref(
            folder, tables / planned.table.row_table, self.home, built, stages
        )
        provenance = describe(self.data)
        at_its_build = reference.text.left_out
        # These two counts follow from the dataset; all others are of the text as it is today.
        left_out = self.corpus.left_out(
            at_its_build.duplicates, at_its_build.also_validation
        )
        text = TextSummary(
            source=provenance.source,
            license=provenance.license,
            left_out=left_out,
        )
        return changed(reference, text=text)

    def _set_damaged_aside(self, planned: DatasetPlan) -> None:
        """Move aside what does not have the bytes of its manifest.

        Units that are damaged, too, are found when they are used.
        """
        folder = self._folder(planned)
        artifacts = [
            *((table, ROW_TABLES, None) for table in row_tables(folder)),
            (folder, "dataset", planned.key),
        ]
        for path, kind, key in artifacts:
            try:
                if path.exists():
                    check(path, kind, checksums=True, key=key)
            except Damaged as fault:
                aside = move_aside(path)
                log.warning("%s It was moved to %s.", fault, aside)
                if kind == "dataset":
                    self.aside = aside

    def _tokenize(self, repair: bool) -> _Tokenization:
        """Write the units that are missing, and with `repair` those of which a byte is wrong."""
        corpus = self.corpus
        notes = self.home / "engine-checks"
        tokenizer = load_or_learn(corpus)
        eos = end_of_text(tokenizer, self.data.tokenizer)
        split_special_tokens = self.data.tokenizer.split_special_tokens
        choose = partial(choose_engine, tokenizer, split_special_tokens, notes)
        is_small = 0 < corpus.size < WORTH_A_FAST_ENGINE
        while True:
            engine = reference_engine() if is_small else choose()
            recipe = recipe_for(self.home, tokenizer, eos, engine, split_special_tokens)
            try:
                workers = corpus.prepare(recipe, repair)
            except EngineDiffers as fault:
                remember_comparison(tokenizer, split_special_tokens, notes, str(fault))
            else:
                # Perhaps another preparation with this recipe has met a difference meanwhile.
                if engine.name == REFERENCE or choose() == engine:
                    return _Tokenization(tokenizer, recipe, engine, workers)
            # Its units may be wrong. They stay, since another preparation may read them; no later
            # one uses them, and `gc` deletes them.
            log.warning("all of the text is encoded again with another engine")

    def _build_missing(
        self, planned: DatasetPlan, tokenized: _Tokenization
    ) -> list[str]:
        """Build the levels of the dataset that are missing or lack files of their manifests.

        Returns:
            names of these levels.
        """
        built: list[str] = []
        folder = self._folder(planned)
        if not has_all_files(folder, "dataset", planned.key):
            aside = _clear(folder) or self.aside
            self._build_tokens(planned, tokenized)
            built.append("tokens")
            if aside:
                _take_tables(aside, folder, planned.key)
        tables = (planned.table, *planned.curriculum)
        for section, table in zip(with_curriculum(self.data), tables, strict=True):
            target = folder / ROW_TABLES / table.row_table
            if not has_all_files(target, ROW_TABLES, table.row_table_key):
                _clear(target)
                try:
                    write_table(section, folder, target, table.row_table_key)
                except DataError:
                    log_left_out(read_dataset(folder).meta.left_out)
                    raise
                if "row tables" not in built:
                    built.append("row tables")
        return built

    def _build_tokens(self, planned: DatasetPlan, tokenized: _Tokenization) -> None:
        """Write the token level of the dataset from the units of the text."""
        folder = self._folder(planned)
        units = self._source_units(tokenized.recipe)
        folder.parent.mkdir(parents=True, exist_ok=True)
        inexpressible = self.corpus.inexpressible(tokenized.recipe)
        selection = select([unit.unit for unit in units], self.data.deduplicate)
        left_out = self.corpus.left_out(selection.duplicates, selection.also_validation)
        has_loss_mask = any(unit.has_loss_mask for unit in units)
        with staged(folder) as new:
            tokenizer = tokenized.tokenizer
            written = write_splits(
                units, selection, new, tokenizer.get_vocab_size(), has_loss_mask
            )
            fault = self._lack_of_text(written, units, selection)
            if fault:
                log_left_out(left_out)
                raise fault
            content = write_content(
                new,
                units,
                selection,
                written,
                tokenizer,
                tokenized.recipe,
                has_loss_mask,
            )
            spelled = ()
            if tokenized.recipe.split_special_tokens:
                with repairable():
                    spelled = spelled_special_tokens(
                        new, content.train.shards, tokenizer
                    )
            workers: dict[str, Any] = (
                {"workers": tokenized.workers} if tokenized.workers else {}
            )
            meta = DatasetMeta(
                provenance=describe(self.data),
                key=planned.key,
                data=self.data.model_dump(mode="json"),
                left_out=left_out,
                inexpressible=inexpressible,
                spelled_special_tokens=spelled,
                infini_llama=version("infini-llama"),
                tokenizers=tokenizers_library.__version__,
                engine=tokenized.engine,
                recipe=tokenized.recipe.folder.name,
                **workers,
            )
            checksums = {
                shard.file: shard.checksum
                for split in SPLITS
                for shard in written[split].shards
            }
            commit(new, folder, "dataset", meta.to_json(), content.to_json(), checksums)

    def _source_units(self, recipe: Recipe) -> list[SourceUnit]:
        """The units of the text, of each source its held-out ones first."""
        texts = sections(self.data)
        units = list[SourceUnit]()
        for source in self.corpus.units_by_source():
            has_loss_mask = texts[source.name].loss_on != "all"
            for name in (*source.validation, *source.training):
                units.append(
                    SourceUnit(source.name, open_unit(recipe, name), has_loss_mask)
                )
        return units

    def _lack_of_text(
        self,
        written: Mapping[str, WrittenSplit],
        units: Sequence[SourceUnit],
        selection: Selection,
    ) -> DataError | None:
        """The error for a split without a document, or a source without one to train on."""
        for split in SPLITS:
            if not written[split].shards:
                return self._too_few(split, selection)
        trained = {shard.source for shard in written["train"].shards}
        for name in sections(self.data):
            if name not in trained:
                return _without_training(name, units, selection)
        return None

    def _too_few(self, split: str, selection: Selection) -> DataError:
        data = self.data
        copies = selection.also_validation
        if split == "train" and copies:
            return DataError(
                f"all {copies} training document(s) are held-out text as well, which is not "
                "trained on; name other text to train on, or to hold out (data.validation_files, "
                "data.validation_split)."
            )
        if all(source.validation for source in self.corpus.sources):
            purpose = "train on" if split == "train" else "hold out"
            return DataError(
                f"there is no document to {purpose}: data.validation_files or "
                "data.validation_split names what is held out, which is not trained on; "
                f"name other text to {purpose}."
            )
        documents = sum(
            int(mask.sum()) for masks in selection.kept.values() for mask in masks
        )
        distinct = documents if data.deduplicate else documents - selection.duplicates
        # Copies fall on the same side.
        other = ", change the fraction" if distinct > 1 else ""
        which = f" with {distinct} different text(s)" if distinct < documents else ""
        return DataError(
            f"{documents} document(s){which} are too few to leave one for "
            f"{'training' if split == 'train' else split} at "
            f"data.validation_fraction={data.validation_fraction}; "
            f"add files, split them into smaller ones{other}, "
            "or name held-out text in data.validation_files."
        )


def _without_training(
    name: str,
    units: Sequence[SourceUnit],
    selection: Selection,
) -> DataError:
    numbers = [number for number, unit in enumerate(units) if unit.source == name]
    kept = {
        split: [selection.kept[split][number] for number in numbers] for split in SPLITS
    }
    held_out = sum(int(mask.sum()) for mask in kept["validation"])
    copies = sum(int((~mask).sum()) for masks in kept.values() for mask in masks)
    return DataError(
        f"data.sources.{name} has no document to train on "
        f"(held out: {held_out}; copies of others: {copies}); add text to it, "
        "name its held-out text (validation_files, validation_split), or remove it."
    )


def _clear(folder: Path) -> Path | None:
    """Remove what killed builds of this artifact left, and move a damaged one aside.

    The artifact's lock is held.

    Returns:
        the place of the damaged one.
    """
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    if not folder.exists():
        return None
    aside = move_aside(folder)
    log.warning("%s is incomplete; it was moved to %s and is rebuilt", folder, aside)
    return aside


def _take_tables(aside: Path, folder: Path, key: str) -> None:
    """Move the undamaged row tables of a dataset that was moved aside into its successor.

    The successor has the same tokens. Tables of damaged shards stay: a table may have been computed
    after the damage, with checksums that are right.

    Args:
        key: of the token level.
    """
    manifest = read_dataset(folder)
    shards = (*manifest.content.train.shards, *manifest.content.validation.shards)
    for shard in shards:
        old = aside / shard.file
        checksum = manifest.files[shard.file].checksum
        if not old.is_file() or file_checksum(old) != checksum:
            log.warning(
                "%s is damaged; the row tables of its dataset are rebuilt.", old
            )
            return
    for table in row_tables(aside):
        try:
            check(table, ROW_TABLES, checksums=True)
            if row_table_key(read_row_table(table).content, key)[:12] == table.name:
                (folder / ROW_TABLES).mkdir(exist_ok=True)
                table.rename(folder / ROW_TABLES / table.name)
        except Damaged as fault:
            log.warning("%s It is rebuilt.", fault)


def warn_of_rows_without_targets(dataset: Path, reference: DatasetRef) -> None:
    """Log the share of the sequences without a target, which teach nothing.

    A prompt longer than a sequence gives such sequences.
    """
    for table in reference.row_tables:
        for split in SPLITS:
            with repairable():
                share = TokenReader(
                    dataset, table.row_table, split
                ).share_without_targets()
            if share:
                log.warning(
                    "%.3g %% of the %s sequences of %d tokens have no target: %s; "
                    "lengthen data.sequence_length, or shorten the prompts",
                    100 * share,
                    split,
                    table.sequence_length,
                    "they change no weight"
                    if split == "train"
                    else "they do not count in the validation loss",
                )


def log_left_out(report: LeftOut) -> None:
    """Log which records are left out, and why."""
    reasons = ", ".join(
        f"{count} {reason}" for reason, count in report.reasons().items()
    )
    if reasons:
        level = (
            logging.WARNING if report.bad_records or report.bad_files else logging.INFO
        )
        log.log(
            level,
            "%d records read: %s",
            report.records,
            "; ".join((reasons, *report.bad)),
        )
    for place, count in report.own_files.items():
        log.info("%s: %d file(s) left out, which are no text", place, count)
    if report.other_files:
        kinds = ", ".join(
            f"{count} {kind}" for kind, count in sorted(report.other_files.items())
        )
        log.info("other files in the folders, which are not read: %s", kinds)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock one key.

    A second builder waits, however long the first one takes, and then uses what it built.
    """
    # Set while a spawned worker imports the script that started it: waiting would last forever.
    is_in_worker = getattr(multiprocessing.current_process(), "_inheriting", False)
    with ExitStack() as stack:
        try:
            stack.enter_context(Lock(path, wait=0.0 if is_in_worker else FOREVER))
        except Busy:
            raise RuntimeError(
                "a worker ran the script again: guard it by if __name__ == '__main__':"
            ) from None
        yield
