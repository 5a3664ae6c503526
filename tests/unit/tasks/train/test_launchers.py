"""Every launcher that a configuration can name is complete."""

from infini_llama.configs.launchers import LAUNCHERS
from infini_llama.tasks.train.launch import WORKERS


def test_every_launcher_has_its_entry_and_its_class():
    assert LAUNCHERS.keys() == WORKERS.keys()
    for launcher in LAUNCHERS.values():
        assert launcher.has_local_workers or (launcher.place and launcher.allocation)
