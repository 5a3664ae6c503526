"""Text by a model: the prompt's tokens in, decoded text out."""

from pathlib import Path

from tokenizers import Tokenizer

from model.llama import Llama
from model.sampling import Sampling
from tasks.artifacts import read_manifest
from tasks.train.writing import Writer


def sample_text(model: Llama, dataset: Path, prompt: str, max_new_tokens: int, seed: int) -> str:
    """The prompt and its continuation at temperature 0.8 and top-k 50, the same for the same seed; the tokenizer is the dataset's."""
    end_of_text = read_manifest(dataset, "dataset")["content"]["eos_id"]
    writer = Writer(model.eval(), Tokenizer.from_file(str(dataset / "tokenizer.json")), [prompt], end_of_text)
    for _ in writer.write(max_new_tokens, Sampling(temperature=0.8, top_k=50, seed=seed)):
        pass
    return prompt + writer.texts[0]
