"""Text by a model: the prompt's tokens in, decoded text out."""

from pathlib import Path

from tokenizers import Tokenizer

from model.generate import generate
from model.llama import Llama


def sample_text(model: Llama, tokenizer_file: Path, prompt: str, max_new_tokens: int, seed: int) -> str:
    """The prompt and its continuation at temperature 0.8 and top-k 50, the same for the same seed."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    model.eval()
    new = list(generate(model, ids, max_new_tokens, temperature=0.8, top_k=50, seed=seed, stop_id=0))
    return tokenizer.decode(ids + new)
