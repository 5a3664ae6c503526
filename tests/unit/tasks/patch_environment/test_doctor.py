"""The report's exit code, what it says since a run, and the card."""

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.patch_environment.doctor import doctor
from support.machines import begun, lay_out, settings


def test_a_comparison_with_a_run_reports_changes_and_their_effect_on_resume(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    before = lay_out(tmp_path / "before")
    begun(settings(), home, "first", machine=before)

    def since(machine, **changed):
        return doctor(settings(**changed), home, home / "runs/first", machine).against

    same = since(before)
    assert same.to_json() == {"run": "first", "resume": "stays bitwise the same", "differences": []}
    other = lay_out(tmp_path / "other", {"proc/cpuinfo": "model name: Epyc\nflags: fpu avx512_bf16\n"})
    assert since(other).resume == "may no longer be bitwise the same"
    fewer = lay_out(tmp_path / "fewer", {"proc/self/status": "Cpus_allowed_list: 0-3\n"})
    assert since(fewer).resume == "is no longer bitwise the same"
    named = {one.name: (one.then, one.now, one.exactness) for one in since(fewer).differences}
    assert named == {"threads": (8, 4, "lost"), "cores": (8, 4, "kept")}


def test_a_comparison_with_something_else_than_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no environment\.json"):
        doctor(None, tmp_path, tmp_path, lay_out(tmp_path))
