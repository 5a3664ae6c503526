"""Learning a tokenizer, in a process of its own: its highest memory is measured."""

import subprocess
import sys

LEARNING = """
from pathlib import Path
from infini_llama.configs.schema import TokenizerConfig
from infini_llama.tasks.tokenizers.tokenizer import train

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

text = "words of a long text\\n" * 400_000
before = kilobytes("VmRSS")
train([text], TokenizerConfig(vocab_size=300))
print(kilobytes("VmHWM") - before)
"""


def test_memory_does_not_grow_with_the_length_of_a_text():
    """8 MB of text, for which `tokenizers` would take 700 MB as a whole, in each of its threads."""
    learning = subprocess.run(
        [sys.executable, "-c", LEARNING], capture_output=True, text=True, check=True
    )
    assert int(learning.stdout) < 150_000
