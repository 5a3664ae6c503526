"""Infini-Llama for Hugging Face's auto classes: load with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`.

The model is that of the files beside this one; here it only gets the shape that transformers 5 expects. This file goes into
exported folders and is the only one that imports transformers.
"""

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from model.config import LlamaConfig
from model.llama import Llama


class InfiniLlamaConfig(PreTrainedConfig):
    """`infini_llama` holds every field of the model's own LlamaConfig."""

    model_type = "infini_llama"

    def __init__(self, infini_llama: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.infini_llama = infini_llama or {}
        super().__init__(**kwargs)


class Remembered:
    """What generation passes from token to token: each layer's state, and how many tokens were read."""

    is_compileable = False

    def __init__(self, capacity: int) -> None:
        self.capacity, self.states, self.length = capacity, None, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


class InfiniLlamaForCausalLM(PreTrainedModel, GenerationMixin):
    """The model, with transformers' way of loading, generating and computing a loss."""

    config_class = InfiniLlamaConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["self_attn.gate"]  # noqa: RUF012
    _is_stateful = True  # what was read cannot be taken back, as assisted generation would

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

        Rows may be padded on either side where `attention_mask` is 0. With `past_key_values` of `generate`, input_ids are the next
        tokens, and logits those after the last one.
        """
        if past_key_values is not None:
            logits = self._continue(input_ids, attention_mask, past_key_values)[:, None]
            return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
        if attention_mask is None or bool(attention_mask.all()):
            logits = self._llama(input_ids)
        else:  # the rows' own tokens first: no token looks at those behind it
            order = attention_mask.argsort(dim=1, descending=True, stable=True)
            logits = self._llama(input_ids.gather(1, order))
            back = order.argsort(dim=1)[..., None].expand_as(logits)
            logits = logits.gather(1, back)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
        return CausalLMOutputWithPast(loss=loss, logits=logits[:, -logits_to_keep:])

    def _continue(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, past: Remembered) -> torch.Tensor:
        """Logits [B, vocab_size] after the next tokens [B, t]."""
        if past.states is None:
            if attention_mask is not None and not bool(attention_mask.all()):
                raise ValueError("prompts of different lengths are not generated from together; give them one by one")
            logits, past.states = self._llama.prefill(input_ids, past.capacity)
        else:
            logits = [self._llama.decode(tokens, past.states) for tokens in input_ids.unbind(dim=1)][-1]
        past.length += input_ids.shape[1]
        return logits

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Instead of transformers' growing cache, which has no place for a compressive memory."""
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = Remembered(max_cache_length + 1)
