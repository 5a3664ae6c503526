"""A small HTTP server that answers as Kubernetes' API does for JobSets, and a node that runs their pods as processes.

It knows creation (409 where the name is taken), reading, watching (one JSON event a chunk, from a version on, 410 for one it has
forgotten), deletion in the foreground, and who may do it (401, 403). The pods get what a kubelet would give them: their command and
environment, JOB_COMPLETION_INDEX, SIGTERM, the grace period of their specification, SIGKILL.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import yaml

PATH = re.compile(r"/apis/([^/]+)/([^/]+)/namespaces/([^/]+)/(jobsets)(?:/([^/]+))?")
REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 410: "Expired"}


class Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        self.status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
        self.status |= {"reason": REASONS[code], "message": message}


class Cluster:
    """The objects and their history; `runs` starts the pods of each that is created."""

    def __init__(self, folder: Path, runs: bool = False, environment: dict | None = None) -> None:
        self.folder, self.runs = folder, runs
        self.environment = environment or dict(os.environ)
        self.objects, self.history, self.version, self.forgotten = {}, [], 100, 0
        self.token, self.forbidden, self.requests, self.watches = "secret-token", "", [], []
        self.changed = threading.Condition()
        self.pods: dict[str, list[subprocess.Popen]] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        for pod in [pod for pods in self.pods.values() for pod in pods]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGKILL)
        self.server.shutdown()
        self.server.server_close()

    def kubeconfig(self) -> Path:
        path = self.folder / "kubeconfig"
        url = f"http://127.0.0.1:{self.server.server_port}"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [{"name": "test", "cluster": {"server": url}}],
                    "users": [{"name": "test", "user": {"token": "secret-token"}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "team"}}],
                }
            )
        )
        return path

    def create(self, plural: str, namespace: str, body: dict) -> dict:
        with self.changed:
            name = body["metadata"]["name"]
            if (plural, namespace, name) in self.objects:
                raise Refused(409, f'{plural} "{name}" already exists')
            body["metadata"]["uid"] = str(uuid.uuid4())
            self.objects[plural, namespace, name] = body
            self._happened("ADDED", plural, body)
        if self.runs:
            self._start(plural, namespace, body)
        return body

    def find(self, plural: str, namespace: str, name: str) -> dict:
        if (plural, namespace, name) not in self.objects:
            raise Refused(404, f'{plural} "{name}" not found')
        return self.objects[plural, namespace, name]

    def delete(self, plural: str, namespace: str, name: str) -> dict:
        """In the foreground: the object is there, with a time of deletion, until its pods have ended."""
        with self.changed:
            body = self.find(plural, namespace, name)
            if "deletionTimestamp" in body["metadata"]:
                return body
            body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self._happened("MODIFIED", plural, body)
        threading.Thread(target=self._finish, args=(plural, namespace, name), daemon=True).start()
        return body

    def set_condition(self, plural: str, namespace: str, name: str, kind: str, message: str = "") -> None:
        with self.changed:
            body = self.find(plural, namespace, name)
            condition = {"type": kind, "status": "True", "reason": kind, "message": message}
            conditions = body.setdefault("status", {}).setdefault("conditions", [])
            conditions.append(condition | {"lastTransitionTime": "2026-01-01T00:00:00Z"})
            self._happened("MODIFIED", plural, body)

    def expire_versions(self) -> None:
        """As etcd does after some minutes: watches from before now are answered by 410, those that are open end."""
        with self.changed:
            self.version += 1
            self.forgotten = self.version
            self.changed.notify_all()

    def _happened(self, kind: str, plural: str, body: dict) -> None:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, plural, {"type": kind, "object": json.loads(json.dumps(body))}))
        self.changed.notify_all()

    def _start(self, plural: str, namespace: str, body: dict) -> None:
        name = body["metadata"]["name"]
        job = body["spec"]["replicatedJobs"][0]["template"]["spec"]
        count, container = job["completions"], job["template"]["spec"]["containers"][0]
        own = {entry["name"]: entry["value"] for entry in container["env"]}
        own["MASTER_ADDR"] = "127.0.0.1"  # where the cluster's names would lead, all pods being on this machine
        command = [sys.executable, *container["command"][1:]]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.pods[name] = [
                subprocess.Popen(
                    command,
                    env=self.environment | own | {"JOB_COMPLETION_INDEX": str(index)},
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
                for index in range(count)
            ]
        threading.Thread(target=self._await, args=(plural, namespace, name), daemon=True).start()

    def _await(self, plural: str, namespace: str, name: str) -> None:
        failed = [code for pod in self.pods[name] if (code := pod.wait())]
        with self.changed:
            body = self.objects.get((plural, namespace, name))
            if body is None or "deletionTimestamp" in body["metadata"]:
                return
        kind = "Failed" if failed else "Completed"
        self.set_condition(plural, namespace, name, kind, f"exit codes {failed}" if failed else "jobset completed")

    def _finish(self, plural: str, namespace: str, name: str) -> None:
        body = self.objects[plural, namespace, name]
        pods = self.pods.get(name, [])
        for pod in pods:
            if pod.poll() is None:
                pod.send_signal(signal.SIGTERM)
        until = time.monotonic() + pod_spec(body)["terminationGracePeriodSeconds"]
        for pod in pods:
            try:
                pod.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(pod.pid, signal.SIGKILL)
                pod.wait()
        with self.changed:
            del self.objects[plural, namespace, name]
            self._happened("DELETED", plural, body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def answer(self, code: int, body: dict) -> None:
                text = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def handle_request(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                url = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                cluster.requests.append((self.command, url.path, json.loads(body) if body else None))
                try:
                    if self.headers.get("Authorization") != f"Bearer {cluster.token}":
                        raise Refused(401, "Unauthorized")
                    match = PATH.fullmatch(url.path)
                    if not match:
                        raise Refused(404, "the server could not find the requested resource")
                    *_, namespace, plural, name = match.groups()
                    if self.command == cluster.forbidden:
                        raise Refused(403, f'{plural} is forbidden: User "test" cannot do that')
                    if self.command == "POST":
                        self.answer(201, cluster.create(plural, namespace, json.loads(body)))
                    elif self.command == "DELETE":
                        self.answer(200, cluster.delete(plural, namespace, name))
                    elif name:
                        self.answer(200, cluster.find(plural, namespace, name))
                    else:
                        self.watch(plural, query)
                except Refused as refused:
                    self.answer(refused.status["code"], refused.status)

            do_GET = do_POST = do_DELETE = handle_request

            def watch(self, plural: str, query: dict[str, str]) -> None:
                assert query["watch"] == "True" or query["watch"] == "true"
                name, version = query["fieldSelector"].removeprefix("metadata.name="), int(query["resourceVersion"])
                until = time.monotonic() + int(query["timeoutSeconds"])
                cluster.watches.append(version)
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while time.monotonic() < until:
                    with cluster.changed:
                        expired = version < cluster.forgotten
                        news = [entry for entry in cluster.history if entry[0] > version and entry[1] == plural]
                        if not news and not expired:
                            cluster.changed.wait(0.5)
                    if expired:
                        gone = Refused(410, f"too old resource version: {version}").status
                        self.chunk({"type": "ERROR", "object": gone})
                        break
                    for number, _, event in news:
                        version = number
                        if event["object"]["metadata"]["name"] == name:
                            self.chunk(event)
                with contextlib.suppress(OSError):
                    self.wfile.write(b"0\r\n\r\n")

            def chunk(self, event: dict) -> None:
                text = json.dumps(event).encode() + b"\n"
                self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
                self.wfile.flush()

        return Handler


def pod_spec(body: dict) -> dict:
    """The part of the pod's specification that says how it ends."""
    return body["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
