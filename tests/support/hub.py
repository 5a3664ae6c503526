"""A small Llama as others write it, as a folder and in a local cache of the Hugging Face Hub."""

from pathlib import Path

COMMIT = "a" * 40


def write_llama(folder: Path) -> Path:
    """A folder written by transformers and tokenizers: random weights, and a vocabulary of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        symbol: number for number, symbol in enumerate([*alphabet, "<|endoftext|>"])
    }
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        **sizes,
        vocab_size=len(vocabulary),
        max_position_embeddings=64,
        eos_token_id=vocabulary["<|endoftext|>"],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_to_hub(cache: Path, name: str) -> Path:
    """`write_llama` as OWNER/NAME in a cache folder (HF_HUB_CACHE), as if it had been downloaded."""
    place = cache / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text(COMMIT)
    return write_llama(place / "snapshots" / COMMIT)
