"""Datasets named by a person instead of by a configuration: the references that the stages take."""

from pathlib import Path

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.tasks.preprocess.rows.tables import table_facts, with_curriculum
from infini_llama.tasks.storage.artifacts import is_moved_aside, read_manifest


def references(dataset: Path, home: Path) -> list[dict]:
    """A reference, as `preprocess` returns it, for each row table of the dataset in this folder.

    Raises:
        DataError: no dataset is there, or it has no row table.
    """
    content = read_manifest(dataset, "dataset")
    tables = [path for path in sorted((dataset / "chunks").glob("[!.]*")) if path.is_dir() and not is_moved_aside(path)]
    if not tables:
        raise DataError(f"{dataset} has no row table; run 'infini-llama preprocess' with its configuration again.")
    return [_reference(dataset, home, content, table) for table in tables]


def reference_for(data: dict, dataset: Path, home: Path) -> dict:
    """The reference whose rows are those that the section `data` of a configuration asks for, curriculum and all."""
    found = references(dataset, home)
    reference, *stages = [_with_rows(section, found, dataset) for section in with_curriculum(data)]
    if not stages:
        return reference
    return reference | {"curriculum": [table_facts(dataset / "chunks" / stage["chunks"]) for stage in stages]}


def _with_rows(data: dict, found: list[dict], dataset: Path) -> dict:
    for reference in found:
        content = read_manifest(dataset / "chunks" / reference["chunks"], "chunks")["content"]
        wanted = (data["sequence_length"], data["strategy"], data["stride"])
        if (content["sequence_length"], content["strategy"], content.get("stride")) == wanted:
            return reference
    lengths = ", ".join(str(reference["sequence_length"]) for reference in found)
    raise ConfigError(
        f"{dataset} has rows of {lengths} tokens, none of data.sequence_length={data['sequence_length']} "
        f"made by data.strategy={data['strategy']}; change that."
    )


def _reference(dataset: Path, home: Path, manifest: dict, table: Path) -> dict:
    rows, content = read_manifest(table, "chunks"), manifest["content"]
    names = ("documents", "tokens", "bytes", "unigram_entropy_bits")
    inside = dataset.is_relative_to(home)
    return {
        "path": dataset.relative_to(home).as_posix() if inside else str(dataset),
        "digest": manifest["digest"],
        "chunks": table.name,
        "chunks_digest": rows["digest"],
        "built": [],
        "sequence_length": rows["content"]["sequence_length"],
        "vocab_size": content["vocab_size"],
        **{
            split: {name: content[split][name] for name in names} | {"rows": rows["content"]["rows"][split]}
            for split in ("train", "validation")
        },
    }
