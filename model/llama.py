"""The Llama architecture (Touvron et al. 2023, arXiv 2302.13971) with softmax or Infini-attention.

Parameter names are those of Hugging Face's LlamaForCausalLM, so that a softmax model's state_dict
is one of theirs; Infini-attention adds model.layers.<i>.self_attn.gate, and with memory_maps matrix
and shift of self_attn.memory_q and memory_k.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from infini_llama.model.attention import Attention, KeyValues
from infini_llama.model.backends import BY_BOUNDARIES
from infini_llama.model.config import BY_TOKEN, FrozenLayers, LlamaConfig
from infini_llama.model.context import Context
from infini_llama.model.infini_attention import InfiniAttention, SegmentAttention
from infini_llama.model.layers import MLP, Checkpointing, RMSNorm, checkpointed
from infini_llama.model.layout import Rows, Segments, rows, segments
from infini_llama.model.loss import chunked_cross_entropy_sum, cross_entropy_sum
from infini_llama.model.rope import Rotary, rotary, scaled_frequencies, segment_rotary

PIECE = 4096  # tokens of a text that are read at a time


class States(NamedTuple):
    """State of a model that reads rows in pieces: rotary tables, and each layer's state."""

    rotary: Rotary
    layers: list[KeyValues]


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), x [B, T, hidden_size].

    Without pre_norm it is norm(x + attention(x)) and so on.
    """

    def __init__(self, config: LlamaConfig, backend: str, number: int) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        if config.attention == "softmax":
            self.self_attn = Attention(config, backend)
        else:
            kind = (
                InfiniAttention
                if number in config.layers_with_memory
                else SegmentAttention
            )
            self.self_attn = kind(config, backend)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.checkpointing: Checkpointing | Callable[..., Any] = "none"

    def forward(self, x: torch.Tensor, rows: Rows | Segments) -> torch.Tensor:
        """x [B, T, hidden_size] to the same shape."""
        kind = self.checkpointing if self.training else "none"
        return checkpointed(self._forward, kind, x, rows)

    def _forward(self, x: torch.Tensor, rows: Rows | Segments) -> torch.Tensor:
        return self._finish(x, self.self_attn(self.normed(x), rows))

    def read(
        self,
        x: torch.Tensor,
        rotary: Rotary,
        state: KeyValues,
        lengths: list[int] | None,
    ) -> torch.Tensor:
        """Continue from a state, as the `read` of its attention does."""
        return self._finish(
            x, self.self_attn.read(self.normed(x), rotary, state, lengths)
        )

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """The input of attention from x."""
        return self.input_layernorm(x) if self.pre_norm else x

    def _finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(attended)
        if self.pre_norm:
            return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        x = self.input_layernorm(x)
        return self.post_attention_layernorm(x + self.dropout(self.mlp(x)))


class Decoder(nn.Module):
    """Embedding, layers and final norm: what Hugging Face names `model.`"""

    def __init__(self, config: LlamaConfig, backend: str) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, backend, number)
            for number in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


def init_weight(name: str, weight: torch.Tensor, deviation: float) -> None:
    """Initialise a weight in place.

    Args:
        name: in its module, or the model's.
        deviation: of a matrix's values.

    Raises:
        RuntimeError: a parameter of a kind that has no rule here, which would otherwise stay
            uninitialised.
    """
    kind = name.rpartition(".")[2]
    if kind == "weight" and weight.ndim == 2:
        weight.normal_(0.0, deviation)
    elif kind == "weight":
        weight.fill_(1.0)  # of a norm
    elif kind == "matrix":
        weight.copy_(torch.eye(weight.shape[-1], device=weight.device))
    elif kind in ("gate", "shift"):
        weight.zero_()
    else:
        raise RuntimeError(f"parameter {name} has no rule for its initial value")


class Llama(nn.Module):
    """A causal language model.

    Its initial weights depend on torch's global seed alone. Under `torch.device("meta")` it is
    built without memory; give it some by `to_empty(device=…)` and call `init_weights()`, and it is
    the same model. There are no buffers.

    `attention_backend` is one of `model.backends.BACKENDS`: what computes softmax attention, no
    part of the architecture. `most_documents` is an upper bound of a training row's documents, if
    it is known; a GPU is otherwise asked in every pass.
    """

    def __init__(self, config: LlamaConfig, attention_backend: str = "sdpa") -> None:
        super().__init__()
        self.config = config
        self.attention_backend = attention_backend
        self.loss_chunk = 0
        self.z_loss = 0.0
        self.most_documents: int | None = None
        # A wrong rope_scaling is refused here.
        scaled_frequencies(config, torch.device("meta"), torch.float32)
        # Of a parameter: accelerate's init_empty_weights sets no default device.
        device = nn.RMSNorm(1).weight.device
        # Else torch would first draw initial weights of its own.
        with torch.device("meta"):
            self.model = Decoder(config, attention_backend)
            self.lm_head = nn.Linear(
                config.hidden_size, config.padded_vocab_size, bias=False
            )
        if device.type == "meta":
            self.tie_weights()
        else:
            self.to_empty(device=device)
            self.init_weights()

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's where the configuration says so.

        `to_empty` separates them.
        """
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise the weights.

        Matrices are normal(0, initializer_range) as Hugging Face's, norms 1, gates 0 (half memory,
        half local), maps of the memory the identity. Rows of embedding and head beyond the
        vocabulary are zeros, so that padding does not change the weights of the others.

        Raises:
            RuntimeError: a parameter of a kind that has no rule here, which would otherwise stay
                uninitialised.
        """
        self.tie_weights()
        for name, parameter in self.named_parameters():
            drawn = parameter
            if name in BY_TOKEN:
                parameter[self.config.vocab_size :] = 0.0
                drawn = parameter[: self.config.vocab_size]
            init_weight(name, drawn, self.config.initializer_range)

    def freeze(self, frozen: FrozenLayers) -> None:
        """Leave weights as they are, without gradients.

        Args:
            frozen: the embedding, a head that is tied to it and so many layers, 0 nothing; or all
                but the attention of the layers that have a memory.
        """
        if frozen == "all_but_memory":
            self.requires_grad_(False)
            for attention in self.memory_layers().values():
                attention.requires_grad_(True)
        elif frozen:
            for part in (self.model.embed_tokens, *self.model.layers[:frozen]):
                part.requires_grad_(False)

    def memory_layers(self) -> dict[int, InfiniAttention]:
        """The attention of each layer that has a memory, by the layer's number."""
        with_memory: dict[int, InfiniAttention] = {}
        for number, layer in enumerate(self._layers()):
            if isinstance(layer.self_attn, InfiniAttention):
                with_memory[number] = layer.self_attn
        return with_memory

    @torch.no_grad()
    def set_gates(self, values: Sequence[float | Sequence[float]]) -> None:
        """Set the gates, before the sigmoid.

        Args:
            values: a value per layer with a memory, for all of its heads, or one for each of them.
        """
        for attention, value in zip(self.memory_layers().values(), values, strict=True):
            gate = attention.gate
            gate.copy_(torch.tensor(value, device=gate.device).expand_as(gate))

    def uses_memory(self) -> bool:
        """Whether there is a memory that is not left out."""
        return any(attention.uses_memory for attention in self.memory_layers().values())

    def use_memory(self, on: bool) -> None:
        """Let Infini-attention read its memory, or leave it out, gates and all.

        What was trained stays as it is.
        """
        for attention in self.memory_layers().values():
            attention.uses_memory = on

    def set_write_jitter(self, most: float) -> None:
        """In training, scale what each segment writes by a random factor between 1 and `most`."""
        for attention in self.memory_layers().values():
            attention.set_write_jitter(most)

    def keep_attention_weights(self, keep: bool) -> None:
        """Set whether the backend `blocked` keeps its softmax weights for the backward pass.

        It otherwise computes them again there.
        """
        for layer in self._layers():
            layer.self_attn.keep_weights = keep

    def checkpoint_activations(self, kind: Checkpointing) -> None:
        """Set what each layer keeps for the backward pass of training.

        The rest is computed again, with the same result.

        Args:
            kind: all it needs (none), its products alone (selective), or its input alone (full).
        """
        for layer in self._layers():
            layer.checkpointing = kind

    def hidden(
        self,
        input_ids: torch.Tensor,
        documents: torch.Tensor | None = None,
        context: Context | None = None,
    ) -> torch.Tensor:
        """Last hidden states [B, T, hidden_size] of input_ids [B, T] int64.

        documents [B, T] numbers each token's document in packed rows (`model.layout`): no token
        sees another document's. With a `context`, input_ids are this rank's part of rows that
        several ranks share, and documents those of whole rows.

        Raises:
            ValueError: a context for a model whose attention is not inside segments alone.
        """
        return self.hidden_from_embeddings(
            self.model.embed_tokens(input_ids), documents, context
        )

    def hidden_from_embeddings(
        self,
        x: torch.Tensor,
        documents: torch.Tensor | None,
        context: Context | None = None,
        layer_outputs: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Last hidden states, see `hidden`, for embeddings x [B, T, hidden_size].

        Each layer's output is appended to `layer_outputs`.
        """
        by_boundaries = self.attention_backend in BY_BOUNDARIES
        most = self.most_documents if self.training else None
        if context is not None and self.config.sees_previous_segment:
            raise ValueError(
                "attend_previous_segment does not support context parallelism; "
                "use segments that see themselves alone"
            )
        if self.config.attention != "softmax":
            layout = segments(
                self.config, x.shape[:2], documents, x, by_boundaries, context, most
            )
        elif context is None:
            layout = rows(self.config, x.shape[:2], documents, x, by_boundaries, most)
        else:
            raise ValueError(
                "softmax attention does not support context parallelism; "
                "use infini or local attention"
            )
        for layer in self._layers():
            x = layer(x, layout)
            if layer_outputs is not None:
                layer_outputs.append(x)
        return self.model.norm(x)

    def attention_weights(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention weights and last hidden states of a model with softmax attention.

        Returns:
            weights [layers, B, H, P, T] of the tokens at `positions` [P] over all tokens of
            input_ids [B, T], and the last hidden states [B, T, hidden_size].
        """
        x = self.model.embed_tokens(input_ids)
        layout = rows(self.config, x.shape[:2], None, x)
        later = torch.arange(x.shape[1], device=x.device) > positions[:, None]
        weights: list[torch.Tensor] = []
        for layer in self._layers():
            q, k, _ = layer.self_attn.project(layer.normed(x))
            q = layout.rotary.turn(q)[:, :, positions]
            k = layout.rotary.turn(k)
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            weights.append(scores.masked_fill(later, -torch.inf).softmax(dim=-1))
            x = layer(x, layout)
        return torch.stack(weights), self.model.norm(x)

    def forward(
        self,
        input_ids: torch.Tensor,
        documents: torch.Tensor | None = None,
        context: Context | None = None,
    ) -> torch.Tensor:
        """Logits [B, T, vocab_size] for input_ids [B, T] int64."""
        return self.logits(self.hidden(input_ids, documents, context))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] to [..., vocab_size]: without the rows that pad the head."""
        logits = self.lm_head(hidden)
        size = self.config.vocab_size
        return logits if size == self.config.padded_vocab_size else logits[..., :size]

    def loss(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        documents: torch.Tensor | None = None,
        context: Context | None = None,
        row_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of cross-entropies (nats, fp32) of input_ids [B, T] against labels [B, T].

        The number of targets is returned with it.

        Labels are already one token ahead of the inputs; -100 is no target. `loss_chunk` tokens'
        logits exist at a time, 0: all; `z_loss` adds to the gradient in training, and `row_weights`
        [B] multiply it (`model.loss`). With a `context` inputs and labels are this rank's part, and
        the sum and number, too.
        """
        z_loss = self.z_loss if self.training else 0.0
        if not self.loss_chunk:
            logits = self(input_ids, documents, context)
            return cross_entropy_sum(logits, labels, z_loss, row_weights)
        return chunked_cross_entropy_sum(
            self.hidden(input_ids, documents, context),
            self.lm_head.weight,
            labels,
            self.loss_chunk,
            z_loss,
            self.config.vocab_size,
            row_weights,
        )

    def new_states(self, batch: int, capacity: int) -> States:
        """Empty states of `batch` rows; a softmax model's have room for `capacity` tokens."""
        return States(
            rotary=self._tables(capacity),
            layers=[
                layer.self_attn.new_state(batch, capacity, self._computed_in())
                for layer in self._layers()
            ],
        )

    def _computed_in(self) -> torch.dtype:
        """The type of keys and values.

        Other programs may have replaced a layer's weights by integers; they leave the embedding.
        """
        weight = self.model.embed_tokens.weight
        if torch.is_autocast_enabled(weight.device.type):
            return torch.get_autocast_dtype(weight.device.type)
        return weight.dtype

    def with_room(self, states: States, length: int) -> States:
        """The states with room for `length` more tokens.

        Where a softmax model's have too little, it is doubled at least.
        """
        capacity = len(states.rotary.cos)
        needed = max(states.layers[0].filled) + length
        if self.config.attention != "softmax" or needed <= capacity:
            return states
        capacity = max(needed, 2 * capacity)
        for state in states.layers:
            state.grow(capacity)
        return States(self._tables(capacity), states.layers)

    def _tables(self, length: int) -> Rotary:
        """Rotary tables of the first `length` positions, or of those in a segment."""
        weight = self.model.embed_tokens.weight
        if self.config.attention != "softmax":
            size = self.config.segment_length
            return segment_rotary(self.config, size, weight.device, weight.dtype)
        return rotary(
            torch.arange(length, device=weight.device), self.config, weight.dtype
        )

    def read(
        self,
        input_ids: torch.Tensor,
        states: States,
        lengths: list[int] | None = None,
    ) -> torch.Tensor:
        """Read the next tokens of each row, input_ids [B, t].

        A text of any length can be read in pieces: the states are updated in place, and
        Infini-attention's do not grow.

        Args:
            lengths: how many of the t tokens are row b's, the others are padding on the right;
                None: all. Only the first piece may have them: later ones read one token at a time
                where rows do not stand together.

        Returns:
            the tokens' last hidden states [B, t, hidden_size].

        Raises:
            ValueError: more tokens than a softmax model's states have room for, or rows that do not
                stand together.
        """
        return self.read_embeddings(self.model.embed_tokens(input_ids), states, lengths)

    def read_embeddings(
        self,
        x: torch.Tensor,
        states: States,
        lengths: list[int] | None = None,
        layer_outputs: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Read embeddings x [B, t, hidden_size], as `read` does.

        Each layer's output is appended to `layer_outputs`.
        """
        for layer, state in zip(self._layers(), states.layers, strict=True):
            x = layer.read(x, states.rotary, state, lengths)
            if layer_outputs is not None:
                layer_outputs.append(x)
        return self.model.norm(x)

    def below_memory(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Input [n, N, hidden_size] of the first layer that sees earlier segments.

        It is that of whole segments, input_ids [n, N], each by itself.
        """
        x = self.model.embed_tokens(input_ids)
        if self.config.sees_previous_segment:
            return x
        layout = segments(self.config, x.shape[:2], None, x)
        for layer in self._layers()[: min(self.memory_layers())]:
            x = layer(x, layout)
        return x

    def remember(self, x: torch.Tensor, states: States) -> None:
        """Read whole segments whose outputs are not needed, from the beginning of a segment.

        Later tokens read what `read` would have left them: only layers with a memory keep something
        of a segment that is over, so that the others' states stay as they are, and what follows the
        last memory's keys and values is left out. With attend_previous_segment all layers keep
        something, and nothing is left out.

        Args:
            x: [B, n N, hidden_size] of `below_memory`.
        """
        if self.config.sees_previous_segment:
            self.read_embeddings(x, states)
            return
        layers = self._layers()
        with_memory = self.memory_layers()
        last = max(with_memory)
        for number in range(min(with_memory), last):
            x = layers[number].read(x, states.rotary, states.layers[number], None)
        with_memory[last].write(layers[last].normed(x), states.layers[last])

    def unseen_segments(self, count: int) -> range:
        """Those of a text's first `count` segments of which later tokens see nothing.

        With a memory there are none. Without it they are all, or with attend_previous_segment those
        that are neither the text's first nor at most as many segments back as there are layers.
        """
        if self.uses_memory():
            return range(0)
        if self.config.sees_previous_segment:
            first = min(1, count)
            return range(first, max(first, count - self.config.num_hidden_layers))
        return range(count)

    def prefill(
        self, input_ids: torch.Tensor, capacity: int
    ) -> tuple[torch.Tensor, States]:
        """Read prompts, input_ids [B, T], in the parallel form.

        The segments that lie behind are read in pieces, so that activations do not grow with the
        prompt.

        Returns:
            logits [B, vocab_size] after each prompt's last token, and the states to `decode` from;
            a softmax model's have room for `capacity` tokens, the prompt's included.
        """
        batch, length = input_ids.shape
        size = self.config.segment_length
        states = self.new_states(batch, capacity)
        count = 0 if self.config.attention == "softmax" else (length - 1) // size
        behind = count * size
        unseen = self.unseen_segments(count)
        step = max(1, PIECE // size) * size
        for first, last in ((0, unseen.start * size), (unseen.stop * size, behind)):
            for start in range(first, last, step):
                piece = input_ids[:, start : min(start + step, last)].reshape(-1, size)
                x = self.below_memory(piece)
                self.remember(x.reshape(batch, -1, self.config.hidden_size), states)
        return self.logits(self.read(input_ids[:, behind:], states)[:, -1]), states

    def decode(self, tokens: torch.Tensor, states: States) -> torch.Tensor:
        """Logits [B, vocab_size] after one more token each, tokens [B].

        They are equal to those of `forward` over everything so far.
        """
        return self.logits(self.read(tokens[:, None], states)[:, -1])

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]


def parameter_groups(model: Llama, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups: "decay", "no_decay", "gates" and "maps".

    They are matrices; norms, the embedding and a head tied to it; and of memories the gates and the
    maps, which have rates of their own. Every parameter that is not frozen is in one of them; a
    group may be empty.
    """
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    gates: list[nn.Parameter] = []
    maps: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.endswith(".gate"):
            gates.append(parameter)
        elif name.endswith((".matrix", ".shift")):
            maps.append(parameter)
        elif parameter.ndim < 2 or parameter is model.model.embed_tokens.weight:
            no_decay.append(parameter)
        else:
            decay.append(parameter)
    return [
        {"name": "decay", "params": decay, "weight_decay": weight_decay},
        {"name": "no_decay", "params": no_decay, "weight_decay": 0.0},
        {"name": "gates", "params": gates, "weight_decay": 0.0},
        {"name": "maps", "params": maps, "weight_decay": 0.0},
    ]
