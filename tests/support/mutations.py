"""Damages files of a small finished run, one at a time, and runs the commands that read them.

    python mutations.py HOME SEED COUNT RESULTS     writes one line of JSON per case into RESULTS

A case is a file, a mutation and a command. It passes if the command refuses with a sentence (64, 65), or succeeds with the output of
the undamaged run, or with another output and a warning.

HOME has `config.yaml`, the finished runs `one` and `other`, each with a dataset of its own, and nothing else; every case starts from
a copy.
"""

import copy
import hashlib
import json
import math
import os
import random
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NOT_READ = re.compile(
    r"\.(log|html|png|txt|gitignore)$|/tensorboard/|/prefect/|events\.out"
)
VOLATILE = {"age", "bytes", "seconds", "created", "measured", "bytes_on_disk"}
TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?")
NAME_OF_EXCEPTION = re.compile(
    r"\b[A-Z][A-Za-z]*(Error|Exception|Warning)\b|Traceback|unexpected [A-Z]"
)
SECONDS = 120.0  # for one command
# Commands that read nothing of a dataset, or nothing of a run; all others read what else is in the home. `gc` lists what is there.
NO_DATASET, NO_RUN = (
    {"runs", "gc", "doctor"},
    {"report of a dataset", "verify", "preprocess", "repair"},
)
# A damaged dataset is none: it is built again.
ALLOWED = {("dry run", ".cached.dataset")}
Leaf = tuple[Any, Any]  # a container and the key or index of one of its values


def dataset_of(home: Path, run: str) -> str:
    return json.loads((home / "runs" / run / "lineage.json").read_text())["dataset"][
        "path"
    ]


def kinds_of_files(home: Path) -> dict[str, list[Path]]:
    """Files that commands read back, relative to `home`, by their path without numbers and digests; none of the run `other`."""
    found: dict[str, list[Path]] = {}
    others = ("config.yaml", "runs/other/", dataset_of(home, "other"))
    for path in sorted(home.rglob("*")):
        relative = path.relative_to(home)
        is_read = not NOT_READ.search(
            f"/{relative}"
        ) and not relative.as_posix().startswith(others)
        if is_read and path.is_file() and not path.is_symlink():
            kind = re.sub(r"[0-9a-f]{12,}|\d+", "N", relative.as_posix())
            found.setdefault(kind, []).append(relative)
    return found


# Mutations: (random, path, path of the same file of another run or None) -> None


def leaves(value: Any) -> Iterator[Leaf]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from leaves(inner)


def change_json(
    path: Path, choose: random.Random, change: Callable[[Leaf], None]
) -> None:
    """Change one value of a JSON file, or of one line of a file of JSON lines; of other text, change a word."""
    text = path.read_bytes().decode("utf-8", "replace")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    number = choose.randrange(len(lines)) if lines else 0
    try:
        value = json.loads(lines[number])
        change(
            choose.choice(
                [leaf for leaf in leaves(value) if leaf[1] != "self_checksum"]
            )
        )
        lines[number] = json.dumps(value, indent=None if path.suffix == ".jsonl" else 1)
        path.write_text("\n".join(lines) + ("\n" if path.suffix == ".jsonl" else ""))
    except (ValueError, IndexError, TypeError):
        flip_a_bit(choose, path, None)


def flip_a_bit(choose: random.Random, path: Path, _: Path | None) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    path.write_bytes(data)


def truncate(choose: random.Random, path: Path, _: Path | None) -> None:
    os.truncate(path, choose.randrange(max(1, path.stat().st_size)))


def drop_a_line(choose: random.Random, path: Path, _: Path | None) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[choose.randrange(len(lines)) if lines else slice(0)]
    path.write_bytes(b"".join(lines))


def empty(_: random.Random, path: Path, __: Path | None) -> None:
    path.write_bytes(b"")


def remove(_: random.Random, path: Path, __: Path | None) -> None:
    path.unlink()


def replace_by_a_folder(_: random.Random, path: Path, __: Path | None) -> None:
    path.unlink()
    path.mkdir()


def remove_a_key(choose: random.Random, path: Path, _: Path | None) -> None:
    change_json(path, choose, lambda leaf: leaf[0].__delitem__(leaf[1]))


def rename_a_key(choose: random.Random, path: Path, _: Path | None) -> None:
    def rename(leaf: Leaf) -> None:
        container, key = leaf
        if isinstance(container, dict):
            container[f"{key}x"] = container.pop(key)
        else:
            container.pop(key)

    change_json(path, choose, rename)


def set_to(choose: random.Random, path: Path, values: list[Any]) -> None:
    def change(leaf: Leaf) -> None:
        leaf[0][leaf[1]] = choose.choice(
            [value for value in values if value != leaf[0][leaf[1]]]
        )

    change_json(path, choose, change)


def wrong_type(choose: random.Random, path: Path, _: Path | None) -> None:
    set_to(choose, path, [1.5, "text", None, True, [], {}, math.nan])


def huge_or_negative(choose: random.Random, path: Path, _: Path | None) -> None:
    set_to(choose, path, [10**30, 1e308, -1, -(10**12), 0, 2**63])


def nested(choose: random.Random, path: Path, _: Path | None) -> None:
    data = path.read_bytes()
    at = choose.choice([0, len(data) // 2])
    path.write_bytes(data[:at] + choose.choice([b"[", b'{"a":']) * 100_000 + data[at:])


def another_number(choose: random.Random, path: Path, _: Path | None) -> None:
    """Another digit somewhere in a text; elsewhere, another byte."""
    data = bytearray(path.read_bytes())
    places = [
        number for number, byte in enumerate(data[:100_000]) if 48 <= byte < 58
    ] or list(range(len(data)))
    if places:
        at = choose.choice(places)
        data[at] = 48 + (data[at] - 47) % 10
    path.write_bytes(data)


def nul_bytes(choose: random.Random, path: Path, _: Path | None) -> None:
    data = bytearray(path.read_bytes())
    start = choose.choice([0, choose.randrange(max(1, len(data)))])
    end = len(data) if choose.random() < 0.3 else start + 16
    data[start:end] = bytes(len(data[start:end]))
    path.write_bytes(data)


def not_utf_8(choose: random.Random, path: Path, _: Path | None) -> None:
    data = path.read_bytes()
    at = choose.randrange(max(1, len(data)))
    path.write_bytes(data[:at] + b"\xff\xfe\xc3" + data[at:])


def of_another_run(choose: random.Random, path: Path, other: Path | None) -> None:
    if other is None:
        flip_a_bit(choose, path, None)
    else:
        shutil.copyfile(other, path)


# Fmt: skip.
MUTATIONS = (
    flip_a_bit,
    truncate,
    drop_a_line,
    empty,
    remove,
    replace_by_a_folder,
    remove_a_key,
    rename_a_key,
    wrong_type,
    huge_or_negative,
    nested,
    another_number,
    nul_bytes,
    not_utf_8,
    of_another_run,
)


def commands(home: Path, dataset: str) -> dict[str, list[str]]:
    config, other = (
        str(home / "config.yaml"),
        ["runtime.name=one", f"runtime.home={home}"],
    )
    return {
        "runs": ["runs"],
        "report": ["report", "one"],
        "report of a dataset": [
            "report",
            dataset,
            "--html",
            str(home / "dataset.html"),
        ],
        "compare": ["compare", "one", "other"],
        "gc": ["gc", "--older-than", "0"],
        "evaluate": ["evaluate", "one"],
        "generate": ["generate", "one", "--prompt", "the cat", "--max-new-tokens", "8"],
        "export": ["export", "one", "--output", str(home / "exported")],
        "verify": ["verify", dataset],
        "preprocess": ["preprocess", config, *other],
        "repair": ["preprocess", config, "--repair", *other],
        "dry run": ["run", config, "--dry-run", *other],
        "doctor": ["doctor", config, "--against", "one", *other],
        "run": ["run", config, "--no-prefect", *other],
        "resume": ["run", config, "--no-prefect", "train.max_steps=12", *other],
    }


class Engine:
    """Executes cases in `home`, which is a copy of `pristine` at the beginning of each."""

    def __init__(self, pristine: Path, home: Path) -> None:
        self.pristine, self.home = pristine, home
        self.kinds = kinds_of_files(pristine)
        self.datasets = [dataset_of(pristine, run) for run in ("one", "other")]
        self.commands = commands(home, Path(self.datasets[0]).name)
        self.expected: dict[str, tuple[dict[str, Any], set[str], str]] = {}

    def counterpart(self, relative: Path) -> Path | None:
        """The same file of the other run or of its dataset."""
        text = (
            relative.as_posix()
            .replace("runs/one/", "runs/other/", 1)
            .replace(*self.datasets, 1)
        )
        path = self.pristine / text
        if "chunks" in relative.parts and not path.exists():  # its key is another one
            path = next(path.parents[1].glob(f"*/{relative.name}"), path)
        if text == relative.as_posix():
            return None
        return path if path.is_file() else None

    def restore(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.copytree(self.pristine, self.home, symlinks=True)

    def run(self, command: str) -> tuple[int, str, dict[str, Any]]:
        """Exit code, standard error, and everything that the command put out: its record, and the files that it wrote."""
        out, err = self.home.parent / "stdout", self.home.parent / "stderr"
        pid = os.fork()
        if pid == 0:
            with forked(out, err):
                os.chdir(self.home.parent)
                os.environ["INFINI_LLAMA_HOME"] = str(self.home)
                from infini_llama.flows.cli.main import main

                os._exit(main([*self.commands[command], "--json"]))
        code = wait(pid)
        text = out.read_text(errors="replace")
        try:
            record = json.loads(text.strip().splitlines()[-1])
            if command == "doctor":  # the rest is the state of the machine
                record = {"against": record.get("against")}
        except (ValueError, IndexError):
            record = {"text": text}
        result = dict(flat(record))
        for page in [self.home / "dataset.html", self.home / "runs/one/report.html"]:
            if page.exists() and command.startswith("report"):
                lines = TIME.sub("", page.read_text()).splitlines()
                result |= {
                    f"{page.name}:{number}": line for number, line in enumerate(lines)
                }
        for path in sorted((self.home / "exported").rglob("*")):
            if path.is_file():
                result[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return code, err.read_text(errors="replace"), result

    def expect(self, command: str) -> tuple[dict[str, Any], set[str], str]:
        """The output of a command on undamaged files, what of it differs from one call to the next, and its log."""
        if command not in self.expected:
            results = []
            for _ in range(2):
                self.restore()
                code, log, result = self.run(command)
                assert code == 0, (command, code, log)
                results.append(result)
                time.sleep(1.1)
            first, second = results
            changing = {
                key for key in first | second if first.get(key) != second.get(key)
            }
            self.expected[command] = first, changing, log
        return self.expected[command]

    def case(
        self, relative: Path, mutation: str, command: str, seed: int
    ) -> dict[str, Any]:
        """One case: what was done, and how it ended."""
        expected, changing, log_before = self.expect(command)
        self.restore()
        mutate = {function.__name__: function for function in MUTATIONS}[mutation]
        mutate(random.Random(seed), self.home / relative, self.counterpart(relative))
        code, log, result = self.run(command)
        differing = {
            key: (expected.get(key), result.get(key))
            for key in expected | result
            if expected.get(key) != result.get(key)
            and not (
                key in changing
                or key.rsplit(".", 1)[-1] in VOLATILE
                or (command, key) in ALLOWED
            )
        }
        warned = warnings(log) - warnings(log_before)
        if any(
            NAME_OF_EXCEPTION.search(line)
            for line in set(log.splitlines()) - set(log_before.splitlines())
        ):
            verdict = "exception"
        elif code in (64, 65):
            verdict = "refused"
        elif code != 0:
            verdict = "failed"
        elif not differing:
            verdict = "healed" if warned else "harmless"
        elif warned:
            verdict = "warned"
        else:
            verdict = "silent"
        case = {
            "file": relative.as_posix(),
            "mutation": mutation,
            "command": command,
            "seed": seed,
        }
        shown = copy.deepcopy(dict(list(differing.items())[:3]))
        return case | {
            "verdict": verdict,
            "code": code,
            "differing": str(shown)[:300],
            "log": log[-600:],
        }

    def draw(self, seed: int, count: int) -> Iterator[dict[str, Any]]:
        """Cases drawn evenly: every kind of file, then every mutation of it, then the commands that read it."""
        choose = random.Random(seed)
        pairs = [
            (kind, mutation.__name__) for kind in self.kinds for mutation in MUTATIONS
        ]
        drawn: list[tuple[str, str]] = []
        while len(drawn) < count:
            choose.shuffle(pairs)
            drawn += pairs
        for kind, mutation in drawn[:count]:
            folder = kind.partition("/")[0]
            without = {"datasets": NO_DATASET, "runs": NO_RUN, "units": {"gc"}}.get(
                folder, set[str]()
            )
            command = choose.choice(
                [name for name in self.commands if name not in without]
            )
            yield self.case(
                choose.choice(self.kinds[kind]),
                mutation,
                command,
                choose.randrange(2**32),
            )


def warnings(log: str) -> set[str]:
    """Warnings and errors of a log, without their numbers."""
    return {
        re.sub(r"\d+", "N", line)
        for line in log.splitlines()
        if re.search(r"\b(warning|error): ", line)
    }


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, inner in (
            value.items() if isinstance(value, dict) else enumerate(value)
        ):
            yield from flat(inner, f"{path}.{key}")
    else:
        yield path, value


class forked:  # noqa: N801
    """The body of a forked process, whose output goes into two files; it never returns."""

    def __init__(self, out: Path, err: Path) -> None:
        self.files = (out, err)

    def __enter__(self) -> None:
        os.setsid()
        for number, path in enumerate(self.files, 1):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdout, sys.stderr = (
            os.fdopen(1, "w", closefd=False),
            os.fdopen(2, "w", closefd=False),
        )

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        code = (
            error.code
            if isinstance(error, SystemExit) and isinstance(error.code, int)
            else 70
        )
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int) -> int:
    until = time.monotonic() + SECONDS
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.killpg(pid, 9)
        time.sleep(0.005)


def load_everything() -> None:
    """Import what the commands need, before the first fork."""
    import importlib
    import pkgutil
    import subprocess

    from support import preloaded

    preloaded.hash_in_one_thread()
    subprocess.Popen = preloaded.Popen
    for library in preloaded.LIBRARIES:
        importlib.import_module(library)
    import infini_llama.tasks

    for module in pkgutil.walk_packages(
        infini_llama.tasks.__path__, "infini_llama.tasks."
    ):
        if not module.name.endswith((".task", "__main__")):
            try:
                importlib.import_module(module.name)
            except ImportError:  # an optional library
                continue
    import torch

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    # Room for the environments of workers, as in preloaded.py.
    os.environ.pop("PADDING", None)
    load_everything()
    # The last argument is padding.
    pristine, seed, count, results = (
        Path(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        Path(sys.argv[4]),
    )
    engine = Engine(pristine, results.with_suffix(".home") / "home")
    (results.with_suffix(".home")).mkdir(parents=True, exist_ok=True)
    with results.open("w") as file:
        for case in engine.draw(seed, count):
            file.write(json.dumps(case) + "\n")
            file.flush()
