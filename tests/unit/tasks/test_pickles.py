"""A pickle in the place of any file of a dataset, under a manifest that vouches for it, is refused and never run."""

import json
import os
import pickle

import pytest

from configs.errors import DataError
from tasks.artifacts import MANIFEST, _serialized, checksum_of, file_checksum
from tasks.verify_data.checks import verify

NOT_READ = ("state.json", "dataset_info.json")  # written for the `datasets` library, which reads them as JSON


class Malicious:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.mark,)


def vouch(folder) -> None:
    """Makes the manifest right about the bytes that are there now, as an attacker would."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        manifest["files"][name] = {"size": (folder / name).stat().st_size, "checksum": file_checksum(folder / name)}
    manifest["digest"] = checksum_of({key: manifest[key] for key in ("kind", "format_version", "files", "content")})
    del manifest["self_checksum"]
    manifest["self_checksum"] = checksum_of(manifest)
    path.write_bytes(_serialized(manifest))


def test_a_pickle_in_any_file_is_refused_and_never_run(built, tmp_path):
    home, reference = built
    dataset = home / reference["path"]
    chunks = dataset / "chunks" / reference["chunks"]
    mark = tmp_path / "it ran"
    poison = pickle.dumps(Malicious(str(mark)))
    pickle.loads(poison)  # it does what it is meant to
    mark.rmdir()
    tried = 0
    for folder in (dataset, chunks):
        for name in json.loads((folder / MANIFEST).read_text())["files"]:
            before = {path: path.read_bytes() for path in (folder / name, folder / MANIFEST)}
            (folder / name).write_bytes(poison)
            vouch(folder)
            names = ("digest", "chunks_digest")
            digests = [json.loads((at / MANIFEST).read_text())["digest"] for at in (dataset, chunks)]
            poisoned = reference | dict(zip(names, digests, strict=True))
            if name.endswith(NOT_READ):
                verify(poisoned, str(home), "deep", 1 << 40)
            else:
                with pytest.raises(DataError):
                    verify(poisoned, str(home), "deep", 1 << 40)
            assert not mark.exists(), name
            tried += 1
            for path, content in before.items():
                path.write_bytes(content)
    assert tried >= 8
    assert verify(reference, str(home), "deep", 1 << 40)["ok"]
