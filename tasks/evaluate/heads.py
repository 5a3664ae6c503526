"""Attention heads of a pretrained model that retrieve.

They are those that can learn to read from a memory. They are measured with full attention, on texts
with a hidden number and on repeated random tokens. See `HeadScores`.
"""

# pyright: reportUnknownMemberType=false
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from random import Random

import torch

from infini_llama.configs.schema.tokenizer import TokenizerConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.evaluate.passkey import Asked, ask, encoded
from infini_llama.tasks.preprocess.sources.passkey import (
    HIDDEN,
    QUESTION,
    Hidden,
    new_key,
)
from infini_llama.tasks.records.heads import HeadScores, Scores
from infini_llama.tasks.report.charts import import_matplotlib
from infini_llama.tasks.storage.hf_folder import Folder
from infini_llama.tasks.tokenizers import tokenizer as tokenizers
from infini_llama.tasks.tokenizers.encoder import TextEncoder
from infini_llama.tasks.train.worker.initial_model import load_pretrained

TEXTS = 12
FILLERS = (64, 192, 320)  # tokens of filler, in turn
REPETITIONS = 4  # rows of random tokens
REPEATED = 64  # tokens that are repeated in each of these rows


def measure_heads(folder: Folder, seed: int) -> HeadScores:
    """Scores of every head of the model in a folder.

    They are computed layer by layer with this package's own model and in fp32.

    Raises:
        ConfigError: the folder's tensors are not those of its configuration, or its tokenizer
            cannot be read.
        DataError: a file is damaged.
    """
    settings = TokenizerConfig(path=str(folder.path))
    encoder = TextEncoder(tokenizers.load(settings), settings.split_special_tokens)
    model = Llama(replace(folder.config, attention="softmax", memory_layers=None))
    load_pretrained(model, folder.path)
    model.eval()
    random = Random(seed)
    fillers = islice(cycle(FILLERS), TEXTS)
    texts = [text_with_number(encoder, filler, random) for filler in fillers]
    measured = [retrieval(model, text) for text in texts]
    mean = torch.stack([scores for scores, _ in measured]).mean(dim=0)
    return HeadScores(
        model=str(folder.path),
        texts=TEXTS,
        found=sum(found for _, found in measured),
        retrieval=_rounded(mean),
        induction=_rounded(induction(model, torch.Generator().manual_seed(seed))),
    )


def text_with_number(encoder: TextEncoder, filler: int, random: Random) -> Asked:
    """A number anywhere in about `filler` tokens of filler."""
    key = new_key(random)
    *shown, _ = encoded(encoder, Hidden(HIDDEN.format(key=key), QUESTION, key))
    return ask(encoder, sum(map(len, shown)) + filler, random.random(), key)


@torch.inference_mode()
def retrieval(model: Llama, asked: Asked) -> tuple[torch.Tensor, bool]:
    """Retrieval scores [layers, H] in one text, and whether the model finds the answer.

    It does if every token of the answer is the likeliest one.
    """
    ids = [*asked.tokens(), *asked.answer]
    size = len(asked.answer)
    mentions = [
        place
        for place in range(asked.length - size + 1)
        if ids[place : place + size] == asked.answer
    ]
    # The tokens that the answer is predicted from.
    before = torch.arange(asked.length - 1, asked.length - 1 + size)
    weights, hidden = model.attention_weights(torch.tensor([ids]), before)
    to_digits: list[torch.Tensor] = []
    for number in range(size):
        places = [place + number for place in mentions]
        to_digits.append(weights[:, 0, :, number, places].sum(-1))
    chosen = model.logits(hidden[0, before]).argmax(dim=-1)
    return torch.stack(to_digits).mean(dim=0), chosen.tolist() == asked.answer


@torch.inference_mode()
def induction(model: Llama, generator: torch.Generator) -> torch.Tensor:
    """Induction scores [layers, H] over rows of random tokens that are repeated once."""
    once = torch.randint(
        model.config.vocab_size, (REPETITIONS, REPEATED), generator=generator
    )
    again = torch.arange(REPEATED, 2 * REPEATED - 1)
    weights, _ = model.attention_weights(torch.cat((once, once), dim=1), again)
    followed = torch.arange(1, REPEATED)
    return weights[..., torch.arange(REPEATED - 1), followed].mean(dim=(1, 3))


def _rounded(scores: torch.Tensor) -> Scores:
    return tuple(tuple(round(score, 4) for score in heads) for heads in scores.tolist())


def save_picture(scores: HeadScores, target: Path) -> None:
    """Save retrieval and induction beside each other, layers by heads; dots mark `for_memory`.

    Args:
        target: a PNG or SVG, by its name's end.
    """
    import_matplotlib()
    from matplotlib.figure import Figure

    layers = len(scores.retrieval)
    heads = len(scores.retrieval[0])
    drawn = Figure(
        figsize=(2.5 + 0.5 * heads, 1.6 + 0.19 * layers), layout="constrained"
    )
    measured = {"retrieval": scores.retrieval, "induction": scores.induction}
    panels = drawn.subplots(1, 2, sharey=True)
    for axes, (title, values) in zip(panels, measured.items(), strict=True):
        axes.imshow(
            values,
            vmin=0,
            vmax=1,
            cmap="viridis",
            aspect="auto",
            interpolation="nearest",
        )
        axes.scatter(
            [head for _, head in scores.for_memory],
            [layer for layer, _ in scores.for_memory],
            s=12,
            color="#d04010",
        )
        axes.set(
            title=title,
            xlabel="head",
            xticks=range(heads),
            yticks=range(0, layers, max(1, layers // 15)),
        )
    drawn.axes[0].set_ylabel("layer")
    drawn.colorbar(panels[-1].images[0], ax=drawn.axes, label="share of attention")
    drawn.savefig(target, dpi=120)
