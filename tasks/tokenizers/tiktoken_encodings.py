"""tiktoken's encodings by name: their rank files, and what the name stands for beside them."""

import base64
import binascii
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.configs.pointers import refuse_pointer
from infini_llama.configs.reading import expanded
from infini_llama.tasks.storage.files import write_atomic

BASE = "https://openaipublic.blob.core.windows.net/encodings"
LARGEST = 64 * 2**20  # bytes of a rank file
PATIENCE = 60.0  # seconds without a byte


@dataclass(frozen=True)
class Encoding:
    """An encoding as tiktoken 0.14 defines it (tiktoken_ext/openai_public.py).

    Its pattern has the form that `tokenizers` takes. There `$` is also the end of a line; where
    tiktoken means that of the text, a lookahead stands here.
    """

    url: str
    sha256: str
    pattern: str
    ranks: int
    special: dict[str, int]

    def special_tokens(self) -> list[str]:
        """The tokens after the last rank, in the order of their ids.

        Ids that mean nothing have a name of their own.
        """
        names = {number: name for name, number in self.special.items()}
        return [
            names.get(number, f"<|reserved_{number}|>")
            for number in range(self.ranks, max(names) + 1)
        ]


ENCODINGS = {
    "r50k_base": Encoding(
        f"{BASE}/r50k_base.tiktoken",
        "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?![\s\S])|\s+(?!\S)|\s+",
        50_256,
        {"<|endoftext|>": 50_256},
    ),
    "cl100k_base": Encoding(
        f"{BASE}/cl100k_base.tiktoken",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s+(?![\s\S])|\s*[\r\n]+|\s+(?!\S)|\s+",
        100_256,
        {
            "<|endoftext|>": 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
    ),
    "o200k_base": Encoding(
        f"{BASE}/o200k_base.tiktoken",
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        199_998,
        {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018},
    ),
}


def rank_file(name: str, path: str | None) -> Path:
    """The encoding's rank file, whose bytes are found to be the published ones.

    It is the one at `path`, in tiktoken's cache, or fetched into that.

    Raises:
        ConfigError: the file at `path` is another one, or cannot be read.
        PipelineError: it cannot be fetched.
    """
    encoding = ENCODINGS[name]
    if path:
        file = expanded(path)
        refuse_pointer(file)
        try:
            checksum = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(
                f"data.tokenizer.path={path} cannot be read ({error.strerror}); name the rank file "
                f"of data.tokenizer.encoding={name}."
            ) from None
        if checksum != encoding.sha256:
            raise ConfigError(
                f"data.tokenizer.path={path} is not the rank file of "
                f"data.tokenizer.encoding={name} (its sha256 is {checksum}, the published one "
                f"{encoding.sha256}); download {encoding.url}."
            )
        return file
    file = cache() / hashlib.sha1(encoding.url.encode()).hexdigest()
    if (
        not file.is_file()
        or hashlib.sha256(file.read_bytes()).hexdigest() != encoding.sha256
    ):
        _fetch(name, encoding, file)
    return file


def cache() -> Path:
    """tiktoken's own cache: a file that either program has fetched serves both."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get(
        "DATA_GYM_CACHE_DIR"
    )
    return Path(folder) if folder else Path(tempfile.gettempdir(), "data-gym-cache")


def _fetch(name: str, encoding: Encoding, file: Path) -> None:
    import urllib.request  # takes a tenth of what all else here takes

    try:
        with urllib.request.urlopen(encoding.url, timeout=PATIENCE) as answer:
            content = answer.read(LARGEST + 1)
        if hashlib.sha256(content).hexdigest() != encoding.sha256:
            raise PipelineError(
                f"data.tokenizer.encoding={name}: the file at {encoding.url} does not have the "
                "published sha256 and is not used."
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, content.decode("ascii"))
    except OSError as error:  # a URLError is one
        raise PipelineError(
            f"data.tokenizer.encoding={name}: {encoding.url} cannot be downloaded to {file.parent} "
            f"({getattr(error, 'reason', error)}); run the same command again, or download it "
            "elsewhere and set data.tokenizer.path to it."
        ) from None


def from_rank_file(file: Path, pattern: str, special: list[str]) -> Tokenizer:
    """Tokenizer of a file of lines 'base64-of-bytes rank'.

    Special tokens get the ids after the last rank.

    tiktoken joins the two neighbours whose joined bytes have the lowest rank. The same as merges:
    every way to make a token of two, in the order of the tokens' ranks; and a word that is a token
    as a whole is that token.

    Raises:
        ValueError: no rank file.
    """
    ranks = _ranks(file)
    letters = byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in ranks and right in ranks:
                merges.append(
                    (rank, ranks[left], ranks[right], spelled(left), spelled(right))
                )
    merges.sort()
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    pairs = [merge[3:] for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _ranks(file: Path) -> dict[bytes, int]:
    """The rank of each token of a rank file.

    Raises:
        ValueError: no rank file.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} is not 'base64 rank'") from None
    is_complete = sorted(ranks.values()) == list(range(len(ranks)))
    has_all_bytes = all(bytes([byte]) in ranks for byte in range(256))
    if not is_complete or not has_all_bytes:
        raise ValueError("its ranks are not 0, 1, 2, … with all 256 bytes among them")
    return ranks


def byte_letters() -> list[str]:
    """The letter that stands for each byte (GPT-2's byte alphabet).

    Printable ones stand for themselves, others are from 256 on.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(256, 512))
    return [
        chr(byte) if byte in printable else chr(next(others)) for byte in range(256)
    ]
