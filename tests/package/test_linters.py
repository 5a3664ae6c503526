"""Every file in deploy/ passes its linter."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent


def passes(*command: object) -> None:
    result = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_yaml():
    passes(BIN / "yamllint", "--strict", DEPLOY)


def test_dockerfiles():
    passes(BIN / "hadolint", *sorted(DEPLOY.glob("Dockerfile.*")))


def test_compose_schema():
    passes(
        BIN / "check-jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        DEPLOY / "compose.yaml",
    )


def test_shell_scripts():
    scripts = [
        *sorted(DEPLOY.glob("*.sbatch")),
        *sorted((ROOT / "scripts").glob("*.sh")),
    ]
    passes(BIN / "shellcheck", *scripts)


def test_kubernetes_resources():
    passes(BIN / "kubernetes-validate", "--strict", *DEPLOY.glob("k8s/[!kt]*.yaml"))


@pytest.mark.skipif(
    not shutil.which("kubectl"),
    reason="the manifests are built by the program that reads them: needs kubectl on PATH, no cluster",
)
def test_kustomization_is_whole(tmp_path):
    built = subprocess.run(
        ["kubectl", "kustomize", DEPLOY / "k8s"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (tmp_path / "all.yaml").write_text(built.stdout)
    passes(BIN / "kubernetes-validate", "--strict", tmp_path / "all.yaml")
    assert all(
        resource["metadata"].get("namespace", "infini-llama") == "infini-llama"
        for resource in filter(None, yaml.safe_load_all(built.stdout))
    )


@pytest.mark.skipif(
    not shutil.which("systemd-analyze"),
    reason="the units are judged by the program that reads them: needs systemd-analyze on PATH",
)
def test_units(tmp_path):
    for unit in (DEPLOY / "systemd").glob(
        "*.service"
    ):  # verify wants the programs to be there
        (tmp_path / unit.name).write_text(
            unit.read_text().replace("/opt/infini-llama/.venv/bin", str(BIN))
        )
    passes("systemd-analyze", "verify", "--man=no", *sorted(tmp_path.iterdir()))
