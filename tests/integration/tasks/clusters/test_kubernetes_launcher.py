"""The Kubernetes launcher against a server that answers as the API does: create, conflict, watch, 410, deletion, refusals."""

import json
import time
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError, TrainFailed
from infini_llama.configs.schema import EnvironmentConfig, KubernetesConfig
from infini_llama.tasks.clusters import kubernetes
from infini_llama.tasks.clusters.launchers import ConfiguredLauncher
from infini_llama.tasks.clusters.manifests import name_of
from infini_llama.tasks.clusters.node_records import read_submitted
from infini_llama.tasks.records.cluster import SubmittedJob
from support.kubernetes_server import Cluster
from support.records import make_plan

PLAN = make_plan(
    **{
        "env": {"OMP_NUM_THREADS": "1"},
        "nnodes": 2,
        "nproc_per_node": 4,
        "threads": 2,
        "device": "cuda",
        "port": "auto",
    }
)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    made = Cluster(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig()))
    monkeypatch.setattr(kubernetes, "AGAIN_SECONDS", 0.05)
    yield made
    made.close()


@pytest.fixture
def attempt_dir(tmp_path) -> Path:
    path = tmp_path / "home" / "runs" / "My_run.1" / "logs" / "attempt-01"
    path.mkdir(parents=True)
    return path


def settings(attempt_dir: Path, **changed) -> KubernetesConfig:
    own = {"image": "registry.example/infini-llama:1", "claim": "state", "mount_path": str(attempt_dir.parents[3])}
    return KubernetesConfig(**(own | changed))


def start(attempt_dir: Path, **changed):
    return kubernetes.start(attempt_dir, settings(attempt_dir, **changed), PLAN, 30.0)


def submitted(attempt_dir: Path) -> SubmittedJob:
    found = read_submitted(attempt_dir)
    assert found is not None
    return found


def wait_for(condition) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_name_is_on_record_before_the_job_is_created_and_its_conditions_are_its_end(
    cluster, attempt_dir, monkeypatch
):
    create, seen = cluster.create, []
    monkeypatch.setattr(cluster, "create", lambda *given: (seen.append(submitted(attempt_dir)), create(*given))[1])
    job = start(attempt_dir)
    name = name_of(attempt_dir)
    assert (seen[0].name, seen[0].uid, seen[0].namespace) == (name, None, "team")
    assert submitted(attempt_dir).uid == cluster.objects["jobsets", "team", name]["metadata"]["uid"]
    assert job.poll() is None
    cluster.set_condition("jobsets", "team", name, "Completed")
    wait_for(lambda: job.poll() == 0)
    assert job.cancelled() is None
    job.end()  # nothing is deleted that has ended by itself
    assert not any(method == "DELETE" for method, *_ in cluster.requests)


def test_a_failed_job_reports_its_cause(cluster, attempt_dir, caplog):
    job = start(attempt_dir)
    cluster.set_condition("jobsets", "team", name_of(attempt_dir), "Failed", "BackoffLimitExceeded")
    wait_for(lambda: job.over.is_set())
    assert job.poll() == 1
    assert "failed: BackoffLimitExceeded" in caplog.text


def test_a_watch_resumes_from_its_version_and_lists_again_after_410(cluster, attempt_dir):
    job = start(attempt_dir)
    wait_for(lambda: cluster.watches)
    cluster.set_condition("jobsets", "team", name_of(attempt_dir), "StartupPolicyCompleted")
    cluster.expire_versions()
    wait_for(lambda: len(cluster.watches) >= 2)
    polls = [path for method, path, _ in cluster.requests if method == "GET" and path.endswith(name_of(attempt_dir))]
    assert len(polls) >= 1  # it was read again, and watched from there
    assert cluster.watches[-1] > cluster.watches[0]
    assert job.poll() is None and not job.message  # which happens every some minutes, and is no fault
    cluster.forgotten = 0
    cluster.set_condition("jobsets", "team", name_of(attempt_dir), "Completed")
    wait_for(lambda: job.poll() == 0)


def test_a_job_created_by_a_killed_command_is_found_by_its_conflict(cluster, attempt_dir):
    start(attempt_dir)
    again = start(attempt_dir)
    assert len(cluster.objects) == 1
    cluster.set_condition("jobsets", "team", name_of(attempt_dir), "Completed")
    wait_for(lambda: again.poll() == 0)


def test_a_foreign_job_of_the_same_name_is_refused(cluster, attempt_dir):
    start(attempt_dir)
    found = cluster.objects["jobsets", "team", name_of(attempt_dir)]
    found["metadata"]["annotations"] = {"infini-llama/attempt": "/elsewhere"}
    with pytest.raises(ConfigError, match="already exists and does not belong to"):
        start(attempt_dir)


def test_the_next_command_attaches_to_a_running_or_ended_job(cluster, attempt_dir):
    launcher = ConfiguredLauncher(EnvironmentConfig(kubernetes=settings(attempt_dir)))
    start(attempt_dir)
    living = launcher.attach(attempt_dir)
    assert living is not None and living.poll() is None
    cluster.set_condition("jobsets", "team", name_of(attempt_dir), "Completed")
    wait_for(lambda: living.poll() == 0)
    ended = launcher.attach(attempt_dir)
    assert ended is not None and ended.poll() == 0


def test_a_recorded_job_that_was_never_created_is_ignored(cluster, attempt_dir):
    cluster.forbidden = "POST"
    with pytest.raises(ConfigError):
        start(attempt_dir)
    assert submitted(attempt_dir).name == name_of(attempt_dir)
    assert ConfiguredLauncher(EnvironmentConfig(kubernetes=settings(attempt_dir))).attach(attempt_dir) is None


def test_a_job_deleted_while_unwatched_has_ended(cluster, attempt_dir):
    start(attempt_dir)
    cluster.delete("jobsets", "team", name_of(attempt_dir))
    wait_for(lambda: not cluster.objects)
    found = ConfiguredLauncher(EnvironmentConfig(kubernetes=settings(attempt_dir))).attach(attempt_dir)
    assert found is not None and found.poll() == 1


def test_deletion_from_outside_is_a_cancellation(cluster, attempt_dir):
    job = start(attempt_dir)
    cluster.delete("jobsets", "team", name_of(attempt_dir))
    wait_for(lambda: job.poll() is not None)
    message = job.cancelled()
    assert message is not None and "was deleted" in message


def test_a_stop_request_deletes_the_job_and_waits_for_its_end(cluster, attempt_dir):
    job = start(attempt_dir)
    job.stop(5.0)
    assert job.poll() == 1 and not cluster.objects and job.cancelled() is None
    assert [body for method, _, body in cluster.requests if method == "DELETE"] == [{"propagationPolicy": "Foreground"}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token": "another"}, "rejected the credentials (401"),
        (
            {"forbidden": "POST"},
            "the account needs create, get, list, watch and delete on jobsets.jobset.x-k8s.io in namespace team",
        ),
    ],
)
def test_refusals_are_sentences(cluster, attempt_dir, change, words):
    for name, value in change.items():
        setattr(cluster, name, value)
    with pytest.raises(ConfigError) as refused:
        start(attempt_dir)
    assert words in str(refused.value)


def test_a_server_that_is_away_for_a_while_does_not_end_the_job(cluster, attempt_dir, caplog):
    job = start(attempt_dir)
    cluster.token = "rotated"
    cluster.expire_versions()
    wait_for(lambda: job.message)
    assert job.poll() is None
    assert "401" in caplog.text and "may still be running" in caplog.text
    cluster.token, cluster.forgotten = "secret-token", 0
    cluster.set_condition("jobsets", "team", name_of(attempt_dir), "Completed")
    wait_for(lambda: job.poll() == 0)


def test_a_missing_answer_is_retried(attempt_dir, cluster):
    cluster.close()
    with pytest.raises(TrainFailed, match="does not answer") as failed:
        start(attempt_dir)
    assert failed.value.retryable


def test_without_a_cluster_there_is_a_sentence(attempt_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="no cluster is configured here"):
        start(attempt_dir)


def test_sent_parts_equal_the_built_parts(cluster, attempt_dir):
    start(attempt_dir, labels={"kueue.x-k8s.io/queue-name": "gpus"})
    _, path, body = cluster.requests[0]
    assert path == "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets"
    assert body["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert json.dumps(body)
