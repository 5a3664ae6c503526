"""The section `data.tokenizer`: a tokenizer that is trained on the text, or a given one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from infini_llama.configs.schema.section import Section, fixed


class TokenizerConfig(Section):
    """The tokenizer: trained on the training documents, or given as a file and used unchanged."""

    kind: Literal["bpe", "wordpiece", "unigram"] = fixed(
        default="bpe",
        description="Kind of tokenizer to train. Each is byte-level, so any text can be encoded.",
    )
    path: str | None = fixed(
        is_path=True,
        default=None,
        description="A tokenizer to use unchanged: a tokenizer.json (for example of an earlier "
        "dataset), a Hugging Face folder, or a .tiktoken rank file (read with the pattern of "
        "cl100k_base). kind and vocab_size are then ignored.",
        min_length=1,
    )
    encoding: Literal["r50k_base", "cl100k_base", "o200k_base"] | None = fixed(
        default=None,
        description="Name of a tiktoken encoding. Its rank file is data.tokenizer.path if set, "
        "otherwise it is taken from tiktoken's cache (TIKTOKEN_CACHE_DIR) or downloaded. Its "
        "sha256 is checked.",
    )
    eos: str | None = fixed(
        default=None,
        description="End-of-text token of the tokenizer in data.tokenizer.path. Default: the one "
        "defined in its folder, or one of the usual names.",
        min_length=1,
    )
    special_tokens: list[Annotated[str, Field(min_length=1)]] = fixed(
        default_factory=list,
        description="Further special tokens of a trained tokenizer. Their IDs follow that of the "
        "end-of-text token. A tokenizer.json in data.tokenizer.path must have them.",
    )
    split_special_tokens: bool = fixed(
        default=True,
        description="true: text that spells a special token is encoded as text. false: it becomes "
        "that token, as in chats that are written with the markers of a template. Prompts are "
        "encoded as the documents are.",
    )
    vocab_size: Annotated[int, Field(ge=257, le=1_000_000)] = fixed(
        default=4096,
        description="Vocabulary size, including the 256 bytes and the end-of-text token.",
    )

    @model_validator(mode="after")
    def _tokens_fit(self) -> TokenizerConfig:
        special = self.special_tokens
        is_trained = not (self.path or self.encoding)
        if is_trained and self.eos not in (None, "<|endoftext|>"):
            raise ValueError(
                f"eos={self.eos!r} is for a given tokenizer, and path=null trains one, whose "
                "end-of-text token is <|endoftext|>; name a tokenizer, or remove eos"
            )
        if self.encoding and special:
            raise ValueError(
                f"special_tokens={special!r} is set together with encoding={self.encoding}, which "
                "defines them; remove one of them"
            )
        if len(set(special)) != len(special) or "<|endoftext|>" in special:
            raise ValueError(
                "special_tokens contains a duplicate, or <|endoftext|>, which is always included; "
                "remove it"
            )
        if self.vocab_size < 257 + len(special):
            raise ValueError(
                f"vocab_size={self.vocab_size} is too small for 256 bytes, the end-of-text token "
                f"and {len(special)} special_tokens; raise it"
            )
        return self
