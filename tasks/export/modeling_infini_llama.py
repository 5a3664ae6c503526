"""Infini-Llama for Hugging Face's auto classes.

Load it with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`.

The model is that of the files beside this one; here it only gets the shape that transformers 5
expects. This file goes into exported folders and is the only one that imports transformers.
"""

from dataclasses import fields
from typing import Any

import torch
import transformers
from torch import nn

if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        "an exported Infini-Llama needs transformers 5 or newer; "
        f"this is {transformers.__version__}"
    )
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
)

from infini_llama.model.config import HF_FIELDS, LlamaConfig
from infini_llama.model.layout import PADDING
from infini_llama.model.llama import Llama, States, init_weight

# Name of the cache among the inputs and outputs of a model: transformers 5.24 renamed
# `past_key_values`.
CACHE = (
    "cache"
    if "cache" in CausalLMOutputWithPast.__dataclass_fields__
    else "past_key_values"
)
# What other attention functions are given for packed rows.
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


class InfiniLlamaConfig(PreTrainedConfig):
    """`infini_llama` holds every field of the model's own LlamaConfig.

    HF_FIELDS stand beside it, too, where transformers reads and changes them: such a field has the
    value there.
    """

    model_type = "infini_llama"

    def __init__(
        self,
        infini_llama: dict[str, Any] | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.use_cache = use_cache
        values = dict(infini_llama or {})
        for field in fields(LlamaConfig):
            if field.name in kwargs and field.name not in HF_FIELDS:
                values[field.name] = kwargs.pop(field.name)
        self.infini_llama = values
        beside = {name: values[name] for name in HF_FIELDS if name in values}
        super().__init__(**(beside | kwargs))

    def llama(self) -> LlamaConfig:
        """The model's own configuration."""
        values = dict(self.infini_llama)
        for name in HF_FIELDS:
            value = getattr(self, name, None)
            if value is not None:
                values[name] = value
        return LlamaConfig(**values)


class InfiniCache:
    """The cache that generation passes from token to token.

    It holds the states of the rows, and how long they are with their padding.

    `capacity` is the number of tokens that a softmax model's states first have room for, `padding`
    that of the first input's tokens that its attention_mask left out.
    """

    is_compileable = False
    is_croppable = False
    # generate() passes on only the tokens that the cache has not read.
    is_linear = (False,)
    # With is_croppable: on Apple GPUs, generate must not read one token ahead.
    _is_user_defined = True

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.padding = 0
        self.states: States | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row b becomes what row beam_idx[b] was."""
        if self.states is not None:
            for state in self.states.layers:
                for name, value in vars(state).items():
                    setattr(state, name, _rows(value, beam_idx))


def _rows(value: Any, order: torch.Tensor) -> Any:
    """Those rows of a tensor, of a list with an entry per row, or of a tuple of tensors."""
    if isinstance(value, torch.Tensor):
        return value[order]
    if isinstance(value, list):
        return [value[row] for row in order.tolist()]
    if isinstance(value, tuple):
        return type(value)(*(_rows(part, order) for part in value))
    return value


class InfiniLlamaForCausalLM(PreTrainedModel, GenerationMixin):
    """The model, with transformers' way of loading, generating and computing a loss."""

    config_class = InfiniLlamaConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = [  # noqa: RUF012
        "self_attn.gate",
        "self_attn.memory_q",
        "self_attn.memory_k",
    ]
    # device_map: its layers are called by other names than forward.
    _no_split_modules = ["Decoder"]  # noqa: RUF012
    # What was read cannot be taken back, as assisted generation would.
    _is_stateful = True
    # `num_items_in_batch`: the loss may be that of one micro-batch of several.
    accepts_loss_kwargs = True
    # Accepted, and without effect: the model chooses its own attention.
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _llama: Llama

    def __init__(self, config: InfiniLlamaConfig) -> None:
        super().__init__(config)
        llama = Llama(config.llama())
        self.model = llama.model
        self.lm_head = llama.lm_head
        # Not a submodule: its parts are, under the names of the weights.
        object.__setattr__(self, "_llama", llama)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module's own weights: those of a folder that lacks them."""
        for name, weight in module.named_parameters(recurse=False):
            init_weight(name, weight, self._llama.config.initializer_range)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Any = "full",
        every_n_layers: int = 1,
    ) -> None:
        """Called by `gradient_checkpointing_enable` and `_disable`."""
        self.gradient_checkpointing = enable
        layers: Any = self.model.layers
        for number, layer in enumerate(layers):
            is_chosen = enable and number % every_n_layers == 0
            layer.checkpointing = gradient_checkpointing_func if is_chosen else "none"

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: InfiniCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        cache: InfiniCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits for input_ids [B, T] or inputs_embeds [B, T, D]; the cross-entropy with `labels`.

        The labels [B, T] are not shifted.

        Rows may be padded on either side, where `attention_mask` [B, T] is 0, or packed:
        `position_ids` [B, T] that do not go up by one begin another document, which sees nothing of
        those before it. A cache is begun with use_cache=True alone. With `past_key_values`, which
        transformers 5.24 calls `cache`, the tokens are the next ones; only the first of them may be
        padded. `kwargs` go to the loss function.

        Raises:
            ValueError: both or none of input_ids and inputs_embeds, two caches, or an input that
                cannot be honoured.
        """
        x = self._embeddings(input_ids, inputs_embeds)
        _refuse_unsupported(attention_mask, position_ids, kwargs)
        past = _given_cache(past_key_values, cache)
        if use_cache and past is None:
            past = InfiniCache(
                max(x.shape[1], self._llama.config.max_position_embeddings)
            )
        hidden_states = self._hidden_states(x, attention_mask, position_ids, past)
        kept = logits_to_keep
        if isinstance(kept, int):
            kept = slice(-kept, None)
        logits = self.lm_head(hidden_states[-1][:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=logits.shape[-1],
                **kwargs,
            )
        with_hidden_states = output_hidden_states
        if with_hidden_states is None:
            with_hidden_states = self.config.output_hidden_states
        output = CausalLMOutputWithPast(
            loss=loss,  # type: ignore
            logits=logits,  # type: ignore
            hidden_states=tuple(hidden_states) if with_hidden_states else None,  # type: ignore
            **{CACHE: past},  # type: ignore
        )
        return output.to_tuple() if return_dict is False else output

    def _embeddings(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
    ) -> torch.Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is not None:
            return inputs_embeds
        return self.model.embed_tokens(input_ids)

    def _hidden_states(
        self,
        x: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        past: InfiniCache | None,
    ) -> list[torch.Tensor]:
        """Hidden states of every layer: the input, the layers' outputs, and what the head reads.

        Each is [B, T, D] like the input x; the output of the last layer is left out.
        """
        batch, length = x.shape[:2]
        documents = (
            None
            if position_ids is None
            else _documents(position_ids.expand(batch, length))
        )
        layer_outputs: list[torch.Tensor] = []
        order = None
        lengths = None
        if past is not None and past.states is not None:
            _refuse_to_continue(attention_mask, documents, past)
            past.states = self._llama.with_room(past.states, length)
            hidden = self._llama.read_embeddings(x, past.states, None, layer_outputs)
        else:
            if attention_mask is not None and not attention_mask.all():
                # The rows' own tokens first: no token looks at those after it.
                order = attention_mask.argsort(dim=1, descending=True, stable=True)
                lengths = attention_mask.sum(dim=1).tolist()
                x = _in_order(x, order)
                if position_ids is not None:
                    in_order = position_ids.expand(batch, length).gather(1, order)
                    documents = _documents(in_order, lengths)
            hidden = self._begin(x, documents, past, lengths, layer_outputs)
            if past is not None and lengths is not None:
                past.padding = batch * length - sum(lengths)
        if past is not None:
            past.length += length
        hidden_states = [x, *layer_outputs[:-1], hidden]
        if order is not None:
            back = order.argsort(dim=1)
            hidden_states = [_in_order(value, back) for value in hidden_states]
        return hidden_states

    def _begin(
        self,
        x: torch.Tensor,
        documents: torch.Tensor | None,
        past: InfiniCache | None,
        lengths: list[int] | None,
        layer_outputs: list[torch.Tensor],
    ) -> torch.Tensor:
        """Hidden states of rows from their first tokens on; of row b the first lengths[b] count."""
        if past is None:
            return self._llama.hidden_from_embeddings(
                x, documents, layer_outputs=layer_outputs
            )
        if documents is not None:
            raise ValueError(
                "position_ids begin several documents in a row, "
                "which use_cache=True cannot continue"
            )
        past.states = self._llama.new_states(len(x), past.capacity)
        return self._llama.read_embeddings(x, past.states, lengths, layer_outputs)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Instead of transformers' growing cache, which has no place for a compressive memory."""
        if generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = InfiniCache(max_cache_length + 1)


class InfiniLlamaModel(InfiniLlamaForCausalLM):
    """The model that AutoModel opens.

    It has the same weights, and the last hidden state [B, T, D] in place of logits.
    """

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        kwargs |= {
            "output_hidden_states": True,
            "return_dict": True,
            "logits_to_keep": 1,
        }
        output: Any = super().forward(*arguments, **kwargs)
        return BaseModelOutputWithPast(
            last_hidden_state=output.hidden_states[-1],
            **{CACHE: output.get(CACHE)},
        )


def _given_cache(past_key_values: Any, cache: InfiniCache | None) -> InfiniCache | None:
    """The cache of a call, by either name.

    Raises:
        ValueError: there are two, or it is another program's.
    """
    if past_key_values is not None and cache is not None:
        raise ValueError("give either past_key_values or cache")
    past = past_key_values if cache is None else cache
    if past is None or isinstance(past, InfiniCache):
        return past
    raise ValueError(
        f"{CACHE} is a {type(past).__name__}, which has no place for a memory; give none, or the "
        "one that an earlier call with use_cache=True has returned"
    )


def _refuse_unsupported(
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    """Refuse arguments that would otherwise be ignored.

    Raises:
        ValueError: naming the argument.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}; "
            "give one of [batch, length]"
        )
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True: attention weights are not computed")
    packed = sorted(name for name in PACKED if kwargs.get(name) is not None)
    if packed and position_ids is None:
        raise ValueError(
            f"{packed[0]} without position_ids: give position_ids that restart in each document"
        )


def _refuse_to_continue(
    attention_mask: torch.Tensor | None,
    documents: torch.Tensor | None,
    past: InfiniCache,
) -> None:
    """Refuse arguments that the cache of what was read before cannot hold.

    Raises:
        ValueError: naming the argument.
    """
    if documents is not None:
        raise ValueError(
            "position_ids begin another document, which past_key_values cannot hold"
        )
    if attention_mask is not None and int((attention_mask == 0).sum()) > past.padding:
        raise ValueError(
            "attention_mask leaves out tokens after the first input, which past_key_values cannot; "
            "pad the first input alone"
        )


def _documents(
    position_ids: torch.Tensor, lengths: list[int] | None = None
) -> torch.Tensor | None:
    """The number of each token's document [B, T]; None where no row has several.

    Args:
        lengths: of row b, only the first lengths[b] tokens count; None: all.
    """
    documents = (position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1).cumsum(
        dim=1
    )
    if lengths is not None:
        places = torch.arange(documents.shape[1], device=documents.device)
        ends = torch.tensor(lengths, device=documents.device)
        documents = documents.masked_fill(places >= ends[:, None], PADDING)
    return documents if bool((documents > 0).any()) else None


def _in_order(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The tokens of x [B, T, D] in the order [B, T]."""
    return x.gather(1, order[..., None].expand_as(x))
