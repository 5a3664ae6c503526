"""Measurements of a pretrained model's heads.

Which attention heads retrieve, and the Infini-attention that follows.
"""

from infini_llama.tasks.records.record import Record

# Share of a head's attention from which it counts as retrieving. SmolLM2-135M's eighth head has
# 0.35, its ninth 0.17.
RETRIEVES = 0.25
# Gates before the sigmoid: 73 % of memory for heads that retrieve, 0.7 % for the others of their
# layers.
OPEN = 1.0
CLOSED = -5.0

Scores = tuple[tuple[float, ...], ...]  # by layer and head, each from 0 to 1


class MemoryKeys(Record):
    """Keys of a configuration that give a pretrained model a memory.

    They are model.memory_layers, train.init_gate (per layer and head) and train.frozen_layers.
    """

    memory_layers: tuple[int, ...]
    init_gate: tuple[tuple[float, ...], ...]
    frozen_layers: int


class HeadScores(Record):
    """Scores of a model's attention heads, all with full attention.

    Attributes:
        model: path of the folder.
        texts: number of texts with a hidden number.
        found: number of those answered with the right number.
        retrieval: share of attention that goes from the token before each digit of the answer to
            that digit in the text (retrieval score: Wu et al. 2024, arXiv 2404.15574).
        induction: share of attention that goes, in a repetition of random tokens, from each token
            to the one that followed it before (Olsson et al. 2022, arXiv 2209.11895). It needs no
            knowledge.
    """

    model: str
    texts: int
    found: int
    retrieval: Scores
    induction: Scores

    @property
    def can_answer(self) -> bool:
        """Whether at least half of the numbers were found.

        The scores of a model that cannot answer are unreliable.
        """
        return 2 * self.found >= self.texts

    @property
    def retrieving(self) -> list[tuple[int, int]]:
        """(layer, head) of each head that retrieves, the highest score first."""
        scores: dict[tuple[int, int], float] = {}
        for layer, heads in enumerate(self.retrieval):
            for head, score in enumerate(heads):
                if score >= RETRIEVES:
                    scores[layer, head] = score
        return sorted(scores, key=lambda place: -scores[place])

    @property
    def for_memory(self) -> list[tuple[int, int]]:
        """(layer, head) of each head that should have a memory, in order.

        They are the heads that retrieve and also repeat random tokens.
        """
        if not self.can_answer:
            return []
        return sorted(
            (layer, head)
            for layer, head in self.retrieving
            if self.induction[layer][head] >= RETRIEVES
        )

    def keys(self) -> MemoryKeys | None:
        """The keys of a configuration that follow; None where no head should have a memory.

        The layers below the first memory stay frozen: what they compute need not change.
        """
        layers = sorted({layer for layer, _ in self.for_memory})
        if not layers:
            return None
        chosen = set(self.for_memory)
        heads = range(len(self.retrieval[0]))
        gates: list[tuple[float, ...]] = []
        for layer in layers:
            gates.append(
                tuple(OPEN if (layer, head) in chosen else CLOSED for head in heads)
            )
        return MemoryKeys(
            memory_layers=tuple(layers),
            init_gate=tuple(gates),
            frozen_layers=layers[0],
        )
