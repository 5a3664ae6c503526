"""The survey and the plan of many short documents: seconds and peak memory, each in a process of its own.

    python benchmarks/survey.py [--documents 250000 1000000 …] [--files 20] [--workers 1] [--output FILE.json]

The documents are generated: about 100 bytes each, one in a hundred a copy of another. `again` is the same survey of unchanged files,
`added` the one after a file of one document was added.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")


def write_files(folder: Path, documents: int, files: int) -> int:
    size = 0
    for number in range(files):
        with (folder / f"{number:06d}.jsonl").open("w", encoding="utf-8") as file:
            for place in range(documents // files):
                mine = place if place % 100 else 0
                text = f"{number if mine else 0} {mine} " + " ".join(
                    WORDS[(mine + step) * 7919 % len(WORDS)] for step in range(20)
                )
                size += file.write(json.dumps({"text": text}) + "\n")
    return size


def child(folder: Path, home: Path, workers: int) -> None:
    from infini_llama.configs.loading import parse_config
    from infini_llama.tasks.preprocess.stage import plan

    data = parse_config(
        {"data": {"files": [str(folder)], "num_workers": workers, "tokenizer": {"vocab_size": 600}}}
    ).data
    begun, cpu = time.perf_counter(), _cpu()
    planned = plan(data, home)
    own, workers_peak = (
        resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    peak = int(Path("/proc/self/status").read_text(encoding="utf-8").split("VmHWM:")[1].split()[0]) / 1024
    measures = {"seconds": time.perf_counter() - begun, "cpu_seconds": _cpu() - cpu, "peak_megabytes": min(own, peak)}
    print(json.dumps(measures | {"worker_peak_megabytes": workers_peak, "documents": planned.documents}))


def _cpu() -> float:
    return sum(
        use.ru_utime + use.ru_stime for use in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[250_000, 1_000_000])
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, home = options.child
        return child(folder, home, options.workers)
    found = []
    for documents in options.documents:
        with tempfile.TemporaryDirectory(prefix="survey-") as place:
            folder, home = Path(place) / "text", Path(place) / "home"
            folder.mkdir()
            size = write_files(folder, documents, options.files)
            time.sleep(2.5)  # a file that has just been written is not believed to stay
            for what in ("first", "again", "added"):
                if what == "added":
                    (folder / "added.jsonl").write_text('{"text": "one more"}\n', encoding="utf-8")
                command = [
                    sys.executable,
                    __file__,
                    "--child",
                    str(folder),
                    str(home),
                    "--workers",
                    str(options.workers),
                ]
                path = os.pathsep.join([str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
                ended = subprocess.run(
                    command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=True
                )
                row = {"what": what, "files": options.files, "bytes": size} | json.loads(ended.stdout.splitlines()[-1])
                found.append(row)
                print(
                    " ".join(
                        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                        for key, value in row.items()
                    )
                )
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
