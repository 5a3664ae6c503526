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
        has_earlier_tokens: queries can see tokens before the first of them, which
            model.attend_previous_segment needs.
    """

    is_for_gpus: bool = False
    has_dropout: bool = True
    has_earlier_tokens: bool = True


ATTENTION_BACKENDS = {
    "sdpa": AttentionBackend("torch's scaled_dot_product_attention."),
    "blocked": AttentionBackend("plain matrix products.", has_dropout=False),
    "flash2": AttentionBackend(
        "flash-attn 2.", is_for_gpus=True, has_earlier_tokens=False
    ),
}
