"""A Hugging Face folder as a source of weights, for training and for import: looked at without torch, never with any code in it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from infini_llama.configs.errors import ConfigError, DataError
from infini_llama.configs.pointers import refuse_pointer
from infini_llama.configs.reading import JsonObject
from infini_llama.model import hf
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.storage.artifacts import checksum_of, file_checksum

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Folder:
    """A model in a folder: its architecture, and the file that each tensor is in."""

    path: Path
    config: LlamaConfig
    files: dict[str, Path]

    def digest(self) -> str:
        """Digest of everything that decides the model: configuration and weight files."""
        paths = [self.path / "config.json", *set(self.files.values())]
        return checksum_of({path.name: file_checksum(path) for path in paths})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor; only the files' headers are read."""
        return {name: tuple(value.get_shape()) for name, value in self.tensors("numpy", slices=True)}

    def tensors(self, framework: str, slices: bool = False) -> Iterator[tuple[str, Any]]:
        """Every tensor with its name, one at a time; with `slices`, what can be asked for a shape without reading it."""
        for file in sorted(set(self.files.values())):
            with opened(file, framework) as source:
                for name in sorted(source.keys()):
                    yield name, source.get_slice(name) if slices else source.get_tensor(name)


def open_folder(path: Path) -> Folder:
    """The model in a folder as `save_pretrained` or `infini-llama export` write it.

    Raises:
        ConfigError: there is no such folder, its weights are pickles, or its architecture cannot be expressed here.
        DataError: a file is missing, damaged, or a pointer to one that was not downloaded.
    """
    path = path.expanduser().absolute()
    for file in sorted(path.glob("*.json")):
        refuse_pointer(file)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} is not a Hugging Face folder (it has no config.json); give a folder written by save_pretrained."
        )
    try:
        config = hf.config_from_hf(_json(path / "config.json"))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path / 'config.json'}: {error}.") from None
    file_of = {name: file for file in weight_files(path) for name in names_in(file)}
    if (path / INDEX).is_file() and (missing := sorted(_weight_map(path).keys() - file_of.keys())):
        raise DataError(f"{path / INDEX} lists {missing[0]}, but no file contains it; download the folder again.")
    return Folder(path, config, file_of)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder.

    Raises:
        ConfigError: it has none. Pickles are never opened: they can run any code.
    """
    if (path / INDEX).is_file():
        names = sorted(set(_weight_map(path).values()))
        for name in names:
            if Path(name).name != name:
                raise DataError(f"{path / INDEX} names '{name}', which is outside its folder.")
            refuse_pointer(path / name)
            if not (path / name).is_file():
                raise DataError(f"{path / name} is missing, but {INDEX} lists it; download the folder again.")
        return [path / name for name in names]
    refuse_pointer(path / ONE)
    if (path / ONE).is_file():
        return [path / ONE]
    pickles = [file.name for pattern in PICKLES for file in sorted(path.glob(pattern))]
    if pickles:
        raise ConfigError(
            f"{path} stores its weights as pickle ({pickles[0]}), which can run any code when it is opened and is "
            "never read here; "
            "convert it to safetensors in an environment that you trust: "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)."
        )
    raise ConfigError(f"{path} has neither {ONE} nor {INDEX}; give a folder with safetensors.")


def _weight_map(path: Path) -> dict[str, str]:
    """The file of each tensor, as the folder's index says."""
    stated = _json(path / INDEX).get("weight_map")
    files = {name: file for name, file in stated.items() if isinstance(file, str)} if isinstance(stated, dict) else {}
    if not isinstance(stated, dict) or len(files) < len(stated):
        raise DataError(f"{path / INDEX}: weight_map must name one file for each tensor; download the folder again.")
    return files


def names_in(file: Path) -> list[str]:
    with opened(file, "numpy") as source:
        return list(source.keys())


@contextmanager
def opened(file: Path, framework: str) -> Iterator[Any]:
    """A safetensors file.

    Raises:
        DataError: it is none, or it was cut short.
    """
    try:
        with safe_open(file, framework=framework) as source:
            yield source
    except SafetensorError as error:
        raise DataError(f"{file} is damaged ({error}); download it again.") from None


def _json(file: Path) -> JsonObject:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise DataError(f"{file} is not JSON.") from None
    if not isinstance(value, dict):
        raise DataError(f"{file} is not a JSON object.")
    return value
