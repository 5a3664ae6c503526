"""Corpora and tokenizers for benchmarks/preparation.py: JSON lines of this machine's Python sources."""

import json
import random
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any
from unicodedata import category

# Words on average; a tenth of the entries of a dictionary have three times as many.
WORDS_OF_AN_ENTRY = 30
LONG = 10_000_000  # characters


def texts_of(corpus: Path) -> list[str]:
    with corpus.open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def train_tokenizer(texts: list[str]) -> Any:
    """Byte-level BPE of 32k tokens that a fast engine, if one is installed, takes."""
    from infini_llama.configs.schema import TokenizerConfig
    from infini_llama.tasks.tokenizers.engines import FAST, compare, golden
    from infini_llama.tasks.tokenizers.tokenizer import train

    for part in range(8):
        tokenizer = train(texts[part::8], TokenizerConfig(vocab_size=32768))
        fault = compare(tokenizer, True, golden(tokenizer)) if find_spec(FAST) else None
        if not fault:
            return tokenizer
        print(
            f"the tokenizer of eighth {part} is not used ({FAST}: {fault})", flush=True
        )
    raise SystemExit(
        "no eighth of the corpus gives a tokenizer that every engine takes; name one by --tokenizer."
    )


def write_corpus(file: Path, size: int, kind: str = "ordinary") -> None:
    """Writes about `size` bytes of text, repeated where there is less of it.

    Args:
        kind: ordinary: a document per source file; dictionary: entries of about 200 bytes; long: documents of 10 MB.
    """
    sources = list(_sources(size))
    documents = {
        "ordinary": lambda: iter(sources),
        "dictionary": lambda: _entries(sources),
        "long": lambda: _long(sources),
    }
    with file.open("w", encoding="utf-8") as target:
        written = 0
        for turn in count():
            for text in documents[kind]():
                # Copies of validation text are left out by us, and not by others.
                again = f"# {turn}\n" if turn else ""
                written += target.write(
                    json.dumps({"text": again + text}, ensure_ascii=False) + "\n"
                )
                if written >= size:
                    return


def _sources(size: int) -> Iterator[str]:
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    seen: set[str] = set()
    found = 0
    for path in (path for root in roots for path in sorted(root.rglob("*.py"))):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text and text not in seen and _is_alike(text):
            seen.add(text)
            found += len(text)
            yield text
        if found >= size:
            return


def _is_alike(text: str) -> bool:
    """Whether every program computes the same on it: gigatoken 0.10.0 on whole files cuts words otherwise where a character is younger
    than its tables, and takes the name of the end-of-text token for the token."""
    return "<|endoftext|>" not in text and not any(
        category(character) == "Cn" for character in set(text)
    )


def _entries(sources: list[str]) -> Iterator[str]:
    choose = random.Random(1)
    seen: set[str] = set()
    for text in sources:
        words = text.split()
        while words:
            length = max(2, int(choose.expovariate(1 / WORDS_OF_AN_ENTRY)))
            if (entry := " ".join(words[:length])) not in seen:
                seen.add(entry)
                yield entry
            words = words[length:]


def _long(sources: list[str]) -> Iterator[str]:
    joined = "\n".join(sources)
    return (joined[start : start + LONG] for start in range(0, len(joined), LONG))
