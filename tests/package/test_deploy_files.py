"""What the files in deploy/ promise, and no linter checks."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from infini_llama.configs.errors import ENDINGS, ExitCode
from infini_llama.configs.loading import parse_config
from infini_llama.configs.schema import RuntimeConfig
from infini_llama.flows.settings import LEASES, SERVER
from infini_llama.tasks.train.stopping import COMMAND_END_SECONDS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
RESOURCES = [
    path
    for path in sorted((DEPLOY / "k8s").glob("*.yaml"))
    if path.name[:2] not in ("ku", "tr")
]


def documents(text: str) -> list[dict]:
    return [document for document in yaml.safe_load_all(text) if document]


def images() -> list[str]:
    names = [service["image"] for service in COMPOSE["services"].values()]
    names += re.findall(
        r"^FROM (\S+)",
        "\n".join(path.read_text() for path in DEPLOY.glob("Dockerfile.*")),
        re.M,
    )
    kustomized = {
        image["name"]
        for image in yaml.safe_load((DEPLOY / "k8s/kustomization.yaml").read_text())[
            "images"
        ]
    }
    names += [
        name
        for path in RESOURCES
        for name in re.findall(r"image: (\S+)", path.read_text())
    ]
    return [
        name for name in names if "${" not in name and name not in kustomized | {"base"}
    ]


def test_images_are_pinned():
    assert len(images()) > 6
    assert all(re.search(r":\d+\.\d+", name) for name in images()), images()


def test_no_port_is_exposed():
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for path in RESOURCES:
        for resource in documents(path.read_text()):
            assert resource["kind"] != "Ingress"
            assert (
                resource["kind"] != "Service"
                or resource["spec"].get("type", "ClusterIP") == "ClusterIP"
            )


def test_a_server_refuses_other_origins():
    for path in (
        DEPLOY / "compose.yaml",
        DEPLOY / "k8s/server.yaml",
        DEPLOY / "systemd/infini-llama-server.service",
    ):
        origins = re.findall(
            r"PREFECT_SERVER_CORS_ALLOWED_ORIGINS[=:] ?(\S+)", path.read_text()
        )
        assert origins and all(
            origin.startswith("http://127.0.0.1:") for origin in origins
        ), path


def test_no_secret_is_written_down():
    for name, service in COMPOSE["services"].items():
        for key, value in service.get("environment", {}).items():
            if "PASSWORD" in key or "AUTH_STRING" in key or "CONNECTION_URL" in key:
                assert "${" in value, (name, key)
    assert all(
        line.endswith("=")
        for line in (DEPLOY / ".env.example").read_text().splitlines()
        if "=" in line[:30]
    )


def test_nothing_runs_as_root():
    for path in DEPLOY.glob("Dockerfile.*"):
        final = path.read_text().rsplit("FROM", 1)[1]
        assert "USER 10001" in final
    for path in RESOURCES:
        for resource in documents(path.read_text()):
            pod = resource.get("spec", {}).get("template", {}).get("spec")
            assert pod is None or pod["securityContext"]["runAsNonRoot"] is True, path


def test_every_long_running_service_has_a_health_check():
    without = {
        name
        for name, service in COMPOSE["services"].items()
        if "healthcheck" not in service
    }
    # Which listen nowhere; they end where they cannot go on, and are restarted.
    assert without == {"services", "worker", "worker-gpu"}


def test_a_worker_may_take_as_long_to_stop_as_it_gives_its_runs():
    from infini_llama.flows.serving import STOP_SECONDS

    # They are cancelled, and what is then left is stopped.
    allowed = 2 * STOP_SECONDS
    assert RuntimeConfig().grace_period + COMMAND_END_SECONDS < STOP_SECONDS
    assert (
        int(COMPOSE["services"]["worker"]["stop_grace_period"].removesuffix("s"))
        > allowed
    )
    (worker,) = [
        d
        for d in documents((DEPLOY / "k8s/worker.yaml").read_text())
        if d["kind"] == "Deployment"
    ]
    assert worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > allowed
    unit = (DEPLOY / "systemd/infini-llama-worker.service").read_text()
    assert int(re.search(r"TimeoutStopSec=(\d+)", unit)[1]) > allowed


def variables_of(path: Path) -> dict[str, str]:
    """Environment variables of the servers of one file in deploy/."""
    if path.suffix == ".service":
        return dict(re.findall(r"^Environment=([A-Z_]+)=(.*)$", path.read_text(), re.M))
    if path.name == "compose.yaml":
        return COMPOSE["services"]["server"]["environment"]
    (settings,) = [
        document["data"]
        for document in documents(path.read_text())
        if document["kind"] == "ConfigMap"
    ]
    return settings


@pytest.mark.parametrize(
    "file", ["compose.yaml", "k8s/server.yaml", "systemd/infini-llama-server.service"]
)
def test_the_settings_of_servers_have_one_source(file):
    variables = variables_of(DEPLOY / file)
    assert {name: variables.get(name) for name in SERVER} == SERVER
    assert variables["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"] in (
        *LEASES.values(),
        "prefect_redis.lease_storage",
    ), "in memory by default"


SHOW_UI = """
import pathlib
import prefect
prefect.__ui_static_subpath__ = prefect.__ui_v2_static_subpath__ = pathlib.Path("/proc/of-another-user")
from fastapi.testclient import TestClient
from prefect.server.api.server import create_ui_app
client = TestClient(create_ui_app(ephemeral=False))
settings = client.get("/ui-settings").json()
print(client.get("/").status_code, client.get("/v2/").status_code, settings["available_uis"])
"""


@pytest.mark.parametrize(
    "file", ["compose.yaml", "k8s/server.yaml", "systemd/infini-llama-server.service"]
)
def test_a_server_that_may_write_to_tmp_alone_has_its_pages(tmp_path, file):
    settings = variables_of(DEPLOY / file)
    if "systemd" not in file:
        (stage,) = re.findall(
            r"^FROM base AS server\n(.*?)^FROM",
            (DEPLOY / "Dockerfile.cpu").read_text(),
            re.M | re.S,
        )
        settings |= dict(re.findall(r"^ENV (\w+)=(\S+)$", stage, re.M))
    settings = {
        name: value.replace("/tmp/", f"{tmp_path}/")
        for name, value in settings.items()
        if "_UI_" in name
    }
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PREFECT_")
    }
    # Fmt: skip.
    done = subprocess.run(
        [sys.executable, "-c", SHOW_UI],
        env=own | settings | {"PREFECT_HOME": str(tmp_path / "home")},
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "200 200 ['v1', 'v2']\n", done.stdout + done.stderr


def test_every_worker_is_one_that_lets_its_runs_save_a_checkpoint():
    """Prefect's own kills them when it is stopped."""
    (worker,) = [
        d
        for d in documents((DEPLOY / "k8s/worker.yaml").read_text())
        if d["kind"] == "Deployment"
    ]
    commands = [
        COMPOSE["services"]["worker"]["command"],
        COMPOSE["services"]["worker-gpu"]["command"],
        worker["spec"]["template"]["spec"]["containers"][0]["command"],
    ]
    assert commands == [["infini-llama", "serve"]] * 3
    unit = (DEPLOY / "systemd/infini-llama-worker.service").read_text()
    assert re.search(r"^ExecStart=\S+/infini-llama serve$", unit, re.M)


def test_prefect_yaml_is_what_deploy_would_make_of_its_configuration(monkeypatch):
    from infini_llama.flows.deployments import PENDING_FOR, Deployment

    monkeypatch.delenv("PYTHONPATH", raising=False)
    (file,) = yaml.safe_load((DEPLOY / "prefect.yaml").read_text())["deployments"]
    path, function = file["entrypoint"].split(":")
    assert f"def {function}(" in (ROOT / path).read_text()
    limit = {"deployment": {"concurrency_limit": file["concurrency_limit"]["limit"]}}
    ours = Deployment(
        file["name"], parse_config(file["parameters"]["config"] | limit)
    ).to_prefect()
    assert (file["description"], file["tags"]) == (ours.description, ours.tags)
    assert ours.version and file["version"] == ours.version.partition("+")[0]
    assert file["work_pool"]["name"] == ours.work_pool_name
    assert ours.concurrency_options
    options = ours.concurrency_options.model_dump(mode="json")
    assert file["concurrency_limit"] == {"limit": ours.concurrency_limit} | options
    assert options["grace_period_seconds"] == PENDING_FOR.total_seconds(), (
        "as long as a run may be pending"
    )
    # the folder of a run is set by the step `pull`
    variables = {
        name: value
        for name, value in ours.job_variables.items()
        if name != "working_dir"
    }
    assert file["work_pool"]["job_variables"] == variables


@pytest.mark.parametrize("name", ["worker", "run@"])
def test_a_unit_that_trains_can_write_the_temporary_folder_of_all_units(name):
    unit = (DEPLOY / f"systemd/infini-llama-{name}.service").read_text()
    assert re.search(r"^ReadWritePaths=/tmp /var/tmp$", unit, re.M), (
        "ProtectSystem=strict makes it read-only"
    )
    assert "\nPrivateTmp" not in unit, "the locks of GPUs are there"


@pytest.mark.parametrize(
    "arguments", [[], ["hooks.example.com/services"], ["http://127.0.0.1:9/"]]
)
def test_a_notification_without_an_address_or_a_server_is_refused(tmp_path, arguments):
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PREFECT_")
    }
    environment |= {"HOME": str(tmp_path), "PREFECT_HOME": str(tmp_path)}
    # Fmt: skip.
    done = subprocess.run(
        [sys.executable, DEPLOY / "notifications.py", *arguments],
        env=environment,
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (
        done.returncode == 1
        and "Traceback" not in done.stderr
        and len(done.stderr.splitlines()) == 1
    )
    assert [path.name for path in tmp_path.iterdir()] == []


FINAL = {int(code) for code, ending in ENDINGS.items() if not ending.should_requeue}


def test_a_job_goes_back_into_the_queue_after_every_code_but_final_ones():
    script = (DEPLOY / "train.sbatch").read_text()
    final = re.search(r"^ +(\d+(?: \| \d+)*)\) ;;", script, re.M)
    assert final and {int(code) for code in final[1].split(" | ")} == FINAL


def test_systemd_restarts_a_run_after_every_code_but_final_ones():
    unit = (DEPLOY / "systemd/infini-llama-run@.service").read_text()
    final = re.search(r"^RestartPreventExitStatus=(.*)$", unit, re.M)
    assert final and {int(code) for code in final[1].split()} == FINAL - {
        ExitCode.FINISHED
    }
    stopped = {ExitCode.PREEMPTED, 128 + signal.SIGTERM}
    for setting in ("SuccessExitStatus", "RestartForceExitStatus"):
        codes = re.search(rf"^{setting}=(.*)$", unit, re.M)
        assert codes and {int(code) for code in codes[1].split()} == stopped
