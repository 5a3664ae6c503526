"""The preprocess stage: builds what is missing of a dataset artifact and returns a reference to it."""

import logging
import multiprocessing
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import tokenizers as tokenizers_library
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError, disk_full_as
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.repair import salvage
from infini_llama.tasks.preprocess.rows.devices import resolve_device
from infini_llama.tasks.preprocess.rows.tables import dataset_ref, with_curriculum, write_table
from infini_llama.tasks.preprocess.sources.scanning import OpenSink, SinkFor
from infini_llama.tasks.preprocess.sources.sources import Source, describe
from infini_llama.tasks.preprocess.sources.survey import Corpus, log_left_out, survey
from infini_llama.tasks.preprocess.sources.texts import batches
from infini_llama.tasks.preprocess.tokenizers.engines import (
    REFERENCE,
    WORTH_A_CHECK,
    EngineDiffers,
    choose_engine,
    refuse,
)
from infini_llama.tasks.preprocess.tokenizers.tokenizer import (
    end_of_text,
    is_given,
    is_lossless,
    load,
    token_bytes,
    train,
)
from infini_llama.tasks.preprocess.tokens.build import Encoding, write_shards
from infini_llama.tasks.preprocess.tokens.journal import Journal
from infini_llama.tasks.preprocess.tokens.keys import TOKENS_VERSION, chunks_key, tokens_key
from infini_llama.tasks.preprocess.tokens.plan import Plan, plan_units
from infini_llama.tasks.preprocess.tokens.shards import WrittenShard, describe_split, dtype_for, save_array
from infini_llama.tasks.preprocess.tokens.spool import Spool, open_spool, spool_of
from infini_llama.tasks.progress import megabytes
from infini_llama.tasks.records.dataset import DatasetPlan, DatasetRef, PlannedTable
from infini_llama.tasks.records.manifest import DatasetContent, DatasetMeta, SplitContent
from infini_llama.tasks.storage.artifacts import Busy, Lock, commit, is_complete, move_aside, set_pointer

log = logging.getLogger("infini_llama.preprocess")
FOREVER = 10.0**9


def plan(data: DataConfig, home: Path) -> DatasetPlan:
    """What `preprocess` would build, known before any work.

    Raises:
        DataError: no text, or unreadable text.
    """
    return _plan(data, _survey(data, home))[0]


def _survey(data: DataConfig, home: Path, sink_for: SinkFor = lambda sources: None) -> Corpus:
    with disk_full_as(f"what is known of the text in {home / 'surveys'}"):
        return survey(data, home / "surveys", sink_for)


def _plan(data: DataConfig, corpus: Corpus) -> tuple[DatasetPlan, Plan]:
    members = corpus.train + corpus.validation
    if not members:
        log_left_out(corpus.report)
        raise DataError(
            "every file that data.files matches is empty, or all documents are skipped; there is no text to train on."
        )
    units = plan_units(corpus, data.shard_size)
    tokens = tokens_key(data, corpus.identity, max(unit.number for unit in units.units) + 1)
    keys = [chunks_key(section, tokens) for section in with_curriculum(data)]
    first, *stages = [PlannedTable(chunks=key[:12], chunks_key=key) for key in keys]
    return DatasetPlan(
        key=tokens,
        chunks=first.chunks,
        chunks_key=first.chunks_key,
        curriculum=tuple(stages),
        name=f"{'mixture' if data.sources else data.source}-{tokens[:12]}",
        documents=sum(map(len, members)),
        bytes=sum(documents.size for documents in members),
    ), units


def lookup(data: DataConfig, home: Path) -> DatasetRef | None:
    """The reference of the complete artifact for this text and these settings, None where something is missing."""
    return Preparation(data, home).lookup()


def preprocess(data: DataConfig, home: Path, repair: bool = False) -> DatasetRef:
    """`Preparation.build`, for a caller that needs nothing else of the survey."""
    return Preparation(data, home).build(repair)


class Preparation:
    """The dataset of a text that is surveyed once: here, and not again for its plan, the look-up and the build.

    Attributes:
        planned: what `build` would build.

    Raises:
        DataError: no text, or unreadable text.
    """

    def __init__(self, data: DataConfig, home: Path) -> None:
        self.data, self.home = data, home
        self.spool: Spool | None = None
        self.corpus = _survey(data, home, self._sink_for)
        self.planned, self.units = _plan(data, self.corpus)
        self.folder = home / "datasets" / self.planned.name

    def _sink_for(self, sources: list[Source]) -> OpenSink | None:
        self.spool = self.spool or open_spool(self.data, self.home, sources)
        return self.spool and self.spool.writer

    def lookup(self) -> DatasetRef | None:
        """The reference of the complete artifact, None where something is missing."""
        tables, folder = self.planned.row_tables, self.folder
        complete = is_complete(folder, "dataset", self.planned.key) and all(
            is_complete(folder / "chunks" / table.chunks, "chunks", table.chunks_key) for table in tables
        )
        return _reference(self.home, folder, self.planned, built=[]) if complete else None

    def build(self, repair: bool = False) -> DatasetRef:
        """Build the token level and the chunk level where they are missing; the same input gives the same bytes.

        Two builders of one key: one builds, the other waits for it. A build that was killed leaves a working folder and a
        journal beside it; the next one carries on from there.

        Args:
            repair: look at every checksum, and build again only the shards and tables that are damaged.

        Returns:
            the reference that the other stages take: path below home, digests, and the facts of both splits.

        Raises:
            DataError: unreadable text, or too little for one row.
            PipelineError: no space left; nothing half-written is used.
        """
        log_left_out(self.corpus.report)
        folder = self.folder
        with (
            disk_full_as(f"the dataset in {folder.parent}"),
            _locked(self.home / "locks" / f"dataset-{self.planned.key[:12]}.lock"),
        ):
            built = _build_missing(self, repair)
            set_pointer(folder.parent, "latest", folder.name)
        reference = _reference(self.home, folder, self.planned, built)
        log.info("dataset %s: %s", folder.name, "built " + " and ".join(built) if built else "complete, nothing to do")
        return reference


def _build_missing(preparation: Preparation, repair: bool) -> list[str]:
    """Builds the levels of the dataset that are missing or damaged, and returns their names."""
    built: list[str] = []
    data, folder, key = preparation.data, preparation.folder, preparation.planned.key
    sections = {chunks_key(section, key): section for section in with_curriculum(data)}
    if not all(is_complete(folder / "chunks" / table[:12], "chunks", table) for table in sections):
        resolve_device(data.device, data.packing)  # a missing one is refused before the work
    journal = Journal(folder.with_name(f".{folder.name}.journal"), folder.with_name(f".{folder.name}.work"))
    if repair or (folder.exists() and not is_complete(folder, "dataset", key)):
        salvage(folder, key, journal)
    if not is_complete(folder, "dataset", key):
        _clear(folder)
        _build_tokens(preparation, journal)
        built.append("tokens")
    journal.close()
    for table_key, section in sections.items():
        table = folder / "chunks" / table_key[:12]
        if not is_complete(table, "chunks", table_key):
            _clear(table)
            write_table(section, folder, table, table_key)
            built += ["chunks"] * ("chunks" not in built)
    return built


def _clear(folder: Path) -> None:
    """Under the lock: removes what killed builds of this artifact left, and moves a damaged one aside."""
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(left)
    if folder.exists():
        log.warning("%s is incomplete; it was moved to %s and is rebuilt", folder, move_aside(folder))


def _build_tokens(preparation: Preparation, journal: Journal) -> None:
    data, plan, folder = preparation.data, preparation.units, preparation.folder
    for split, members in plan.documents.items():
        if not members:
            found = sum(unit.documents for unit in plan.units)
            other = ", change the fraction" if found > 1 else ""
            raise DataError(
                f"{found} document(s) are too few to leave one for {'training' if split == 'train' else split} at "
                f"data.validation_fraction={data.validation_fraction}; add files, split them into smaller ones{other}, "
                "or name held-out text in data.validation_files."
            )
    tokenizer = _tokenizer(data, plan, journal)
    eos = end_of_text(tokenizer, data.tokenizer)
    checks = preparation.home / "engine-checks"
    wanted = data.tokenizer_engine
    if wanted == "auto" and sum(unit.size for unit in plan.units) < WORTH_A_CHECK:
        wanted = REFERENCE
    engine = choose_engine(wanted, tokenizer, lambda: _first_texts(plan), checks)
    spool = preparation.spool or spool_of(preparation.home, tokenizer, eos, engine)
    try:
        write_shards(data, plan, Encoding(tokenizer, eos, engine, data.answer_after), journal, spool)
    except EngineDiffers as fault:
        log.warning("%s; all of the text is encoded again with %s", fault, REFERENCE)
        journal.discard(unit.file for unit in plan.units)  # first: what carries on after a kill sees the refusal alone
        refuse(engine.name, tokenizer, checks, str(fault))
        refused = engine.refused | {engine.name: str(fault)}
        engine = choose_engine(REFERENCE, tokenizer, list, checks).model_copy(update={"refused": refused})
        write_shards(data, plan, Encoding(tokenizer, eos, engine, data.answer_after), journal, spool)
    save_array(journal.work / "token_bytes.npy", token_bytes(tokenizer))
    written, size = journal.entries(), tokenizer.get_vocab_size()
    content = DatasetContent(
        vocab_size=size,
        dtype=dtype_for(size).name,
        eos_id=eos,
        text_yields_special_tokens=False,
        train=_described(plan, "train", journal, size, data.loss_on == "answer"),
        validation=_described(plan, "validation", journal, size, data.loss_on == "answer"),
        lossless=is_lossless(tokenizer),
        loss_on=data.loss_on,
    )
    meta = DatasetMeta(
        **describe(data).to_json(),  # pyright: ignore[reportArgumentType]
        key=preparation.planned.key,
        data=data.model_dump(mode="json"),
        left_out=preparation.corpus.report,
        infini_llama=version("infini-llama"),
        tokenizers=tokenizers_library.__version__,
        engine=engine,
        units={unit.file: written[unit.file].key for unit in plan.units},
    )
    checksums = {name: entry.checksum for name, entry in written.items()}
    commit(journal.work, folder, "dataset", TOKENS_VERSION, meta.to_json(), content.to_json(), checksums)
    journal.close()
    spool.remove({member.rows.file for several in plan.documents.values() for member in several})


def _tokenizer(data: DataConfig, plan: Plan, journal: Journal) -> Tokenizer:
    """The tokenizer of a build that carries on, or else a given or newly trained one, which is then in the journal."""
    work = journal.work
    work.mkdir(parents=True, exist_ok=True)
    if "tokenizer.json" in journal.resume():  # it decides every shard
        return Tokenizer.from_file(str(work / "tokenizer.json"))
    journal.close()
    work.mkdir()
    tokenizer = load(data.tokenizer) if is_given(data.tokenizer) else train(_read(plan), data.tokenizer)
    (work / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    journal.record("tokenizer.json")
    return tokenizer


def _described(plan: Plan, split: str, journal: Journal, vocab_size: int, has_prompts: bool) -> SplitContent:
    written = journal.entries()
    shards = [
        WrittenShard(unit.file, written[unit.file].documents, written[unit.file].tokens, unit.size, unit.source)
        for unit in plan.units
        if unit.split == split
    ]
    return describe_split(journal.work / split, vocab_size, sum(shard.size for shard in shards), shards, has_prompts)


def _first_texts(plan: Plan) -> list[str]:
    return next(batches(plan.texts("train")))[0]


def _read(plan: Plan) -> Iterator[str]:
    done, total = 0, sum(unit.size for unit in plan.units if unit.split == "train")
    for texts, size in batches(plan.texts("train")):
        yield from texts
        done += size
        log.info("reading text for the tokenizer", extra={"progress": megabytes(done, total)})
    log.info("training the tokenizer")


def _reference(home: Path, folder: Path, planned: DatasetPlan, built: list[str]) -> DatasetRef:
    tables = folder / "chunks"
    stages = [tables / stage.chunks for stage in planned.curriculum]
    return dataset_ref(folder, tables / planned.chunks, home, built, stages)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Locks one key; a second builder waits, however long the first one takes, and then uses what it built."""
    with ExitStack() as stack:
        try:
            stack.enter_context(Lock(path))
        except Busy as other:
            # set while a spawned worker imports the script that started it: waiting would last forever
            if getattr(multiprocessing.current_process(), "_inheriting", False):
                raise RuntimeError("a worker ran the script again: guard it by if __name__ == '__main__':") from None
            log.info("another process builds this dataset; waiting for it (%s)", other)
            stack.enter_context(Lock(path, wait=FOREVER))
        yield
