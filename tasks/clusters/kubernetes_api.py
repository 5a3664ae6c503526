"""One JobSet in Kubernetes' API: the way to it, and what is read of it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client, config, watch
from kubernetes.config.config_exception import ConfigException

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.clusters.manifests import ATTEMPT

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
ANSWER_SECONDS = 30.0  # that one answer may take
WATCH_SECONDS = 240  # after which a watch is renewed; the API server ends one by itself after 5 to 10 minutes
GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"


@dataclass(frozen=True)
class JobSet:
    """What is read of the object that the API server has.

    Attributes:
        uid: of this object, not of a later one of that name.
        version: from which on to watch it.
        attempt: the folder of the attempt that it was created for.
        fault: why it failed; None: it has not.
    """

    uid: str
    version: str
    attempt: str | None
    is_deleting: bool
    has_completed: bool
    fault: str | None

    @classmethod
    def parse(cls, found: Any) -> "JobSet":
        """From the API's JSON."""
        metadata, conditions = found["metadata"], found.get("status", {}).get("conditions", [])
        true = {one["type"]: one.get("message") or one.get("reason") for one in conditions if one["status"] == "True"}
        return cls(
            uid=metadata["uid"],
            version=metadata["resourceVersion"],
            attempt=metadata.get("annotations", {}).get(ATTEMPT),
            is_deleting=bool(metadata.get("deletionTimestamp")),
            has_completed="Completed" in true,
            fault=str(true["Failed"]) if "Failed" in true else None,
        )


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

    def create(self, body: Mapping[str, Any]) -> JobSet:
        made = self.api.create_namespaced_custom_object(*self._at(), body, _request_timeout=ANSWER_SECONDS)
        return JobSet.parse(made)

    def get(self) -> JobSet:
        found = self.api.get_namespaced_custom_object(*self._at(), self.name, _request_timeout=ANSWER_SECONDS)
        return JobSet.parse(found)

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
