"""What has to be the same on every node before the first step: the code, the versions under it, the data and its order."""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from infini_llama.tasks.preprocess.tokens.reader import TokenReader
from infini_llama.tasks.storage.artifacts import read_manifest
from infini_llama.tasks.train.worker.data.mixture import mixed_rows, parts_of
from infini_llama.tasks.train.worker.data.order import sample_rows

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "model", "tasks")  # all that a worker runs
VERSIONS = (
    "infini-llama",
    "torch",
    "numpy",
    "pyarrow",
    "tokenizers",
    "safetensors",
    "triton",
    "flash-attn",
    "flash-attn-4",
)
ROWS = 64  # whose tokens are read


def code_digest(root: Path = ROOT) -> str:
    """Of every Python file that workers may import from us, by path and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def facts(order: dict) -> dict[str, str]:
    """What this machine has and sees, by a name for people.

    Raises:
        DataError: the dataset of `order` is not here, or damaged.
    """
    dataset = Path(order["dataset"])
    tables = [order["chunks"], *(stage["chunks"] for stage in order["config"]["data"]["curriculum"])]
    return {
        "code of infini-llama": code_digest(),
        "python": platform.python_version(),
        **{name: _version(name) for name in VERSIONS},
        "dataset": read_manifest(dataset, "dataset").digest,
        "rows": " ".join(read_manifest(dataset / "chunks" / table, "chunks").digest for table in tables),
        "order and tokens of the first rows": first_rows_digest(order),
    }


def first_rows_digest(order: dict) -> str:
    """Of a global batch at the beginning of the row table: its row numbers, and the tokens of some of them as they are read here."""
    reader = TokenReader(Path(order["dataset"]), order["chunks"], "train")
    train = order["config"]["train"]
    if order["weights"]:
        parts = parts_of(reader.sources, order["weights"])
        rows = mixed_rows(0, train["global_batch_size"], parts, train["seed"])
    else:
        rows = sample_rows(0, train["global_batch_size"], len(reader), train["seed"])
    digest = hashlib.blake2b(rows.astype("<i8").tobytes(), digest_size=16)
    digest.update(reader.gather(rows[:ROWS]).astype("<i8").tobytes())
    return digest.hexdigest()


def differences(first: dict, other: dict) -> list[str]:
    """A sentence for each fact in which a node's record differs from the first node's."""
    return [
        f"node {other['node']} ({other['host']}) has {name} {other['facts'].get(name)}, but node 0 ({first['host']}) has {here}."
        for name, here in first["facts"].items()
        if other["facts"].get(name) != here
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
