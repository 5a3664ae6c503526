"""A model's text for prompts in words: encoding, decoding as it is written, and where it stops."""

from collections.abc import Iterator

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from infini_llama.model.generate import Sampling, generate_batch
from infini_llama.model.llama import Llama
from infini_llama.tasks.runs.load import TrainedRun, end_of_text_of

GREEDY = Sampling(temperature=0.0)


def generate(run: TrainedRun, prompts: list[str], max_new_tokens: int = 128, sampling: Sampling = GREEDY) -> list[str]:
    """Continue each prompt with the model of `run`, as loaded by `load_run`; the texts come without their prompts."""
    end_of_text = end_of_text_of(run.checkpoint.parents[1])
    writer = Writer(run.model, run.tokenizer, prompts, end_of_text)
    for _ in writer.write(max_new_tokens, sampling):
        pass
    return writer.texts


class Writer:
    """The texts of several prompts, growing token by token.

    Attributes:
        texts: what was written so far for each prompt, without the prompt, and without a stop string or what follows it.
        tokens: the new tokens of each, the one that ended it included unless it is the end of text.
    """

    def __init__(
        self, model: Llama, tokenizer: Tokenizer, prompts: list[str], end_of_text: int, stops: tuple[str, ...] = ()
    ) -> None:
        self.model, self.tokenizer, self.end_of_text, self.stops = model, tokenizer, end_of_text, stops
        self.prompts = [tokenizer.encode(prompt, add_special_tokens=False).ids or [end_of_text] for prompt in prompts]
        self.texts, self.tokens = [""] * len(prompts), [list[int]() for _ in prompts]
        self._streams = [DecodeStream(skip_special_tokens=True) for _ in prompts]
        self._ended: set[int] = set()  # rows that met a stop string

    def write(self, max_new_tokens: int, sampling: Sampling) -> Iterator[tuple[int, str]]:
        """Pairs of a prompt's number and the next piece of its text, as soon as it cannot be part of a stop string any more."""
        shown = [0] * len(self.texts)
        for step in generate_batch(self.model, self.prompts, max_new_tokens, sampling, self._take):
            for row, token in enumerate(step):
                if token is not None:
                    certain = len(self.texts[row]) - (0 if row in self._ended else self._open_end(self.texts[row]))
                    if certain > shown[row]:
                        yield row, self.texts[row][shown[row] : certain]
                        shown[row] = certain
        for row in range(len(self.texts)):
            self._add_rest(row)
            if len(self.texts[row]) > shown[row]:
                yield row, self.texts[row][shown[row] :]

    def _take(self, row: int, token: int) -> bool:
        """Adds a token to its text and says whether the text ends with it."""
        if token == self.end_of_text:
            return True
        self.tokens[row].append(token)
        return self._add(row, self._streams[row].step(self.tokenizer, token) or "")

    def _add_rest(self, row: int) -> None:
        """Adds what the stream holds back at the end of a text: half a character, shown as U+FFFD, and what stands before it."""
        whole = self.tokenizer.decode(self.tokens[row], skip_special_tokens=True)
        if row not in self._ended and whole.startswith(self.texts[row]):
            self._add(row, whole[len(self.texts[row]) :])

    def _add(self, row: int, piece: str) -> bool:
        """Adds to a text, but not a stop string nor what follows it; says whether there was one."""
        before = len(self.texts[row])
        self.texts[row] += piece
        # Only a stop string that the new piece is part of can be new.
        places = [self.texts[row].find(stop, max(0, before - len(stop) + 1)) for stop in self.stops]
        if not any(place >= 0 for place in places):
            return False
        self.texts[row] = self.texts[row][: min(place for place in places if place >= 0)]
        self._ended.add(row)
        return True

    def _open_end(self, text: str) -> int:
        """Characters at the end of the text that may turn out to begin a stop string."""
        lengths = (n for stop in self.stops for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n]))
        return max(lengths, default=0)
