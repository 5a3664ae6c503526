"""The key that a wrong name most likely means.

It is one that another program calls so, or one of a similar name.
"""

import difflib

from infini_llama.configs.keys import all_keys

SIMILAR = 0.75  # of difflib, from 0 to 1: typing errors, not words that share letters

# Each name with the key to write instead; two keys where one name covers both stages.
KEYS = {
    "adam_eps": "train.adam_epsilon",
    "activation": "model.hidden_act",
    "amp": "environment.precision",
    "amp_dtype": "environment.precision",
    "batch_size": "train.global_batch_size",
    "best_model": "runtime.resume",
    "bf16": "environment.precision",
    "block_size": "data.sequence_length",
    "checkpoint": "runtime.resume",
    "checkpoint_dir": "runtime.home",
    "checkpoint_every": "train.save_steps",
    "compile_model": "train.compile",
    "context_length": "data.sequence_length",
    "context_parallel_degree": "train.context_parallel",
    "context_parallel_size": "train.context_parallel",
    "cp": "train.context_parallel",
    "cp_size": "train.context_parallel",
    "data.strategy": "data.packing",
    "d_ff": "model.intermediate_size",
    "d_model": "model.hidden_size",
    "data_dir": "runtime.home",
    "dataset_name": "data.dataset",
    "deepspeed": "train.parallel",
    "dim": "model.hidden_size",
    "disable_flash_attn": "environment.attention_backend",
    "distributed": "environment.nproc_per_node",
    "dropout": "model.hidden_dropout",
    "dtype": "environment.precision",
    "epochs": "train.num_epochs",
    "eval_every": "train.eval_steps",
    "eval_interval": "train.eval_steps",
    "ffn_dim": "model.intermediate_size",
    "flash_attention": "environment.attention_backend",
    "fp16": "environment.precision",
    "fp8": "environment.precision",
    "gpu": "environment.gpus or data.device",
    "gpu_device": "data.device or environment.gpus",
    "gpu_id": "data.device or environment.gpus",
    "grad_clip": "train.max_grad_norm",
    "gradient_accumulation_steps": "train.global_batch_size",
    "gradient_checkpointing": "train.activation_checkpointing",
    "gradient_clipping": "train.max_grad_norm",
    "hidden_dim": "model.hidden_size",
    "input_dir": "data.files",
    "log_every": "train.logging_steps",
    "log_interval": "train.logging_steps",
    "logdir": "runtime.home",
    "lr": "train.learning_rate",
    "lr_scheduler": "train.lr_schedule",
    "lr_scheduler_type": "train.lr_schedule",
    "machine_rank": "environment.node_rank",
    "main_process_ip": "environment.master_addr",
    "make_vocab_size_divisible_by": "model.pad_vocab_to_multiple_of",
    "master_address": "environment.master_addr",
    "max_iters": "train.max_steps",
    "max_length": "data.sequence_length",
    "max_lr": "train.learning_rate",
    "max_position_embeddings": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "mixed_precision": "environment.precision",
    "n_embd": "model.hidden_size",
    "n_head": "model.num_attention_heads",
    "n_heads": "model.num_attention_heads",
    "n_kv_heads": "model.num_key_value_heads",
    "n_layer": "model.num_hidden_layers",
    "n_layers": "model.num_hidden_layers",
    "no_gpu": "data.device or environment.device",
    "num_gpus": "environment.nproc_per_node",
    "num_heads": "model.num_attention_heads",
    "num_kv_heads": "model.num_key_value_heads",
    "num_layers": "model.num_hidden_layers",
    "num_machines": "environment.nnodes",
    "num_nodes": "environment.nnodes",
    "num_processes": "environment.nproc_per_node",
    "num_train_epochs": "train.num_epochs",
    "output_dir": "runtime.home",
    "pack_sequences": "data.packing",
    "packing_strategy": "data.packing",
    "pad_to_multiple_of": "model.pad_vocab_to_multiple_of",
    "padding_multiple": "model.pad_vocab_to_multiple_of",
    "per_device_train_batch_size": "train.micro_batch_size",
    "preprocessing_num_workers": "data.num_workers",
    "resume_from_checkpoint": "runtime.resume",
    "reshard_after_forward": "train.zero_stage",
    "run_name": "runtime.name",
    "save_dir": "runtime.home",
    "save_interval": "train.save_steps",
    "save_every": "train.save_steps",
    "seq_len": "data.sequence_length",
    "steps": "train.max_steps",
    "tensorboard_dir": "runtime.home",
    "tokenizer_type": "data.tokenizer.kind",
    "train.num_workers": "train.dataloader_num_workers",
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "use_amp": "environment.precision",
    "use_deepspeed": "train.parallel",
    "use_flash_attention": "environment.attention_backend",
    "use_gpu_dataloader": "train.dataloader_num_workers",
    "world_size": "environment.nproc_per_node",
    "zero_optimization": "train.deepspeed_config",
}

# Keys of other programs that are none here, each with what the program does instead.
DECIDED = {
    "data.tokenizer.min_frequency": "a merge needs two occurrences",
    "model.rope_scaling.mscale": (
        "yarn has the temperature of its paper, or model.rope_scaling.attention_factor"
    ),
    "model.rope_scaling.mscale_all_dim": (
        "yarn has the temperature of its paper, or model.rope_scaling.attention_factor"
    ),
    "model.rope_scaling.truncate": "yarn's ramp starts and ends at whole indices",
    "train.eval_on_start": (
        "a run with train.init_from is evaluated before its first step; a fresh model is not"
    ),
    "train.momentum": "sgd and muon have a momentum of 0.95",
    "train.tensor_parallel": (
        "use train.parallel=fsdp for models that do not fit one process, train.context_parallel "
        "for long sequences"
    ),
}

# Options of other programs that are no keys here, each with what to do instead.
OPTIONS = {
    "c": "the configuration is the first argument, without an option",
    "checkpoint": "the same command resumes; for a given checkpoint write runtime.resume=PATH",
    "config": "the configuration is the first argument, without an option",
    "config_file": "the configuration is the first argument, without an option",
    "d": "to train on a given dataset use 'infini-llama train CONFIG --dataset DATASET'",
    "data_dir": "to train on a given dataset use 'infini-llama train CONFIG --dataset DATASET'",
    "g": "write environment.gpus=[NUMBER]",
    "gpu": (
        "write environment.gpus=[NUMBER] for training, or data.device=cuda:NUMBER for preparation"
    ),
    "preprocessed_data": (
        "to train on a given dataset use 'infini-llama train CONFIG --dataset DATASET'"
    ),
    "resume_from_checkpoint": (
        "the same command resumes; for a given checkpoint write runtime.resume=PATH"
    ),
    "skip_preprocessing": "leave it out: a dataset that is complete is not built again",
    "t": "TensorBoard's files are in the run's folder; leave it out",
    "tensorboard_dir": "TensorBoard's files are in the run's folder; leave it out",
}


def nearest(steps: tuple[str, ...], is_section: bool = False) -> tuple[str, ...]:
    """The known keys that a wrong one most likely means.

    They are those for another program's name, or the one of the most similar name.
    """
    steps = tuple(step.lower().replace("-", "_") for step in steps)
    for name in (".".join(steps), steps[-1]):
        if name in KEYS:
            return tuple(KEYS[name].split(" or "))
    parent = ".".join(steps[:-1])
    word = difflib.SequenceMatcher(b=steps[-1])
    scored: list[tuple[float, int, str]] = []
    for key, holds_section in all_keys().items():
        above, _, name = key.rpartition(".")
        word.set_seq1(name)
        # The quick ratio is an upper bound of the ratio, which takes longer.
        if holds_section != is_section or word.quick_ratio() < SIMILAR:
            continue
        ratio = word.ratio()
        if ratio >= SIMILAR:
            bonus = 0.2 if above == parent else 0.0
            scored.append((ratio + bonus, -key.count("."), key))
    return (max(scored)[2],) if scored else ()
