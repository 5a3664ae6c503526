"""What a longer context costs: one training step's time and memory a token, by kind of attention.

    .venv/bin/python benchmarks/attention.py [--lengths 2048 4096 8192 16384 32768] [--rounds 3]

Models of equal size (2 layers, width 256, 4 heads of 64, vocabulary 256, feed-forward 682) run forward and backward over one row, fp32.
Compared: Infini-attention with segments of 512 (linear, delta_bounded), full causal attention by torch's SDPA, and, where it is
installed, infini-transformer-pytorch 0.1.6 (the most used other implementation) on the same segments, with the gradient through
all of them as ours and with its default of cutting it every second one. Each case is a process of its own with one thread, in
which the second of two steps is measured; times are the process's own, so that a busy machine does little to them. glibc's allocator
is told to keep what it has (GLIBC_TUNABLES below), else from 32k on every tensor of 32 MB is given back to the kernel and faulted in
anew, which then is half of the time. Memory is the growth of the peak resident size. The result goes to
benchmarks/results/attention-cpu.json.

    .venv/bin/python benchmarks/attention.py --backends [--precisions fp32 bf16] [--threads 1 2] [--rounds 7] [--lengths 64 …]

What decides the rule for environment.attention_backend (tasks/patch_environment/plan.py): forward and backward pass of the functions
of model.backends alone, with `blocked` in both of its forms, in the shapes that a run has. In a round each function has CALLS turns, of
which its fastest counts: what interrupts a turn is not the function's. A shape is decided where the ratios of all rounds have the same
sign. Each shape is a process of its own. The rows of this processor, precision, number of threads and lengths in
benchmarks/results/attention-backends.json are replaced. On a machine that is not quiet, run it under `chrt -f 1`: after each turn it lets
other programs have the time that Linux reserves for them, so that they do not interrupt a turn.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from stored_rows import about, store

from infini_llama.model.backends import causal_attention

SEGMENT, VOCABULARY, WIDTH, LAYERS, HEADS, INNER = 512, 256, 256, 2, 4, 682
LONG, SHORT_AND_LONG = (
    [2048, 4096, 8192, 16384, 32768],
    [64, 128, 256, 512, 1024, 2048, 4096, 8192],
)
KEEP = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"
OURS = {
    "infini linear": {"attention": "infini"},
    "infini delta_bounded": {"attention": "infini", "memory_update": "delta_bounded"},
    "full attention": {"attention": "softmax"},
}
# Of outputs and gradients, relative: what rounding explains.
TOLERANCE = {
    torch.float32: 1e-4,
    torch.bfloat16: 3e-2,
}
THEIRS = {
    "infini-transformer-pytorch": 10**9,
    "infini-transformer-pytorch, gradient cut": 2,
}


def ours(kind: str):  # noqa: ANN201
    from infini_llama.model.config import LlamaConfig
    from infini_llama.model.llama import Llama

    settings: Any = OURS[kind]
    config = LlamaConfig(
        VOCABULARY,
        WIDTH,
        INNER,
        LAYERS,
        HEADS,
        HEADS,
        2048,
        segment_length=SEGMENT,
        **settings,
    )
    model = Llama(config)

    def step(row: torch.Tensor) -> None:
        total, count = model.loss(row[:, :-1], row[:, 1:])
        (total / count).backward()

    return step


def theirs(kind: str):  # noqa: ANN201
    from infini_transformer_pytorch import InfiniTransformer, InfiniTransformerWrapper  # type: ignore[import-not-found]

    delta = {"use_mem_delta_rule": False}
    model = InfiniTransformer(
        num_tokens=VOCABULARY,
        dim=WIDTH,
        depth=LAYERS,
        dim_head=64,
        heads=HEADS,
        **delta,
    )
    cut = THEIRS[kind]
    wrapped = InfiniTransformerWrapper(
        model, segment_length=SEGMENT, detach_mems_every_num_segments=cut
    )
    return lambda row: wrapped(row, backward=True)


def peak() -> int:
    """Bytes at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(kind: str, length: int) -> None:
    """One case: a step to warm up, then the measured one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = (ours if kind in OURS else theirs)(kind)
    step(torch.randint(VOCABULARY, (1, SEGMENT + 1)))
    row = torch.randint(VOCABULARY, (1, length + 1))
    before = peak()
    step(row)
    started = time.process_time()
    step(row)
    seconds = time.process_time() - started
    print(json.dumps({"seconds": seconds, "bytes": peak() - before}))


# Heads, heads of keys and values, and head size of the presets and of benchmarks/training.py, with the tokens of a micro-batch.
HEADS_OF_MODELS = ((8, 4, 32), (8, 4, 64), (12, 12, 64))
TOKENS = 2048
# Tokens of a row, and those of its documents.
WITH_DOCUMENTS = {
    128: (20,),
    256: (20, 100),
    512: (20, 100),
    1024: (20, 400),
    2048: (100, 700),
}
FORMS = ("sdpa", "blocked", "recomputed")
COSTS = Path(__file__).with_name("results") / "attention-cpu.json"
BACKENDS = Path(__file__).with_name("results") / "attention-backends.json"
CALLS = 3
# Part of the time for other programs; Linux gives them 5 % of each second by force.
RESERVED = 0.1


def try_forms(case: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of forward and backward of each form, round by round."""
    torch.set_num_threads(case["threads"])
    dtype = torch.bfloat16 if case["precision"] == "bf16" else torch.float32
    batch, length, size = case["batch"], case["length"], case["head_size"]
    heads = (case["heads"], case["kv_heads"], case["kv_heads"], case["heads"])
    q, k, v, downstream = (
        torch.randn(batch, length, number, size).to(dtype).transpose(1, 2)
        for number in heads
    )
    documents = None
    if case["document"]:
        documents = (torch.arange(length) // case["document"]).repeat(batch, 1)
    for x in (q, k, v):
        x.requires_grad_()

    def run(form: str) -> tuple[float, list[torch.Tensor]]:
        started = time.perf_counter()
        backend = "sdpa" if form == "sdpa" else "blocked"
        output = causal_attention(
            q, k, v, documents, backend, keep_weights=form == "blocked"
        )
        gradients = torch.autograd.grad(output, (q, k, v), downstream)
        return time.perf_counter() - started, [output.detach(), *gradients]

    results = {form: run(form)[1] for form in FORMS}  # it warms up, too
    for form in FORMS[1:]:
        pairs = zip(results[form], results["sdpa"], strict=True)
        apart = max(
            ((one - other).norm() / other.norm()).item() for one, other in pairs
        )
        if apart > TOLERANCE[dtype]:
            raise RuntimeError(f"{form} differs from sdpa by {apart:.2g} in {case}")
    del results
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(rounds):
        calls: dict[str, list[float]] = {form: [] for form in FORMS}
        for form in FORMS * CALLS:
            calls[form].append(run(form)[0])
            time.sleep(RESERVED * calls[form][-1])
        for form, times in calls.items():
            seconds[form].append(min(times))
    return seconds


def cases_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one document, above 2,048 tokens with one of HEADS_OF_MODELS alone, and those of WITH_DOCUMENTS."""
    one = HEADS_OF_MODELS[1:2]
    shapes = [
        (length, 0, heads)
        for length in options.lengths
        for heads in (HEADS_OF_MODELS if length <= 2048 else one)
    ]
    shapes += [
        (length, document, *one)
        for length in options.lengths
        for document in WITH_DOCUMENTS.get(length, ())
    ]
    names = ("heads", "kv_heads", "head_size")
    return [
        {
            "device": "cpu",
            "precision": precision,
            "threads": threads,
            "batch": max(1, TOKENS // length),
        }
        | {"length": length, "document": document}
        | dict(zip(names, heads, strict=True))
        for precision, threads, (length, document, heads) in product(
            options.precisions, options.threads, shapes
        )
    ]


def compare_backends(options: argparse.Namespace) -> None:
    """Each shape in a process of its own."""
    # Under chrt: other programs do not interrupt.
    fifo = os.sched_getscheduler(0) == os.SCHED_FIFO
    known = about() | {"priority": "real time" if fifo else "ordinary"}
    for case in cases_of(options):
        command = [
            sys.executable,
            __file__,
            "--rounds",
            str(options.rounds),
            "--case",
            json.dumps(case),
        ]
        answer = subprocess.run(
            command,
            env=os.environ | {"GLIBC_TUNABLES": KEEP},
            check=True,
            capture_output=True,
            text=True,
        )
        timed: dict[str, list[float]] = json.loads(answer.stdout)
        store(BACKENDS, known | case | {"seconds": timed}, ("processor", *case))
        print(
            ", ".join(
                f"{name} {value}" for name, value in case.items() if name != "device"
            ),
            end=": ",
        )
        for form, seconds in timed.items():
            ratios = [
                sdpa / own for sdpa, own in zip(timed["sdpa"], seconds, strict=True)
            ]
            middle = statistics.median(ratios)
            print(
                f"{form} {1e3 * statistics.median(seconds):.1f} ms ({middle:.2f}x {min(ratios):.2f} – {max(ratios):.2f})",
                end="  ",
            )
        print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument(
        "--backends",
        action="store_true",
        help="compare the functions of model.backends",
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"]
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child[0], int(options.child[1]))
    if options.case:
        return print(json.dumps(try_forms(json.loads(options.case), options.rounds)))
    options.lengths = options.lengths or (SHORT_AND_LONG if options.backends else LONG)
    if options.backends:
        return compare_backends(options)
    kinds = [*OURS, *(THEIRS if find_spec("infini_transformer_pytorch") else ())]
    cases: dict[str, dict[int, list[dict]]] = {
        kind: {length: [] for length in options.lengths} for kind in kinds
    }
    for _ in range(options.rounds):
        for length in options.lengths:
            for kind in kinds:
                command = [
                    sys.executable,
                    __file__,
                    "--child",
                    kind,
                    str(length),
                ]
                answer = subprocess.run(
                    command,
                    env=os.environ | {"GLIBC_TUNABLES": KEEP},
                    check=True,
                    capture_output=True,
                    text=True,
                )
                cases[kind][length].append(json.loads(answer.stdout))
    print(
        f"{'microseconds a token':<42}"
        + "".join(f"{length:>10}" for length in options.lengths)
    )
    for kind, lengths in cases.items():
        times = [
            statistics.median(run["seconds"] for run in runs) / length * 1e6
            for length, runs in lengths.items()
        ]
        print(f"{kind:<42}" + "".join(f"{value:>10.1f}" for value in times))
    print(f"{'kilobytes a token':<42}")
    for kind, lengths in cases.items():
        sizes = [
            statistics.median(run["bytes"] for run in runs) / length / 1e3
            for length, runs in lengths.items()
        ]
        print(f"{kind:<42}" + "".join(f"{value:>10.1f}" for value in sizes))
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    stored = {
        "machine": machine,
        "torch": torch.__version__,
        "load": os.getloadavg(),
        "runs": cases,
    }
    COSTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
