"""The code that a folder carries when Hugging Face's Llama cannot express the model: ours, file by file, and a class around it."""

import re
from importlib.metadata import version
from pathlib import Path

from infini_llama import model

WRAPPER = Path(__file__).with_name("modeling_infini_llama.py")
AUTO_MAP = {
    "AutoConfig": f"{WRAPPER.stem}.InfiniLlamaConfig",
    "AutoModel": f"{WRAPPER.stem}.InfiniLlamaModel",
    "AutoModelForCausalLM": f"{WRAPPER.stem}.InfiniLlamaForCausalLM",
}
IMPORT = re.compile(r"^(\s*)from infini_llama\.model(\.\w+)? import (.+)$", re.MULTILINE)


def write_code(folder: Path) -> None:
    """Copies the class and every file of `model` that it needs, with relative imports in place of absolute ones."""
    waiting, seen = [WRAPPER], {WRAPPER.stem}
    while waiting:
        file = waiting.pop()
        text = file.read_text(encoding="utf-8")
        for name in needed(text):
            if name not in seen:
                seen.add(name)
                waiting.append(Path(str(model.__path__[0])) / f"{name}.py")
        origin = f"# From infini-llama {version('infini-llama')} (Apache-2.0)\n"
        (folder / file.name).write_text(origin + IMPORT.sub(_relative, text), encoding="utf-8")


def needed(text: str) -> set[str]:
    """Files of `model` that a source text imports."""
    found: set[str] = set()
    for _, module, names in IMPORT.findall(text):
        found |= {module[1:]} if module else {name.strip() for name in names.split(",")}
    return found


def _relative(match: re.Match[str]) -> str:
    """`from infini_llama.model.x import y` as `from .x import y`.

    Hugging Face's loader does not follow `from . import x`, so a second line names the file in the way that it does.
    """
    indent, module, names = match.groups()
    if module:
        return f"{indent}from {module} import {names}"
    files = [name.strip() for name in names.split(",")]
    return "\n".join(f"{indent}from . import {file}\n{indent}from .{file} import __name__ as _" for file in files)
