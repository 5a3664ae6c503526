"""A command whose caller has closed the standard streams, as some schedulers and daemons do."""

import os
import subprocess

from support.laboratory import COMMAND, own_environment


def test_a_command_works_without_streams(tmp_path):
    ended = subprocess.run(
        [COMMAND, "runs"],
        env=own_environment(tmp_path),
        preexec_fn=lambda: os.closerange(0, 3),
    )
    assert ended.returncode == 0
