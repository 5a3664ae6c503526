"""Everything that is measured and checked on a GPU, in parts of at most ten minutes each:

    python benchmarks/gpu/run.py --part correctness throughput memory data infini [--wheels wheels] [--out build/gpu]
    python benchmarks/gpu/run.py --rehearse --together   # the same code at tiny sizes on the CPU, about a minute

It needs Python 3.12, torch 2.11 built for CUDA 13, numpy, tokenizers, pyarrow, transformers and tensorboard, and no network, Prefect
or datasets. What else the package imports is carried as wheels: `benchmarks/gpu/collect_wheels.sh wheels` downloads them.

A part is a list of cases. Each runs in a process of its own with a time limit, so that a crash or a hang costs one case; a rehearsal
can have all of them in one (--together), which imports once. The rows of a case are written to OUT/PART.json at once, and OUT/PART.md
is the table of them. A second call runs what is missing or failed; --again runs all. After --minutes no new case is started.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from case import Case, Row

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PARTS = ("correctness", "throughput", "memory", "data", "infini")


def cases_of(part: str) -> dict[str, Case]:
    return import_module(f"part_{part}").CASES


class Results:
    """The rows of one part by case, in OUT/PART.json, and their table in OUT/PART.md."""

    def __init__(self, out: Path, part: str, header: dict[str, Any]) -> None:
        self.path, self.part, self.header = out / f"{part}.json", part, header
        self.cases: dict[str, Any] = {}
        if self.path.exists():
            before = json.loads(self.path.read_text(encoding="utf-8"))
            if {name: before.get(name) for name in header} == header:
                self.cases = before["cases"]

    def is_done(self, case: str) -> bool:
        return case in self.cases and "error" not in self.cases[case]

    def add(self, case: str, found: dict[str, Any]) -> None:
        self.cases[case] = found
        written = json.dumps(self.header | {"cases": self.cases}, indent=1)
        replaced = self.path.with_suffix(".tmp")
        replaced.write_text(written + "\n", encoding="utf-8")
        replaced.replace(self.path)
        self.path.with_suffix(".md").write_text(self.table(), encoding="utf-8")

    def table(self) -> str:
        """One Markdown table per case; a failed one is a sentence."""
        lines = [f"# {self.part}: {self.header['device']}", ""]
        for case, found in self.cases.items():
            lines += [f"## {case} ({found['seconds']:.0f} s)", ""]
            if "error" in found:
                lines += [f"failed: {found['error']}", ""]
                continue
            names = list(dict.fromkeys(name for row in found["rows"] for name in row))
            lines += [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
            lines += [
                f"| {' | '.join(shown(row.get(name)) for name in names)} |"
                for row in found["rows"]
            ]
            lines.append("")
        return "\n".join(lines)


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


def run_case(
    part: str,
    case: str,
    arguments: argparse.Namespace,
    env: dict[str, str],
    limit: float,
) -> dict[str, Any]:
    """The rows of a case, or the error that it ended with; both with its seconds."""
    command = [
        sys.executable,
        __file__,
        "--child",
        part,
        case,
        "--device",
        arguments.device,
        "--out",
        arguments.out,
    ]
    command += ["--rehearse"] if arguments.rehearse else []
    began = time.monotonic()
    child = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=limit)
        error = f"it ended with code {child.returncode}" if child.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # with the processes that it started
        output, error = child.communicate()[0], f"it took more than {limit:.0f} s"
    seconds = round(time.monotonic() - began, 1)
    lines = (output or "").strip().splitlines() or [""]
    if not error and lines[-1].startswith("["):
        return {"seconds": seconds, "rows": json.loads(lines[-1])}
    return {
        "seconds": seconds,
        "error": f"{error or 'no result'}: {lines[-1][:300]}",
        "output": lines[-40:],
    }


def run_here(part: str, case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """`run_case` in this process, without a limit."""
    began = time.monotonic()
    try:
        rows = cases_of(part)[case].function(arguments.device, arguments.rehearse)
    except Exception as error:
        traceback.print_exc()
        return {
            "seconds": round(time.monotonic() - began, 1),
            "error": f"{type(error).__name__}: {error}"[:300],
        }
    return {"seconds": round(time.monotonic() - began, 1), "rows": rows}


def child(part: str, case: str, arguments: argparse.Namespace) -> None:
    """In the case's own process: the rows are the last line."""
    rows: list[Row] = cases_of(part)[case].function(
        arguments.device, arguments.rehearse
    )
    print(f"\n{json.dumps(rows)}", flush=True)


def environment(arguments: argparse.Namespace) -> dict[str, str]:
    """Variables of the cases: this checkout first, then the wheels, unpacked into OUT/site."""
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    if arguments.wheels:
        site = Path(arguments.out).absolute() / "site"
        wheels = [str(path) for path in sorted(Path(arguments.wheels).glob("*.whl"))]
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--upgrade",
        ]
        subprocess.run([*pip, "--target", str(site), *wheels], check=True)
        paths.append(str(site))
    paths += [
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path and path not in paths
    ]
    small = (
        {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        if arguments.rehearse
        else {}
    )
    return (
        os.environ
        | small
        | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    )


def device_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the results are of: a case that was measured on another machine is measured again."""
    import torch

    arguments.device = "cpu" if arguments.rehearse else "cuda"
    name = (
        torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else platform.processor() or "cpu"
    )
    return {"device": name, "rehearsal": arguments.rehearse, "torch": torch.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--case", nargs="+", help="of these parts; default: all")
    parser.add_argument(
        "--out", default=str(ROOT / "build" / "gpu"), help="folder of the results"
    )
    parser.add_argument(
        "--wheels",
        help="folder that collect_wheels.sh wrote; default: everything is installed",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.5,
        help="of this call; a case that does not fit is left",
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument(
        "--together",
        action="store_true",
        help="the cases of a rehearsal in one process",
    )
    parser.add_argument(
        "--again", action="store_true", help="run cases that have a result, too"
    )
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        part, case = arguments.child
        child(part, case, arguments)
        return 0
    until = time.monotonic() + 60 * arguments.minutes
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    env = environment(arguments)
    os.environ.update(env)  # before torch is imported
    sys.path[1:1] = env["PYTHONPATH"].split(os.pathsep)
    header = device_of(arguments)
    failed, left = [], []
    for part in arguments.part:
        results = Results(Path(arguments.out), part, header)
        for name, case in cases_of(part).items():
            if (arguments.case and name not in arguments.case) or (
                results.is_done(name) and not arguments.again
            ):
                continue
            limit = min(
                until - time.monotonic(),
                480.0 if arguments.rehearse else 2.0 * case.seconds,
            )
            if not arguments.rehearse and limit < case.seconds:
                left.append(f"{part}/{name}")
                continue
            together = arguments.rehearse and arguments.together
            found = (
                run_here(part, name, arguments)
                if together
                else run_case(part, name, arguments, env, limit)
            )
            results.add(name, found)
            print(
                f"{part}/{name}: {found.get('error', 'done')}, {found['seconds']} s",
                flush=True,
            )
            failed += [f"{part}/{name}"] if "error" in found else []
        print(
            results.table() if results.cases else f"{part}: nothing measured",
            flush=True,
        )
    print(
        f"failed: {', '.join(failed) or 'none'}; left for the next call: {', '.join(left) or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
