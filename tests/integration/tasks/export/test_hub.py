"""Models of the Hub by name: from a local cache, and the answers of a server on this machine."""

from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.export import importing as hub
from infini_llama.tasks.export.importing import folder_of
from support.services import answering

COMMIT = "a" * 40


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """An empty cache of the Hub."""
    download = partial(hub.snapshot_download, cache_dir=tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", download)
    return tmp_path


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "GatedRepo", "is gated"),
        (404, "RevisionNotFound", "no revision"),
        (404, "RepoNotFound", "neither a folder"),
    ],
)
def test_a_refusal_of_the_hub_is_one_sentence(cache, monkeypatch, status, code, words):
    with answering(lambda _: (status, ""), {"X-Error-Code": code}) as place:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://{place}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        with pytest.raises(ConfigError, match=words) as raised:
            folder_of("someone/model", "v1")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("proxy", ["ftp://127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_an_unusable_proxy_is_one_sentence(cache, monkeypatch, proxy):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    close_session()  # the next client asks the environment again
    with pytest.raises(ConfigError, match="proxy"):
        folder_of("someone/model", None)
    close_session()


def test_a_name_that_the_hub_does_not_take_is_a_folder_that_is_missing():
    with pytest.raises(ConfigError, match="neither a folder"):
        folder_of("models/Llama--135M", None)


def test_a_model_in_the_cache_needs_no_network(cache, monkeypatch):
    place = cache / "models--someone--model"
    (place / "snapshots" / COMMIT).mkdir(parents=True)
    (place / "snapshots" / COMMIT / "config.json").write_text("{}")
    (place / "refs").mkdir()
    (place / "refs/main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert folder_of("someone/model", None) == place / "snapshots" / COMMIT
    with pytest.raises(ConfigError, match="local cache"):
        folder_of("someone/other", None)


def test_a_folder_is_taken_as_it_is(tmp_path):
    assert folder_of(str(tmp_path), None) == tmp_path
    with pytest.raises(ConfigError, match="--revision"):
        folder_of(str(tmp_path), "main")
