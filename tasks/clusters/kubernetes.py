"""The workers as a JobSet: created under a name that is known beforehand, watched, and deleted to stop them."""

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from kubernetes import watch
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from infini_llama.configs.errors import ConfigError, TrainFailed
from infini_llama.configs.schema.launchers import KubernetesConfig
from infini_llama.tasks.clusters.kubernetes_api import GROUP, PLURAL, JobSet, Place, connect
from infini_llama.tasks.clusters.manifests import ENDING, manifest, name_of
from infini_llama.tasks.clusters.node_records import write_submitted
from infini_llama.tasks.clusters.rendezvous import Nodes
from infini_llama.tasks.records.cluster import SubmittedJob
from infini_llama.tasks.records.plan import EnvironmentPlan

AGAIN_SECONDS = 2.0  # until the API server is asked again after a failure
ENDING_SECONDS = 600.0  # after which a job that does not go away is reported, not waited for
log = logging.getLogger("infini_llama.train")


def start(attempt_dir: Path, section: KubernetesConfig, plan: EnvironmentPlan, grace_period: float) -> "KubernetesJob":
    """Creates the job of an attempt, or takes the one that is there already, when an earlier command died in between.

    Raises:
        ConfigError: the cluster refuses it, or is not known.
        TrainFailed: the API server does not answer.
    """
    place = connect(section.context, section.namespace, name_of(attempt_dir))
    body = manifest(attempt_dir, section, place.namespace, plan, grace_period)
    submitted = SubmittedJob(launcher="kubernetes", name=place.name, namespace=place.namespace, context=section.context)
    write_submitted(attempt_dir, submitted)
    try:
        found = _asked(lambda: place.create(body))
    except ApiException as refused:
        if refused.status != 409:
            raise _sentence(refused, place) from refused
        found = _asked(place.get)
        if found.attempt != str(attempt_dir):
            raise ConfigError(
                f"{place} already exists and does not belong to {attempt_dir}; delete it, or use another "
                "environment.kubernetes.namespace."
            ) from refused
    write_submitted(attempt_dir, submitted.model_copy(update={"uid": found.uid}))
    log.info("%s is created", place)
    return KubernetesJob(attempt_dir, place, found)


def attach(attempt_dir: Path, submitted: SubmittedJob, section: KubernetesConfig) -> "KubernetesJob | None":
    """The job of an attempt, living or ended; None where it was never created.

    Args:
        section: environment.kubernetes, whose context reaches the cluster where the record names none.

    Raises:
        TrainFailed: the API server does not answer, so the state is unknown.
    """
    place = connect(submitted.context or section.context, submitted.namespace, submitted.name)
    try:
        found = _asked(place.get)
    except ApiException as error:
        if error.status != 404:
            raise _sentence(error, place) from error
        if submitted.uid is None:
            return None
        gone = KubernetesJob(attempt_dir, place, None)
        gone.end()
        return gone
    write_submitted(attempt_dir, submitted.model_copy(update={"uid": found.uid}))
    return KubernetesJob(attempt_dir, place, found)


class KubernetesJob(Nodes):
    """The job of an attempt, followed by a thread that reads the API's events.

    Args:
        found: the object as it was last seen; None: it is gone.
    """

    detached = True

    def __init__(self, attempt_dir: Path, place: Place, found: JobSet | None) -> None:
        self.attempt_dir, self.place = attempt_dir, place
        self.code: int | None = None
        self.deleted, self.message, self.logged = False, "", ""
        self.by_us = found is None
        self.over = threading.Event()
        if found is None:
            self._has_gone()
            return
        self._learn(found)
        self.thread = threading.Thread(target=self._follow, args=(found.version,), name="kubernetes", daemon=True)
        self.thread.start()

    def poll(self) -> int | None:
        if self.message != self.logged:  # by the main thread, whose lines belong to the run
            self.logged = self.message
            log.warning("%s", self.logged)
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
                    self.message = f"{_sentence(error, self.place)} The job may still be running."
                    self.over.wait(AGAIN_SECONDS)
            except (HTTPError, OSError, ValueError) as error:
                version = None
                self.message = (
                    f"The Kubernetes API does not answer ({type(error).__name__}); {self.place} may still be running."
                )
                self.over.wait(AGAIN_SECONDS)

    def _look(self) -> str:
        """Learns how the job is now; returns the version from which on to watch."""
        found = self.place.get()
        self._learn(found)
        return found.version

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
                self._learn(JobSet.parse(event["object"]))
            version = event["object"]["metadata"]["resourceVersion"]
            if self.over.is_set():
                break
        return version

    def _learn(self, found: JobSet) -> None:
        """Whether it has ended, by its conditions. One that is being deleted has ended when it is gone."""
        if found.is_deleting:
            return
        if found.has_completed:
            self._has_ended(0)
        elif found.fault is not None:
            self.message = f"{self.place} failed: {found.fault}"
            self._has_ended(1)

    def _has_gone(self) -> None:
        self.deleted = True
        self._has_ended(1)

    def _has_ended(self, code: int) -> None:
        self.code = code if self.code is None else self.code
        self.over.set()


def _asked(question: Callable[[], JobSet]) -> JobSet:
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
