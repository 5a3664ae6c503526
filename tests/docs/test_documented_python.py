"""Every Python block of the README and the docs, each in a process of its own, in a folder that has what the pages assume."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from support.preloaded import Server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (page.name, block)
    for page in PAGES
    for block in BLOCK.findall(page.read_text(encoding="utf-8"))
]
# Folders that the pages have made by `infini-llama export`.
EXPORTS = (
    "my-model",
    "tiny-hf",
)
LLAMA_CPP = {
    "convert_hf_to_gguf.py": "def main(): pass\n",
    "conversion/base.py": "class TextModel: get_vocab_base_pre = None\n",
}


def run(server: Server, folder: Path, *command: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    environment.pop("INFINI_LLAMA_HOME", None)  # the pages mean ./workspace
    code = server.run([*command], environment, folder / "log", folder, seconds=240)
    assert code == 0, (folder / "log").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, server) -> Path:
    """A user's texts, the run that the README's example makes of them, and its exports."""
    place = tmp_path_factory.mktemp("documented")
    (place / "texts/more").mkdir(parents=True)
    for number in range(60):
        text = f"def count_{number}(cats):\n    return cats + {number}\n"
        (place / f"texts/more/{number}.txt").write_text(text * 40)
    for name, text in LLAMA_CPP.items():
        (place / "llama.cpp" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "llama.cpp" / name).write_text(text)
    run(
        server,
        place,
        sys.executable,
        "-c",
        next(block for page, block in BLOCKS if page == "README.md"),
    )
    first, *others = EXPORTS
    run(
        server,
        place,
        sys.executable,
        "-m",
        "infini_llama",
        "export",
        "run",
        "--output",
        first,
    )
    for name in others:
        shutil.copytree(place / first, place / name)
    return place


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("page", "block"), BLOCKS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(BLOCKS)]
)
def test_a_block_runs(server, folder, page, block):
    run(server, folder, sys.executable, "-c", block, "llama.cpp")


def test_the_notebook_runs(server, tmp_path):
    cells = json.loads((ROOT / "docs/api.ipynb").read_text(encoding="utf-8"))["cells"]
    run(
        server,
        tmp_path,
        sys.executable,
        "-c",
        "\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"
        ),
    )
