"""Conversion of configurations and state dicts from and to Hugging Face's, as plain dicts.

A model that Hugging Face's LlamaForCausalLM can express becomes one of those ("llama"). Any other,
so also one with Infini-attention, keeps its whole LlamaConfig under one key of a configuration of
its own kind ("infini_llama"), which the code that is exported with it reads. Parameter names are
the same in both.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from infini_llama.model.config import BY_TOKEN, HF_FIELDS, LlamaConfig, is_number

if TYPE_CHECKING:  # configurations are read without it
    import torch

INFINI_LLAMA = "infini_llama"
# Keys of other programs and architectures that change what a model computes, with the values that
# do not.
CHANGES_THE_MODEL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "use_bias": (False,),
    "bias": (False,),
    "attention_out_bias": (False,),
    "lm_head_bias": (False,),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "alibi": (False,),
    "attn_temperature_tuning": (False,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "attention_multiplier": (),
    "scale_depth": (),
    "dim_model_base": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "attention_chunk_size": (),
    "num_experts": (),
    "num_local_experts": (),
    "n_routed_experts": (),
    "text_config": (),
    "quantization_config": (),
    "compression_config": (),
}
# Kinds of rotary scaling, and what each may say.
SCALINGS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
    },
}
# Expressed by keys of their own.
OTHER_KEYS = {"rope_theta", "rope_scaling", "head_dim"}
# Of tensors in memory: a folder holds the rows of tokens alone.
NOT_STORED = {"pad_vocab_to_multiple_of"}
# Without effect on what a trained model computes, so that leaving them out loses nothing.
TRAINING = {"hidden_dropout", "memory_write_jitter"}
# Of attention in segments: without effect on softmax, and covered by naming the other attention.
SEGMENTS = {
    "segment_length",
    "memory_update",
    "memory_layers",
    "memory_maps",
    "attend_previous_segment",
}
# Endings of the names of weights that a memory adds to the attention of a layer.
OF_MEMORY = (
    ".self_attn.gate",
    ".self_attn.memory_q.matrix",
    ".self_attn.memory_q.shift",
    ".self_attn.memory_k.matrix",
    ".self_attn.memory_k.shift",
)


def beyond_llama(config: LlamaConfig) -> list[str]:
    """The settings, as name=value, that Hugging Face's Llama has no place for.

    There are none where it can express the model.
    """
    defaults = {field.name: field.default for field in fields(config)}
    ours = (
        defaults.keys()
        - HF_FIELDS.keys()
        - OTHER_KEYS
        - TRAINING
        - SEGMENTS
        - NOT_STORED
    )
    beyond: list[str] = []
    for name, default in defaults.items():
        value = getattr(config, name)
        if name in ours and value != default:
            beyond.append(f"{name}={value}")
    return beyond


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The architecture as config.json of a "llama" has it.

    Rotary settings stand there twice: under `rope_parameters`, where transformers 5 looks for them,
    and under `rope_theta` and `rope_scaling`, where all other readers do.

    Raises:
        ValueError: Hugging Face's Llama cannot express the model; the message names the settings.
    """
    beyond = beyond_llama(config)
    if beyond:
        raise ValueError(f"Hugging Face's Llama cannot express {', '.join(beyond)}")
    ours = config.to_dict()
    plain_rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: ours[name] for name in HF_FIELDS},
        "head_dim": config.head_size,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": config.rope_theta,
        "rope_scaling": ours["rope_scaling"],
        "rope_parameters": plain_rope | (config.rope_scaling or {}),
    }


def config_to_infini_llama(config: LlamaConfig) -> dict[str, Any]:
    """The architecture as config.json of an "infini_llama" has it.

    The whole LlamaConfig is under one key, and the usual names beside it are for readers that only
    look at sizes.
    """
    ours = {
        name: value
        for name, value in config.to_dict().items()
        if name not in NOT_STORED
    }
    return {
        "architectures": ["InfiniLlamaForCausalLM"],
        "model_type": INFINI_LLAMA,
        **{name: ours[name] for name in HF_FIELDS},
        INFINI_LLAMA: ours,
    }


def config_from_hf(values: Mapping[str, Any]) -> LlamaConfig:
    """The architecture that a config.json describes, of either kind.

    Raises:
        ValueError: it is another architecture, contradicts itself, or has a setting that this model
            cannot express; the message names key and value.
    """
    kind = values.get("model_type")
    if kind == INFINI_LLAMA:
        # transformers changes the names beside the whole configuration, such as the vocabulary's
        # size
        whole: dict[str, Any] | None = values.get(INFINI_LLAMA)
        beside = {
            name: values[name] for name in HF_FIELDS if values.get(name) is not None
        }
        return LlamaConfig(**(whole | beside if whole else {}))
    if kind != "llama":
        raise ValueError(f"model_type={kind!r} is neither 'llama' nor '{INFINI_LLAMA}'")
    _refuse_other_models(values)
    settings = {name: values.get(name, default) for name, default in HF_FIELDS.items()}
    heads = settings["num_attention_heads"]
    if settings["num_key_value_heads"] is None:
        settings |= {"num_key_value_heads": heads}
    missing = [name for name, value in settings.items() if value is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing")
    theta, scaling = _rope(values)
    size = values.get("head_dim")
    # A usual size says nothing more.
    usual = type(size) is int and size * heads == settings["hidden_size"]
    others: dict[str, Any] = {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "head_dim": None if usual else size,
    }
    return LlamaConfig(**(settings | others))


def _refuse_other_models(values: Mapping[str, Any]) -> None:
    """Refuse a "llama" whose configuration says that it computes something else.

    transformers' Llama ignores some of these keys.

    Raises:
        ValueError: names key and value.
    """
    for name, harmless in CHANGES_THE_MODEL.items():
        value = values.get(name)
        if value is not None and value not in harmless:
            needed = (
                f", only {harmless[0]!r}" if harmless else "; use a model without it"
            )
            raise ValueError(f"{name}={value!r} cannot be expressed here{needed}")
    window = values.get("sliding_window")
    if values.get("use_sliding_window") is not False and window is not None:
        raise ValueError(
            f"sliding_window={window!r} cannot be expressed here, only None"
        )
    for name, same in (("layer_types", "full_attention"), ("no_rope_layers", 1)):
        layers: Any = values.get(name)
        if layers is not None and (
            not isinstance(layers, list)
            or any(entry != same for entry in cast(list[Any], layers))
        ):
            raise ValueError(
                f"{name}={layers!r} cannot be expressed here, only {same!r} in every layer"
            )
    activation = values.get("hidden_act", HF_FIELDS["hidden_act"])
    for name in ("hidden_activation", "activation_function"):
        value = values.get(name)
        if value not in (None, activation):
            raise ValueError(
                f"{name}={value!r} contradicts hidden_act={values.get('hidden_act')!r}; "
                "remove one of them"
            )
    named: Any = values.get("architectures") or ["LlamaForCausalLM"]
    if not any(
        name in str(named).lower() for name in ("'llamaforcausallm'", "'llamamodel'")
    ):
        raise ValueError(f"architectures={named!r} does not contain 'LlamaForCausalLM'")


def _rope(values: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and rope_scaling of a config.json in the style of transformers 4 or 5.

    Programs disagree about which of two places counts, so both must have the same value.

    Raises:
        ValueError: they do not, or a scaling cannot be expressed here.
    """
    read = [
        _rotary(name, values[name], values)
        for name in ("rope_scaling", "rope_parameters")
        if values.get(name)
    ]
    if not read:
        return _rotary("rope_parameters", {}, values)
    first = read[0]
    if any(other != first for other in read):
        raise ValueError(
            f"rope_scaling={values['rope_scaling']!r} contradicts "
            f"rope_parameters={values['rope_parameters']!r}; remove one of them"
        )
    return first


def _rotary(
    key: str, value: Any, values: Mapping[str, Any]
) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and rope_scaling of one of the two keys, completed by what stands beside it."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}={value!r} is not a mapping")
    # of no effect with these values
    neutral = {
        "partial_rotary_factor": 1,
        "truncate": 1,
        "beta_fast": 0,
        "beta_slow": 0,
    }
    inside: dict[str, Any] = {}
    for name, entry in cast(Mapping[str, Any], value).items():
        is_neutral = name in neutral and entry == neutral[name]
        if entry is not None and not is_neutral:
            inside[name] = entry
    kind = inside.pop("rope_type", inside.get("type", "default"))
    inside.pop("type", None)
    if kind not in SCALINGS:
        raise ValueError(
            f"rope_type={kind!r} cannot be expressed here, only {', '.join(SCALINGS)}"
        )
    for name in ("rope_theta", "original_max_position_embeddings"):
        beside = values.get(name)
        if beside is None:
            continue
        inside.setdefault(name, beside)
        if inside[name] != beside:
            raise ValueError(
                f"{name}={beside!r} contradicts {inside[name]!r} in {key}; remove one of them"
            )
    theta = inside.pop("rope_theta", 10_000.0)
    if not is_number(theta):
        raise ValueError(f"rope_theta={theta!r} is not a number")
    if kind in ("llama3", "yarn"):
        # Hugging Face reads a configuration without it in this way.
        length = values.get("max_position_embeddings", 2048)
        inside.setdefault("original_max_position_embeddings", length)
    else:
        inside.pop("original_max_position_embeddings", None)
    unknown = sorted(inside.keys() - SCALINGS[kind])
    if unknown:
        raise ValueError(
            f"{key}: {unknown[0]}={inside[unknown[0]]!r} cannot be expressed here "
            f"with rope_type={kind!r}"
        )
    return float(theta), None if kind == "default" else {"rope_type": kind} | inside


def shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a folder of this model holds.

    A tied head is not among them.
    """
    import torch

    from infini_llama.model.llama import Llama

    with torch.device("meta"):
        state = Llama(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in to_hf(state, config).items()}


def to_hf(
    state: "Mapping[str, torch.Tensor]", config: LlamaConfig
) -> "dict[str, torch.Tensor]":
    """Our state dict as a folder holds it.

    The names are the same. A head that is the embedding and rows that pad the vocabulary are left
    out.
    """
    return {
        name: tensor[: config.vocab_size] if name in BY_TOKEN else tensor
        for name, tensor in state.items()
        if name != "lm_head.weight" or not config.tie_word_embeddings
    }


def ignored(name: str, config: LlamaConfig) -> bool:
    """Whether a tensor of a folder is not loaded.

    These are rotary tables of old files, the head where it is the embedding, and gates and maps of
    layers that have no memory here.
    """
    if is_of_memory(name):
        with_memory = tuple(
            f"model.layers.{layer}." for layer in config.layers_with_memory
        )
        return not name.startswith(with_memory)
    tied_head = name == "lm_head.weight" and config.tie_word_embeddings
    return tied_head or name.endswith("rotary_emb.inv_freq")


def is_of_memory(name: str) -> bool:
    """Whether a tensor is gates or maps of a layer with a memory, which are always in fp32."""
    return name.endswith(OF_MEMORY)


def check_shapes(
    tensors: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    config: LlamaConfig,
) -> None:
    """Check that a folder's tensors are exactly this model's.

    Gates and maps alone may be missing, as in a model to be converted.

    Args:
        expected: `shapes` of the model.

    Raises:
        ValueError: names the first tensors that are missing, unknown or of another shape.
    """
    missing = [
        name for name in expected if name not in tensors and not is_of_memory(name)
    ]
    unknown = [
        name for name in tensors if name not in expected and not ignored(name, config)
    ]
    differing = [
        f"{name} {tensors[name]}, not {shape}"
        for name, shape in expected.items()
        if tensors.get(name, shape) != shape
    ]
    for words, names in (
        ("lacks", missing),
        ("has unknown", unknown),
        ("has of another shape", differing),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"it {words}: {', '.join(names[:3])}{more}")
