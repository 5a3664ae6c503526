"""What the CPU tests prove, on CUDA: the same numbers, the same bytes, the same resume."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from support.laboratory import CONFIG, Laboratory, exact_metrics, kill
from support.models import generate

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.gpu


def model_of(attention: str) -> Llama:
    torch.manual_seed(0)
    model = Llama(
        LlamaConfig(512, 128, 256, 2, 4, 2, 256, attention=attention, segment_length=32)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".gate"):
                parameter.normal_()
    return model


@pytest.mark.parametrize("attention", ["softmax", "infini"])
def test_loss_and_gradients_equal_the_cpus(attention):
    torch.set_float32_matmul_precision("highest")
    tokens = torch.randint(0, 512, (4, 201), generator=torch.Generator().manual_seed(1))
    results = []
    for device in ("cpu", "cuda"):
        model = model_of(attention).to(device)
        total, count = model.loss(tokens[:, :-1].to(device), tokens[:, 1:].to(device))
        (total / count).backward()
        results.append(
            (
                total.item() / 800,
                {
                    name: parameter.grad.cpu()
                    for name, parameter in model.named_parameters()
                },
            )
        )
    (cpu_loss, cpu), (gpu_loss, gpu) = results
    assert abs(cpu_loss - gpu_loss) < 1e-5
    for name, expected in cpu.items():
        assert torch.allclose(expected, gpu[name], rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("attention", ["softmax", "infini"])
def test_greedy_text_equals_the_cpus(attention):
    model, prompt = model_of(attention), list(range(70))
    assert generate(model, prompt, 40) == generate(model.to("cuda"), prompt, 40)


@pytest.mark.parametrize("compiled", ["block", "off"])
@pytest.mark.parametrize(
    "attention, precision", [("infini", "bf16"), ("softmax", "fp32")]
)
def test_killed_and_run_again_is_bitwise_the_uninterrupted_run(
    attention, precision, compiled, tmp_path
):
    lab = Laboratory(tmp_path, tmp_path / "config.yaml")
    # A GPU machine's Python may come without the sources of its library.
    config = CONFIG | {"data": CONFIG["data"] | {"files": [f"{ROOT}/tasks/**/*.py"]}}
    lab.config.write_text(yaml.safe_dump(config))
    overrides = (
        f"model.attention={attention}",
        f"environment.precision={precision}",
        f"train.compile={compiled}",
        "environment.device=cuda",
    )
    expected = lab.finish("calm", *overrides)
    started = lab.start("killed", *overrides)
    lab.wait_for_step("killed", 25, started)
    kill(started.process.pid)
    started.wait()
    summary = lab.finish("killed", *overrides)
    assert summary["weights_sha256"] == expected["weights_sha256"]
    assert exact_metrics(lab.run_dir("killed")) == exact_metrics(lab.run_dir("calm"))
    assert (
        json.loads((lab.run_dir("killed") / "environment.json").read_text())["plan"][
            "device"
        ]
        == "cuda"
    )
