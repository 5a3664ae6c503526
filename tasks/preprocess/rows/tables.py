"""Row tables of a dataset: the rows of each source by itself, so that no row holds text of two."""

import logging
import multiprocessing
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import numpy as np

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.packing import ON_A_GPU, PACKED
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig
from infini_llama.configs.schema.sources import HELD_OUT
from infini_llama.tasks.preprocess.rows.packing import (
    ComputeRows,
    RowArrays,
    compute_rows,
    costs_of,
)
from infini_llama.tasks.preprocess.tokens.reader import Rows, rows_of, target_counts
from infini_llama.tasks.preprocess.tokens.shards import (
    document_lengths,
    entropy_bits,
    save_array,
)
from infini_llama.tasks.preprocess.tokens.stream import TokenStream
from infini_llama.tasks.records.manifest import (
    SPLITS,
    BySplit,
    RowCosts,
    RowTableContent,
    RowTableMeta,
    Shard,
    SourceRows,
    SplitContent,
)
from infini_llama.tasks.storage.artifacts import (
    FORMAT_VERSIONS,
    ROW_TABLES,
    commit,
    key_of,
    read_dataset,
    staged,
)
from infini_llama.tasks.storage.dataset_files import repairable

log = logging.getLogger("infini_llama.preprocess")
DEVICES = Path("/dev")


def row_table_key(settings: DataConfig | RowTableContent, tokens_key: str) -> str:
    """64 hex digits for the row table of one strategy and length.

    Args:
        tokens_key: key of the token level below it.
    """
    strategy = (
        settings.packing if isinstance(settings, DataConfig) else settings.strategy
    )
    key: dict[str, object] = {
        "version": FORMAT_VERSIONS[ROW_TABLES],
        "tokens": tokens_key,
        "strategy": strategy,
        "sequence_length": settings.sequence_length,
    }
    if strategy == "window":
        key["stride"] = settings.stride
    return key_of(key)


def require_device(requested: str) -> None:
    """Refuse a requested GPU that is not there.

    Raises:
        ConfigError: there is none. torch is not imported to find out.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    hides_all = visible == "" or visible.startswith(("-1", ","))
    has_gpu = (DEVICES / "nvidiactl").exists() and not hides_all
    if requested.startswith("cuda") and not has_gpu:
        raise ConfigError(
            f"data.device={requested}, but this machine has no working NVIDIA driver; "
            "use data.device=auto or cpu."
        )


@contextmanager
def rows_on(device: str) -> Generator[ComputeRows]:
    """The function `compute_rows` on a device, with the same bytes on any.

    A GPU works in a process of its own, which ends with the context, so that no CUDA context stays
    beside training.

    Raises:
        ConfigError: from the function: the device does not work.
    """
    if device == "cpu":
        yield compute_rows
        return
    from concurrent.futures import ProcessPoolExecutor  # only for a GPU

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:

        def on_device(
            lengths: np.ndarray,
            strategy: str,
            sequence_length: int,
            stride: int | None,
        ) -> RowArrays:
            if strategy not in PACKED:
                lengths = lengths.sum(keepdims=True)  # all that such rows depend on
            try:
                rows = pool.submit(
                    rows_by_torch,
                    lengths,
                    strategy,
                    sequence_length,
                    stride,
                    device,
                )
                return rows.result()
            except Exception as error:
                lines = str(error).strip().splitlines()
                reason = lines[0] if lines else type(error).__name__
                raise ConfigError(
                    f"data.device: {device} does not work ({reason}); use data.device=auto or cpu."
                ) from error

        yield on_device


def rows_by_torch(
    lengths: np.ndarray,
    strategy: str,
    sequence_length: int,
    stride: int | None,
    device: str,
) -> RowArrays:
    """The rows as `gpu.compute_rows` gives them; only the process that computes imports torch."""
    from infini_llama.tasks.preprocess.rows import gpu

    return gpu.compute_rows(lengths, strategy, sequence_length, stride, device)


@dataclass(frozen=True, eq=False)
class Table:
    """Places of the rows of a split in its stream of tokens."""

    arrays: dict[str, np.ndarray]  # "rows", and "pieces" where the strategy packs
    rows: int
    sources: tuple[SourceRows, ...]  # in the order of their rows
    costs: RowCosts


def build_table(
    lengths: dict[str, np.ndarray],
    strategy: str,
    sequence_length: int,
    stride: int | None = None,
    compute: ComputeRows = compute_rows,
) -> Table:
    """Rows of `sequence_length` inputs each.

    Args:
        lengths: int64 [documents] of each source, tokens of its documents; their streams follow
            each other.
        compute: computes the rows of one source.
    """
    by_name: dict[str, list[np.ndarray]] = {}
    sources = list[SourceRows]()
    costs = list[RowCosts]()
    first_token = 0
    first_piece = 0
    for name, of_source in lengths.items():
        table = compute(of_source, strategy, sequence_length, stride)
        if table.pieces is None:
            arrays = {"rows": table.entries + first_token}
        else:
            # Its first bound is the last one of the source before.
            shared = 1 if by_name else 0
            arrays = {
                "rows": table.entries[shared:] + first_piece,
                "pieces": table.pieces + np.array([first_token, 0]),
            }
            first_piece += len(table.pieces)
        for array_name, array in arrays.items():
            by_name.setdefault(array_name, []).append(array)
        sources.append(SourceRows(name=name, rows=len(table)))
        costs.append(costs_of(table, of_source, sequence_length))
        first_token += int(of_source.sum())
    rows = [source.rows for source in sources]
    return Table(
        arrays={name: np.concatenate(arrays) for name, arrays in by_name.items()},
        rows=sum(rows),
        sources=tuple(sources),
        costs=costs[0] if len(costs) == 1 else _sum(costs, rows),
    )


def _sum(costs: list[RowCosts], rows: list[int]) -> RowCosts:
    filled = sum(
        cost.efficiency * count for cost, count in zip(costs, rows, strict=True)
    )
    return RowCosts(
        efficiency=filled / max(1, sum(rows)),
        cut_documents=sum(cost.cut_documents for cost in costs),
        lost_tokens=sum(cost.lost_tokens for cost in costs),
        targets=sum(cost.targets for cost in costs),
    )


def lengths_by_source(dataset: Path, shards: Sequence[Shard]) -> dict[str, np.ndarray]:
    """Tokens of the documents of each source of a split, int64 [documents].

    The name "" is that of the only source.
    """
    by_source = groupby(shards, key=lambda shard: shard.source)
    return {name: document_lengths(dataset, list(group)) for name, group in by_source}


def with_curriculum(data: DataConfig) -> list[DataConfig]:
    """The section `data` for each row table of a run.

    The first one is that of data.sequence_length; those of the curriculum's stages follow.
    """
    stages = [
        changed(data, sequence_length=stage.sequence_length, curriculum=[])
        for stage in data.curriculum
    ]
    return [data, *stages]


def write_table(
    data: DataConfig,
    dataset: Path,
    target: Path,
    key: str,
) -> None:
    """Compute and commit the row tables of both splits.

    Their strategy and length are those of the section `data`.

    On a GPU only where one is requested, for strategies ON_A_GPU.

    Raises:
        DataError: a split, or a source's training text, is shorter than one row, or a shard does
            not have the bytes its manifest says.
    """
    device = _device_of(data)
    content = read_dataset(dataset).content
    with rows_on(device) as compute:
        built = {
            split: _table_of(data, dataset, split, content[split], compute)
            for split in SPLITS
        }
    train, validation = (built[split] for split in SPLITS)
    sources = BySplit(train=train.sources, validation=validation.sources)
    facts = RowTableContent(
        strategy=data.packing,
        sequence_length=data.sequence_length,
        rows=BySplit(train=train.rows, validation=validation.rows),
        stride=data.stride,
        sources=sources if data.sources else None,
    )
    with repairable():
        training_rows = _rows_of(dataset, "train", train, data.sequence_length)
        validation_rows = _rows_of(
            dataset, "validation", validation, data.sequence_length
        )
        costs = BySplit(
            train=_costs(train, training_rows),
            validation=_costs(validation, validation_rows),
        )
        targets = target_counts(validation_rows, content.vocab_size)
    meta = RowTableMeta(
        key=key,
        device=device,
        packing=costs,
        infini_llama=version("infini-llama"),
        unigram_entropy_bits=entropy_bits(targets),
    )
    with staged(target) as folder:
        for split, table in built.items():
            for name, array in table.arrays.items():
                save_array(folder / f"{split}.{name}.npy", array)
        commit(folder, target, ROW_TABLES, meta.to_json(), facts.to_json())


def _device_of(data: DataConfig) -> str:
    """The device that computes rows."""
    if data.device == "auto" or data.packing in ON_A_GPU:
        return "cpu" if data.device == "auto" else data.device
    if data.device.startswith("cuda"):
        log.info(
            "data.packing=%s is computed on the CPU: its pieces are placed one after another",
            data.packing,
        )
    return "cpu"


def _rows_of(
    dataset: Path,
    split: str,
    table: Table,
    sequence_length: int,
) -> Rows:
    """The rows of a split, whose shards are verified before their first use."""
    manifest = read_dataset(dataset)
    stream = TokenStream(dataset, manifest, split, verify_on_read=True)
    return rows_of(
        stream,
        entries=table.arrays["rows"],
        pieces=table.arrays.get("pieces"),
        size=sequence_length + 1,
        padding=manifest.content.eos_id,
    )


def _costs(table: Table, rows: Rows) -> RowCosts:
    """The costs of the rows of a table, with the targets that their loss mask leaves.

    Raises:
        DataError: a shard does not have the bytes its manifest says.
    """
    if not rows.stream.has_loss_mask:
        return table.costs
    targets = sum(rows.count_targets(np.array([row])) for row in range(len(rows)))
    return changed(table.costs, targets=targets)


def _table_of(
    data: DataConfig,
    dataset: Path,
    split: str,
    content: SplitContent,
    compute: ComputeRows,
) -> Table:
    """The row table of one split.

    Raises:
        DataError: the split has too little text for one; see `write_table`.
    """
    length = data.sequence_length
    lengths = lengths_by_source(dataset, content.shards)
    table = build_table(lengths, data.packing, length, data.stride, compute)
    without = [source.name for source in table.sources if not source.rows]
    # Each source is trained on, and some held-out text is enough.
    if table.rows and not (split == "train" and without):
        for name in without:
            log.warning(
                "data.sources.%s is not in the validation loss: its %d held-out tokens fill no row "
                "of data.sequence_length=%d; raise data.validation_fraction",
                name,
                int(lengths[name].sum()),
                length,
            )
        return table
    refused = without[:1] if split == "train" else without
    source = f" of data.sources.{refused[0]}" if split == "train" and refused[0] else ""
    if data.packing in PACKED:
        documents = sum(len(lengths[name]) for name in refused)
        fault = f"{documents} document(s), of which none has a token beside its end; add text"
    else:
        tokens = sum(int(lengths[name].sum()) for name in refused)
        each = " in each source" if len(refused) > 1 else ""
        fault = (
            f"{tokens} tokens, fewer{each} than one sequence of data.sequence_length={length} "
            "and its last label; lower it, add text"
        )
    names_held_out = any(
        not set(HELD_OUT).isdisjoint(text.set_keys) for text in (data, *data.sources)
    )
    fraction = "" if names_held_out else ", or change data.validation_fraction"
    raise DataError(f"the {split} text{source} has {fault}{fraction}.")
