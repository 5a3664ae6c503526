"""scripts/bootstrap.sh in a project of one dependency: which build of torch it installs, from two indexes on this machine."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.remote import WebServer

ROOT = Path(__file__).parents[2]
# Builds a wheel without any package that would have to be fetched.
BACKEND = """
import zipfile
def build_editable(folder, *_):
    name = "project-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("project-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: project\\nVersion: 1.0\\nRequires-Dist: torch\\n")
        wheel.writestr("project-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("project-1.0.dist-info/RECORD", "")
    return name
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "project"
version = "1.0"
"""


def write_wheel(folder: Path, name: str, version: str) -> None:
    """A package without a module, in an index of one page per package."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    about = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / name / f"{about}-py3-none-any.whl", "w") as wheel:
        needs = (
            "Requires-Dist: nvidia-cublas\n"
            if name == "torch" and "+cpu" not in version
            else ""
        )
        facts = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        wheel.writestr(f"{about}.dist-info/METADATA", facts)
        wheel.writestr(
            f"{about}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{about}.dist-info/RECORD", "")


@dataclass
class Machine:
    """A folder with the script, and a server with the indexes /simple and /cpu."""

    folder: Path
    url: str

    def bootstrap(self, gpu: bool, **settings: str) -> str:
        """What it writes to stderr."""
        driver = self.folder / "driver" / "nvidia-smi"
        driver.write_text(
            "#!/bin/sh\n"
            + ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'" if gpu else "exit 9")
            + "\n"
        )
        driver.chmod(0o755)
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "TORCH", "VENV"))
        }
        own |= {
            "PATH": f"{driver.parent}:{os.environ['PATH']}",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_CACHE_DIR": "1",
        }
        own |= {
            "PIP_INDEX_URL": f"{self.url}/simple",
            "TORCH_CPU_INDEX": f"{self.url}/cpu",
        }
        done = subprocess.run(
            ["scripts/bootstrap.sh"],
            cwd=self.folder,
            env=own | settings,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stderr

    def torch(self) -> str:
        """The version that is installed."""
        (found,) = self.folder.glob(".venv/lib/python*/site-packages/torch-*.dist-info")
        return found.name.removeprefix("torch-").removesuffix(".dist-info")


@pytest.fixture
def machine(tmp_path) -> Iterator[Machine]:
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    (project / "driver").mkdir()
    shutil.copy(ROOT / "scripts" / "bootstrap.sh", project / "scripts")
    (project / "backend.py").write_text(BACKEND)
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "constraints.txt").write_text("torch==2.13.0\n")
    write_wheel(tmp_path / "web" / "simple", "torch", "2.13.0")
    write_wheel(tmp_path / "web" / "simple", "nvidia-cublas", "13.0")
    write_wheel(tmp_path / "web" / "cpu", "torch", "2.13.0+cpu")

    with WebServer(tmp_path / "web") as server:
        yield Machine(project, server.url)


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """What the script makes first, which takes most of its time."""
    folder = tmp_path_factory.mktemp("environment") / ".venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


@pytest.fixture
def prepared(machine, environment) -> Machine:
    """A machine that has the environment, with nothing in it."""
    shutil.copytree(environment, machine.folder / ".venv", symlinks=True)
    return machine


def test_without_a_gpu_the_cpu_build_comes_from_its_own_index(machine):
    printed = machine.bootstrap(gpu=False)
    assert machine.torch() == "2.13.0+cpu"
    assert "installed torch 2.13.0+cpu; .venv takes" in printed
    assert machine.bootstrap(gpu=False) == "", "a second call does nothing"


def test_without_that_index_torch_comes_from_the_package_index(prepared):
    printed = prepared.bootstrap(gpu=False, TORCH_CPU_INDEX="http://127.0.0.1:9/cpu")
    assert prepared.torch() == "2.13.0"
    assert (
        "http://127.0.0.1:9/cpu does not answer" in printed
        and "installed torch 2.13.0 with CUDA; .venv takes" in printed
    )


@pytest.mark.parametrize(
    ("gpu", "wanted", "installed"),
    [(True, "", "2.13.0"), (False, "cuda", "2.13.0"), (True, "cpu", "2.13.0+cpu")],
)
def test_a_gpu_or_TORCH_decides(prepared, gpu, wanted, installed):  # noqa: N802
    prepared.bootstrap(gpu, **({"TORCH": wanted} if wanted else {}))
    assert prepared.torch() == installed
