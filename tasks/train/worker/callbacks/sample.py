"""Texts by a model, as a first look at what it learned."""

from pathlib import Path

from tokenizers import Tokenizer

from infini_llama.model.llama import Llama
from infini_llama.model.sampling import Sampling
from infini_llama.tasks.runs.generation import Writer
from infini_llama.tasks.storage.artifacts import read_manifest
from infini_llama.tasks.train.worker.strategies.native import gathered
from infini_llama.tasks.train.worker.strategies.ranks import Ranks


def sample_texts(model: Llama, dataset: Path, prompts: list[str], max_new_tokens: int, seed: int) -> list[str]:
    """Each prompt with its continuation at temperature 0.8 and top-k 50; the tokenizer is the dataset's.

    The same seed writes the same texts; the first is what its prompt alone would give.
    """
    end_of_text = read_manifest(dataset, "dataset")["content"]["eos_id"]
    writer = Writer(model.eval(), Tokenizer.from_file(str(dataset / "tokenizer.json")), prompts, end_of_text)
    for _ in writer.write(max_new_tokens, Sampling(temperature=0.8, top_k=50, seed=seed)):
        pass
    return [prompt + text for prompt, text in zip(prompts, writer.texts, strict=True)]


def prompts_of(train: dict) -> list[str]:
    return [train["sample_prompt"], *train["sample_prompts"]]


def sample_on_the_way(model: Llama, order: dict, ranks: Ranks) -> list[str]:
    """Texts by the model as it is now, on the first rank; called by all, since each may hold a share of the model."""
    train, texts = order["config"]["train"], []
    if (now := gathered(model, ranks)) is not None:
        texts = sample_texts(now, Path(order["dataset"]), prompts_of(train), train["sample_tokens"], train["seed"])
    model.train()
    ranks.barrier()
    return texts
