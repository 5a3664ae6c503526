"""The result of `estimate`, computed before anything is built."""

from infini_llama.tasks.records.plan import Device, Precision
from infini_llama.tasks.records.record import Record


class ParameterCount(Record):
    """Numbers of parameters.

    Attributes:
        of_matrices: those that take part in a matrix product.
    """

    total: int
    embedding: int
    of_matrices: int


class FlopsPerToken(Record):
    """FLOPs per token, forward and backward.

    Attributes:
        memory: of the compressive memory.
    """

    matrices: float
    attention: float
    memory: float
    total: float


class RunSize(Record):
    """Tokens per step and of the whole run, and its FLOPs.

    None for a length that depends on the dataset.
    """

    tokens_per_step: int
    tokens: int | None
    flops: float | None


class Layout(Record):
    """The parts that a step is divided into.

    Attributes:
        micro_batch_size: sequences.
        shards: workers that share the optimizer state.
    """

    micro_batch_size: int
    micro_batches: int
    workers: int
    shards: int
    precision: Precision
    device: Device
    loss_chunk: int


class Estimate(Record):
    """Parameters, FLOPs and bytes of a run.

    Attributes:
        memory: bytes of one worker by part: those of `bytes_needed`; on a CPU also
            `checkpoint_copy` (of asynchronous saves), `process` and `holes`, so that `total` is the
            peak of the resident set; on a GPU `total` is the peak of what torch's allocator has
            given out.
        checkpoint: bytes on disk.
    """

    parameters: ParameterCount
    flops_per_token: FlopsPerToken
    run: RunSize
    layout: Layout
    memory: dict[str, int]
    checkpoint: int
