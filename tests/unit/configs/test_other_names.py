"""Every key and option of the five earlier programs is a key here, or is answered with what to write instead."""

import pytest

from infini_llama.configs import other_names
from infini_llama.configs.keys import all_keys
from infini_llama.configs.problems import validate
from infini_llama.flows.cli.main import parse

# The sections of the earlier programs' configurations by the section that is most like each, with every key they named.
KEYS = {
    "model": {
        "d_model": "model.hidden_size",
        "n_heads": "model.num_attention_heads",
        "n_layers": "model.num_hidden_layers",
        "d_ff": "model.intermediate_size",
        "max_seq_len": "data.sequence_length",
        "dropout": "model.hidden_dropout",
        "attention_dropout": "",
        "activation": "model.hidden_act",
        "pre_norm": "",
        "gradient_checkpointing": "train.activation_checkpointing",
        "hidden_size": "",
        "num_layers": "model.num_hidden_layers",
        "num_heads": "model.num_attention_heads",
        "num_kv_heads": "model.num_key_value_heads",
        "vocab_size": "data.tokenizer.vocab_size",
    },
    "train": {
        "batch_size": "train.global_batch_size",
        "micro_batch_size": "",
        "learning_rate": "",
        "weight_decay": "",
        "num_epochs": "",
        "max_steps": "",
        "lr_scheduler": "train.lr_schedule",
        "warmup_steps": "",
        "optimizer": "",
        "gradient_accumulation_steps": "train.global_batch_size",
        "use_amp": "environment.precision",
        "amp_dtype": "environment.precision",
        "mixed_precision": "environment.precision",
        "max_grad_norm": "",
        "save_steps": "",
        "eval_steps": "",
        "eval_interval": "train.eval_steps",
        "save_every": "train.save_steps",
        "logging_steps": "",
        "log_every": "train.logging_steps",
        "checkpoint_dir": "runtime.home",
        "save_dir": "runtime.home",
        "report_to": "",
        "use_deepspeed": "train.parallel",
        "deepspeed_config": "",
        "world_size": "environment.nproc_per_node",
        "distributed_backend": "environment.distributed_backend",
        "save_total_limit": "",
        "resume_from_checkpoint": "runtime.resume",
        "compile_model": "train.compile",
        "num_workers": "train.dataloader_num_workers",
        "gpu_id": "data.device or environment.gpus",
        "disable_flash_attn": "environment.attention_backend",
        "train_batch_size": "train.global_batch_size",
        "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    },
    "data": {
        "dataset_name": "data.dataset",
        "dataset_config": "",
        "dataset_split": "",
        "validation_split": "",
        "text_column": "",
        "max_length": "data.sequence_length",
        "min_length": "",
        "strategy": "data.packing",
        "pack_sequences": "data.packing",
        "packing_strategy": "data.packing",
        "preprocessing_num_workers": "data.num_workers",
        "stride": "",
        "tokenizer_type": "data.tokenizer.kind",
        "input_dir": "data.files",
        "num_workers": "",
    },
}
ALL = [
    (section, key, meant)
    for section, keys in KEYS.items()
    for key, meant in keys.items()
]
OPTIONS = {
    "--config-file": "first argument",
    "--config": "first argument",
    "-c": "first argument",
    "--output-dir": "runtime.home=",
    "--data-dir": "--dataset",
    "-d": "--dataset",
    "--preprocessed-data": "--dataset",
    "--gpu": "environment.gpus=",
    "-g": "environment.gpus=",
    "--gpu-id": "data.device=",
    "--gpu-device": "data.device=",
    "--no-gpu": "data.device=",
    "--batch-size": "train.global_batch_size=",
    "--use-gpu-dataloader": "train.dataloader_num_workers=",
    "--disable-flash-attn": "environment.attention_backend=",
    "--tensorboard-dir": "TensorBoard",
    "-t": "TensorBoard",
    "--skip-preprocessing": "leave it out",
    "--distributed": "environment.nproc_per_node=",
    "--num-nodes": "environment.nnodes=",
    "--nproc_per_node": "environment.nproc_per_node=",
    "--nnodes": "environment.nnodes=",
    "--node_rank": "environment.node_rank=",
    "--master_addr": "environment.master_addr=",
    "--master_port": "environment.master_port=",
    "--input_dir": "data.files=",
    "--tokenizer_type": "data.tokenizer.kind=",
    "--vocab_size": "data.tokenizer.vocab_size=",
    "--max_length": "data.sequence_length=",
    "--stride": "data.stride=",
    "--num_workers": "data.num_workers=",
    "--save_dir": "runtime.home=",
    "--hidden_size": "model.hidden_size=",
    "--num_layers": "model.num_hidden_layers=",
    "--num_heads": "model.num_attention_heads=",
    "--num_kv_heads": "model.num_key_value_heads=",
    "--micro_batch_size": "train.micro_batch_size=",
    "--max_steps": "train.max_steps=",
    "--learning_rate": "train.learning_rate=",
    "--mixed_precision": "environment.precision=",
    "--compile_model": "train.compile=",
    "--eval_interval": "train.eval_steps=",
    "--checkpoint": "runtime.resume=",
    "--resume_from_checkpoint": "runtime.resume=",
}


@pytest.mark.parametrize(("section", "key", "meant"), ALL)
def test_each_name_of_the_field_is_a_key_or_suggests_one(section, key, meant):
    if not meant:
        assert f"{section}.{key}" in all_keys()
        return
    _, problems = validate(
        {"data": {"source": "python-stdlib"}}
        | {section: {"source": "python-stdlib", key: 1}}
    )
    (line,) = [line for line in problems if line.startswith(f"{section}.{key}:")]
    assert line.endswith(f"did you mean {meant}?")


@pytest.mark.parametrize(
    ("option", "value", "meant"),
    [
        ("--no-gpu", [], "data.device="),
        *((option, ["1"], meant) for option, meant in OPTIONS.items()),
    ],
)
def test_an_unknown_option_suggests_the_key(option, value, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["run", "my.yaml", option, *value])
    assert ended.value.code == 64
    hint = capsys.readouterr().err.splitlines()[-1]
    assert hint.strip().startswith(f"{option}: ") and meant in hint


def test_an_option_of_a_command_without_a_configuration_has_no_hint(capsys):
    with pytest.raises(SystemExit):
        parse(["report", "x", "--max_steps", "1"])
    assert "train.max_steps" not in capsys.readouterr().err


def test_aliases_are_not_keys_and_map_to_keys():
    leaves = {key.rpartition(".")[2] for key in all_keys()}
    meant = {key for keys in other_names.KEYS.values() for key in keys.split(" or ")}
    assert meant <= all_keys().keys()
    assert not other_names.KEYS.keys() & (all_keys().keys() | leaves - {"checkpoint"})
    assert other_names.nearest(("per-device-train-batch-size",)) == (
        "train.micro_batch_size",
    )


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("max_stps", ("train.max_steps",)),
        ("fils", ("data.files",)),
        ("gpus", ("environment.gpus",)),
        ("srun_option", ("environment.srun_options",)),
        ("activate", ()),
        ("zzz", ()),
        ("relation", ()),
    ],
)
def test_a_typing_error_leads_to_the_key_and_an_unrelated_word_to_none(word, meant):
    assert other_names.nearest((word,)) == meant


@pytest.mark.parametrize("key", other_names.DECIDED)
def test_a_key_that_the_program_decides_is_answered_with_what_it_does(key):
    config = {
        "data": {"source": "python-stdlib"},
        "model": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    }
    *parents, name = key.split(".")
    section = config
    for parent in parents:
        section = section.setdefault(parent, {})
    section[name] = "on"
    _, (line,) = validate(config)
    assert (
        line == f"{key}: unknown key; leave it out: {other_names.DECIDED[key]}"
        and key not in all_keys()
    )
