"""Whole machines from their raw readings to the plan and its findings, and the process that asks torch about GPUs."""

import json
import os
import socket
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.machine import Machine
from infini_llama.tasks.patch_environment.doctor import DoctorReport, doctor
from infini_llama.tasks.patch_environment.gpus import gpus
from infini_llama.tasks.patch_environment.plan import plan_environment
from infini_llama.tasks.patch_environment.probe import probe
from infini_llama.tasks.patch_environment.stage import patch_environment
from infini_llama.tasks.records.machine import Gpu, GpuFacts
from infini_llama.tasks.records.plan import Finding
from support.machines import (
    GIB,
    H100,
    begun,
    in_home,
    lay_out,
    reason_of,
    settings,
    with_driver,
    write_command,
)

GLIBC = "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by flash_attn_2_cuda.so)"


def report(machine, home, **requested):
    return doctor(settings(**requested), Path(home), machine=machine)


def findings(report: DoctorReport) -> dict[str, Finding]:
    return {found.name: found for found in report.findings}


def test_no_gpu(tmp_path):
    machine = lay_out(tmp_path)
    plan = report(machine, tmp_path).plan
    assert (plan.device, plan.nproc_per_node, plan.threads, plan.precision) == (
        "cpu",
        1,
        8,
        "bf16",
    )
    assert (plan.attention_backend, plan.allocator, plan.compile) == (
        "sdpa",
        "glibc",
        "off",
    )


def test_four_gpus_with_one_busy(tmp_path):
    machine = lay_out(tmp_path, gpus=[H100] * 4, busy=2)
    found = report(
        machine, tmp_path, train={"global_batch_size": 24, "micro_batch_size": 8}
    )
    plan = found.plan
    assert (plan.device, plan.gpus, plan.nproc_per_node) == ("cuda", (0, 1, 3), 3)
    assert (
        plan.env["CUDA_VISIBLE_DEVICES"] == "0,1,3"
        and plan.distributed_backend == "nccl"
    )
    assert "4242" in findings(found)["GPU 2"].sentence and found.exit_code == 0
    forced = report(
        machine, tmp_path, environment={"gpus": [2]}, train={"global_batch_size": 8}
    )
    assert (
        forced.plan.gpus == (2,)
        and findings(forced)["GPU 2 in the plan"].severity == "warning"
    )
    everywhere = report(machine, tmp_path, environment={"nproc_per_node": 4}).plan
    assert (
        everywhere.gpus == (0, 1, 2, 3) and "CUDA_VISIBLE_DEVICES" not in everywhere.env
    )


def test_a_driver_that_does_not_report_processes(tmp_path):
    machine = lay_out(tmp_path, gpus=[H100])
    answer = "case $1 in *apps*) echo '[Not Supported], [Not Supported]';; *) echo '[N/A], 390.1, [N/A]';; esac"
    write_command(tmp_path / "machine-bin", "nvidia-smi", answer)
    (gpu,) = gpus(machine).gpus
    assert (gpu.driver, gpu.busy, gpu.processes, gpu.is_busy) == (
        "390.1",
        None,
        (),
        False,
    )


@pytest.mark.parametrize(
    ("package", "cause"),
    [(f"raise ImportError({GLIBC!r})", "glibc 2.38"), (None, "another package")],
)
def test_flash_attn_that_cannot_be_used(tmp_path, monkeypatch, caplog, package, cause):
    folder = tmp_path / "site" / "flash_attn"
    (folder / "cute").mkdir(parents=True)
    (folder / "cute" / "__init__.py").write_text(
        "def flash_attn_varlen_func(*arguments, **options): ..."
    )
    if package:
        (folder / "__init__.py").write_text(package)
    machine = lay_out(tmp_path, gpus=[H100], flash=folder.parent)
    # Once: it imports torch in a process of its own.
    facts = probe(tmp_path, settings(), machine)
    monkeypatch.setattr(
        "infini_llama.tasks.patch_environment.doctor.probe", lambda *_, **__: facts
    )
    found = report(machine, tmp_path)
    assert found.plan.attention_backend == "sdpa"
    finding = findings(found)["flash attention"]
    assert finding.severity == "warning" and cause in finding.sentence
    monkeypatch.setattr(
        "infini_llama.tasks.patch_environment.stage.probe", lambda *_: facts
    )
    with caplog.at_level("INFO", "infini_llama.environment"):
        plan = patch_environment(in_home(settings(), tmp_path)).plan
    reason = reason_of(plan, "attention_backend")
    assert f"attention_backend=sdpa ({reason})" in caplog.text
    refused = report(machine, tmp_path, environment={"attention_backend": "flash2"})
    assert refused.exit_code == 64 and refused.plan is None
    assert refused.findings[0].sentence.startswith(
        "environment.attention_backend=flash2"
    )


def test_a_network_file_system(tmp_path):
    mounts = f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n"
    found = report(lay_out(tmp_path, {"proc/self/mounts": mounts}), tmp_path)
    assert findings(found)["file system"].severity == "warning" and found.exit_code == 0


def test_a_control_group_of_1_gb(tmp_path):
    limit = {
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB // 2}\n",
    }
    found = report(
        lay_out(tmp_path, limit), tmp_path, train={"micro_batch_size": "auto"}
    )
    assert findings(found)["memory available"].severity == "warning"
    assert found.plan.micro_batch_size == 1 and found.plan.nproc_per_node == 1
    assert findings(found)["memory"].severity == "warning"
    roomy = report(
        lay_out(tmp_path / "roomy"), tmp_path, train={"micro_batch_size": "auto"}
    ).plan
    assert roomy.micro_batch_size > 1


def test_no_compiler(tmp_path):
    machine = lay_out(tmp_path, compiler=False)
    found = report(machine, tmp_path)
    assert (
        "apt install g++" in findings(found)["compiler"].sentence
        and found.plan.compile == "off"
    )
    refused = report(machine, tmp_path, train={"compile": "block"})
    assert "train.compile=block" in refused.findings[0].sentence


@pytest.mark.parametrize(
    ("requested", "gpus", "key"),
    [
        ({"gpus": [7]}, [H100] * 4, "environment.gpus"),
        ({"gpus": [0]}, None, "environment.gpus"),
        ({"attention_backend": "flash2"}, None, "environment.attention_backend=flash2"),
        ({"gpus": [0, 1], "nproc_per_node": 4}, [H100] * 4, "environment.gpus"),
    ],
)
def test_wrong_settings_are_refused_by_their_keys(tmp_path, requested, gpus, key):
    machine = lay_out(tmp_path, gpus=gpus)
    with pytest.raises(ConfigError) as refused:
        plan_environment(
            settings(requested), probe(tmp_path, settings(requested), machine)
        )
    assert key in str(refused.value)
    answer = report(machine, tmp_path, environment=requested)
    assert answer.exit_code == 64 and json.dumps(answer.to_json())


def test_a_fixed_port_that_is_busy_is_refused(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        requested = settings({"master_port": port})
        with pytest.raises(ConfigError, match=f"environment.master_port={port}"):
            plan_environment(requested, probe(tmp_path, requested, lay_out(tmp_path)))
    assert plan_environment(requested, probe(tmp_path, requested)).port == port


GPUS = {"gpus": [{"name": "H100", "capability": [9, 0]}], "nccl": True}
ANSWER = f"print('noise'); print('''{json.dumps(GPUS)}''')"


@pytest.mark.parametrize(
    ("program", "seconds", "expected"),
    [
        (ANSWER, 60, GpuFacts(gpus=(Gpu(name="H100", capability=(9, 0)),), nccl=True)),
        (
            "raise RuntimeError('driver too old')",
            60,
            GpuFacts(gpus=(), gpu_fault="RuntimeError: driver too old"),
        ),
        (
            "import os; os.abort()",
            60,
            GpuFacts(gpus=(), gpu_fault="torch ended with code -6"),
        ),
        (
            "import time; time.sleep(60)",
            0.3,
            GpuFacts(gpus=(), gpu_fault="torch did not answer within 0.3 seconds"),
        ),
    ],
)
def test_the_child_that_probes_torch_may_answer_fail_die_or_hang(
    tmp_path, program, seconds, expected
):
    assert gpus(with_driver(tmp_path, gpu_probe=("-c", program)), seconds) == expected


def test_the_real_probe_runs(tmp_path):
    """On a machine with a GPU it describes it; on one without, torch says so in a sentence."""
    answer = gpus(with_driver(tmp_path))
    assert answer.gpus or any(word in answer.gpu_fault for word in ("CUDA", "NVIDIA"))


def test_an_installed_flash_attn_is_imported_without_a_gpu(tmp_path):
    package = tmp_path / "site" / "flash_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "raise ImportError('libcudart.so.11.0: cannot open shared object file')"
    )
    paths = os.pathsep.join((str(package.parent), os.environ.get("PYTHONPATH", "")))
    found = gpus(
        Machine(root=tmp_path, environ=dict(os.environ) | {"PYTHONPATH": paths})
    )
    assert not found.gpus and "CUDA 11.0" in (found.flash_attention or "")


@pytest.mark.parametrize(
    "requested", [{"device": "cuda"}, {"device": "cpu"}, {"nproc_per_node": 2}]
)
def test_the_same_command_again_has_the_plan_that_it_had(tmp_path, requested):
    with_gpus = requested != {"nproc_per_node": 2}
    machine = lay_out(tmp_path / "machine", gpus=[H100] * 4 if with_gpus else [])
    other = "cpu" if requested == {"device": "cuda"} else "auto"
    begun(settings({"device": other}), tmp_path, "run", machine=machine)
    first, second = (
        begun(settings(requested), tmp_path, "run", machine=machine).pinned()
        for _ in range(2)
    )
    assert second == first
    assert first.threads * first.nproc_per_node <= 8
