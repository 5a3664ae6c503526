"""The preprocess stage: builds what is missing of a dataset artifact and says where it is."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers as tokenizers_library
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError, disk_full_as
from infini_llama.tasks.preprocess.keys import TOKENS_VERSION, chunks_key, tokens_key
from infini_llama.tasks.preprocess.repair import salvage
from infini_llama.tasks.preprocess.rows.chunking import resolve_device
from infini_llama.tasks.preprocess.rows.tables import table_facts, with_curriculum, write_table
from infini_llama.tasks.preprocess.sources.sources import describe
from infini_llama.tasks.preprocess.sources.survey import Corpus, survey, tell
from infini_llama.tasks.preprocess.tokenizers.engines import REFERENCE, EngineDiffers, choose_engine, refuse
from infini_llama.tasks.preprocess.tokenizers.tokenizer import (
    end_of_text,
    is_given,
    is_lossless,
    load,
    token_bytes,
    train,
)
from infini_llama.tasks.preprocess.tokens.arrays import save_array
from infini_llama.tasks.preprocess.tokens.build import do_units
from infini_llama.tasks.preprocess.tokens.journal import Journal
from infini_llama.tasks.preprocess.tokens.plan import Plan, Unit, plan_units
from infini_llama.tasks.preprocess.tokens.reuse import reuse, with_keys
from infini_llama.tasks.preprocess.tokens.shards import batches, describe_split, dtype_for
from infini_llama.tasks.storage.artifacts import Busy, Lock, commit, is_complete, move_aside, read_manifest, set_pointer

log = logging.getLogger("infini_llama.preprocess")
FOREVER = 10.0**9
WORTH_A_CHECK = 4_000_000  # bytes of text: less is encoded before a fast engine is imported and checked


def plan(data: dict, home: str) -> dict[str, Any]:
    """What `preprocess` would build, known before any work.

    Returns:
        {"key", "chunks_key": 64 hex digits each; "name": folder below datasets/; "documents"; "bytes"; "chunks" and "chunks_key", also
        of each stage in "curriculum": names and keys of the row tables}.

    Raises:
        DataError: no text, or unreadable text.
    """
    return _plan(data, survey(data, Path(home) / "surveys"))[0]


def _plan(data: dict, corpus: Corpus) -> tuple[dict[str, Any], Plan]:
    members = corpus.train + corpus.validation
    if not members:
        tell(corpus.report)
        raise DataError(
            "every file that data.files matches is empty, or everything in them is left out; there is no text to train on."
        )
    units = plan_units(corpus, data["shard_size"])
    tokens = tokens_key(data, corpus.identity, max(unit.number for unit in units.units) + 1)
    tables = [chunks_key(section, tokens) for section in with_curriculum(data)]
    return {
        "key": tokens,
        "chunks_key": tables[0],
        "chunks": tables[0][:12],
        "curriculum": [{"chunks": key[:12], "chunks_key": key} for key in tables[1:]],
        "name": f"{'mixture' if data['sources'] else data['source']}-{tokens[:12]}",
        "documents": sum(len(documents.sizes) for documents in members),
        "bytes": int(sum(documents.sizes.sum() for documents in members)),
    }, units


def lookup(data: dict, home: str) -> dict[str, Any] | None:
    """The reference of the complete artifact for this text and these settings, None where something is missing."""
    planned = plan(data, home)
    folder = Path(home) / "datasets" / planned["name"]
    tables = {table["chunks_key"]: folder / "chunks" / table["chunks"] for table in [planned, *planned["curriculum"]]}
    if is_complete(folder, "dataset", planned["key"]) and all(
        is_complete(table, "chunks", key) for key, table in tables.items()
    ):
        return _reference(Path(home), folder, planned, built=[])
    return None


def preprocess(data: dict, home: str, repair: bool = False) -> dict[str, Any]:
    """Builds the token level and the chunk level where they are missing; the same input gives the same bytes.

    Two builders of one key: one builds, the other waits for it. A build that was killed leaves a working folder and a
    journal beside it; the next one carries on from there.

    Args:
        repair: look at every checksum, and build again only the shards and tables that are damaged.

    Returns:
        the reference that the other stages take: path below home, digests, and the facts of both splits.

    Raises:
        DataError: no text, unreadable text, or too little for one row.
        PipelineError: no space left; nothing half-written is believed.
    """
    corpus = survey(data, Path(home) / "surveys")
    planned, units = _plan(data, corpus)
    tell(corpus.report)
    folder = Path(home) / "datasets" / planned["name"]
    built = []
    with (
        disk_full_as(f"the dataset in {folder.parent}"),
        _alone(Path(home) / "locks" / f"dataset-{planned['key'][:12]}.lock"),
    ):
        sections = {chunks_key(section, planned["key"]): section for section in with_curriculum(data)}
        if not all(is_complete(folder / "chunks" / key[:12], "chunks", key) for key in sections):
            resolve_device(data["device"])  # a device that is not there is refused before the work, not after it
        journal = Journal(folder.with_name(f".{folder.name}.journal"), folder.with_name(f".{folder.name}.work"))
        if repair or (folder.exists() and not is_complete(folder, "dataset", planned["key"])):
            salvage(folder, planned["key"], journal)
        if not is_complete(folder, "dataset", planned["key"]):
            _clear(folder)
            _build_tokens(data, corpus, units, folder, planned["key"], journal)
            built.append("tokens")
        journal.close()
        for key, section in sections.items():
            table = folder / "chunks" / key[:12]
            if not is_complete(table, "chunks", key):
                _clear(table)
                write_table(section, folder, table, key)
                built += ["chunks"] * ("chunks" not in built)
        set_pointer(folder.parent, "latest", folder.name)
    reference = _reference(Path(home), folder, planned, built)
    log.info("dataset %s: %s", folder.name, "built " + " and ".join(built) if built else "complete, nothing to do")
    return reference


def _clear(folder: Path) -> None:
    """Under the lock: removes what killed builds of this artifact left, and moves a damaged one aside."""
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(left)
    if folder.exists():
        log.warning("%s is not complete; it was moved to %s and is built anew", folder, move_aside(folder))


def _build_tokens(data: dict, corpus: Corpus, plan: Plan, folder: Path, key: str, journal: Journal) -> None:
    for split, members in plan.documents.items():
        if not members:
            found = sum(unit.documents for unit in plan.units)
            raise DataError(
                f"{found} document(s) leave none for {'training' if split == 'train' else split} at data.validation_fraction="
                f"{data['validation_fraction']}; add files, split them into smaller ones, or change the fraction."
            )
    work = journal.work
    work.mkdir(parents=True, exist_ok=True)
    if "tokenizer.json" in journal.resume():  # it decides every shard
        tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    else:
        journal.close()
        work.mkdir()
        settings = data["tokenizer"]
        tokenizer = load(settings) if is_given(settings) else train(_read(plan), settings)
        (work / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        journal.record("tokenizer.json")
    eos = end_of_text(tokenizer, data["tokenizer"])
    checks = folder.parent.parent / "engine-checks"
    wanted = data["tokenizer_engine"]
    if wanted == "auto" and sum(unit.size for unit in plan.units) < WORTH_A_CHECK:
        wanted = REFERENCE
    engine = choose_engine(wanted, tokenizer, lambda: _first_texts(plan), checks)
    try:
        _encode(data, plan, tokenizer, eos, engine, folder.parent, journal)
    except EngineDiffers as fault:
        log.warning("%s; all of the text is encoded again by %s", fault, REFERENCE)
        journal.forget(unit.file for unit in plan.units)  # first: what carries on after a kill sees the refusal alone
        refuse(engine["name"], tokenizer, checks, str(fault))
        refused = engine["refused"] | {engine["name"]: str(fault)}
        engine = choose_engine(REFERENCE, tokenizer, list, checks) | {"refused": refused}
        _encode(data, plan, tokenizer, eos, engine, folder.parent, journal)
    save_array(work / "token_bytes.npy", token_bytes(tokenizer))
    written, size = journal.lines(), tokenizer.get_vocab_size()

    def facts(name: str) -> dict[str, Any]:
        units = [unit for unit in plan.units if unit.split == name]
        shards = [
            {field: written[unit.file][field] for field in ("file", "documents", "tokens")}
            | ({"source": unit.source} if unit.source else {})
            for unit in units
        ]
        described = describe_split(work / name, size, sum(unit.size for unit in units), shards)
        return described | ({"sources": _by_source(units, shards)} if data["sources"] else {})

    content = {
        "vocab_size": size,
        "dtype": dtype_for(size).name,
        "eos_id": eos,
        "text_yields_special_tokens": False,
        "train": facts("train"),
        "validation": facts("validation"),
    } | ({} if is_lossless(tokenizer) else {"lossless": False})
    meta = describe(data) | {
        "key": key,
        "data": data,
        "left_out": corpus.report,
        "infini_llama": version("infini-llama"),
        "tokenizers": tokenizers_library.__version__,
        "engine": engine,
        "units": {unit.file: written[unit.file]["key"] for unit in plan.units},
    }
    checksums = {name: line["checksum"] for name, line in written.items()}
    commit(work, folder, "dataset", TOKENS_VERSION, meta, content, checksums)
    journal.close()


def _encode(
    data: dict, plan: Plan, tokenizer: Tokenizer, eos: int, engine: dict[str, Any], datasets: Path, journal: Journal
) -> None:
    """Every shard by this engine: what is done, what earlier datasets have, and the rest, which is tokenized."""
    plan = with_keys(plan, journal.work / "tokenizer.json", eos, engine)
    done = journal.lines()
    missing = [unit for unit in plan.units if done.get(unit.file, {}).get("key") != unit.key]
    journal.forget(unit.file for unit in missing)  # written by another engine or version than today's
    if len(missing) < len(plan.units):
        log.info("carrying on: %d of %d shards are done", len(plan.units) - len(missing), len(plan.units))
    do_units(plan, reuse(missing, datasets, journal), journal, tokenizer, eos, data, engine["name"])


def _by_source(units: list[Unit], shards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each source gives of a split, in the order of its documents."""
    found: dict[str, dict[str, Any]] = {}
    for unit, shard in zip(units, shards, strict=True):
        facts = found.setdefault(unit.source, {"name": unit.source, "documents": 0, "tokens": 0, "bytes": 0})
        for name, count in (("documents", shard["documents"]), ("tokens", shard["tokens"]), ("bytes", unit.size)):
            facts[name] += count
    return list(found.values())


def _first_texts(plan: Plan) -> list[str]:
    return next(batches(plan.texts("train")))[0]


def _read(plan: Plan) -> Iterator[str]:
    done, total = 0, sum(unit.size for unit in plan.units if unit.split == "train")
    for texts, size in batches(plan.texts("train")):
        yield from texts
        done += size
        progress = {"done": round(done / 1e6, 1), "total": round(total / 1e6, 1), "unit": "MB"}
        log.info("reading text for the tokenizer", extra={"progress": progress})
    log.info("learning the tokenizer's merges")


def _reference(home: Path, folder: Path, planned: dict[str, Any], built: list[str]) -> dict[str, Any]:
    dataset, table = read_manifest(folder, "dataset"), read_manifest(folder / "chunks" / planned["chunks"], "chunks")
    content, rows = dataset["content"], table["content"]["rows"]
    stages = [table_facts(folder / "chunks" / stage["chunks"]) for stage in planned["curriculum"]]

    def facts(split: str) -> dict[str, Any]:
        names = ("documents", "tokens", "bytes", "unigram_entropy_bits")
        return {name: content[split][name] for name in names} | {"rows": rows[split]}

    return {
        "path": folder.relative_to(home).as_posix(),
        "digest": dataset["digest"],
        "chunks": planned["chunks"],
        "chunks_digest": table["digest"],
        "built": built,
        "sequence_length": table["content"]["sequence_length"],
        "vocab_size": content["vocab_size"],
        "train": facts("train"),
        "validation": facts("validation"),
    } | ({"curriculum": stages} if stages else {})


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds the lock of one key; a second builder waits, however long the first one takes, and then uses what it built."""
    with ExitStack() as held:
        try:
            held.enter_context(Lock(path))
        except Busy as other:
            log.info("another process builds this dataset; waiting for it (%s)", other)
            held.enter_context(Lock(path, wait=FOREVER))
        yield
