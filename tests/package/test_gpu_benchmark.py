"""benchmarks/gpu at tiny sizes on the CPU, with only the packages that a bare GPU machine has and the wheels that are carried."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.benchmarks import FOLDER, program

# What a GPU machine has, what benchmarks/gpu/collect_wheels.sh brings, and what must not be needed though another package may want it.
MACHINE = ("torch", "numpy", "tokenizers", "pyarrow", "transformers", "tensorboard")
CARRIED = (
    "infini-llama",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "blake3",
    "orjson",
    "msgspec",
    "xxhash",
)
PEERS = ("accelerate", "psutil")  # for transformers' Trainer
CHARTS = (
    "matplotlib",
    "contourpy",
    "cycler",
    "fonttools",
    "kiwisolver",
    "pyparsing",
    "python-dateutil",
    "six",
)
REFUSED = ("rich", "prefect", "datasets", "pydantic-settings")
# Cases that start whole runs: the slow test, and tests/integration.
STARTING_RUNS = {
    "resume",
    "out of memory",
    "checkpoint",
}
FINDER = """
import sys
from importlib.machinery import PathFinder
class Finder:
    def find_spec(self, name, path=None, target=None):
        if path is None and name in {hidden!r}:
            return None
        return PathFinder.find_spec(name, path, target)
    find_distributions = staticmethod(PathFinder.find_distributions)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder()
"""


def with_requirements(*names):
    """These distributions and all that they require, canonical names."""
    found, waiting = set(), list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        with contextlib.suppress(PackageNotFoundError):
            for requirement in map(Requirement, requires(name) or []):
                if requirement.marker is None or requirement.marker.evaluate(
                    {"extra": ""}
                ):
                    waiting.append(requirement.name)
    return found


@pytest.fixture
def bare(tmp_path):
    """Variables of a process that can import no other package."""
    there = (with_requirements(*MACHINE) | {*CARRIED, *PEERS, *CHARTS}) - set(REFUSED)
    owners = {
        module: {canonicalize_name(name) for name in names}
        for module, names in packages_distributions().items()
    }
    hidden = {module for module, names in owners.items() if not names & there}
    (tmp_path / "blocker").mkdir()
    (tmp_path / "blocker" / "sitecustomize.py").write_text(
        FINDER.replace("{hidden!r}", repr(hidden))
    )
    paths = [str(tmp_path / "blocker"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    for name in ("prefect", "datasets", "rich", "pydantic_settings"):
        refused = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            env=env,
            capture_output=True,
            check=False,
        )
        assert refused.returncode, name
    return env


def rehearse(env, out, *arguments):
    command = [
        sys.executable,
        str(FOLDER / "gpu/run.py"),
        "--rehearse",
        "--out",
        str(out),
        *arguments,
    ]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=580, check=False
    )


run = program("gpu/run")


def cases(out, part):
    return json.loads((out / f"{part}.json").read_text())["cases"]


@pytest.mark.timeout(600)
def test_every_part_runs_on_a_bare_machine(bare, tmp_path):
    names = {name for part in run.PARTS for name in run.cases_of(part)} - STARTING_RUNS
    result = rehearse(bare, tmp_path / "out", "--together", "--case", *sorted(names))
    assert result.returncode == 0, result.stdout + result.stderr
    for part in run.PARTS:
        found = cases(tmp_path / "out", part)
        assert found.keys() == run.cases_of(part).keys() - STARTING_RUNS and all(
            case["rows"] for case in found.values()
        )
        assert all(
            row.get("passed", True) for case in found.values() for row in case["rows"]
        )
        assert (tmp_path / "out" / f"{part}.md").read_text().count("|") > 5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_killed_and_resumed_on_a_bare_machine(bare, tmp_path):
    result = rehearse(
        bare, tmp_path / "out", "--part", "correctness", "--case", "resume"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(
        row["passed"]
        for row in cases(tmp_path / "out", "correctness")["resume"]["rows"]
    )


def test_a_failed_case_is_repeated_and_a_finished_one_is_not(tmp_path):
    out = tmp_path / "out"
    assert (
        rehearse(os.environ, out, "--part", "data", "--case", "chunking").returncode
        == 0
    )
    before = cases(out, "data")["chunking"]
    written = json.loads((out / "data.json").read_text())
    written["cases"]["preparing ahead"] = {"seconds": 0.0, "error": "killed"}
    (out / "data.json").write_text(json.dumps(written))
    assert (
        rehearse(
            os.environ, out, "--part", "data", "--case", "chunking", "preparing ahead"
        ).returncode
        == 0
    )
    assert cases(out, "data")["chunking"] == before
    assert "rows" in cases(out, "data")["preparing ahead"]


def test_the_parts_are_planned_for_40_minutes():
    cases = {part: run.cases_of(part) for part in run.PARTS}
    assert (
        sum(case.seconds for part in cases.values() for case in part.values())
        <= 40 * 60
    )
    assert all(
        case.seconds < 9.5 * 60 for part in cases.values() for case in part.values()
    )


@pytest.mark.parametrize("limit", [60.0, 0.2])
def test_a_case_that_ends_or_hangs_is_an_error_of_its_own(limit, tmp_path):
    arguments = argparse.Namespace(device="cpu", out=str(tmp_path), rehearse=True)
    found = run.run_case("data", "no such case", arguments, dict(os.environ), limit)
    assert "rows" not in found and (
        "KeyError" in found["error"] or "0 s" in found["error"]
    )
    results = run.Results(tmp_path, "data", {"device": "cpu"})
    results.add("no such case", found)
    assert not run.Results(tmp_path, "data", {"device": "cpu"}).is_done("no such case")
    assert "failed" in (tmp_path / "data.md").read_text()
