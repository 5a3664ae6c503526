"""The strategies that `data.packing` names, without numpy."""

from dataclasses import dataclass

from infini_llama.configs.choices import Choice

MODULE = "infini_llama.tasks.preprocess.rows.packing"


@dataclass(frozen=True)
class Packing(Choice):
    """A value of `data.packing`.

    Attributes:
        fit: function that puts pieces of documents into rows, as "module:name"; "": the stream of
            tokens is cut wherever a row ends.
        is_on_gpu: tasks/preprocess/rows/gpu.py computes it too.
    """

    fit: str = ""
    is_on_gpu: bool = False


PACKING = {
    "concat": Packing(
        description="documents joined by the end-of-text token and cut.",
        is_on_gpu=True,
    ),
    "window": Packing(
        description="the same, overlapping by data.stride.",
        is_on_gpu=True,
    ),
    "greedy": Packing(
        description="whole documents, as many as follow each other in one sequence.",
        fit=f"{MODULE}:greedy",
        is_on_gpu=True,
    ),
    "first_fit": Packing(
        description="whole documents, each in the first sequence with room.",
        fit=f"{MODULE}:first_fit",
    ),
    "best_fit": Packing(
        description="whole documents, the longest first, each in the fullest sequence with room, "
        "which needs the least padding.",
        fit=f"{MODULE}:best_fit",
    ),
    "padded": Packing(
        description="one document per sequence.",
        fit=f"{MODULE}:padded",
        is_on_gpu=True,
    ),
}
PACKED = tuple(name for name, entry in PACKING.items() if entry.fit)
ON_A_GPU = tuple(name for name, entry in PACKING.items() if entry.is_on_gpu)
