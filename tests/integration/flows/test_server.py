"""The embedded Prefect server: comes up, takes the user's own API where there is one, and never outlives its parent."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.waiting import wait_until

HOLD = """
import sys, time
from pathlib import Path
from infini_llama.flows.server import api_for_run
with api_for_run(Path(sys.argv[1])):
    print("up", flush=True)
    time.sleep(600)
"""


def servers_of(home: Path) -> list[psutil.Process]:
    servers = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PREFECT_HOME") == str(home / "prefect") and "uvicorn" in process.cmdline():
                servers.append(process)
    return servers


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_dies_with_its_parent(no_prefect, tmp_path, ending):
    home = tmp_path / "home"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        assert len(servers_of(home)) == 1
        parent.send_signal(ending)
        parent.communicate(timeout=30)
    wait_until(lambda: servers_of(home) == [], 10)
    assert not (home / "prefect" / "server.log").read_text().count("Traceback")


def test_api_of_the_active_profile_is_used(no_prefect, tmp_path):
    folder = tmp_path / "user" / ".prefect"
    folder.mkdir(parents=True)
    (folder / "profiles.toml").write_text(
        'active = "team"\n[profiles.team]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n'
    )
    check = (
        "import os, sys; from pathlib import Path; from infini_llama.flows.server import api_for_run\n"
        "with api_for_run(Path('home')):\n"
        "    from prefect.settings import get_current_settings\n"
        "    assert get_current_settings().api.url == 'http://127.0.0.1:9/api', get_current_settings().api.url\n"
        "    assert 'PREFECT_HOME' not in os.environ\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    subprocess.run([sys.executable, "-c", check], env=environment, check=True, timeout=60)
    assert not (tmp_path / "home").exists()
