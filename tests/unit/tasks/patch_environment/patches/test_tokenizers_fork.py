"""The warning at a fork, which tokenizers had up to 0.22."""

from importlib.metadata import version

import pytest
from packaging.version import Version

FORK = """
import os
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.train_from_iterator(["hello world"] * 100, trainers.BpeTrainer(vocab_size=60, show_progress=False))
tokenizer.encode_batch(["hello " * 20] * 1000)
child = os.fork()
if child == 0:
    tokenizer.encode_batch(["hello"] * 50)
    os._exit(0)
os.waitpid(child, 0)
"""
OLD = Version(version("tokenizers")) < Version("0.23")


def test_a_fork_is_silent_with_the_patch(run):
    patched = run(FORK, "tokenizers-fork")
    assert patched.returncode == 0 and "just got forked" not in patched.stderr


def test_a_fork_warns_without_it_up_to_0_22_and_no_longer(run):
    assert ("just got forked" in run(FORK).stderr) == OLD


@pytest.mark.skipif(OLD, reason="the patch applies here")
def test_where_the_fault_is_gone_the_patch_is_not_planned():
    from infini_llama.tasks.patch_environment.patches.registry import needed_patches

    installed = {"tokenizers": version("tokenizers")}
    assert "tokenizers-fork" not in [patch.name for patch in needed_patches(installed)]
    assert "tokenizers-fork" in [patch.name for patch in needed_patches({"tokenizers": "0.22.1"})]
