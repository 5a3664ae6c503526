"""The Llama architecture (Touvron et al. 2023, arXiv 2302.13971) with softmax or Infini-attention.

Parameter names are those of Hugging Face's LlamaForCausalLM, so that a softmax model's state_dict is one of theirs;
Infini-attention adds model.layers.<i>.self_attn.gate.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from model.attention import Attention, KeyValues
from model.config import LlamaConfig
from model.infini_attention import InfiniAttention
from model.loss import cross_entropy_sum
from model.mlp import MLP
from model.norm import RMSNorm
from model.rope import Rotary, rotary


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x is [B, T, hidden_size]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = InfiniAttention(config) if config.attention == "infini" else Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        return self._finish(x + self.self_attn(self.input_layernorm(x), rotary))

    def prefill(self, x: torch.Tensor, rotary: Rotary, capacity: int) -> tuple[torch.Tensor, KeyValues]:
        attended, state = self.self_attn.prefill(self.input_layernorm(x), rotary, capacity)
        return self._finish(x + attended), state

    def decode(self, x: torch.Tensor, rotary: Rotary, state: KeyValues) -> torch.Tensor:
        return self._finish(x + self.self_attn.decode(self.input_layernorm(x), rotary, state))

    def _finish(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm: what Hugging Face names `model.`"""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """A causal language model.

    Its initial weights depend on torch's global seed alone. Under `torch.device("meta")` it is built without memory; give it some
    by `to_empty(device=…)` and call `init_weights()`, and it is the same model. There are no buffers.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):  # else torch would first draw initial weights of its own
            self.model = Decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if device.type == "meta":
            self.tie_weights()
        else:
            self.to_empty(device=device)
            self.init_weights()

    def tie_weights(self) -> None:
        """Makes the head's weight the embedding's where the configuration says so; `to_empty` separates them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Matrices normal(0, initializer_range) as Hugging Face's, norms 1, gates 0 (half memory, half local).

        Raises:
            RuntimeError: a parameter of a kind that has no rule here, which would otherwise stay uninitialised.
        """
        self.tie_weights()
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith(".gate"):
                parameter.zero_()
            elif name.endswith(".weight") and parameter.ndim == 2:
                parameter.normal_(0.0, self.config.initializer_range, generator=generator)
            else:
                raise RuntimeError(f"parameter {name} has no rule for its initial value")

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What the head reads: input_ids [B, T] int64 to [B, T, hidden_size]."""
        x = self.model.embed_tokens(input_ids)
        positions = self._positions(0, self._window(x.shape[1]), x)
        for layer in self._layers():
            x = layer(x, positions)
        return self.model.norm(x)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, vocab_size] for input_ids [B, T] int64."""
        return self.lm_head(self.hidden(input_ids))

    def loss(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of cross-entropies (nats, fp32) of input_ids [B, T] against labels [B, T], and the number of targets.

        Labels are already one token ahead of the inputs; -100 is no target.
        """
        return cross_entropy_sum(self(input_ids), labels)

    def prefill(self, input_ids: torch.Tensor, capacity: int) -> tuple[torch.Tensor, list[KeyValues]]:
        """Reads a prompt, input_ids [B, T], in the parallel form.

        Returns:
            logits [B, vocab_size] after its last token, and each layer's state to `decode` from; a softmax layer's has room for
            `capacity` tokens, the prompt's included.
        """
        x = self.model.embed_tokens(input_ids)
        positions = self._positions(0, self._window(x.shape[1]), x)
        states = []
        for layer in self._layers():
            x, state = layer.prefill(x, positions, capacity)
            states.append(state)
        return self.lm_head(self.model.norm(x[:, -1])), states

    def decode(self, tokens: torch.Tensor, states: Sequence[KeyValues]) -> torch.Tensor:
        """Logits [B, vocab_size] after one more token each, tokens [B]; equal to `forward` over everything so far.

        The states are updated in place.
        """
        x = self.model.embed_tokens(tokens[:, None])
        position = self._positions(states[0].filled, 1, x)
        for layer, state in zip(self._layers(), states, strict=True):
            x = layer.decode(x, position, state)
        return self.lm_head(self.model.norm(x[:, -1]))

    def _window(self, length: int) -> int:
        """Positions that a row of `length` tokens uses: Infini-attention's start anew in each segment."""
        return min(length, self.config.segment_length) if self.config.attention == "infini" else length

    def _positions(self, first: int, length: int, x: torch.Tensor) -> Rotary:
        """Rotary tables of positions first … first + length - 1, for the device and type of x."""
        integers = torch.arange(first, first + length, device=x.device)
        return rotary(integers, self.config.head_dim, self.config.rope_theta, x.dtype)

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]


def parameter_groups(model: Llama, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups: "decay" (matrices), "no_decay" (norms, embedding and a head tied to it), "gates" (a rate of their own).

    Every parameter is in one of them; a group may be empty.
    """
    decay, no_decay, gates = [], [], []
    for name, parameter in model.named_parameters():
        if name.endswith(".gate"):
            gates.append(parameter)
        elif parameter.ndim < 2 or parameter is model.model.embed_tokens.weight:
            no_decay.append(parameter)
        else:
            decay.append(parameter)
    return [
        {"name": "decay", "params": decay, "weight_decay": weight_decay},
        {"name": "no_decay", "params": no_decay, "weight_decay": 0.0},
        {"name": "gates", "params": gates, "weight_decay": 0.0},
    ]
