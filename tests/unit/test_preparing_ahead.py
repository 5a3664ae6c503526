"""benchmarks/preparing_ahead.py: the side without a preparation trains on the same text, cut into rows of the same length."""

import importlib.util
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).parents[2]


def test_rows_made_while_training_hold_whole_documents_and_their_ends(tmp_path):
    spec = importlib.util.spec_from_file_location(
        "preparing_ahead", ROOT / "benchmarks/preparing_ahead.py"
    )
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    words = ["<end>", "a", "b", "c", "d"]
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: number for number, word in enumerate(words)}, unk_token="<end>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = benchmark.WhileTraining(
        ["a b", "c d a"], tmp_path / "tokenizer.json", eos=0, length=6
    )
    stream = []
    for inputs, labels in islice(iter(rows), 20):
        assert inputs.shape == labels.shape == (benchmark.BATCH, 6) and inputs[
            :, 1:
        ].equal(labels[:, :-1])
        stream += [
            token
            for row, last in zip(inputs.tolist(), labels[:, -1].tolist(), strict=True)
            for token in (*row, last)
        ]
    documents = "".join(words[token][0] for token in stream).split("<")[:-1]
    assert set(documents) == {"ab", "cda"}
