"""Dask and Ray do the same units as local processes: equal bytes, also where a worker is killed in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError
from support.stages import preprocess

BUILD = """
import json, sys
from pathlib import Path
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens import parts
parts.RUN_BYTES, parts.PER_FILE = 1500, 0
if __name__ == "__main__":
    print(json.dumps(preprocess(DataConfig.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2])).digest))
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_a_worker_killed_in_the_middle_loses_only_its_part(data, tmp_path, digests, engine, small_parts):
    pytest.importorskip("distributed" if engine == "dask" else engine)
    (tmp_path / "text").mkdir()
    for number in range(400):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} größer " * 100)
    settings = data(files=[str(tmp_path / "text")])
    expected = preprocess(settings, str(tmp_path / "local"))
    home = tmp_path / engine
    given = json.dumps(settings | {"engine": engine, "num_workers": 2})
    (tmp_path / "build.py").write_text(BUILD)
    with (tmp_path / "log").open("wb") as log:
        build = subprocess.Popen(
            [sys.executable, tmp_path / "build.py", given, str(home)], stdout=subprocess.PIPE, stderr=log, text=True
        )
    killed = None
    while build.poll() is None and killed is None:
        for folder in home.glob("units/*/.*.tmp"):
            pid = int(folder.name.split(".")[-2].split("-")[0])
            if any(home.glob("units/*/*/manifest.json")):
                os.kill(pid, signal.SIGKILL)
                killed = pid
                break
        time.sleep(0.002)
    answer, _ = build.communicate(timeout=240)
    assert build.returncode == 0, (tmp_path / "log").read_text()
    assert killed is not None and not Path(f"/proc/{killed}").exists()
    assert json.loads(answer.splitlines()[-1]) == expected["digest"]
    assert digests(home / "datasets") == digests(tmp_path / "local" / "datasets")
    assert not [path for path in (home / "datasets").iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "address"), [("dask", "tcp://127.0.0.1:1"), ("ray", "127.0.0.1:1")])
def test_a_cluster_that_does_not_answer_is_named(data, tmp_path, engine, address):
    pytest.importorskip("distributed" if engine == "dask" else engine)
    with pytest.raises(ConfigError, match=f"data.engine_address={address}"):
        preprocess(data(engine=engine, engine_address=address), str(tmp_path / "home"))
