"""Installations: sdist, wheels, and a download whose links are text files all give the same package, which runs from an empty folder."""

import json
import os
import re
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("flows", "tasks", "model", "configs")
SMALL = [
    "data.tokenizer.vocab_size=300",
    "train.max_steps=2",
    "train.warmup_steps=1",
    "model.hidden_size=48",
    "model.num_hidden_layers=1",
]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def call(*command: object, codes: tuple[int, ...] = (0,), **options: Any) -> str:
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        **options,
    )
    assert done.returncode in codes, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """A Python with the programs that build and check packages."""
    folder = tmp_path_factory.mktemp("builder")
    venv.create(folder, with_pip=True)
    call(folder / "bin/pip", "install", "--quiet", "build", "twine", "hatchling")
    return folder / "bin/python"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A clone: every file that git has or would add."""
    folder = tmp_path_factory.mktemp("clone") / "infini-llama"
    for name in call(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT
    ).splitlines():
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def download(tree, tmp_path_factory):
    """The same without links: a text file with the target's path in place of each, as in a zip file."""
    folder = tmp_path_factory.mktemp("download") / "infini-llama"
    shutil.copytree(tree, folder, symlinks=True)
    for name in FOLDERS:
        link = folder / "src/infini_llama" / name
        target = str(link.readlink())
        link.unlink()
        link.write_text(target)
    return folder


def build(builder: Path, source: Path, output: Path, kind: str) -> Path:
    call(
        builder,
        "-m",
        "build",
        f"--{kind}",
        "--no-isolation",
        "--outdir",
        output,
        source,
    )
    (package,) = output.iterdir()
    return package


def fresh_environment(folder: Path) -> Path:
    """An environment with this one's dependencies and without the package: a path in a .pth file has no .pth files of its own."""
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return folder / "bin"


def test_every_way_to_build_gives_the_same_wheel(builder, tree, download, tmp_path):
    here = {
        f"infini_llama/{path.relative_to(tree).as_posix()}"
        for name in FOLDERS
        for path in (tree / name).rglob("*")
        if path.is_file()
    }
    here |= {
        f"infini_llama/{path.name}"
        for path in (tree / "src/infini_llama").iterdir()
        if path.is_file()
    }
    wheel = build(builder, tree, tmp_path / "tree", "wheel")
    with zipfile.ZipFile(wheel) as archive:
        assert {
            name for name in archive.namelist() if not name.startswith("infini_llama-")
        } == here
    sdist = build(builder, tree, tmp_path / "sdist", "sdist")
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for name, source in {"sdist": unpacked, "download": download}.items():
        assert (
            build(builder, source, tmp_path / f"wheel-of-{name}", "wheel").read_bytes()
            == wheel.read_bytes()
        ), name
    assert (
        build(builder, download, tmp_path / "sdist-of-download", "sdist").read_bytes()
        == sdist.read_bytes()
    )
    assert "FAILED" not in call(
        builder, "-m", "twine", "check", "--strict", wheel, sdist
    )


@pytest.mark.parametrize("dockerfile", ["Dockerfile.cpu", "Dockerfile.gpu"])
def test_an_image_copies_what_the_wheel_needs(builder, tree, tmp_path, dockerfile):
    for line in re.findall(
        r"^COPY (?!--from)(.+)$",
        (tree / "deploy" / dockerfile).read_text(),
        re.MULTILINE,
    ):
        *patterns, target = line.split()
        into = tmp_path / "context" / target
        for source in (path for pattern in patterns for path in tree.glob(pattern)):
            if source.is_dir():
                shutil.copytree(source, into)
            elif not target.startswith("/"):
                (into if target.endswith("/") else into.parent).mkdir(
                    parents=True, exist_ok=True
                )
                shutil.copy(source, into)
    expected = build(builder, tree, tmp_path / "tree", "wheel")
    assert (
        build(builder, tmp_path / "context", tmp_path / "image", "wheel").read_bytes()
        == expected.read_bytes()
    )


def test_an_installation_runs_from_an_empty_folder(download, tmp_path):
    """By the zip of a download, of which pip makes the wheel that every other way gives."""
    archive = shutil.make_archive(
        str(tmp_path / "download"), "zip", download.parent, download.name
    )
    place = fresh_environment(tmp_path / "environment")
    call(place / "pip", "install", "--quiet", "hatchling")
    # the environment's own version of the package has the same name and number
    options = "--quiet --no-deps --no-index --force-reinstall --no-build-isolation"
    call(place / "pip", "install", *options.split(), archive)
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {
        "HOME": str(empty),
        "PATH": f"{place}:/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    where = call(
        place / "python",
        "-c",
        "import infini_llama.tasks as tasks; print(tasks.__path__[0])",
        cwd=empty,
        env=environment,
    )
    assert where.strip().startswith(str(tmp_path / "environment"))
    assert re.search(
        r"\d", call(place / "infini-llama", "--version", cwd=empty, env=environment)
    )
    # 1: warnings.
    call(place / "infini-llama", "doctor", cwd=empty, env=environment, codes=(0, 1))
    command = [place / "infini-llama", "run", "tiny", "--direct", "--json", *SMALL]
    printed = call(*command, cwd=empty, env=environment)
    assert json.loads(printed.splitlines()[0])["train_loss"] > 0


def test_a_checkout_without_links_is_named(builder, download, tmp_path):
    place = fresh_environment(tmp_path / "environment")
    call(place / "pip", "install", "--quiet", "hatchling")
    output = call(
        place / "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "-e",
        download,
        codes=(1,),
    )
    assert "is not a link to configs/" in output and "Traceback" not in output
    environment = os.environ | {"PYTHONPATH": str(download / "src")}
    said = call(
        sys.executable,
        "-c",
        "import infini_llama.configs",
        codes=(1,),
        env=environment,
        cwd=tmp_path,
    )
    assert (
        "ImportError" in said.splitlines()[-1]
        and "is not a link" in said.splitlines()[-1]
    )
