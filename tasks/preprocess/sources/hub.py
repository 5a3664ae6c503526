"""Datasets of the Hugging Face Hub: their commits, and their files.

A file is read by ranges, or from the cache of huggingface_hub, into which it is copied when it is
read at first.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO

from infini_llama.configs.reading import expanded
from infini_llama.tasks.preprocess.sources.remote import RemoteFile, tried

ANSWERS_WITHIN = 10.0  # seconds
ASKED_AT_ONCE = 500  # files of one request
COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Revision:
    """The revision of a dataset that is read.

    Attributes:
        commit: what was requested where the Hub is not reached and the cache has none of it; None:
            the dataset is a folder.
        cached: folder of the cache with the files of the commit, where the Hub is not reached.
    """

    commit: str | None
    cached: Path | None = None


@cache
def revision_of(dataset: str, revision: str | None) -> Revision:
    """The commit that `revision` names now, or did when the Hub was last reached."""
    if expanded(dataset).is_dir():
        return Revision(None)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = HfApi().dataset_info(dataset, revision=revision, timeout=ANSWERS_WITHIN)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return Revision(revision)  # opening it raises a clear error
    except Exception:  # there is no network, or `dataset` is no name
        folder = _with_card(dataset, revision, is_reached=False)
        return Revision(folder.name, folder) if folder else Revision(revision)
    _with_card(dataset, revision, is_reached=True)
    return Revision(info.sha or revision)


def _with_card(dataset: str, revision: str | None, is_reached: bool) -> Path | None:
    """The folder of the cache for the commit that `revision` names; None: there is none.

    Where the Hub is reached, the cache remembers the commit, and has the card, if there is one.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            dataset,
            repo_type="dataset",
            revision=revision,
            allow_patterns=["README.md"],
            local_files_only=not is_reached,
        )
    except Exception:  # opening the dataset raises a clear error
        return None
    return Path(folder)


@dataclass(frozen=True)
class HubFile(RemoteFile):
    """A file of a dataset on the Hub.

    Attributes:
        dataset, commit, path: its place there.
        is_streamed: it is read by ranges, and never copied.
    """

    dataset: str = ""
    commit: str = ""
    path: str = ""
    is_streamed: bool = False

    @property
    def place(self) -> str:
        """Its place whatever the commit: its stamp says which content it has."""
        return f"hf://datasets/{self.dataset}/{self.path}"

    def has_changed(self) -> bool:
        """False: the files of a commit do not change."""
        return False

    def for_its_table(self) -> RemoteFile:
        from huggingface_hub import try_to_load_from_cache

        is_cached = isinstance(
            try_to_load_from_cache(
                self.dataset,
                self.path,
                repo_type="dataset",
                revision=self.commit,
            ),
            str,
        )
        return self if is_cached else replace(self, is_streamed=True)

    def open(self) -> IO[bytes]:
        """The file for reading; its copy unless it is streamed.

        Raises:
            PipelineError, OSError: see `RemoteFile.open`.
        """
        if self.is_streamed:
            return super().open()
        from huggingface_hub import hf_hub_download

        copy = tried(
            self.url,
            lambda: hf_hub_download(
                self.dataset,
                self.path,
                repo_type="dataset",
                revision=self.commit,
            ),
        )
        return Path(copy).open("rb")


def hub_files(
    dataset: str,
    revision: Revision,
    paths: Sequence[str],
    is_streamed: bool,
) -> list[HubFile]:
    """Files of a dataset in this order, with their sizes and what stands for their content.

    Raises:
        PipelineError, OSError: the Hub is not reached or refuses; see `tried`.
    """
    facts = dict[str, tuple[int, str]]()
    for first in range(0, len(paths), ASKED_AT_ONCE):
        facts |= _facts(dataset, revision, list(paths[first : first + ASKED_AT_ONCE]))
    return [
        HubFile(
            url=f"hf://datasets/{dataset}@{revision.commit}/{path}",
            size=facts[path][0],
            stamp=facts[path],
            dataset=dataset,
            commit=revision.commit or "",
            path=path,
            is_streamed=is_streamed,
        )
        for path in paths
    ]


def _facts(
    dataset: str, revision: Revision, paths: list[str]
) -> dict[str, tuple[int, str]]:
    """Size and hash of each file."""
    if revision.cached is not None:
        files = {path: revision.cached / path for path in paths}
        # A file of the cache is a link to one that is named by its hash.
        return {
            path: (file.stat().st_size, file.resolve().name)
            for path, file in files.items()
        }
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    entries = tried(
        f"hf://datasets/{dataset}",
        lambda: HfApi().get_paths_info(
            dataset,
            paths,
            revision=revision.commit,
            repo_type="dataset",
        ),
    )
    return {
        entry.path: (entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
        for entry in entries
        if isinstance(entry, RepoFile)
    }
