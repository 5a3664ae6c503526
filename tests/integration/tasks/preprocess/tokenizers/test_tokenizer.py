"""A tokenizer is a function of the text: the number of threads that train it changes nothing."""

import os
import subprocess
import sys

import pytest

TRAIN = """
import sys, sysconfig
from pathlib import Path
from infini_llama.configs.schema import TokenizerConfig
from infini_llama.tasks.preprocess.tokenizers.tokenizer import train
texts = [path.read_text() for path in sorted(Path(sysconfig.get_path("stdlib"), "json").glob("*.py"))]
sys.stdout.write(train(texts, TokenizerConfig(kind=sys.argv[1], vocab_size=1000)).to_str())
"""


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_the_same_text_gives_the_same_tokenizer_with_any_number_of_threads(kind):
    command = [sys.executable, "-c", TRAIN, kind]
    trained = {
        subprocess.run(command, env=os.environ | {"RAYON_NUM_THREADS": threads}, capture_output=True, check=True).stdout
        for threads in ("1", "4")
    }
    assert len(trained) == 1 and len(trained.pop()) > 10_000
