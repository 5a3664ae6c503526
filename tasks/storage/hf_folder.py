"""A Hugging Face folder as a source of weights, for training and for import.

This is the one place where it is checked: configuration, files, tensors and tokenizer agree, and
transformers would load the same model. No code in the folder is executed.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from infini_llama.configs.errors import ConfigError, DataError, is_panic
from infini_llama.configs.pointers import refuse_pointer
from infini_llama.configs.reading import JsonObject, expanded
from infini_llama.model import hf
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.records.lineage import Conversation
from infini_llama.tasks.storage.artifacts import checksum_of, file_checksum
from infini_llama.tasks.storage.dataset_files import TOKENIZER

CONFIG = "config.json"
GENERATION = "generation_config.json"
ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TEMPLATES = "additional_chat_templates/*.jinja"
READ = ("*.json", "*.safetensors", "*.jinja", TEMPLATES)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
OTHER_WEIGHTS = ("*.safetensors", "*.gguf", "*.h5", "*.msgpack")
OTHER_TOKENIZERS = (
    "tokenizer.model",
    "*.spm",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "*.tiktoken",
    "tokenizer_config.json",
)
# Of weights; others are those of quantized models.
TYPES = (
    "F64",
    "F32",
    "F16",
    "BF16",
)
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ROWS = 4096  # of embedding and head that are compared at once
CONVERT_TOKENIZER = "AutoTokenizer.from_pretrained('FOLDER').save_pretrained('FOLDER')"
CONVERT = "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
# Settings of a tokenizer that a chat template or its batches need, beside single special tokens.
OF_CHAT = (
    "additional_special_tokens",
    "extra_special_tokens",
    "padding_side",
    "truncation_side",
)


@dataclass(frozen=True)
class Folder:
    """A model in a folder: its architecture, and the file that each tensor is in.

    Attributes:
        untied: config.json ties the head to the embedding, but the head has other values: `config`
            has a head of its own.
    """

    path: Path
    config: LlamaConfig
    files: dict[str, Path]
    untied: bool = False

    def digest(self) -> str:
        """Digest of everything that decides the model: configuration and weight files."""
        paths = [self.path / CONFIG, *set(self.files.values())]
        return checksum_of({path.name: file_checksum(path) for path in paths})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor; only the files' headers are read."""
        return {
            name: tuple(value.get_shape())
            for name, value in self.tensors("numpy", slices=True)
        }

    def tensors(
        self, framework: str, slices: bool = False
    ) -> Iterator[tuple[str, Any]]:
        """Every tensor with its name, one at a time.

        Args:
            slices: instead of a tensor, what can be asked for a shape without reading it.
        """
        for file in sorted(set(self.files.values())):
            with opened(file, framework) as source:
                for name in sorted(source.keys()):
                    yield (
                        self._name_of(name),
                        source.get_slice(name) if slices else source.get_tensor(name),
                    )

    def _name_of(self, stored: str) -> str:
        """The name of a stored tensor: that of the embedding, where a file has its tied head alone.

        safetensors' `save_model` writes the first name of a tied pair.
        """
        is_tied = self.config.tie_word_embeddings and EMBEDDING not in self.files
        return EMBEDDING if stored == HEAD and is_tied else stored


def open_folder(path: Path) -> Folder:
    """The model in a folder as `save_pretrained` or `infini-llama export` write it.

    Raises:
        ConfigError: there is no such folder, its weights are pickles, its architecture cannot be
            expressed here, or its parts contradict each other; names key or tensor, and value.
        DataError: a file is missing, damaged, or a pointer to one that was not downloaded.
    """
    path = expanded(path).absolute()
    for file in sorted(file for pattern in READ for file in path.glob(pattern)):
        refuse_pointer(file)
        if not file.exists():
            raise DataError(
                f"{file} is a link to {file.readlink()}, which is missing; copy the folder with "
                "the files behind its links (cp -rL), or download it again."
            )
    if not (path / CONFIG).is_file():
        raise ConfigError(
            f"{path} is not a Hugging Face folder (it has no {CONFIG}); give a folder written by "
            "save_pretrained."
        )
    if (path / "adapter_config.json").exists():
        raise ConfigError(
            f"{path} has an adapter (adapter_config.json) beside its weights; merge it into them "
            "with PEFT: merge_and_unload().save_pretrained(…)."
        )
    stated = _json(path / CONFIG)
    try:
        config = hf.config_from_hf(stated)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"{path / CONFIG}: {error}.") from None
    _refuse_ids_beyond(path / CONFIG, stated, config.vocab_size)
    if (path / GENERATION).is_file():
        _refuse_ids_beyond(
            path / GENERATION, _json(path / GENERATION), config.vocab_size
        )
    folder = Folder(path, config, _file_of_each_tensor(path, stated))
    _refuse_types(folder)
    folder = _with_its_head(folder)
    if config.num_hidden_layers > len(folder.files):
        raise ConfigError(
            f"{path}: its tensors do not match its {CONFIG}: "
            f"num_hidden_layers={config.num_hidden_layers}, and it has {len(folder.files)} tensors."
        )
    try:
        expected = hf.shapes(folder.config)
    except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        # Sizes beyond what torch can count.
        raise ConfigError(f"{path / CONFIG}: {error}.") from None
    try:
        hf.check_shapes(folder.shapes(), expected, folder.config)
    except ValueError as error:
        raise ConfigError(
            f"{path}: its tensors do not match its {CONFIG}: {error}."
        ) from None
    return folder


def conversation_of(folder: Folder) -> Conversation:
    """Chat templates, generation settings and end tokens in the files beside the weights.

    Raises:
        DataError: a file is damaged.
    """
    files = {
        name: folder.path / name
        for name in (
            CONFIG,
            GENERATION,
            "tokenizer_config.json",
            "special_tokens_map.json",
        )
    }
    stated, generation, tokens, older = (
        _json(file) if file.is_file() else {} for file in files.values()
    )
    ends: list[int] = []
    for value in (generation.get("eos_token_id"), stated.get("eos_token_id")):
        numbers = value if isinstance(value, list) else [value]
        ends += [number for number in numbers if isinstance(number, int)]
    template = _template(folder.path, tokens.get("chat_template"))
    contents = {
        name: _content(value)
        for name, value in (older | tokens).items()
        if name.endswith("_token")
    }
    special = {
        name: token for name, token in contents.items() if isinstance(token, str)
    }
    kept = {
        name: value
        for name, value in generation.items()
        if name not in ("_from_model_config", "transformers_version")
    }
    return Conversation(
        end_tokens=tuple(dict.fromkeys(ends)),
        generation=kept,
        chat_template=template,
        special_tokens=special if template else {},
        tokenizer_settings={
            name: tokens[name] for name in OF_CHAT if template and name in tokens
        },
    )


def _template(path: Path, stated: object) -> str | dict[str, str] | None:
    """The chat template, or several by their names.

    They are those in files of their own; without any, the `stated` one of tokenizer_config.json.
    """
    files: dict[str, Path] = {}
    if (path / "chat_template.jinja").is_file():
        files["default"] = path / "chat_template.jinja"
    files |= {file.stem: file for file in sorted(path.glob(TEMPLATES))}
    if files:
        stated = [
            {"name": name, "template": _text(file)} for name, file in files.items()
        ]
    if not isinstance(stated, list):
        return stated if isinstance(stated, str) else None
    templates = dict[str, str]()
    for each in stated:
        match each:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
    if templates.keys() == {"default"}:
        return templates["default"]
    return templates or None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 (byte {error.start}); convert it, or remove it."
        ) from None


def _content(token: object) -> object:
    """The text of a token, which tokenizer_config.json states as it is or as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _refuse_ids_beyond(file: Path, stated: JsonObject, vocab_size: int) -> None:
    """Refuse a text's first, last or padding token that has no row in the embedding.

    -1 is for "no padding".
    """
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = stated.get(key)
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        least = -1 if key == "pad_token_id" else 0
        if any(
            type(number) is not int or not least <= number < vocab_size
            for number in numbers
        ):
            raise ConfigError(
                f"{file}: {key}={value!r} is no token of a model with vocab_size={vocab_size}; "
                "correct it, or remove it."
            )


def _file_of_each_tensor(path: Path, stated: JsonObject) -> dict[str, Path]:
    """The file of each tensor, of the one set of weights that transformers loads as well.

    Raises:
        ConfigError: there are several sets, or none.
        DataError: a file is missing or damaged, or the index is not that of the files.
    """
    named = stated.get("transformers_weights")
    if named not in (None, ONE, INDEX):
        raise ConfigError(
            f"{path / CONFIG}: transformers_weights={named!r} is not read here; rename the file to "
            f"{ONE}."
        )
    if not (path / INDEX).is_file():
        return dict.fromkeys(names_in(_one_file(path)), path / ONE)
    index = _weight_map(path)
    shards = sorted(set(index.values()))
    if (path / ONE).exists() and shards != [ONE]:
        raise ConfigError(
            f"{path} has two sets of weights, {ONE} and the files of {INDEX}, and programs "
            "disagree about which counts; remove one."
        )
    for name in shards:
        if Path(name).name != name:
            raise DataError(
                f"{path / INDEX} names '{name}', which is outside its folder."
            )
        refuse_pointer(path / name)
        if not (path / name).is_file():
            raise DataError(
                f"{path / name} is missing, but {INDEX} lists it; download the folder again."
            )
    stored = [(tensor, file) for file in shards for tensor in names_in(path / file)]
    for tensor, file in stored:
        if index.get(tensor) != file:
            raise DataError(
                f"{path / file} contains {tensor}, which {INDEX} has in "
                f"{index.get(tensor, 'no file')}; download the folder again."
            )
    missing = sorted(index.keys() - dict(stored).keys())
    if missing:
        raise DataError(
            f"{path / INDEX} lists {missing[0]}, but no file contains it; download the folder "
            "again."
        )
    return {tensor: path / file for tensor, file in stored}


def _one_file(path: Path) -> Path:
    """model.safetensors of a folder.

    Raises:
        ConfigError: it has none. Pickles are never opened: they can run any code.
    """
    refuse_pointer(path / ONE)
    if (path / ONE).is_file():
        return path / ONE
    pickles = [file.name for pattern in PICKLES for file in sorted(path.glob(pattern))]
    if pickles:
        raise ConfigError(
            f"{path} stores its weights as pickle ({pickles[0]}), which can run any code when it "
            "is opened and is never read here; convert it to safetensors in an environment that "
            f"you trust: {CONVERT}."
        )
    others = ", ".join(
        file.name for pattern in OTHER_WEIGHTS for file in sorted(path.glob(pattern))
    )
    beside = (
        f" (it has {others}, which transformers does not load by itself either)"
        if others
        else ""
    )
    raise ConfigError(
        f"{path} has neither {ONE} nor {INDEX}{beside}; give a folder with both or one of them, as "
        f"{CONVERT} writes it."
    )


def _weight_map(path: Path) -> dict[str, str]:
    """The file of each tensor, as the folder's index says."""
    stated = _json(path / INDEX).get("weight_map")
    files = (
        {name: file for name, file in stated.items() if isinstance(file, str)}
        if isinstance(stated, dict)
        else {}
    )
    if not files or not isinstance(stated, dict) or len(files) < len(stated):
        raise DataError(
            f"{path / INDEX}: weight_map must name one file for each tensor; download the folder "
            "again."
        )
    return files


def names_in(file: Path) -> list[str]:
    with opened(file, "numpy") as source:
        return list(source.keys())


def _refuse_types(folder: Folder) -> None:
    for name, value in folder.tensors("numpy", slices=True):
        kind = value.get_dtype()
        if kind not in TYPES and not hf.ignored(name, folder.config):
            raise ConfigError(
                f"{folder.path}: {name} has the type {kind}, not one of {', '.join(TYPES)}; "
                "weights of a quantized model are not read here, use the original."
            )


def _with_its_head(folder: Folder) -> Folder:
    """The folder with a head of its own where the files have one with other values.

    Its config.json ties the head to the embedding all the same; transformers 5 does likewise.

    Raises:
        ConfigError: that head has another shape than the embedding, or their file is larger than
            the memory.
    """
    if not (
        folder.config.tie_word_embeddings and {EMBEDDING, HEAD} <= folder.files.keys()
    ):
        return folder
    with (
        opened(folder.files[EMBEDDING], "pt") as first,
        opened(folder.files[HEAD], "pt") as second,
    ):
        embedding = first.get_slice(EMBEDDING)
        head = second.get_slice(HEAD)
        if embedding.get_shape() != head.get_shape():
            raise ConfigError(
                f"{folder.path / CONFIG}: tie_word_embeddings=True, but {HEAD} has the shape "
                f"{head.get_shape()} and {EMBEDDING} {embedding.get_shape()}; remove {HEAD}, or "
                "correct the weights."
            )
        starts = range(0, embedding.get_shape()[0], ROWS)
        blocks = [slice(start, start + ROWS) for start in starts]
        if all(
            bool((embedding[rows].float() == head[rows].float()).all())
            for rows in blocks
        ):
            return folder
    return replace(
        folder, config=replace(folder.config, tie_word_embeddings=False), untied=True
    )


def tokenizer_of(folder: Folder) -> Tokenizer:
    """The folder's tokenizer, each of whose tokens has a row in the embedding.

    Raises:
        ConfigError: it has no tokenizer.json, or its files and the model disagree about a token.
        DataError: the file is damaged.
    """
    file = folder.path / TOKENIZER
    if not file.is_file():
        others = ", ".join(
            other.name
            for pattern in OTHER_TOKENIZERS
            for other in sorted(folder.path.glob(pattern))
        )
        place = f"put the {TOKENIZER} of its tokens there"
        if others:
            place = (
                f"it has {others}, which cannot be read here; write one with transformers: "
                f"{CONVERT_TOKENIZER}, or {place}"
            )
        raise ConfigError(
            f"{folder.path} has no {TOKENIZER}, and no other tokenizer fits its weights: {place}."
        )
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8-sig"))
    except BaseException as error:  # `tokenizers` raises nothing narrower, and panics
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise DataError(f"{file} is not a tokenizer ({error}).") from None
    rows = folder.config.vocab_size
    vocabulary = tokenizer.get_vocab()
    beyond = sorted(
        (number, token) for token, number in vocabulary.items() if number >= rows
    )
    if beyond:
        raise ConfigError(
            f"{file} has {len(vocabulary)} tokens and the model's embedding {rows} rows: "
            f"{beyond[0][1]!r} has the ID {beyond[0][0]}; they do not belong to the same model, or "
            "the embedding has to be enlarged with transformers: resize_token_embeddings."
        )
    refuse_other_added_tokens(folder.path, tokenizer)
    return tokenizer


def refuse_other_added_tokens(path: Path, tokenizer: Tokenizer) -> None:
    """Refuse files beside a tokenizer.json that give its added tokens other IDs, or add some.

    transformers would add theirs to it.

    Args:
        path: their folder.

    Raises:
        ConfigError: they disagree about a token.
        DataError: one of them is damaged.
    """
    for token, number, other in _added_tokens(path):
        stated = tokenizer.token_to_id(token)
        if stated != number:
            raise ConfigError(
                f"{other} gives {token!r} the ID {number}, and {TOKENIZER} "
                f"{'none' if stated is None else stated}; write one tokenizer with transformers: "
                f"{CONVERT_TOKENIZER}."
            )


def _added_tokens(path: Path) -> list[tuple[str, int, Path]]:
    """Added tokens with their IDs, as the files beside tokenizer.json have them.

    transformers adds them to it.
    """
    stated: list[tuple[str, int, Path]] = []
    settings = path / "tokenizer_config.json"
    tokens = path / "added_tokens.json"
    for file in (settings, tokens):
        refuse_pointer(file)
    if settings.is_file():
        added = _json(settings).get("added_tokens_decoder")
        for number, token in added.items() if isinstance(added, dict) else ():
            content = _content(token)
            if number.isdecimal() and isinstance(content, str):
                stated.append((content, int(number), settings))
    if tokens.is_file():
        stated += [
            (token, number, tokens)
            for token, number in _json(tokens).items()
            if isinstance(number, int)
        ]
    return stated


@contextmanager
def opened(file: Path, framework: str) -> Iterator[Any]:
    """A safetensors file.

    Args:
        framework: "pt", or "numpy" where only names, types and shapes are read: torch cannot map a
            file larger than the memory.

    Raises:
        ConfigError: it is larger than the memory.
        DataError: it is none, or it was cut short.
    """
    try:
        with safe_open(file, framework=framework) as source:
            yield source
    except RuntimeError as error:
        if "unable to mmap" not in str(error):
            raise
        raise ConfigError(
            f"{file} cannot be mapped into the memory of this machine ({file.stat().st_size:,} "
            "bytes); use a machine with more, or write the model in smaller files with "
            "transformers: save_pretrained(…, max_shard_size='5GB')."
        ) from None
    except SafetensorError as error:
        raise DataError(f"{file} is damaged ({error}); download it again.") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}).") from None


def _json(file: Path) -> JsonObject:
    try:
        value = json.loads(_text(file))
    except (ValueError, RecursionError):
        raise DataError(f"{file} is not JSON.") from None
    if not isinstance(value, dict):
        raise DataError(f"{file} is not a JSON object.")
    return value
