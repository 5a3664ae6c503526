"""The texts of one split of a Hugging Face dataset.

They are read from the copy that `datasets` makes on this machine, or streamed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from infini_llama.configs.errors import PipelineError
from infini_llama.configs.pointers import refuse_pointer
from infini_llama.configs.reading import expanded
from infini_llama.tasks.preprocess.sources.columnar import named_column
from infini_llama.tasks.preprocess.sources.formats import format_of
from infini_llama.tasks.preprocess.sources.texts import TextRecords, Unreadable, as_text

AT_ONCE = 256  # rows
ANSWERS_WITHIN = 10.0  # seconds


def is_saved(folder: Path) -> bool:
    """Whether save_to_disk wrote the folder: one dataset, or its splits."""
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


@cache
def commit_of(path: str, revision: str | None) -> str | None:
    """The commit of a dataset on the Hub that `revision` names.

    It is `revision` itself where the Hub is not reached, or there is none.
    """
    if expanded(path).is_dir():
        return None
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(path, revision=revision, timeout=ANSWERS_WITHIN)
    except Exception:
        # Without the Hub, or for a path that is no dataset: opening it raises a clear error.
        return revision
    return info.sha or revision


@dataclass(frozen=True)
class HubSplit:
    """One split of a dataset.

    Attributes:
        path: name on the hub, local folder of one, or folder written by save_to_disk, which is read
            in place in any case.
        streaming: its files are read as they come, and no copy is kept: memory holds a few rows (of
            parquet a row group).
    """

    path: str
    configuration: str | None
    split: str
    revision: str | None
    streaming: bool = False


def unread_files(path: str, configuration: str | None) -> list[str]:
    """Names of files in a local folder that are of no split.

    `datasets` reads those of one format, and names decide the splits.
    """
    folder = expanded(path)
    if not folder.is_dir() or is_saved(folder):
        return []
    from datasets import load_dataset_builder

    try:
        splits = load_dataset_builder(str(folder), configuration).config.data_files or {}
    except Exception:  # opening it raises a clear error
        return []
    read = {Path(file).resolve() for files in splits.values() for file in files}
    unread = list[str]()
    for file in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if not is_hidden and file.is_file() and file.resolve() not in read:
            unread.append(file.name)
    return unread


def spans(source: HubSplit, most: int) -> list[tuple[int, int]] | None:
    """Ranges of rows of about `most` bytes.

    None where the split is small, or is read from its beginning as it comes.

    Raises:
        Unreadable, PipelineError: see `texts_of`.
    """
    if source.streaming:
        return None
    dataset = _opened(source)
    size = dataset.data.nbytes
    if size <= most:
        return None
    count = len(dataset)
    rows = max(1, most * count // max(1, size))
    return [(first, min(first + rows, count)) for first in range(0, count, rows)]


def texts_of(
    source: HubSplit,
    text_column: str,
    span: tuple[int, int] | None = None,
) -> TextRecords:
    """Every text in order, and a Fault for each row without one.

    They are the same with and without `streaming`.

    Args:
        span: the first row to read, and the one after the last; all where None.

    Raises:
        Unreadable: it cannot be opened, or is damaged, or has no such column.
        DataError: a file of a local folder is a pointer to one that was not downloaded.
        PipelineError: what is read from elsewhere breaks off, or is not reached; the text is not
            known to be bad.
    """
    dataset = _opened(source)
    # Those of a stream of JSON or CSV are known with the first rows.
    if dataset.column_names is not None:
        named_column(dataset.column_names, text_column)
        dataset = dataset.select_columns([text_column])
    if span is not None:
        dataset = dataset.select(range(*span))
    batches = _unbroken(_batches_of(dataset), source)
    values = chain.from_iterable(_column_of(batch, text_column) for batch in batches)
    for row, value in enumerate(values, start=span[0] if span else 0):
        yield as_text("" if value is None else value, f"row {row + 1}")


def _batches_of(dataset: Any) -> Iterator[dict[str, list[Any]]]:
    from datasets import Dataset

    batches = dataset.with_format(None).iter(batch_size=AT_ONCE)
    if isinstance(dataset, Dataset):
        # A saved one is read in place, and any offset in it is followed.
        dataset.data.validate(full=True)
    yield from batches


def _column_of(batch: dict[str, list[Any]], text_column: str) -> list[Any]:
    named_column(list(batch), text_column)
    return batch[text_column]


def _unbroken(
    batches: Iterator[dict[str, list[Any]]],
    source: HubSplit,
) -> Iterator[dict[str, list[Any]]]:
    """The batches; an error among them is raised as PipelineError or Unreadable."""
    try:
        yield from batches
    except Exception as error:
        # It is of the network, a filesystem, or any of the readers inside `datasets`.
        fault = f"breaks off in split '{source.split}' ({_words(error)})"
        # What a cut connection looks like depends on the reader it meets; nothing that comes from
        # elsewhere is dropped for it.
        if _of_the_network(error) or (source.streaming and not expanded(source.path).is_dir()):
            raise PipelineError(f"{source.path} {fault}; run the same command again.") from None
        raise Unreadable(fault) from None


def _opened(source: HubSplit) -> Any:
    import datasets  # heavy, and needed for this source alone

    split = source.split
    folder = expanded(source.path)
    files = sorted(folder.rglob("[!.]*.*")) if folder.is_dir() else ()
    for file in files:
        if format_of(file.name):
            refuse_pointer(file)
    try:
        if is_saved(folder):
            loaded: Any = datasets.load_from_disk(str(folder))
            # By itself, it is the default split, and the one that it was.
            if not isinstance(loaded, datasets.DatasetDict):
                loaded = dict.fromkeys(("train", str(loaded.split or "train")), loaded)
            if split not in loaded:
                raise ValueError(f"it has {', '.join(map(str, loaded))}")
            return loaded[split]
        place = str(folder) if folder.is_dir() else source.path
        return datasets.load_dataset(
            place,
            source.configuration,
            split=split,
            streaming=source.streaming,
            revision=source.revision,
        )
    except Exception as error:  # `datasets` has no common class for what is wrong with a file
        fault = f"cannot be opened as a dataset with split '{split}' ({_words(error)})"
        if _of_the_network(error):
            raise PipelineError(f"{source.path} {fault}; run the same command again.") from None
        raise Unreadable(fault) from None


def _of_the_network(error: Exception) -> bool:
    return any(
        isinstance(fault, ConnectionError | TimeoutError) for fault in (error, error.__cause__)
    )


def _words(error: Exception) -> str:
    """The message of an error, or of its cause, in one line."""
    is_plain = isinstance(error, OSError | ValueError | KeyError)
    clearest = error if is_plain else error.__cause__ or error
    return " ".join(str(clearest).split())
