"""The functions that `environment.attention_backend` names, without torch.

`BACKENDS` of model/backends.py has them.
"""

from dataclasses import dataclass

from infini_llama.configs.choices import Choice


@dataclass(frozen=True)
class AttentionBackend(Choice):
    """A value of `environment.attention_backend`.

    Attributes:
        is_for_gpus: it works on GPUs alone, and in half precision.
        has_dropout: it can drop attention weights.
    """

    is_for_gpus: bool = False
    has_dropout: bool = True


ATTENTION_BACKENDS = {
    "sdpa": AttentionBackend("torch's scaled_dot_product_attention."),
    "blocked": AttentionBackend("plain matrix products.", has_dropout=False),
    "flash2": AttentionBackend("flash-attn 2.", is_for_gpus=True),
}
