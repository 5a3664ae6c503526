"""A run's model as a folder that Hugging Face's programs open.

It holds weights, configuration, tokenizer and model card.
"""

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tokenizers import Tokenizer

from infini_llama import model
from infini_llama.configs.errors import ConfigError, disk_full_as
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import TrainingConfig
from infini_llama.model import hf
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.export.card import Exported, ModelFacts, model_card
from infini_llama.tasks.preprocess.tokens.reader import held_out_prompt
from infini_llama.tasks.records.lineage import Conversation
from infini_llama.tasks.records.metrics import ValidationLine
from infini_llama.tasks.runs import checkpoints
from infini_llama.tasks.runs.load import (
    dataset_of,
    end_of_text_of,
    find_checkpoint,
    load_run,
)
from infini_llama.tasks.runs.reading import reading_of
from infini_llama.tasks.runs.run_folder import RunFolder, read_metrics
from infini_llama.tasks.storage.artifacts import (
    EXPORT,
    MANIFEST,
    commit,
    has_all_files,
    read_manifest,
    remove,
    rename_synced,
    staged,
)
from infini_llama.tasks.storage.dataset_files import (
    TOKENIZER,
    read_file,
    read_tokenizer,
)
from infini_llama.tasks.storage.locks import FOREVER, Lock
from infini_llama.tasks.storage.tensors import model_tensors, state_hash

log = logging.getLogger("infini_llama.export")
INDEX = "model.safetensors.index.json"
SHARD_SIZE = "5GB"
SIZE = r"\s*(?=.*[1-9])[0-9]{1,15}(\.[0-9]+)?\s*[KMGTkmgt][Bb]\s*"
# Settings of transformers that count with do_sample alone, and their defaults.
SAMPLING = {
    "temperature": 1,
    "top_p": 1,
    "top_k": 50,
    "min_p": None,
    "typical_p": 1,
    "top_h": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def export(
    run_dir: Path,
    output: Path,
    checkpoint: str,
    dtype: str,
    max_shard_size: str,
) -> Exported:
    """Write the folder `output`, all of it or nothing; the same run gives the same bytes.

    A model that Hugging Face's Llama can express opens with `AutoModelForCausalLM` as it is; any
    other takes the code along that computes it and needs trust_remote_code=True.

    Args:
        checkpoint: latest, best, or the name of one.
        dtype: of the weights, one of DTYPES; gates and maps of memories stay fp32.
        max_shard_size: of one file, as "5GB" or "200MB".

    Raises:
        ConfigError: no such run or checkpoint, `output` has something in it, or `max_shard_size` is
            no size.
        DataError: checkpoint or tokenizer is damaged.
    """
    # Hugging Face's function raises on inf, and takes 0 for any size.
    if not re.fullmatch(SIZE, max_shard_size):
        raise ConfigError(
            f"--max-shard-size {max_shard_size} is not a size; use for example 5GB or 200MB."
        )
    output = output.absolute()
    if output.is_symlink() or (output.exists() and not _is_empty_folder(output)):
        raise ConfigError(
            f"--output {output} already exists; name a new folder, or remove it."
        )
    if any(parent.is_file() for parent in output.parents):
        raise ConfigError(f"--output {output} is below a file; name another folder.")
    output.parent.mkdir(parents=True, exist_ok=True)
    with staged(output) as folder:
        record = write_model(run_dir, folder, checkpoint, dtype, max_shard_size)
        rename_synced(folder, output)  # perhaps onto an empty folder
    return changed(record, path=str(output))


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def export_trained(run_dir: Path) -> Path:
    """Export the newest checkpoint of a run into its folder, unless it is there already.

    The folder `export` of the run is an artifact whose key is the checkpoint's digest: complete or
    not there, replaced as a whole, and mirrored.

    Raises:
        DataError: checkpoint or tokenizer is damaged.
        PipelineError: no space left.
    """
    run = RunFolder(run_dir)
    output = run.export
    # Of two commands, the second would delete what the first has staged.
    with Lock(run.export_lock, wait=FOREVER):
        chosen = find_checkpoint(run_dir, "latest")
        key = read_manifest(chosen, checkpoints.KIND).digest
        if has_all_files(output, EXPORT, key):
            log.info("%s was already exported", chosen.name)
            return output
        for left in output.parent.glob(f".{output.name}.*.tmp"):  # of a killed export
            shutil.rmtree(left, ignore_errors=True)
        before = output.with_name(f"{output.name}.before")
        with disk_full_as(f"the export in {output}"), staged(output) as folder:
            write_model(run_dir, folder, chosen.name, "float32", SHARD_SIZE)
            if has_all_files(output, EXPORT):  # of a checkpoint before
                if before.exists():
                    _bring_over(before, output)
                output.rename(before)
            commit(folder, output, EXPORT, {"key": key})
            if before.exists():
                _bring_over(before, output)
    log.info("%s was exported to %s", chosen.name, output)
    return output


def _bring_over(before: Path, output: Path) -> None:
    """Remove the export of an earlier checkpoint, but for what others have put into its folder."""
    own = {MANIFEST, *read_manifest(before, EXPORT).files}
    for path in before.iterdir():
        if path.name in own:
            continue
        place = output / path.name
        if place.exists():  # a file that this export has, and the earlier one had not
            place = place.with_name(f"{path.name}.before")
        path.rename(place)
    remove(before)


def write_model(
    run_dir: Path,
    folder: Path,
    checkpoint: str,
    dtype: str,
    max_shard_size: str,
) -> Exported:
    """Write weights, configuration, tokenizer and card into `folder`; see `export`."""
    model, tokenizer, chosen = load_run(run_dir, checkpoint)
    facts = facts_of(run_dir, chosen, model, tokenizer.get_vocab_size())
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in hf.to_hf(model.state_dict(), model.config).items():
        converted = tensor if hf.is_of_memory(name) else _converted(name, tensor, dtype)
        weights[name] = converted.contiguous()
    lineage = RunFolder(run_dir).require_lineage()
    config = model.config
    end = end_of_text_of(run_dir)
    kept = lineage.conversation
    initial = lineage.init_from
    if initial:
        # A model does not forget longer texts than the rows that it is trained on further.
        longest = max(config.max_position_embeddings, initial.max_position_embeddings)
        config = replace(config, max_position_embeddings=longest)
    beyond = hf.beyond_llama(config)
    files = write_weights(weights, folder, max_shard_size, facts)
    write_config(folder, config, dtype, end, kept)
    write_tokenizer(folder, dataset_of(run_dir), tokenizer, end, config, kept)
    (folder / "README.md").write_text(
        model_card(facts, config, dtype, beyond), encoding="utf-8"
    )
    return Exported(
        path=str(folder),
        run=facts.run,
        step=facts.step,
        parameters=facts.parameters,
        dtype=dtype,
        files=tuple(files),
        custom_code=tuple(beyond),
    )


def _converted(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    converted = tensor.to(DTYPES[dtype])
    if not torch.stack(torch.aminmax(converted)).isfinite().all():
        raise ConfigError(
            f"--dtype {dtype}: {name} has values up to {float(tensor.abs().max()):g}, "
            f"which {dtype} cannot hold; use bfloat16 or float32."
        )
    return converted


def facts_of(run_dir: Path, chosen: Path, model: Llama, vocabulary: int) -> ModelFacts:
    """Origin, training and validation loss of the weights."""
    run = RunFolder(run_dir)
    lineage = run.require_lineage()
    state = checkpoints.read_state(chosen)
    measured = [
        line
        for line in read_metrics(run)
        if isinstance(line, ValidationLine) and line.step == state.step
    ]
    dataset = lineage.dataset
    train = lineage.train
    special_tokens = lineage.conversation.special_tokens
    stored = hf.to_hf(model.state_dict(), model.config)
    return ModelFacts(
        run=run_dir.name,
        step=state.step,
        tokens=state.tokens,
        parameters=sum(tensor.numel() for tensor in stored.values()),
        validation_loss=measured[-1].loss if measured else None,
        bits_per_byte=measured[-1].bits_per_byte if measured else None,
        dataset=Path(dataset.path).name,
        dataset_digest=dataset.digest,
        sequence_length=dataset.sequence_length,
        vocabulary=vocabulary,
        weights_sha256=state_hash(model_tensors(model), "model."),
        infini_llama=version("infini-llama"),
        sample_prompt=sample_prompt(train, dataset_of(run_dir)),
        split_special_tokens=reading_of(run_dir).encoder.split_special_tokens,
        pad_token=special_tokens.get("pad_token"),
        global_batch_size=train.global_batch_size,
        learning_rate=train.learning_rate,
        seed=train.seed,
    )


def sample_prompt(train: TrainingConfig, dataset: Path) -> str:
    """The text that the card's example continues.

    It is the first of train.sample_prompts, by default the beginning of a held-out text.
    """
    if train.sample_prompts is None:
        tokenizer = read_tokenizer(dataset)
        ids = held_out_prompt(dataset, tokenizer)
        return tokenizer.decode(ids, skip_special_tokens=False)
    return next(iter(train.sample_prompts), "Once")


def write_weights(
    weights: dict[str, torch.Tensor],
    folder: Path,
    max_shard_size: str,
    facts: ModelFacts,
) -> list[str]:
    """Write safetensors files of at most `max_shard_size`, with an index where there are several.

    A larger tensor has a file of its own.

    Returns:
        the files' names.
    """
    split = split_torch_state_dict_into_shards(weights, max_shard_size=max_shard_size)
    about = {"format": "pt"} | facts.metadata()
    for file, names_in_file in split.filename_to_tensors.items():
        tensors = {name: weights[name] for name in names_in_file}
        save_file(tensors, folder / file, metadata=about)
        order_metadata(folder / file)
        readable_as_others(folder / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(folder / INDEX, index)
    return list(split.filename_to_tensors)


def readable_as_others(file: Path) -> None:
    """Give a file the mode of others that this process writes.

    safetensors leaves it readable by its owner alone.
    """
    folder_mode = file.parent.stat().st_mode  # made under the umask
    file.chmod(folder_mode & 0o666)


def order_metadata(file: Path) -> None:
    """Write the header's metadata in alphabetical order.

    safetensors leaves it in that of a hash table, another each time.
    """
    with file.open("r+b") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
        ordered = text.encode().ljust(length)
        assert len(ordered) == length
        opened.seek(8)
        opened.write(ordered)


def write_config(
    folder: Path,
    config: LlamaConfig,
    dtype: str,
    end_of_text: int,
    kept: Conversation,
) -> None:
    """Write config.json and generation_config.json.

    Where Hugging Face's Llama cannot express the model, the code is written, too.

    Args:
        kept: of the model that the run started from: generation settings and end tokens.
    """
    # A document follows an end-of-text token in training, so that is also what a text begins with.
    every = [*kept.ends_with(end_of_text)]
    texts = {
        "bos_token_id": end_of_text,
        "eos_token_id": every if len(every) > 1 else end_of_text,
    }
    ends = texts | {"pad_token_id": None}
    # `dtype` is for transformers 5, `torch_dtype` for all other readers.
    types = {"dtype": dtype, "torch_dtype": dtype, "use_cache": True}
    if hf.beyond_llama(config):
        described = hf.config_to_infini_llama(config) | {"auto_map": AUTO_MAP}
        write_code(folder)
    else:
        described = hf.config_to_hf(config)
    _write_json(folder / "config.json", described | ends | types)
    _write_json(folder / "generation_config.json", _generation(kept.generation) | texts)


def _generation(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Generation settings that transformers also writes again once it has changed them.

    Those are settings of sampling with do_sample alone, and no padding token below 0. Where they
    say that tokens are not sampled, those of sampling are left out.
    """
    settings = {
        name: value
        for name, value in kept.items()
        if (name, value) != ("pad_token_id", -1)
    }
    if settings.get("do_sample") is False or settings.get("temperature") == 0:
        others = {
            name: value for name, value in settings.items() if name not in SAMPLING
        }
        return others | {"do_sample": False}
    if any(
        settings.get(name) not in (None, default) for name, default in SAMPLING.items()
    ):
        settings["do_sample"] = True
    return settings


def write_tokenizer(
    folder: Path,
    dataset: Path,
    tokenizer: Tokenizer,
    end_of_text: int,
    config: LlamaConfig,
    kept: Conversation,
) -> None:
    """Write tokenizer.json as the dataset has it, and the files that Hugging Face's classes read.

    Args:
        kept: of the model that the run started from: chat templates, and the tokens that they may
            name.
    """
    (folder / TOKENIZER).write_bytes(read_file(dataset, TOKENIZER))
    end = tokenizer.id_to_token(end_of_text)
    special = {"eos_token": end}
    if (
        kept.chat_template is None
    ):  # one that names a bos means the folder's, if it has one
        special = {"bos_token": end} | special
    special |= kept.special_tokens
    if isinstance(kept.chat_template, str):
        (folder / "chat_template.jinja").write_text(
            kept.chat_template, encoding="utf-8"
        )
    # Infini-attention reads texts of any length.
    longest = (
        config.max_position_embeddings if config.attention == "softmax" else 10**30
    )
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": longest,
    }
    if isinstance(kept.chat_template, dict):
        about["chat_template"] = [
            {"name": name, "template": text}
            for name, text in kept.chat_template.items()
        ]
    _write_json(
        folder / "tokenizer_config.json", special | about | kept.tokenizer_settings
    )
    _write_json(folder / "special_tokens_map.json", special)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(
        json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


WRAPPER = Path(__file__).with_name("modeling_infini_llama.py")
AUTO_MAP = {
    "AutoConfig": f"{WRAPPER.stem}.InfiniLlamaConfig",
    "AutoModel": f"{WRAPPER.stem}.InfiniLlamaModel",
    "AutoModelForCausalLM": f"{WRAPPER.stem}.InfiniLlamaForCausalLM",
}
IMPORT = re.compile(
    r"^(\s*)from infini_llama\.model(\.\w+)? import (.+)$", re.MULTILINE
)


def write_code(folder: Path) -> None:
    """Copy the class and every file of `model` that it needs.

    Relative imports take the place of absolute ones.
    """
    waiting = [WRAPPER]
    seen = {WRAPPER.stem}
    while waiting:
        file = waiting.pop()
        text = file.read_text(encoding="utf-8")
        for name in needed(text):
            if name not in seen:
                seen.add(name)
                waiting.append(Path(str(model.__path__[0])) / f"{name}.py")
        origin = f"# From infini-llama {version('infini-llama')} (Apache-2.0)\n"
        (folder / file.name).write_text(
            origin + IMPORT.sub(_relative, text), encoding="utf-8"
        )


def needed(text: str) -> set[str]:
    """Files of `model` that a source text imports."""
    files: set[str] = set()
    for _, module, names in IMPORT.findall(text):
        if module:
            files.add(module[1:])
        else:
            files |= {name.strip() for name in names.split(",")}
    return files


def _relative(match: re.Match[str]) -> str:
    """`from infini_llama.model.x import y` as `from .x import y`.

    Hugging Face's loader does not follow `from . import x`, so a second line names the file in the
    way that it does.
    """
    indent, module, names = match.groups()
    if module:
        return f"{indent}from {module} import {names}"
    files = [name.strip() for name in names.split(",")]
    return "\n".join(
        f"{indent}from . import {file}\n{indent}from .{file} import __name__ as _"
        for file in files
    )
