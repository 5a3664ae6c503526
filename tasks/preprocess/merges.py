"""Learns the merges of byte-level BPE with gigatoken: python -m MODULE PARENT_PID FILE MERGES.

It runs in a process of its own. gigatoken prints its progress, and holds Python's lock until it is
done, so that no request to stop would be heard meanwhile. The last lines of stdout are the merges:
two tokens as hexadecimal digits, in the order in which they were learned.
"""

import os
import signal
import sys
from importlib import import_module
from typing import Any

from infini_llama.tasks.runs.exec_wrapper import die_with_parent

SEPARATOR = b"\xff"  # between documents; UTF-8 never has it
BYTES = 256


def main() -> None:
    parent, file, number = sys.argv[1:]
    die_with_parent(signal.SIGKILL, int(parent))
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    gigatoken: Any = import_module("gigatoken")
    text = gigatoken.TextFileSource([file], separator=SEPARATOR)
    # It has a token for every byte first; ties go to the pair that `tokenizers` would take.
    _, merges = gigatoken.train_bpe(
        text, BYTES + int(number), [], tie_breaking="huggingface"
    )
    with os.fdopen(output, "w", encoding="ascii") as lines:
        for left, right in merges:
            lines.write(f"{left.hex()} {right.hex()}\n")


if __name__ == "__main__":
    main()
