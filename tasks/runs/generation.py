"""A model's text for prompts: decoding as it is written, and where it stops."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from infini_llama.configs.errors import tokenizer_faults
from infini_llama.model.generate import Sampling, generate_batch
from infini_llama.model.llama import Llama
from infini_llama.tasks.runs.load import TrainedRun, end_tokens_of
from infini_llama.tasks.runs.reading import reading_of
from infini_llama.tasks.runs.run_folder import RunFolder

GREEDY = Sampling(temperature=0.0)
BROKEN = "\ufffd"  # what decoders write for bytes that are no character
log = logging.getLogger("infini_llama.generate")


def generate(
    run: TrainedRun,
    prompts: list[str],
    max_new_tokens: int = 128,
    sampling: Sampling = GREEDY,
) -> list[str]:
    """Continue each prompt with the model of `run`, as loaded by `load_run`.

    The texts come without their prompts.
    """
    run_dir = run.checkpoint.parents[1]
    encode = reading_of(run_dir).encoder.encode
    writer = Writer(
        run.model, run.tokenizer, [*map(encode, prompts)], end_tokens_of(run_dir)
    )
    warn_beyond_trained_length(run_dir, writer, max_new_tokens)
    for _ in writer.write(max_new_tokens, sampling):
        pass
    return writer.texts


def warn_beyond_trained_length(
    run_dir: Path,
    writer: "Writer",
    max_new_tokens: int,
) -> None:
    """Log one line if full attention may read more tokens than in training.

    Other attention reads no more at once than its segment.
    """
    initial = RunFolder(run_dir).require_lineage().init_from
    config = writer.model.config
    trained = max(
        config.max_position_embeddings,
        initial.max_position_embeddings if initial else 0,
    )
    longest = max(map(len, writer.prompts), default=0)
    if config.attention == "softmax" and longest + max_new_tokens > trained:
        log.warning(
            "the prompt's %d tokens and up to %d new ones are more than the %d that the model was "
            "trained on; text beyond them may be poor. Use a shorter prompt or a smaller "
            "--max-new-tokens.",
            longest,
            max_new_tokens,
            trained,
        )


class Continuation:
    """The text of tokens that continue a prompt, as they come.

    It is the decoding of prompt and tokens together, without the prompt's part. A character that
    the prompt ends with stays one, whatever bytes follow it. `tokenizers`' own DecodeStream knows
    no prompt, and raises at bytes that are no UTF-8.

    Attributes:
        final: the text's beginning, which no later token changes.
        open: the rest, which one may change: a part of a character, or byte tokens, of which one
            can invalidate those before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self.tokenizer = tokenizer
        self.final = ""
        self.open = ""
        self.special = {
            number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self.is_local = _is_local(tokenizer)
        self._follow([token for token in prompt if self._has_text(token)])

    def add(self, token: int) -> None:
        """Add the next token. Special ones have no text."""
        if not self._has_text(token):
            return
        self.tokens.append(token)
        text = self._decode(self.tokens)
        before = next(filter(text.startswith, self.before), self.before[0])
        self.open = text[len(before) :]
        if (
            self.is_local
            and not self._is_byte(token)
            and not self.open.endswith(BROKEN)
        ):
            self.final += self.open
            self.open = ""
            self._follow(self.tokens)

    def _follow(self, tokens: list[int]) -> None:
        """Continue after these tokens.

        Those that matter for the text of others are kept, with their own text.
        """
        trailing = 0
        while trailing < len(tokens) and self._is_byte(tokens[-1 - trailing]):
            trailing += 1
        kept = min(trailing + 1, len(tokens)) if self.is_local else len(tokens)
        # A decoder may still strip what follows.
        while kept < len(tokens) and not self._decode(tokens[-kept:]):
            kept += 1
        self.tokens = tokens[len(tokens) - kept :]
        whole = self._decode(self.tokens)
        if not trailing:
            self.before = (whole,)
            return
        # The first one is what the text becomes where an invalid byte follows the byte tokens at
        # its end.
        broken = self._decode(self.tokens[: kept - trailing]) + BROKEN * trailing
        self.before = (broken, whole)

    def _has_text(self, token: int) -> bool:
        return (
            token not in self.special and self.tokenizer.id_to_token(token) is not None
        )

    def _is_byte(self, token: int) -> bool:
        text = self.tokenizer.id_to_token(token) or ""
        return len(text) == 6 and text.startswith("<0x") and text.endswith(">")

    def _decode(self, tokens: list[int]) -> str:
        with tokenizer_faults():
            return self.tokenizer.decode(tokens)


def _is_local(tokenizer: Tokenizer) -> bool:
    """Whether tokens decode to the same text whatever follows them.

    Parts of characters and byte tokens at their end may still change.
    """
    fused = False
    decoder = {"type": "Sequence"}
    if tokenizer.decoder:
        decoder = json.loads(tokenizer.decoder.__getstate__())
    for step in _steps(decoder):
        match step:
            case {"type": "Fuse" | "ByteLevel"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": str(pattern)}} if (
                len(pattern) == 1
            ):
                pass
            case {"type": "Strip", "stop": 0}:
                pass
            case {
                "type": "Replace"
                | "Strip"
                | "Metaspace"
                | "WordPiece"
                | "BPEDecoder"
                | "ByteFallback"
            } if not fused:
                pass
            case _:
                return False
    return True


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
    for step in decoder.get("decoders", ()):
        yield from _steps(step)


class Writer:
    """The texts of several prompts, growing token by token.

    Attributes:
        texts: what was written so far for each prompt, without the prompt, and without a stop
            string or what follows it.
        tokens: the new tokens of each, the one that ended it included unless it is one of
            `end_tokens`.

    Args:
        prompts: their IDs, as the run's encoder gives them.
        end_tokens: IDs that end a text; an empty prompt is the first of them.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        prompts: Sequence[list[int]],
        end_tokens: Sequence[int],
        stops: tuple[str, ...] = (),
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        self.stops = stops
        self.prompts = [prompt or [end_tokens[0]] for prompt in prompts]
        self.texts = [""] * len(prompts)
        self.tokens = [list[int]() for _ in prompts]
        self._continuations = [
            Continuation(tokenizer, prompt) for prompt in self.prompts
        ]
        self._ended: set[int] = set()  # rows that met a stop string

    def write(
        self,
        max_new_tokens: int,
        sampling: Sampling,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, str]]:
        """Pairs of a prompt's number and the next piece of its text.

        A piece comes as soon as no later token can change it or make it a stop string.

        Args:
            is_over: once it is true, no further token is begun.
        """
        shown = [0] * len(self.texts)
        size = self.tokenizer.get_vocab_size()
        steps = generate_batch(
            self.model,
            self.prompts,
            max_new_tokens,
            sampling,
            self._take,
            size,
        )
        for step in steps:
            for row, token in enumerate(step):
                if token is not None:
                    certain = self._certain_length(row)
                    if certain > shown[row]:
                        yield row, self.texts[row][shown[row] : certain]
                        shown[row] = certain
            if is_over():
                break
        for row, text in enumerate(self.texts):
            if len(text) > shown[row]:
                yield row, text[shown[row] :]

    def _certain_length(self, row: int) -> int:
        """Characters of a text that no later token can change or make a stop string."""
        if row in self._ended:
            return len(self.texts[row])
        final = self._continuations[row].final
        return len(final) - self._open_end(final)

    def _take(self, row: int, token: int) -> bool:
        """Add a token to its text; return whether the text ends with it."""
        if token in self.end_tokens:
            return True
        self.tokens[row].append(token)
        continuation = self._continuations[row]
        before = len(continuation.final)
        continuation.add(token)
        text = continuation.final + continuation.open
        # Only a stop string that the new piece is part of can be new.
        places = [
            text.find(stop, max(0, before - len(stop) + 1)) for stop in self.stops
        ]
        found = [place for place in places if place >= 0]
        self.texts[row] = text[: min(found, default=len(text))]
        if found:
            self._ended.add(row)
        return row in self._ended

    def _open_end(self, text: str) -> int:
        """Characters at the end of the text that may turn out to begin a stop string."""
        lengths = (
            length
            for stop in self.stops
            for length in range(len(stop) - 1, 0, -1)
            if text.endswith(stop[:length])
        )
        return max(lengths, default=0)
