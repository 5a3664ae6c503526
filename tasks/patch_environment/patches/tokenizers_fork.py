"""tokenizers warns of every fork after it has used its threads."""

import os

from infini_llama.tasks.patch_environment.patches.patch import Patch


def apply() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


PATCH = Patch(
    name="tokenizers-fork",
    fault="tokenizers writes four lines of warning at every fork after it has used its threads; workers encode one prompt and "
    "need none of them.",
    reference="https://github.com/huggingface/transformers/issues/5486",
    package="tokenizers",
    versions="<0.23",
    apply=apply,
)
