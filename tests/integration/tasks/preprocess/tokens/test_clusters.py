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
from support.stages import plan, preprocess

BUILD = """
import json, sys
from pathlib import Path
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.stage import preprocess
if __name__ == "__main__":
    print(json.dumps(preprocess(DataConfig.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2])).digest))
"""

PLAN = """
import json, sys
from pathlib import Path
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.preprocess.sources import scanning
from infini_llama.tasks.preprocess.stage import plan
if __name__ == "__main__":
    scanning.WORTH_WORKERS = 0
    print(json.dumps(plan(DataConfig.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2])).to_json()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_a_worker_killed_while_it_surveys_loses_only_its_part(data, tmp_path, engine):
    pytest.importorskip("distributed" if engine == "dask" else engine)
    (tmp_path / "text").mkdir()
    for number in range(24):
        lines = (json.dumps({"text": f"{number} {line} " + "größer " * 20}) for line in range(9000))
        (tmp_path / "text" / f"{number}.jsonl").write_text("\n".join(lines))
    settings, home = data(files=[str(tmp_path / "text")]), tmp_path / engine
    expected = plan(settings, str(tmp_path / "local"))
    given = json.dumps(settings | {"engine": engine, "num_workers": 2})
    (tmp_path / "plan.py").write_text(PLAN)
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, tmp_path / "plan.py", given, str(home)], stdout=subprocess.PIPE, stderr=log, text=True
        )
    killed = None
    while child.poll() is None and killed is None:
        for part in home.glob("surveys/*-*-*.rows"):
            killed = int(part.stem.rpartition("-")[2])
            os.kill(killed, signal.SIGKILL)
            break
        time.sleep(0.002)
    answer, _ = child.communicate(timeout=240)
    assert child.returncode == 0, (tmp_path / "log").read_text()
    assert killed is not None and not Path(f"/proc/{killed}").exists()
    assert json.loads(answer.splitlines()[-1]) == expected
    assert len(list(home.glob("surveys/*.rows"))) > 4 and not list(home.glob("surveys/*-*-*.rows"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_a_worker_killed_in_the_middle_loses_only_its_part(data, tmp_path, digests, engine):
    pytest.importorskip("distributed" if engine == "dask" else engine)
    settings = data(shard_size=1024)
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
        for folder in home.glob("datasets/.*.work-parts/*"):
            pid = int(folder.name.split("-")[-2])
            if any(home.glob("datasets/.*.work/train/*.arrow")):
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
