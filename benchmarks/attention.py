"""What a longer context costs: one training step's time and memory a token, by kind of attention.

    .venv/bin/python benchmarks/attention.py [--lengths 2048 4096 8192 16384 32768] [--rounds 3] [--device cpu]

Models of equal size (2 layers, width 256, 4 heads of 64, vocabulary 256, feed-forward 682) run forward and backward over one row, fp32.
Compared: Infini-attention with segments of 512 (linear, delta_bounded), full causal attention by torch's SDPA, and, where it is
installed, infini-transformer-pytorch 0.1.6 (the most used other implementation) on the same segments, with the gradient through
all of them as ours and with its default of cutting it every second one. Each case is a process of its own with one thread, in
which the second of two steps is measured; times are the process's own, so that a busy machine does little to them. glibc's allocator
is told to keep what it has (GLIBC_TUNABLES below), else from 32k on every tensor of 32 MB is given back to the kernel and faulted in
anew, which then is half of the time. Memory is the growth of the peak resident size (on a GPU the allocator's peak). The result goes
to benchmarks/results/attention-<device>.json.

    .venv/bin/python benchmarks/attention.py --backends sdpa blocked [--precisions fp32 bf16] [--rounds 5]

The functions of model.backends instead: forward and backward of 2,048 tokens in rows of 128 to 2,048, 8 heads of 32 or 64 and 4 of
keys and values, one thread, by the trial of the probe, against exact attention. The rows of this
processor in the same file are replaced, under "backends".
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

import torch

from infini_llama.tasks.patch_environment.gpu_probe import AttentionTrial
from infini_llama.tasks.patch_environment.machine import Machine, cpu

SEGMENT, VOCABULARY, WIDTH, LAYERS, HEADS, INNER = 512, 256, 256, 2, 4, 682
KEEP = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"
OURS = {
    "infini linear": {"attention": "infini"},
    "infini delta_bounded": {"attention": "infini", "memory_update": "delta_bounded"},
    "full attention": {"attention": "softmax"},
}
THEIRS = {"infini-transformer-pytorch": 10**9, "infini-transformer-pytorch, gradient cut": 2}


def ours(kind: str, device: str):  # noqa: ANN201
    from infini_llama.model.config import LlamaConfig
    from infini_llama.model.llama import Llama

    config = LlamaConfig(VOCABULARY, WIDTH, INNER, LAYERS, HEADS, HEADS, 2048, segment_length=SEGMENT, **OURS[kind])  # type: ignore[arg-type]
    model = Llama(config).to(device)

    def step(row: torch.Tensor) -> None:
        total, count = model.loss(row[:, :-1], row[:, 1:])
        (total / count).backward()

    return step


def theirs(kind: str, device: str):  # noqa: ANN201
    from infini_transformer_pytorch import InfiniTransformer, InfiniTransformerWrapper  # type: ignore[import-not-found]

    delta = {"use_mem_delta_rule": False}
    model = InfiniTransformer(num_tokens=VOCABULARY, dim=WIDTH, depth=LAYERS, dim_head=64, heads=HEADS, **delta)
    cut = THEIRS[kind]
    wrapped = InfiniTransformerWrapper(model, segment_length=SEGMENT, detach_mems_every_num_segments=cut).to(device)
    return lambda row: wrapped(row, backward=True)


def peak(device: str) -> int:
    """Bytes at most so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(kind: str, length: int, device: str) -> None:
    """One case: a step to warm up, then the measured one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = (ours if kind in OURS else theirs)(kind, device)
    step(torch.randint(VOCABULARY, (1, SEGMENT + 1), device=device))
    row = torch.randint(VOCABULARY, (1, length + 1), device=device)
    before = peak(device)
    step(row)
    if device == "cuda":
        torch.cuda.synchronize()
        started = time.perf_counter()
        step(row)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    else:
        started = time.process_time()
        step(row)
        seconds = time.process_time() - started
    print(json.dumps({"seconds": seconds, "bytes": peak(device) - before}))


def try_backends(case: list, rounds: int) -> dict[str, dict]:
    """Median seconds of forward and backward by each backend, or why it cannot be used.

    Args:
        case: backends, device, precision, batch, heads, kv_heads, length, head_dim.
    """
    backends, device, precision, batch, heads, kv_heads, length, head_dim = case
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    trial = AttentionTrial(device, dtype, (batch, heads, length, head_dim), kv_heads)
    results: dict[str, dict] = {}
    for backend in backends:
        if fault := trial.fault(backend):
            results[backend] = {"error": fault}
            continue
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            trial.run(backend)
            times.append(time.perf_counter() - began)
        results[backend] = {"seconds": statistics.median(times)}
    return results


def compare_backends(options: argparse.Namespace, target: Path) -> None:
    """Each precision, head size and length in a process of its own."""
    processor = cpu(Machine()).model + (" with bf16" if cpu(Machine()).bf16 else " without bf16")
    if options.device == "cuda":
        processor = torch.cuda.get_device_name()
    rows = []
    for precision, head_dim, length in product(options.precisions, (32, 64), (128, 256, 512, 1024, 2048)):
        case = [options.backends, options.device, precision, max(1, 2048 // length), 8, 4, length, head_dim]
        command = [sys.executable, __file__, "--rounds", str(options.rounds), "--case", json.dumps(case)]
        answer = subprocess.run(
            command, env=os.environ | {"GLIBC_TUNABLES": KEEP}, check=True, capture_output=True, text=True
        )
        found = json.loads(answer.stdout)
        rows.append({"processor": processor, "case": case[2:], "torch": torch.__version__, "found": found})
        first = found[options.backends[0]].get("seconds", float("nan"))
        times = (f"{name} {1e3 * got['seconds']:.1f} ms ({first / got['seconds']:.2f}x)" for name, got in found.items())
        print(f"{precision} head {head_dim} rows of {length:>5}: {', '.join(times)}", flush=True)
    stored = json.loads(target.read_text(encoding="utf-8"))
    kept = [row for row in stored.get("backends", []) if row["processor"] != processor]
    target.write_text(json.dumps(stored | {"backends": kept + rows}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--backends", nargs="+", help="compare these functions of model.backends")
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    target = Path(__file__).with_name("results") / f"attention-{options.device}.json"
    if options.child:
        return child(options.child[0], int(options.child[1]), options.device)
    if options.case:
        torch.set_num_threads(1)
        return print(json.dumps(try_backends(json.loads(options.case), options.rounds)))
    if options.backends:
        return compare_backends(options, target)
    kinds = [*OURS, *(THEIRS if find_spec("infini_transformer_pytorch") else ())]
    cases: dict[str, dict[int, list[dict]]] = {kind: {length: [] for length in options.lengths} for kind in kinds}
    for _ in range(options.rounds):
        for length in options.lengths:
            for kind in kinds:
                command = [sys.executable, __file__, "--device", options.device, "--child", kind, str(length)]
                answer = subprocess.run(
                    command, env=os.environ | {"GLIBC_TUNABLES": KEEP}, check=True, capture_output=True, text=True
                )
                cases[kind][length].append(json.loads(answer.stdout))
    print(f"{'microseconds a token':<42}" + "".join(f"{length:>10}" for length in options.lengths))
    for kind, lengths in cases.items():
        times = [statistics.median(run["seconds"] for run in runs) / length * 1e6 for length, runs in lengths.items()]
        print(f"{kind:<42}" + "".join(f"{value:>10.1f}" for value in times))
    print(f"{'kilobytes a token':<42}")
    for kind, lengths in cases.items():
        sizes = [statistics.median(run["bytes"] for run in runs) / length / 1e3 for length, runs in lengths.items()]
        print(f"{kind:<42}" + "".join(f"{value:>10.1f}" for value in sizes))
    machine = {"cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    if options.device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    stored = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    stored |= {"machine": machine, "torch": torch.__version__, "load": os.getloadavg(), "runs": cases}
    target.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
