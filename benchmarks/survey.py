"""Preparing many documents or files: seconds and peak memory, each in a process of its own.

    python benchmarks/survey.py [--cases DOCUMENTS:FILES …] [--workers 1] [--output FILE.json]

The documents are generated: about 100 bytes each, one in a hundred an exact copy of another; the tokenizer is given. `first` is the
preparation of new text, `again` the same command with unchanged files, `added` the one after a file of one document was added. On a busy
machine `cpu_seconds` say more than `seconds`.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
)


def write_files(folder: Path, documents: int, files: int) -> int:
    size = 0
    for number in range(files):
        with (folder / f"{number:06d}.jsonl").open("w", encoding="utf-8") as file:
            for place in range(
                number * (documents // files), (number + 1) * (documents // files)
            ):
                mine = place if place % 100 else 0
                text = f"{mine} " + " ".join(
                    WORDS[(mine + step) * 7919 % len(WORDS)] for step in range(20)
                )
                size += file.write(json.dumps({"text": text}) + "\n")
    return size


def child(folder: Path, home: Path, workers: int) -> None:
    from infini_llama.configs.loading import parse_config
    from infini_llama.tasks.preprocess.stage import preprocess

    data = parse_config(
        {
            "data": {
                "files": [str(folder)],
                "num_workers": workers,
                "tokenizer": {"path": str(folder.parent / "tokenizer.json")},
            }
        }
    ).data
    begun, cpu = time.perf_counter(), _cpu()
    reference = preprocess(data, home)
    own, workers_peak = (
        resource.getrusage(who).ru_maxrss / 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    peak = (
        int(
            Path("/proc/self/status")
            .read_text(encoding="utf-8")
            .split("VmHWM:")[1]
            .split()[0]
        )
        / 1024
    )
    measures = {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": _cpu() - cpu,
        "peak_megabytes": min(own, peak),
    }
    print(
        json.dumps(
            measures
            | {
                "worker_peak_megabytes": workers_peak,
                "documents": reference.train.documents + reference.validation.documents,
            }
        )
    )


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
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["1000000:20", "4000000:20", "20000000:20", "20000:20000"],
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_name("results") / "survey.json",
    )
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, home = options.child
        return child(folder, home, options.workers)
    from infini_llama.configs.schema import TokenizerConfig
    from infini_llama.tasks.tokenizers.tokenizer import train

    found: list[dict[str, object]] = []
    for case in options.cases:
        documents, files = map(int, case.split(":"))
        with tempfile.TemporaryDirectory(prefix="survey-") as place:
            folder, home = Path(place) / "text", Path(place) / "home"
            folder.mkdir()
            size = write_files(folder, documents, files)
            texts = [" ".join(WORDS), "0 1 2 3 4 5 6 7 8 9"] * 9
            train(texts, TokenizerConfig(vocab_size=600)).save(
                str(Path(place) / "tokenizer.json")
            )
            time.sleep(2.5)  # a file that has just been written is not believed to stay
            for what in ("first", "again", "added"):
                if what == "added":
                    (folder / "added.jsonl").write_text(
                        '{"text": "one more"}\n', encoding="utf-8"
                    )
                found.append(
                    {"what": what, "files": files, "bytes": size}
                    | measured(folder, home, options.workers)
                )
                row = (
                    f"{key}={value:.4g}"
                    if isinstance(value, float)
                    else f"{key}={value}"
                    for key, value in found[-1].items()
                )
                print(" ".join(row), flush=True)
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "load_at_the_end": os.getloadavg(),
    }
    stored = {"machine": machine, "workers": options.workers, "runs": found}
    options.output.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def measured(folder: Path, home: Path, workers: int) -> dict[str, object]:
    """One survey in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--child",
        str(folder),
        str(home),
        "--workers",
        str(workers),
    ]
    path = os.pathsep.join(
        [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    )
    ended = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        check=True,
    )
    return json.loads(ended.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
