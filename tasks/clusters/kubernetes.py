"""The workers as a JobSet: created under a name that is known beforehand, watched, and deleted to stop them."""

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from infini_llama.configs.errors import ConfigError, TrainFailed
from infini_llama.configs.schema.launchers import KubernetesConfig
from infini_llama.tasks.clusters.manifests import ATTEMPT, ENDING, manifest, name_of
from infini_llama.tasks.clusters.node_records import read_job, write_job
from infini_llama.tasks.clusters.rendezvous import Nodes
from infini_llama.tasks.records.plan import EnvironmentPlan

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
ANSWER_SECONDS = 30.0  # that one answer may take
WATCH_SECONDS = 240  # after which a watch is renewed; the API server ends one by itself after 5 to 10 minutes
AGAIN_SECONDS = 2.0  # until the API server is asked again after a failure
ENDING_SECONDS = 600.0  # after which a job that does not go away is reported, not waited for
GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
log = logging.getLogger("infini_llama.train")


def start(attempt_dir: Path, section: KubernetesConfig, plan: EnvironmentPlan, grace_period: float) -> "KubernetesJob":
    """Creates the job of an attempt, or takes the one that is there already, when an earlier command died in between.

    Raises:
        ConfigError: the cluster refuses it, or is not known.
        TrainFailed: the API server does not answer.
    """
    place = connect(section.context, section.namespace, name_of(attempt_dir))
    body = manifest(attempt_dir, section, place.namespace, plan, grace_period)
    own = {"launcher": "kubernetes", "name": place.name, "namespace": place.namespace}
    write_job(attempt_dir, **own, context=section.context, uid=None)
    try:
        found = _asked(lambda: place.create(body))
    except ApiException as refused:
        if refused.status != 409:
            raise _sentence(refused, place) from refused
        found = _asked(place.get)
        if found["metadata"].get("annotations", {}).get(ATTEMPT) != str(attempt_dir):
            raise ConfigError(
                f"{place} already exists and does not belong to {attempt_dir}; delete it, or use another "
                "environment.kubernetes.namespace."
            ) from refused
    write_job(attempt_dir, uid=found["metadata"]["uid"])
    log.info("%s is created", place)
    return KubernetesJob(attempt_dir, place, found)


def attach(attempt_dir: Path, section: KubernetesConfig) -> "KubernetesJob | None":
    """The job of an attempt, living or ended; None where it was never created.

    Args:
        section: environment.kubernetes, whose context reaches the cluster where the record names none.

    Raises:
        TrainFailed: the API server does not answer, so the state is unknown.
    """
    known = read_job(attempt_dir)
    place = connect(known["context"] or section.context, known["namespace"], known["name"])
    try:
        found = _asked(place.get)
    except ApiException as error:
        if error.status != 404:
            raise _sentence(error, place) from error
        if known["uid"] is None:
            return None
        gone = KubernetesJob(attempt_dir, place, None)
        gone.end()
        return gone
    write_job(attempt_dir, uid=found["metadata"]["uid"])
    return KubernetesJob(attempt_dir, place, found)


@dataclass(frozen=True)
class Place:
    """Where one job is in the API."""

    api: Any  # CustomObjectsApi, whose answers are dicts although its signatures say anything
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{PLURAL}/{self.name} in namespace {self.namespace}"

    def _at(self) -> tuple[str, str, str, str]:
        return GROUP, VERSION, self.namespace, PLURAL

    def create(self, body: dict) -> dict:
        return self.api.create_namespaced_custom_object(*self._at(), body, _request_timeout=ANSWER_SECONDS)

    def get(self) -> dict:
        return self.api.get_namespaced_custom_object(*self._at(), self.name, _request_timeout=ANSWER_SECONDS)

    def delete(self) -> None:
        """The object goes once its pods have gone, which have their own grace period."""
        options = client.V1DeleteOptions(propagation_policy="Foreground")
        self.api.delete_namespaced_custom_object(*self._at(), self.name, body=options, _request_timeout=ANSWER_SECONDS)

    def events(self, stream: watch.Watch, version: str) -> Any:
        return stream.stream(
            self.api.list_namespaced_custom_object,
            *self._at(),
            field_selector=f"metadata.name={self.name}",
            resource_version=version,
            timeout_seconds=WATCH_SECONDS,
            _request_timeout=WATCH_SECONDS + ANSWER_SECONDS,
        )


def connect(context: str | None, namespace: str | None, name: str) -> Place:
    """The way to a cluster: by a pod's own account, or by the kubeconfig ($KUBECONFIG, ~/.kube/config).

    Raises:
        ConfigError: there is neither.
    """
    settings = client.Configuration()
    try:
        if context is None and OWN_NAMESPACE.exists():
            config.load_incluster_config(client_configuration=settings)
            namespace = namespace or OWN_NAMESPACE.read_text(encoding="utf-8").strip()
        else:
            file = os.environ.get("KUBECONFIG")  # the client itself only looks at its import
            config.load_kube_config(config_file=file, context=context, client_configuration=settings)
            known: Any = config.list_kube_config_contexts(config_file=file)
            contexts, current = known
            chosen = next(one for one in contexts if one["name"] == (context or current["name"]))
            namespace = namespace or chosen["context"].get("namespace") or "default"
    except ConfigException as error:
        raise ConfigError(
            f"environment.launcher=kubernetes, but no cluster is configured here ({error}); set KUBECONFIG or "
            "environment.kubernetes.context, or run this in a pod of the cluster."
        ) from error
    return Place(client.CustomObjectsApi(client.ApiClient(settings)), str(namespace), name)


class KubernetesJob(Nodes):
    """The job of an attempt, followed by a thread that reads the API's events.

    Args:
        found: the object as it was last seen; None: it is gone.
    """

    detached = True

    def __init__(self, attempt_dir: Path, place: Place, found: dict | None) -> None:
        self.attempt_dir, self.place = attempt_dir, place
        self.code: int | None = None
        self.deleted, self.said, self.told = False, "", ""
        self.by_us = found is None
        self.over = threading.Event()
        if found is None:
            self._has_gone()
            return
        self._learn(found)
        version = found["metadata"]["resourceVersion"]
        self.thread = threading.Thread(target=self._follow, args=(version,), name="kubernetes", daemon=True)
        self.thread.start()

    def poll(self) -> int | None:
        if self.said != self.told:  # by the main thread, whose lines belong to the run
            self.told = self.said
            log.warning("%s", self.told)
        return self.code

    def stop(self, grace_period: float) -> None:
        """The pods get SIGTERM and their own grace period, which is longer."""
        self._delete()
        self.over.wait(grace_period + ENDING)
        self.end()

    def end(self) -> None:
        if self.over.is_set():
            return
        self._delete()
        if not self.over.wait(ENDING_SECONDS):
            raise TrainFailed(f"{self.place} was not deleted in time; check its pods, and run the same command again.")

    def cancelled(self) -> str | None:
        return f"{self.place} was deleted" if self.deleted and not self.by_us else None

    def _delete(self) -> None:
        self.by_us = True
        try:
            self.place.delete()
        except ApiException as error:
            if error.status != 404:
                log.warning("%s", _sentence(error, self.place))
        except (HTTPError, OSError) as error:
            log.warning("%s could not be deleted (%s)", self.place, error)

    def _follow(self, version: str | None) -> None:
        """Learns of every change until the end. An API server that is silent, or has forgotten where we were, is asked anew."""
        while not self.over.is_set():
            try:
                version = self._read_events(version or self._look())
            except ApiException as error:
                version = None
                if error.status == 404:
                    self._has_gone()
                elif error.status != 410:  # Gone: what happened since that version is not known any more
                    self.said = f"{_sentence(error, self.place)} The job may still be running."
                    self.over.wait(AGAIN_SECONDS)
            except (HTTPError, OSError, ValueError) as error:
                version = None
                self.said = (
                    f"The Kubernetes API does not answer ({type(error).__name__}); {self.place} may still be running."
                )
                self.over.wait(AGAIN_SECONDS)

    def _look(self) -> str:
        """Learns how the job is now; returns the version from which on to watch."""
        found = self.place.get()
        self._learn(found)
        return found["metadata"]["resourceVersion"]

    def _read_events(self, version: str) -> str | None:
        """Follows one watch to its end; returns the version to carry on from, None where that is not known."""
        stream = watch.Watch()
        for event in self.place.events(stream, version):
            if event is None:  # a line that is no event
                return None
            if event["type"] == "DELETED":
                self._has_gone()
                return None
            if event["type"] != "BOOKMARK":
                self._learn(event["object"])
            version = event["object"]["metadata"]["resourceVersion"]
            if self.over.is_set():
                break
        return version

    def _learn(self, found: dict) -> None:
        """Whether it has ended, by its conditions. One that is being deleted has ended when it is gone."""
        if found["metadata"].get("deletionTimestamp"):
            return
        for condition in found.get("status", {}).get("conditions", []):
            if condition["status"] != "True":
                continue
            if condition["type"] == "Completed":
                self._has_ended(0)
            elif condition["type"] == "Failed":
                self.said = f"{self.place} failed: {condition.get('message') or condition.get('reason')}"
                self._has_ended(1)

    def _has_gone(self) -> None:
        self.deleted = True
        self._has_ended(1)

    def _has_ended(self, code: int) -> None:
        self.code = code if self.code is None else self.code
        self.over.set()


def _asked(question: Callable[[], dict]) -> dict:
    """The answer of the API server.

    Raises:
        TrainFailed: it does not answer.
    """
    try:
        return question()
    except (HTTPError, OSError) as error:
        raise TrainFailed(f"the Kubernetes API does not answer: {error}.") from error


def _sentence(error: ApiException, place: Place) -> ConfigError | TrainFailed:
    """What an answer means, and who can change it."""
    try:
        reason = json.loads(error.body or "{}").get("message") or error.reason
    except ValueError:
        reason = error.reason
    if error.status == 401:
        return ConfigError(
            f"the Kubernetes API rejected the credentials (401: {reason}); renew the login of the kubeconfig."
        )
    if error.status == 403:
        return ConfigError(
            f"the Kubernetes API does not allow it (403: {reason}); the account needs create, get, list, watch and delete on "
            f"{PLURAL}.{GROUP} in namespace {place.namespace} (deploy/k8s/worker.yaml)."
        )
    if error.status == 404:
        return ConfigError(
            f"the cluster has no {PLURAL}.{GROUP}, or no namespace {place.namespace} (404: {reason}); "
            "install its controller, or change environment.kubernetes."
        )
    if error.status == 422:
        return ConfigError(f"the Kubernetes API rejected {place} (422: {reason}); see environment.kubernetes.")
    return TrainFailed(f"the Kubernetes API failed at {place} ({error.status}: {reason}).")
