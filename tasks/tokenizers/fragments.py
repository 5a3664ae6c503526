"""Fragments of a long text, where it is known that they have the tokens of the text.

To encode them is a third faster. `tokenizers` takes 85 bytes of memory per character of a text
whose words it learns or encodes.
"""

import json
import re
from collections.abc import Callable, Iterator

from tokenizers import Tokenizer

from infini_llama.tasks.tokenizers.tiktoken_encodings import ENCODINGS

SHORT = 1000  # characters: a fragment ends at the first seam after so many
LINE_ENDS = re.compile(r"(?<=[!-~])(?=\n)|(?<=[A-Za-z])(?= [A-Za-z])")
WORDS_AT_LINE_ENDS = re.compile(r"(?<=[A-Za-z0-9])(?=\n)|(?<=[A-Za-z])(?= [A-Za-z])")
PATTERNS = {  # that take a line's end to punctuation before it
    ENCODINGS["cl100k_base"].pattern,
    ENCODINGS["o200k_base"].pattern,
    # Llama 3's, and Qwen 2's, as their tokenizer.json has them
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
}
# Later steps that look at one word at a time, wherever it stands.
WORD_BY_WORD = {"ByteLevel", "Split", "Digits", "Punctuation"}


def cut_of(encoder: Tokenizer) -> Callable[[str], list[str]]:
    """Function that cuts a text into fragments whose tokens in sequence are those of the text.

    It gives one fragment where that is not known.

    A seam lies between an ASCII character and a line's end: any that is no whitespace under GPT-2's
    pattern, a letter or digit under the others known here. Another lies between a letter and one
    space before a letter, both ASCII: under all of them the space belongs to the next word. Those
    patterns have no alternative that reaches over a seam, and none that looks beyond it (only
    spaces look at what follows them); words are then encoded each by itself. So it holds where such
    a pattern cuts the text as it is, and no added token is looked for before.
    """
    seam = None
    if encoder.pre_tokenizer and not (
        encoder.normalizer or encoder.get_added_tokens_decoder()
    ):
        seam = _seam_of(json.loads(encoder.pre_tokenizer.__getstate__()))
    return lambda text: [text] if seam is None else list(_fragments(text, seam))


def _seam_of(step: dict) -> re.Pattern | None:
    """A pattern of places at which words are certain to end.

    Args:
        step: of a pre-tokenizer, as tokenizer.json describes it.
    """
    match step:
        case {"type": "Sequence", "pretokenizers": [first, *rest]}:
            return (
                _seam_of(first)
                if all(step["type"] in WORD_BY_WORD for step in rest)
                else None
            )
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return LINE_ENDS
        case {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }:
            if pattern == ENCODINGS["r50k_base"].pattern:
                return LINE_ENDS
            if pattern in PATTERNS:
                return WORDS_AT_LINE_ENDS
    return None


def _fragments(text: str, seam: re.Pattern) -> Iterator[str]:
    first = 0
    while len(text) - first > SHORT and (place := seam.search(text, first + SHORT)):
        yield text[first : place.start()]
        first = place.start()
    yield text[first:]
