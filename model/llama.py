"""The Llama architecture (Touvron et al. 2023, arXiv 2302.13971) with softmax or Infini-attention.

Parameter names are those of Hugging Face's LlamaForCausalLM, so that a softmax model's state_dict is one of theirs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from model.attention import Attention, AttentionState
from model.config import LlamaConfig
from model.loss import cross_entropy_sum
from model.mlp import MLP
from model.norm import RMSNorm
from model.rope import Rotary, rotary_tables


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        return x + self.mlp(self.post_attention_layernorm(x))

    def step(
        self, x: torch.Tensor, attend: Callable[[torch.Tensor], tuple[torch.Tensor, AttentionState]]
    ) -> tuple[torch.Tensor, AttentionState]:
        """The same with an attention that also returns its state."""
        attended, state = attend(self.input_layernorm(x))
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), state


class Decoder(nn.Module):
    """Embedding, layers and final norm: `model.` of Hugging Face's names."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """A causal language model. Its initial weights depend on torch's global seed alone."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Normal(0, initializer_range) for matrices, ones for norms, zeros for gates; also after `to_empty` from the meta device.

        Raises:
            RuntimeError: a parameter of a kind that has no rule here, which would otherwise stay uninitialised.
        """
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                if name.endswith("norm.weight"):
                    parameter.fill_(1.0)
                elif name.endswith(".gate"):
                    parameter.zero_()
                elif parameter.ndim == 2:
                    parameter.normal_(0.0, self.config.initializer_range)
                else:
                    raise RuntimeError(f"parameter {name} has no rule for its initial value")
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def rotary(self, first: int, length: int, like: torch.Tensor) -> Rotary:
        """Tables of positions first … first + length - 1, on the device of `like`."""
        positions = torch.arange(first, first + length, device=like.device)
        return rotary_tables(positions, self.config.head_dim, self.config.rope_theta, like.dtype)

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What the head reads: input_ids [B, T] int64 to [B, T, hidden_size]."""
        x = self.model.embed_tokens(input_ids)
        length = input_ids.shape[1]
        if self.config.attention == "infini":
            length = min(length, self.config.segment_length)  # positions start anew in each segment
        rotary = self.rotary(0, length, x)
        for layer in self.model.layers:
            x = layer(x, rotary)
        return self.model.norm(x)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, vocab_size] for input_ids [B, T] int64."""
        return self.lm_head(self.hidden(input_ids))

    def loss(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of cross-entropies (nats, fp32) of input_ids [B, T] against labels [B, T], and the number of targets.

        Labels are already one token ahead of the inputs; -100 is no target.
        """
        return cross_entropy_sum(self(input_ids), labels)

    def prefill(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, list[AttentionState]]:
        """Logits [B, vocab_size] after the last of input_ids [B, T], and each layer's state to `decode` from."""
        x = self.model.embed_tokens(input_ids)
        length = input_ids.shape[1]
        if self.config.attention == "infini":
            length = min(length, self.config.segment_length)
        rotary = self.rotary(0, length, x)
        states = []
        for layer in self.layers():
            x, state = layer.step(x, lambda normed, layer=layer: layer.self_attn.prefill(normed, rotary))
            states.append(state)
        return self.lm_head(self.model.norm(x[:, -1])), states

    def decode(
        self, input_ids: torch.Tensor, states: list[AttentionState]
    ) -> tuple[torch.Tensor, list[AttentionState]]:
        """Logits [B, vocab_size] after one more token, input_ids [B, 1]; equal to `forward` over everything so far."""
        x = self.model.embed_tokens(input_ids)
        rotary = self.rotary(states[0].k.shape[2], 1, x)
        after = []
        for layer, state in zip(self.layers(), states, strict=True):
            x, state = layer.step(
                x, lambda normed, layer=layer, state=state: layer.self_attn.decode(normed, state, rotary)
            )
            after.append(state)
        return self.lm_head(self.model.norm(x[:, -1])), after

    def layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]


def parameter_groups(model: Llama, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups: matrices with weight decay; norms and embeddings without; gates without, for a rate of their own."""
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": [], "gates": []}
    for name, parameter in model.named_parameters():
        if name.endswith(".gate"):
            groups["gates"].append(parameter)
        elif parameter.ndim < 2 or "embed_tokens" in name:
            groups["no_decay"].append(parameter)
        else:
            groups["decay"].append(parameter)
    decay = {"decay": weight_decay, "no_decay": 0.0, "gates": 0.0}
    return [{"params": members, "weight_decay": decay[name], "name": name} for name, members in groups.items()]
