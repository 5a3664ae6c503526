"""From JSON lines to what training reads, by us and by peers, at equal work: the same text, tokenizer and end-of-text tokens.

    python benchmarks/preparation.py [--megabytes 118] [--kind dictionary] [--rounds 3] [--only NAME …] [--output FILE.json]

The corpus, unless --corpus names one: the Python sources of the standard library and of what is installed beside it, exact duplicates
left out, repeated where --megabytes asks for more. --kind: a record per file (ordinary), entries of 200 bytes (dictionary), or 10 MB
(long). The tokenizer, unless --tokenizer names one: byte-level BPE of 32k tokens learned from the first eighth of it whose tokenizer
the fast engine takes.

Each round runs every program once, each in a process of its own. `work_seconds` and `cpu_seconds` are of the preparation alone
(with the processes it starts), `start_seconds` of its imports and, for us, of the engine's check, which is made once a tokenizer and
not once a corpus; `ids` stands for how often each token occurs, so it is the same for the same ids; `peak_megabytes` is the largest
process's. Peers that are not installed are named and left out. `megatron-fast` is what Megatron-LM's tools/preprocess_data_fast.py
does (gigatoken over the whole file, the end-of-text token appended, .bin and .idx written; no checksum, no fsync), `ours, unchanged` the
same command again. `ours, default` is the whole work of a configuration that
names no tokenizer: one of 4,096 tokens is learned from the text, the engine is checked, and the text is encoded. Its ids are its own.

Where two programs' `ids` differ, or their numbers of tokens by more than the rows that are not full, it ends with an error and stores
nothing.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from agreement import require_close, require_equal
from preparation_corpora import texts_of, train_tokenizer, write_corpus

from infini_llama.configs.reading import JsonObject

LENGTH = 2048
SPLITS = ("train", "validation")
# What training reads; not the tokenizer, not manifests.
DATA = (
    ".arrow",
    ".npy",
    ".bin",
    ".idx",
    ".ds",
    ".index",
)
Work = Callable[[], int]  # returns the tokens written


def ours(corpus: Path, tokenizer: Path, output: Path, engine: str) -> Work:
    from infini_llama.configs.loading import parse_config
    from infini_llama.tasks.preprocess.stage import preprocess
    from infini_llama.tasks.storage.artifacts import read_dataset
    from infini_llama.tasks.tokenizers.engines import choose_engine, remember_comparison
    from infini_llama.tasks.tokenizers.tokenizer import load

    given = settings(corpus)
    given["tokenizer"] = {"path": str(tokenizer)}
    data = parse_config({"data": given}).data
    checks = output / "engine-checks"
    if engine == "gigatoken":
        # Once a tokenizer, not once a corpus.
        choose_engine(load(data.tokenizer), True, checks)
    else:
        fault = "this benchmark compares the engines"
        remember_comparison(load(data.tokenizer), True, checks, fault)

    def work() -> int:
        reference = preprocess(data, output)
        used = read_dataset(output / reference.path).meta.engine
        if used is None or used.name != engine:
            raise SystemExit(
                f"{engine} does not take this tokenizer: {used and used.refused}"
            )
        return reference.train.tokens + reference.validation.tokens

    return work


def settings(corpus: Path) -> JsonObject:
    """The section `data` of a configuration that names no tokenizer."""
    with corpus.open(encoding="utf-8") as file:
        # A few long documents.
        held_out = 0.01 if len(list(islice(file, 200))) == 200 else 0.3
    return {
        "files": [str(corpus)],
        "validation_fraction": held_out,
        "sequence_length": LENGTH,
        "device": "cpu",
    }


def default(corpus: Path, tokenizer: Path, output: Path) -> Work:
    """As a user gets it: the tokenizer is learned from the text, and the engine is checked."""
    from infini_llama.configs.loading import parse_config
    from infini_llama.tasks.preprocess.stage import preprocess

    data = parse_config({"data": settings(corpus)}).data

    def work() -> int:
        reference = preprocess(data, output)
        return reference.train.tokens + reference.validation.tokens

    return work


def again(corpus: Path, tokenizer: Path, output: Path) -> Work:
    """The same command once more, on a dataset that is complete."""
    first = ours(corpus, tokenizer, output, "gigatoken")
    time.sleep(2.5)  # what has just been written is read again
    first()
    return first


def megatron_fast(corpus: Path, tokenizer: Path, output: Path) -> Work:
    ak: Any = import_module("awkward")
    gigatoken: Any = import_module("gigatoken")

    def work() -> int:
        engine = gigatoken.Tokenizer.from_json(tokenizer.read_text(encoding="utf-8"))
        documents: Any = engine.encode_files(
            gigatoken.JsonlFileSource([str(corpus)], field="text")
        )
        lengths = ak.to_numpy(ak.num(documents)).astype(np.int64)
        flat = np.insert(
            ak.to_numpy(ak.flatten(documents)), lengths.cumsum(), 0
        ).astype(np.uint16)
        with (output / "text_document.bin").open("wb") as file:
            file.write(flat.tobytes(order="C"))
        sizes = (lengths + 1).astype(np.int32)
        with (output / "text_document.idx").open("wb") as file:
            file.write(b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x08")
            file.write(
                np.array([len(sizes), len(sizes) + 1], "<u8").tobytes()
                + sizes.tobytes()
            )
            file.write(((sizes.astype(np.int64).cumsum() - sizes) * 2).tobytes())
            file.write(np.arange(len(sizes) + 1, dtype=np.int64).tobytes())
        return len(flat)

    return work


def datasets_map(corpus: Path, tokenizer: Path, output: Path) -> Work:
    """`run_clm` of transformers' examples: map the tokenizer over the text, then group_texts."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    encoder = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))

    def group(batch: dict[str, list]) -> dict[str, list]:
        joined: list[int] = list(chain.from_iterable(batch["input_ids"]))
        whole = len(joined) // LENGTH * LENGTH
        rows = [joined[start : start + LENGTH] for start in range(0, whole, LENGTH)]
        return {"input_ids": rows, "labels": [row.copy() for row in rows]}

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        ids = encoder(
            batch["text"], add_special_tokens=False, return_attention_mask=False
        )["input_ids"]
        return {"input_ids": [[*document, 0] for document in ids]}

    def work() -> int:
        text: Any = datasets.load_dataset(
            "json",
            data_files=str(corpus),
            split="train",
            cache_dir=str(output / "cache"),
        )
        tokens = text.map(tokenize, batched=True, num_proc=2, remove_columns=["text"])
        rows = tokens.map(group, batched=True, num_proc=2)
        rows.save_to_disk(str(output / "rows"))
        shutil.rmtree(output / "cache")
        return len(rows) * LENGTH

    return work


def datatrove(corpus: Path, tokenizer: Path, output: Path) -> Work:
    executor: Any = import_module("datatrove.executor")
    readers: Any = import_module("datatrove.pipeline.readers")
    writers: Any = import_module("datatrove.pipeline.tokens")

    def work() -> int:
        reader = readers.JsonlReader(str(corpus.parent), glob_pattern=corpus.name)
        writer = writers.DocumentTokenizer(
            str(output / "tokens"),
            tokenizer_name_or_path=str(tokenizer),
            eos_token="<|endoftext|>",
            shuffle_documents=False,
        )
        executor.LocalPipelineExecutor(
            [reader, writer], tasks=1, logging_dir=str(output / "logs")
        ).run()
        return (
            sum(path.stat().st_size for path in (output / "tokens").rglob("*.ds")) // 2
        )

    return work


class Encoded:
    """The ids of each line's text, for `litdata`, which sends its function to other processes."""

    def __init__(self, tokenizer: Path) -> None:
        # Opened in the process that uses it.
        self.tokenizer, self.encoder = (
            str(tokenizer),
            cast(Any, None),
        )

    def __call__(self, lines: list[str]) -> Any:
        import torch
        from tokenizers import Tokenizer

        self.encoder = self.encoder or Tokenizer.from_file(self.tokenizer)
        for line in lines:
            ids = self.encoder.encode(
                json.loads(line)["text"], add_special_tokens=False
            ).ids
            yield torch.tensor([*ids, 0], dtype=torch.int32)


def litdata(corpus: Path, tokenizer: Path, output: Path) -> Work:
    library: Any = import_module("litdata")

    def work() -> int:
        lines = corpus.read_text(encoding="utf-8").split("\n")[:-1]
        loader = library.TokensLoader(block_size=LENGTH)
        rows = str(output / "rows")
        library.optimize(
            Encoded(tokenizer),
            [lines[::2], lines[1::2]],
            output_dir=rows,
            chunk_size=LENGTH * 8012,
            num_workers=2,
            item_loader=loader,
        )
        return (
            sum(path.stat().st_size for path in (output / "rows").rglob("*.bin")) // 4
        )

    return work


# Its IDs are those of no other program.
LEARNED = "ours, default"
PROGRAMS: dict[str, tuple[Callable[..., Work], tuple[Any, ...]]] = {
    LEARNED: (default, ()),
    "ours, gigatoken": (ours, ("gigatoken",)),
    "megatron-fast": (megatron_fast, ()),
    "ours, unchanged": (again, ()),
    "ours, tokenizers": (ours, ("tokenizers",)),
    "datasets.map": (datasets_map, ()),
    "datatrove": (datatrove, ()),
    "litdata": (litdata, ()),
}


def child(name: str, corpus: Path, tokenizer: Path) -> None:
    """One program in this process: its measures as a line of JSON, the last of stdout."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="preparation-") as folder:
        prepare, more = PROGRAMS[name]
        work = prepare(corpus, tokenizer, Path(folder), *more)
        started, cpu = time.perf_counter(), _cpu()
        tokens = work()
        wall, cpu = time.perf_counter() - started, _cpu() - cpu
        peak = max(_own_peak(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
        files = [
            path
            for path in Path(folder).rglob("*")
            if path.suffix in DATA and path.name != "token_bytes.npy"
        ]
        written, ids = (
            sum({path.stat().st_ino: path.stat().st_size for path in files}.values()),
            _counts(files),
        )
    measures = {
        "start_seconds": started - begun,
        "work_seconds": wall,
        "cpu_seconds": cpu,
        "peak_megabytes": peak / 1024,
    }
    print(
        json.dumps(
            measures | {"tokens": tokens, "bytes_a_token": written / tokens, "ids": ids}
        )
    )


def require_same_tokens(found: dict[str, list[dict[str, float]]]) -> None:
    """Every run has the same ids as the others whose ids are counted, and as many tokens, but for ends of rows and documents.

    Raises:
        SystemExit: a program's tokens differ.
    """
    runs = {
        f"{name}, round {number + 1}": run
        for name, times in found.items()
        if name != LEARNED
        for number, run in enumerate(times)
    }
    if LEARNED in found:
        require_equal(
            "the ids",
            {str(number): run["ids"] for number, run in enumerate(found[LEARNED])},
        )
    counted = {name: run["ids"] for name, run in runs.items() if run["ids"]}
    if counted:
        require_equal("the token ids", counted)
    if runs:
        require_close(
            "the numbers of tokens",
            {name: [run["tokens"]] for name, run in runs.items()},
            tolerance=0.05,
        )


def _counts(files: list[Path]) -> int:
    """What stands for how often each id occurs in our shards or Megatron's; 0 for other files."""
    from blake3 import blake3

    from infini_llama.tasks.preprocess.tokens.shards import map_shard

    streams = [
        map_shard(path)[1]
        for path in files
        if path.suffix == ".arrow" and path.parent.name in SPLITS
    ]
    streams += [
        np.fromfile(path, np.uint16)
        for path in files
        if path.name == "text_document.bin"
    ]
    counts = sum(
        (np.bincount(stream, minlength=2**16) for stream in streams),
        np.zeros(2**16, np.int64),
    )
    return int(blake3(counts.tobytes()).hexdigest()[:12], 16) if streams else 0


def _own_peak() -> int:
    """In KB. Not ru_maxrss, which begins at what the process that started this one had."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0])


def _cpu() -> float:
    return sum(
        use.ru_utime + use.ru_stime
        for use in map(
            resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=118)
    parser.add_argument(
        "--kind", choices=["ordinary", "dictionary", "long"], default="ordinary"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_name("results") / "preparation.json",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child, options.corpus, options.tokenizer)
    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        corpus, tokenizer = (
            options.corpus or Path(folder) / "corpus.jsonl",
            options.tokenizer or Path(folder) / "tokenizer.json",
        )
        if not options.corpus:
            write_corpus(corpus, options.megabytes * 1_000_000, options.kind)
        if not options.tokenizer:
            train_tokenizer(texts_of(corpus)).save(str(tokenizer))
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.rounds):
            for name in options.only:
                command = [
                    sys.executable,
                    __file__,
                    "--child",
                    name,
                    "--corpus",
                    str(corpus),
                    "--tokenizer",
                    str(tokenizer),
                ]
                paths = [
                    str(Path(__file__).parents[1] / "src"),
                    *os.environ.get("PYTHONPATH", "").split(os.pathsep),
                ]
                environment = os.environ | {
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    "HF_HUB_OFFLINE": "1",
                }
                ended = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    env=environment,
                    check=False,
                )
                try:
                    measures = json.loads(ended.stdout.splitlines()[-1])
                except (IndexError, ValueError):
                    print(
                        f"{name}: does not run here ({(ended.stderr.splitlines() or ['no message'])[-1]})",
                        flush=True,
                    )
                    continue
                found.setdefault(name, []).append(measures)
                print(
                    f"{name:18}"
                    + " ".join(f"{key}={value:.4g}" for key, value in measures.items()),
                    flush=True,
                )
        size = corpus.stat().st_size
    require_same_tokens(found)
    versions = {}
    for package in (
        "gigatoken",
        "tokenizers",
        "datasets",
        "datatrove",
        "litdata",
        "orjson",
    ):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
    }
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "load_at_the_end": os.getloadavg(),
    }
    stored = {
        "kind": options.kind,
        "corpus_bytes": size,
        "machine": machine,
        "versions": versions,
        "medians": medians,
        "runs": found,
    }
    options.output.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
