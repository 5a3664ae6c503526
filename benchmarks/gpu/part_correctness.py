"""Numbers and bytes on this device against the CPU's: attention, models, memory, and a real run that is killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from case import Case, Row, model_config, one_rank, relative_difference

from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.backends import BACKENDS, causal_attention
from infini_llama.model.hf import config_to_hf, to_hf
from infini_llama.model.infini_attention import InfiniAttention
from infini_llama.model.layout import segments
from infini_llama.model.llama import Llama
from infini_llama.tasks.train.worker.data.loader import Batch
from infini_llama.tasks.train.worker.strategies.compiling import Compiled
from infini_llama.tasks.train.worker.strategies.strategy import build_strategy


def attention(device: str, rehearse: bool) -> list[Row]:
    """Outputs and gradients of every backend against fp64 on the CPU; flash-attn needs a GPU."""
    rows: list[Row] = []
    dtype = torch.float32 if rehearse else torch.bfloat16
    backends = [name for name in BACKENDS if device == "cuda" or name != "flash2"]
    for backend in backends:
        for size, kv_heads, packed in (
            (64, 8, False),
            (128, 2, False),
            (64, 8, True),
            (128, 2, True),
        ):
            row: Row = {
                "backend": backend,
                "head size": size,
                "kv heads": kv_heads,
                "packed": packed,
            }
            try:
                rows.append(
                    row | _attention(device, backend, dtype, size, kv_heads, packed)
                )
            except RuntimeError as error:
                rows.append(row | {"error": " ".join(str(error).split())[:120]})
    return rows


def _attention(
    device: str,
    backend: str,
    dtype: torch.dtype,
    size: int,
    kv_heads: int,
    packed: bool,
) -> Row:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 300, size).to(dtype) for heads in (8, kv_heads, kv_heads)
    )
    weights = torch.randn(2, 8, 300, size).to(dtype)
    documents = (
        torch.tensor([[0] * 100 + [1] * 170 + [-1] * 30, [3] * 7 + [4] * 293])
        if packed
        else None
    )
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = causal_attention(exact[0], exact[1], exact[2], documents)
    gradients = torch.autograd.grad((expected * weights).sum(), exact)
    ours = [x.to(device).requires_grad_() for x in (q, k, v)]
    there = None if documents is None else documents.to(device)
    found = causal_attention(ours[0], ours[1], ours[2], there, backend)
    found_gradients = torch.autograd.grad((found * weights.to(device)).sum(), ours)
    worst = max(
        relative_difference(a, b)
        for a, b in zip(found_gradients, gradients, strict=True)
    )
    difference = relative_difference(found, expected)
    return {
        "output differs by": difference,
        "gradients by": worst,
        "passed": max(difference, worst) < 2e-2,
    }


def models(device: str, rehearse: bool) -> list[Row]:
    """Loss and gradients of fp32 models against the CPU's, and logits against transformers'."""
    torch.set_float32_matmul_precision("highest")
    rows: list[Row] = []
    kinds: list[dict[str, Any]] = [{}, {"qk_norm": True}]
    kinds += [
        {"attention": "infini", "segment_length": 32, "memory_update": name}
        for name in ("linear", "delta")
    ]
    for fields in kinds:
        config = replace(model_config("125M", 256, rehearse=True), **fields)
        tokens = torch.randint(
            0, 512, (4, 201), generator=torch.Generator().manual_seed(1)
        )
        results = []
        for place in ("cpu", device):
            torch.manual_seed(0)
            model = Llama(config).to(place)
            total, count = model.loss(tokens[:, :-1].to(place), tokens[:, 1:].to(place))
            (total / count).backward()
            gradients = torch.cat(
                [
                    value.grad.flatten().cpu()
                    for value in model.parameters()
                    if value.grad is not None
                ]
            )
            results.append((total.detach().cpu() / 800, gradients))
        (loss, gradient), (other_loss, other_gradient) = results
        apart = [
            relative_difference(other_loss, loss),
            relative_difference(other_gradient, gradient),
        ]
        row: Row = {
            "model": json.dumps(fields),
            "loss differs by": apart[0],
            "gradients by": apart[1],
        }
        rows.append(row | {"passed": max(apart) < 1e-3})
    return [*rows, _transformers(device)]


def _transformers(device: str) -> Row:
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = Llama(model_config("125M", 256, rehearse=True))
    theirs: Any = LlamaForCausalLM(TheirConfig(**config_to_hf(model.config)))
    theirs.load_state_dict(model.state_dict(), strict=False)
    theirs.tie_weights()
    ids = torch.randint(0, 512, (2, 200))
    with torch.inference_mode():
        expected = theirs.to(device).eval()(ids.to(device)).logits
        difference = relative_difference(model.to(device)(ids.to(device)), expected)
    return {
        "model": "logits of transformers",
        "loss differs by": difference,
        "passed": difference < 1e-3,
    }


def switches(device: str, rehearse: bool) -> list[Row]:
    """Loss and gradients of two micro-batches under each setting that makes steps faster, against none of them, in fp32 or fp64."""
    torch.set_float32_matmul_precision("highest")
    expected = _accumulated(device, {})
    rows: list[Row] = []
    for name, most in SWITCHES.items():
        row: Row = {"setting": name}
        found = _accumulated(device, {name: True})
        apart = [
            relative_difference(a, b) for a, b in zip(found, expected, strict=True)
        ]
        row |= {
            "loss differs by": apart[0],
            "gradients by": apart[1],
            "passed": max(apart) < most,
        }
        rows.append(row)
    return rows


# Largest relative difference that rounding explains.
SWITCHES = {"padded": 1e-4, "chunked": 1e-4, "block": 1e-4}


def _accumulated(device: str, on: dict[str, bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradients, without rows that pad the vocabulary, of a model with these settings."""
    torch.manual_seed(0)
    ranks = one_rank(device)
    config = replace(
        model_config("125M", 256, rehearse=True),
        vocab_size=500,
        pad_vocab_to_multiple_of=128 if "padded" in on else 1,
    )
    model = Llama(config).to(ranks.device)
    model.loss_chunk = 50 if "chunked" in on else 0
    strategy = build_strategy(model, TrainingConfig(), "fp32", 4, ranks)
    if "block" in on:
        Compiled(strategy.module, model, "block").switch_on()
    rows = torch.randint(
        0, 500, (2, 4, 193), generator=torch.Generator().manual_seed(1)
    ).to(ranks.device)
    total = torch.zeros(())
    for _ in range(2):  # the first compiles
        strategy.discard_gradients()
        total = strategy.accumulate(
            [Batch(part[:, :-1], part[:, 1:]) for part in rows], rows[:, :, 1:].numel()
        )
    gradients = {
        name: value.grad
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    return total, torch.cat(
        [gradient.flatten() for gradient in to_hf(gradients, config).values()]
    )


def infini(device: str, rehearse: bool) -> list[Row]:
    """Infini-attention in fp32 against the literal loop of the paper's equations in fp64 (tests/support/literal_infini.py)."""
    from support.literal_infini import literal_infini  # pyright: ignore[reportMissingImports]

    torch.set_float32_matmul_precision("highest")
    rows: list[Row] = []
    for update in ("linear", "delta", "delta_bounded"):
        for documents in (None, torch.tensor([[0] * 13 + [1] * 20 + [2] * 17])):
            torch.manual_seed(0)
            config = replace(
                model_config("125M", 64, rehearse=True),
                attention="infini",
                segment_length=8,
                memory_update=update,
            )
            layer = InfiniAttention(config)
            for parameter in layer.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
            x = torch.randn(1, 50, config.hidden_size)
            layer.double()
            q, k, v = layer.project(x.double())
            expected = literal_infini(
                q, k, v, layer.gate, 8, config.rope_theta, update, documents
            )
            layer.float().to(device)
            layout = segments(
                config,
                x.shape[:2],
                None if documents is None else documents.to(device),
                x.to(device),
            )
            q, k, v = (part.float().to(device) for part in (q, k, v))
            found = layer.attend(q, k, v, layout)[0]
            difference = relative_difference(found, expected)
            row: Row = {
                "update": update,
                "documents": documents is not None,
                "differs by": difference,
            }
            rows.append(row | {"passed": difference < 1e-3})
    return rows


RUN = {
    "data.sequence_length": 64,
    "data.tokenizer.vocab_size": 512,
    "model.hidden_size": 64,
    "model.intermediate_size": 192,
    "model.num_hidden_layers": 2,
    "model.num_key_value_heads": 2,
    "model.segment_length": 16,
    "train.max_steps": 30,
    "train.warmup_steps": 5,
    "train.eval_steps": 20,
    "train.eval_tokens": 8 * 64,
    "train.save_steps": 10,
    "environment.threads": 1,
    "environment.nproc_per_node": 1,
}


def start(
    home: Path, name: str, settings: dict[str, Any]
) -> tuple[subprocess.Popen[bytes], Path]:
    """A `run` without Prefect in a process group of its own, and its log."""
    config, text, log = home / "config.yaml", home / "text.jsonl", home / f"{name}.log"
    config.write_text("{}\n", encoding="utf-8")
    documents = (
        {"text": f"def f{n}(x):\n    return x * {n * n % 977} + {n}\n" * (1 + n % 7)}
        for n in range(4000)
    )
    text.write_text(
        "".join(f"{json.dumps(document)}\n" for document in documents), encoding="utf-8"
    )
    overrides = [
        f"data.files=[{text}]",
        *(f"{key}={value}" for key, value in (RUN | settings).items()),
    ]
    command = [
        sys.executable,
        "-m",
        "infini_llama",
        "run",
        str(config),
        "--no-prefect",
        "--quiet",
    ]
    command += [f"runtime.home={home}", f"runtime.name={name}", *overrides]
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True
        ), log


def finish(home: Path, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The summary of a run that is started, or started again, and ends."""
    process, log = start(home, name, settings)
    if process.wait():
        raise RuntimeError(
            f"{name} ended with {process.returncode}: {log.read_text(encoding='utf-8')[-500:]}"
        )
    return json.loads(
        (home / "runs" / name / "summary.json").read_text(encoding="utf-8")
    )


def kill_after(home: Path, name: str, settings: dict[str, Any], step: int) -> None:
    """Start a run and end all its processes with SIGKILL once it has recorded a step."""
    process, _ = start(home, name, settings)
    metrics = home / "runs" / name / "metrics.jsonl"
    while process.poll() is None:
        if (
            metrics.exists()
            and metrics.read_text(encoding="utf-8").count('"loss"') >= step
        ):
            break
        time.sleep(0.05)
    else:
        raise RuntimeError(f"{name} ended before step {step}")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def resume(device: str, rehearse: bool) -> list[Row]:
    """A run that is killed and started again against one that is not: the hash of the weights."""
    rows: list[Row] = []
    cases = [("softmax", "fp32"), ("infini", "bf16")]
    if not rehearse:
        cases = [
            (kind, precision)
            for kind in ("softmax", "infini")
            for precision in ("fp32", "bf16")
        ]
    with TemporaryDirectory(prefix="resume-") as folder:
        for kind, precision in cases[: 1 if rehearse else None]:
            settings = {
                "environment.device": device,
                "environment.precision": precision,
                "model.attention": kind,
            }
            expected = finish(Path(folder), f"calm-{kind}-{precision}", settings)
            name = f"killed-{kind}-{precision}"
            kill_after(Path(folder), name, settings, 15)
            found = finish(Path(folder), name, settings)
            same = found["weights_sha256"] == expected["weights_sha256"]
            rows.append(
                {
                    "attention": kind,
                    "precision": precision,
                    "loss": found.get("loss"),
                    "passed": same,
                }
            )
    return rows


def out_of_memory(device: str, rehearse: bool) -> list[Row]:
    """A run whose micro-batch does not fit is finished with a smaller one (a rehearsal's fits)."""
    settings: dict[str, Any] = {
        "environment.device": device,
        "train.max_steps": 6,
        "train.warmup_steps": 1,
    }
    settings |= {
        "train.global_batch_size": 8,
        "train.micro_batch_size": 8,
        "train.save_steps": 3,
    }
    if not rehearse:
        # 4.2 million tokens of a micro-batch keep over 200 GB of activations.
        settings |= {
            "model.hidden_size": 512,
            "data.sequence_length": 4096,
            "model.num_hidden_layers": 8,
        }
        settings |= {"train.global_batch_size": 1024, "train.micro_batch_size": 1024}
    with TemporaryDirectory(prefix="memory-") as folder:
        finish(Path(folder), "large", settings)
        lines = (
            (Path(folder) / "runs" / "large" / "attempts.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        )
    sizes = [json.loads(line).get("micro_batch_size") for line in lines]
    return [
        {
            "attempts": len(lines),
            "micro-batches": str(sizes),
            "passed": rehearse or len(lines) > 1,
        }
    ]


CASES = {
    "attention": Case(attention, 40),
    "models": Case(models, 30),
    "switches": Case(switches, 80),
    "infini": Case(infini, 30),
    "resume": Case(resume, 180),
    "out of memory": Case(out_of_memory, 100),
}
