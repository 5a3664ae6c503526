"""Models of the Hub by name: from a local cache, and the answers of a server on this machine."""

import http.server
import threading

import pytest
from huggingface_hub import constants

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.export import importing as hub
from infini_llama.tasks.export.importing import folder_of

COMMIT = "a" * 40


@pytest.fixture
def answering(monkeypatch, tmp_path):
    """start(status, error code): a Hub that gives this answer to everything."""
    servers = []

    def start(status: int, code: str) -> None:
        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        real = hub.snapshot_download
        monkeypatch.setattr(
            hub, "snapshot_download", lambda *a, **k: real(*a, cache_dir=tmp_path / "cache", **k)
        )

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "GatedRepo", "is gated"),
        (404, "RevisionNotFound", "no revision"),
        (404, "RepoNotFound", "neither a folder"),
    ],
)
def test_a_refusal_of_the_hub_is_one_sentence(answering, status, code, words):
    answering(status, code)
    with pytest.raises(ConfigError, match=words) as raised:
        folder_of("someone/model", "v1")
    assert "\n" not in str(raised.value)


def test_a_model_in_the_cache_needs_no_network(monkeypatch, tmp_path):
    place = tmp_path / "models--someone--model"
    (place / "snapshots" / COMMIT).mkdir(parents=True)
    (place / "snapshots" / COMMIT / "config.json").write_text("{}")
    (place / "refs").mkdir()
    (place / "refs/main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    real = hub.snapshot_download
    monkeypatch.setattr(hub, "snapshot_download", lambda *a, **k: real(*a, cache_dir=tmp_path, **k))
    assert folder_of("someone/model", None) == place / "snapshots" / COMMIT
    with pytest.raises(ConfigError, match="local cache"):
        folder_of("someone/other", None)


def test_a_folder_is_taken_as_it_is(tmp_path):
    assert folder_of(str(tmp_path), None) == tmp_path
    with pytest.raises(ConfigError, match="--revision"):
        folder_of(str(tmp_path), "main")
