"""Whole machines from their raw readings to the plan and its sentences."""

import json
import socket
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.patch_environment.doctor import DoctorReport, doctor
from infini_llama.tasks.patch_environment.planning.plan import resolve
from infini_llama.tasks.patch_environment.probe.probe import probe
from infini_llama.tasks.patch_environment.stage import patch_environment
from infini_llama.tasks.records.plan import Finding
from support.machines import GIB, H100, T4, in_home, lay_out, settings

GLIBC = "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by flash_attn_2_cuda.so)"


def report(machine, home, **requested):
    return doctor(settings(**requested), Path(home), machine=machine)


def findings(report: DoctorReport) -> dict[str, Finding]:
    return {found.name: found for found in report.findings}


def test_no_gpu(tmp_path):
    machine = lay_out(tmp_path)
    plan = report(machine, tmp_path).plan
    assert (plan.device, plan.nproc_per_node, plan.threads, plan.precision) == ("cpu", 1, 8, "bf16")
    assert (plan.attention_backend, plan.allocator, plan.compile) == ("sdpa", "glibc", "off")
    assert "AMX" in plan.reasons["precision"]


def test_four_gpus_with_one_busy(tmp_path):
    machine = lay_out(tmp_path, gpus=[H100] * 4, busy=2)
    found = report(machine, tmp_path, train={"global_batch_size": 24, "micro_batch_size": 8})
    plan = found.plan
    assert (plan.device, plan.gpus, plan.nproc_per_node) == ("cuda", (0, 1, 3), 3)
    assert plan.env["CUDA_VISIBLE_DEVICES"] == "0,1,3" and plan.distributed_backend == "nccl"
    assert plan.env["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1" and plan.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "4242" in findings(found)["GPU 2"].sentence and found.exit_code == 0
    assert findings(found)["between GPUs"].value == "NVLink"
    forced = report(machine, tmp_path, environment={"gpus": [2]}, train={"global_batch_size": 8})
    assert forced.plan.gpus == (2,) and findings(forced)["GPU 2 in the plan"].severity == "warning"
    everywhere = report(machine, tmp_path, environment={"nproc_per_node": 4}).plan
    assert everywhere.gpus == (0, 1, 2, 3) and "CUDA_VISIBLE_DEVICES" not in everywhere.env


def test_an_old_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "infini_llama.tasks.patch_environment.probe.probe.torch_cuda", lambda: "12.8"
    )  # this machine's torch may have no CUDA
    machine = lay_out(
        tmp_path, gpus=[H100], driver=("470.82", "11.4"), fault="The NVIDIA driver on your system is too old"
    )
    found = report(machine, tmp_path)
    assert found.plan.device == "cpu" and found.exit_code == 64
    driver = findings(found)["driver"]
    assert "12.8" in driver.sentence and "11.4" in driver.sentence
    assert "too old" in findings(found)["GPUs"].sentence


@pytest.mark.parametrize(
    ("package", "backend", "severity", "words"),
    [
        (f"raise ImportError({GLIBC!r})", "flash2", "warning", "glibc 2.38"),
        (None, "flash2", "warning", "another package"),
    ],
)
def test_flash_attn_that_cannot_be_used(tmp_path, monkeypatch, caplog, package, backend, severity, words):
    folder = tmp_path / "site" / "flash_attn"
    (folder / "cute").mkdir(parents=True)
    (folder / "cute" / "__init__.py").write_text("def flash_attn_varlen_func(*arguments, **options): ...")
    if package:
        (folder / "__init__.py").write_text(package)
    machine = lay_out(tmp_path, gpus=[H100], flash=folder.parent)
    facts = probe(tmp_path, settings(), machine)  # once: it imports torch in a process of its own
    monkeypatch.setattr("infini_llama.tasks.patch_environment.doctor.probe", lambda *_, **__: facts)
    found = report(machine, tmp_path)
    assert found.plan.attention_backend == "sdpa"
    finding = findings(found)[f"attention by {backend}"]
    assert finding.severity == severity and words in finding.sentence
    monkeypatch.setattr("infini_llama.tasks.patch_environment.stage.probe", lambda *_: facts)
    with caplog.at_level("INFO", "infini_llama.environment"):
        plan = patch_environment(in_home(settings(), tmp_path), "run").plan
    reason = plan.reasons["attention_backend"]
    assert [line.args for line in caplog.records if reason in line.getMessage()] == [(plan.attention_backend, reason)]
    refused = report(machine, tmp_path, environment={"attention_backend": backend})
    assert refused.exit_code == 64 and refused.plan is None
    assert refused.findings[0].sentence.startswith("environment.attention_backend=flash2")


def test_a_tiny_dev_shm(tmp_path):
    found = report(lay_out(tmp_path, gpus=[H100] * 2, shared_memory=64 * 1024**2), tmp_path)
    assert "--shm-size" in findings(found)["/dev/shm"].sentence and found.plan.nproc_per_node == 2


def test_a_disk_that_cannot_be_written(tmp_path):
    found = report(lay_out(tmp_path), "/proc/nowhere")
    assert found.exit_code == 64 and "runtime.home" in findings(found)["disk"].sentence


def test_a_network_disk_with_a_different_clock(tmp_path):
    mounts = f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n"
    found = report(lay_out(tmp_path, {"proc/self/mounts": mounts}, clock=90.0), tmp_path)
    assert findings(found)["file system"].severity == "warning" and found.exit_code == 0
    assert findings(found)["clock"].value.startswith("90") and "NTP" in findings(found)["clock"].sentence


def test_a_control_group_of_1_gb(tmp_path):
    limit = {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": f"{GIB // 2}\n"}
    found = report(lay_out(tmp_path, limit), tmp_path, train={"micro_batch_size": "auto"})
    assert findings(found)["memory available"].severity == "warning"
    assert found.plan.micro_batch_size == 1 and found.plan.nproc_per_node == 1
    assert findings(found)["memory"].severity == "warning"
    roomy = report(lay_out(tmp_path / "roomy"), tmp_path, train={"micro_batch_size": "auto"}).plan
    assert roomy.micro_batch_size > 1


def test_no_compiler(tmp_path):
    machine = lay_out(tmp_path, compiler=False)
    found = report(machine, tmp_path)
    assert "apt install g++" in findings(found)["compiler"].sentence and found.plan.compile == "off"
    refused = report(machine, tmp_path, train={"compile": "block"})
    assert "train.compile=block" in refused.findings[0].sentence


def test_other_runs_and_low_limits(tmp_path):
    job = "/home/x/workspace/runs/big/logs/attempt-01/resolved.json"
    files = {
        "proc/77/cmdline": f"python\0-m\0infini_llama.tasks.train.worker\0{job}\0",
        "proc/78/cmdline": f"python\0-m\0torch.distributed.run\0--module\0infini_llama.tasks.train.worker\0{job}\0",
        "proc/self/limits": "Max open files            256                  4096  files\nMax file size   1073741824  unlimited  bytes\n",
    }
    found = findings(report(lay_out(tmp_path, files), tmp_path))
    assert found["other runs"].value == "big (1 worker(s))" and found["open files"].severity == "warning"
    assert "ulimit -f unlimited" in found["largest file"].sentence


@pytest.mark.parametrize(
    ("requested", "gpus", "words"),
    [
        ({"gpus": [7]}, [H100] * 4, "environment.gpus"),
        ({"precision": "bf16"}, [T4], "environment.precision=bf16"),
        ({"distributed_backend": "nccl"}, None, "environment.distributed_backend=nccl"),
        ({"gpus": [0]}, None, "environment.gpus"),
        ({"attention_backend": "flash2"}, None, "environment.attention_backend=flash2"),
        ({"allocator": "jemalloc"}, None, "environment.allocator=jemalloc"),
        ({"gpus": [0, 1], "nproc_per_node": 4}, [H100] * 4, "environment.gpus"),
    ],
)
def test_wrong_settings_are_refused_by_their_keys(tmp_path, requested, gpus, words):
    machine = lay_out(tmp_path, gpus=gpus)
    with pytest.raises(ConfigError) as refused:
        resolve(settings(requested), probe(tmp_path, settings(requested), machine))
    assert words in str(refused.value)
    answer = report(machine, tmp_path, environment=requested)
    assert answer.exit_code == 64 and json.dumps(answer.to_json())


def test_a_fixed_port_that_is_busy_is_refused(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        requested = settings({"master_port": port})
        with pytest.raises(ConfigError, match=f"environment.master_port={port}"):
            resolve(requested, probe(tmp_path, requested, lay_out(tmp_path)))
    assert resolve(requested, probe(tmp_path, requested)).port == port
