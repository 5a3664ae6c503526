"""Infini-Llama for Hugging Face's auto classes: load with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`.

The model is that of the files beside this one; here it only gets the shape that transformers 5 expects. This file goes into
exported folders and is the only one that imports transformers.
"""

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama, States


class InfiniLlamaConfig(PreTrainedConfig):
    """`infini_llama` holds every field of the model's own LlamaConfig."""

    model_type = "infini_llama"

    def __init__(self, infini_llama: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.infini_llama = infini_llama or {}
        super().__init__(**kwargs)


class Remembered:
    """What generation passes from token to token: the states of the rows, and how long they are with their padding."""

    is_compileable = False

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
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
    """Those rows of a tensor, of a list with an entry a row, or of a tuple of tensors."""
    if isinstance(value, torch.Tensor):
        return value[order]
    if isinstance(value, list):
        return [value[row] for row in order.tolist()]
    return type(value)(*(_rows(part, order) for part in value)) if isinstance(value, tuple) else value


class InfiniLlamaForCausalLM(PreTrainedModel, GenerationMixin):
    """The model, with transformers' way of loading, generating and computing a loss."""

    config_class = InfiniLlamaConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["self_attn.gate"]  # noqa: RUF012
    _is_stateful = True  # what was read cannot be taken back, as assisted generation would
    _llama: Llama

    def __init__(self, config: InfiniLlamaConfig) -> None:
        super().__init__(config)
        llama = Llama(LlamaConfig.from_dict(config.infini_llama))
        self.model, self.lm_head = llama.model, llama.lm_head
        object.__setattr__(self, "_llama", llama)  # not a submodule: its parts are, under the names of the weights
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Llama has initialised itself."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Remembered | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        **unused: Any,
    ) -> CausalLMOutputWithPast:
        """Logits for input_ids [B, T], and with `labels` [B, T] (not shifted) the mean cross-entropy.

        Rows may be padded on either side, where `attention_mask` is 0. With the `past_key_values` that `generate` passes, input_ids
        are the next tokens; only the first of them may be padded.
        """
        if past_key_values is not None and past_key_values.states is not None:
            hidden = self._llama.read(input_ids, past_key_values.states)
        elif attention_mask is None or bool(attention_mask.all()):
            hidden = self._begin(input_ids, past_key_values, None)
        else:  # the rows' own tokens first: no token looks at those behind it
            order = attention_mask.argsort(dim=1, descending=True, stable=True)
            hidden = self._begin(input_ids.gather(1, order), past_key_values, attention_mask.sum(dim=1).tolist())
            hidden = hidden.gather(1, order.argsort(dim=1)[..., None].expand_as(hidden))
        if past_key_values is not None:
            past_key_values.length += input_ids.shape[1]
        logits = self.lm_head(hidden[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)  # type: ignore

    def _begin(self, input_ids: torch.Tensor, past: Remembered | None, lengths: list[int] | None) -> torch.Tensor:
        """What the head reads of rows from their first tokens on; of row b the first lengths[b] count."""
        if past is None:
            return self._llama.hidden(input_ids)
        past.states = self._llama.new_states(len(input_ids), past.capacity)
        return self._llama.read(input_ids, past.states, lengths)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Instead of transformers' growing cache, which has no place for a compressive memory."""
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = Remembered(max_cache_length + 1)
