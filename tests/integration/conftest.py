"""A home folder for each file of tests, and the runs that nobody disturbs, each made once for all test processes."""

import os
import shutil
from collections.abc import Callable

import pytest

from infini_llama.tasks.storage.locks import Lock
from support.laboratory import Laboratory


@pytest.fixture(scope="module")
def lab(tmp_path_factory, server) -> Laboratory:
    """Of one file of tests, so that no other file has a run of the same name."""
    return Laboratory.create(tmp_path_factory.mktemp("home"), server)


@pytest.fixture(scope="session")
def calm(tmp_path_factory, server) -> Laboratory:
    """The home of the undisturbed runs. Several processes of one test session share it, by a lock."""
    base = tmp_path_factory.getbasetemp()
    return Laboratory.create(
        (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "calm", server
    )


@pytest.fixture(scope="module")
def uninterrupted(lab, calm) -> Callable[[str, int], str]:
    """Name of the run that nobody disturbs, by attention and number of workers; each is made once.

    The run is copied into the laboratory, with its dataset.
    """

    def make(attention: str, workers: int) -> str:
        name = f"calm-{attention}-{workers}"
        if not lab.run_dir(name).exists():
            with Lock(calm.home / "calm.lock", wait=600):
                if not (calm.run_dir(name) / "summary.json").exists():
                    calm.finish(
                        name,
                        f"model.attention={attention}",
                        f"environment.nproc_per_node={workers}",
                    )
            shutil.copytree(calm.run_dir(name), lab.run_dir(name), symlinks=True)
            for dataset in (calm.home / "datasets").glob("files-*"):
                if (
                    dataset.is_dir()
                    and not (lab.home / "datasets" / dataset.name).exists()
                ):
                    shutil.copytree(dataset, lab.home / "datasets" / dataset.name)
        return name

    return make


@pytest.fixture(scope="module")
def calm_softmax_2(uninterrupted) -> str:
    """Name of the run that nobody disturbs, with softmax attention and two workers."""
    return uninterrupted("softmax", 2)
