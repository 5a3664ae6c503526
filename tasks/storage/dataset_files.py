"""Files of a dataset, as every command after its preparation reads them.

Each is compared with the manifest before it is used.
"""

from collections.abc import Generator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
from blake3 import blake3
from tokenizers import Tokenizer

from infini_llama.configs.errors import DataError
from infini_llama.tasks.records.manifest import DatasetManifest
from infini_llama.tasks.storage.artifacts import (
    ROW_TABLES,
    Damaged,
    check,
    read_dataset,
    readable,
    row_tables,
)

TOKENIZER = "tokenizer.json"
TOKEN_BYTES = "token_bytes.npy"
REPAIR = "Run 'infini-llama preprocess CONFIG --repair' to rebuild what is damaged."


def verified_manifest(dataset: Path, digest: str | None = None) -> DatasetManifest:
    """The manifest of the dataset in a folder.

    Args:
        digest: what a run was trained on; None: any.

    Raises:
        DataError: there is none, it is damaged, or it is of another dataset.
    """
    with repairable():
        manifest = read_dataset(dataset)
    # Undamaged, so --repair would not change it.
    if digest is not None and manifest.digest != digest:
        raise DataError(
            f"{dataset} is another dataset than the run was trained on: its digest is "
            f"{manifest.digest}, and {digest} was expected."
        )
    return manifest


def verify_dataset(dataset: Path) -> None:
    """Compare every file of a dataset and of its row tables with the checksums in their manifests.

    Raises:
        DataError: names the first file that differs and the command that rebuilds it.
    """
    with repairable():
        check(dataset, "dataset", checksums=True)
        for table in row_tables(dataset):
            check(table, ROW_TABLES, checksums=True)


def read_tokenizer(dataset: Path) -> Tokenizer:
    """The dataset's tokenizer, once its bytes are verified.

    Raises:
        DataError: as `read_file`.
    """
    return Tokenizer.from_buffer(read_file(dataset, TOKENIZER))


def document_bytes_file(split: str) -> str:
    """Name of the file with the bytes of each document of a split, int32 [documents].

    Datasets have it whose tokenizer changes text: there the bytes of a text are not those of its
    tokens.
    """
    return f"{split}.document_bytes.npy"


def read_token_bytes(dataset: Path) -> np.ndarray:
    """Bytes of text that each token stands for, int [vocab_size].

    They are exact if the tokenizer is lossless. Otherwise they are the widths by which the tokens
    of a document share its bytes. The file's bytes are verified before.

    Raises:
        DataError: as `read_file`.
    """
    return np.load(BytesIO(read_file(dataset, TOKEN_BYTES)), allow_pickle=False)


def read_file(dataset: Path, name: str) -> bytes:
    """The bytes of one of a dataset's small files, verified.

    Raises:
        DataError: the file is missing or damaged; names it and the command that rebuilds it.
    """
    path = dataset / name
    expected = verified_manifest(dataset).files[name].checksum
    with repairable(), readable(path):
        contents = path.read_bytes()
        if f"blake3:{blake3(contents).hexdigest()}" != expected:
            raise Damaged(
                f"{path} does not have the bytes its manifest says (checksum differs)."
            )
    return contents


@contextmanager
def repairable() -> Generator[None]:
    """Add to a DataError of the block how a dataset is repaired."""
    try:
        yield
    except DataError as fault:
        raise Damaged(f"{fault} {REPAIR}") from None
