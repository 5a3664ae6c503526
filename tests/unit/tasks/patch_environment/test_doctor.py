"""The report's exit code, what it says since a run, and the card."""

import json

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.patch_environment.card import card
from infini_llama.tasks.patch_environment.doctor import doctor
from infini_llama.tasks.records.environment import EnvironmentRecord
from support.machines import H100, begun, lay_out, settings


def test_the_exit_code_follows_the_worst_finding(tmp_path):
    well = doctor(settings(), tmp_path, machine=lay_out(tmp_path / "well"))
    warned = doctor(settings(), tmp_path, machine=lay_out(tmp_path / "busy", gpus=[H100] * 2, busy=0))
    ill = doctor(settings({"gpus": [7]}), tmp_path, machine=lay_out(tmp_path / "ill", gpus=[H100]))
    assert [report.exit_code for report in (well, warned, ill)] == [0, 1, 64]
    for report, worst in ((warned, "warning"), (ill, "error")):
        assert report.findings[0].severity == worst and json.dumps(report.to_json())


def test_against_a_run_says_what_changed_and_whether_resume_stays_exact(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    before = lay_out(tmp_path / "before")
    begun(settings(), home, "first", machine=before)

    def since(machine, **wishes):
        return doctor(settings(**wishes), home, home / "runs/first", machine).against

    same = since(before)
    assert same.to_json() == {"run": "first", "resume": "stays bitwise the same", "differences": []}
    other = lay_out(tmp_path / "other", {"proc/cpuinfo": "model name: Epyc\nflags: fpu\n"})
    assert since(other).resume == "may no longer be bitwise the same"
    fewer = lay_out(tmp_path / "fewer", {"proc/self/status": "Cpus_allowed_list: 0-3\n"})
    assert since(fewer).resume == "is no longer bitwise the same"
    named = {one.name: (one.then, one.now, one.exactness) for one in since(fewer).differences}
    assert named == {"threads": (8, 4, "lost"), "cores": (8, 4, "kept")}


def test_against_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no environment\.json"):
        doctor(None, tmp_path, tmp_path, lay_out(tmp_path))


def test_a_run_that_resumes_elsewhere_says_what_differs_before_its_first_step(tmp_path, caplog):
    begun(settings(), tmp_path, "run", machine=lay_out(tmp_path / "here"))
    caplog.clear()
    there = lay_out(tmp_path / "there", {"proc/cpuinfo": "model name: Epyc\nflags: fpu\n"}, gpus=[H100])
    plan = begun(settings(), tmp_path, "run", machine=there)
    assert plan.device == "cpu", "a run stays where it began"
    assert "the processor was Xeon at the last attempt and is Epyc now" in caplog.text
    assert "the list of GPUs was [] at the last attempt and is ['H100'] now" in caplog.text


def test_a_run_of_an_older_version_goes_on_as_it_was(tmp_path, caplog):
    machine = lay_out(tmp_path / "here")
    begun(settings(), tmp_path, "run", machine=machine)
    path = tmp_path / "runs/run/environment.json"
    record = json.loads(path.read_text())
    for name in ("compile", "allocator", "micro_batch_size"):
        del record["pinned"][name]
    path.write_text(json.dumps(record))
    caplog.clear()
    plan = begun(settings({"tune": "quick"}), tmp_path, "run", machine=machine)
    assert (plan.precision, plan.allocator, plan.compile) == ("fp32", "system", "off")
    assert "bitwise" not in caplog.text and "written anew" not in caplog.text


def test_the_card_shows_plan_findings_and_patches(tmp_path):
    machine = lay_out(tmp_path / "here", gpus=[H100] * 2, busy=1)
    plan = begun(settings(), tmp_path, "run", machine=machine)
    record = json.loads((tmp_path / "runs/run/environment.json").read_text())
    text = card(EnvironmentRecord.from_json(record), plan)
    assert "| nproc_per_node | 1 |" in text and "- nproc_per_node: one worker per GPU" in text
    assert "| GPUs | H100 (85.9 GB), H100 (85.9 GB) |" in text and "**warning** GPU 1: " in text
    assert "[adam-weight-decay](https://" in text and "**ok**" not in text
    table = text.split("### Why")[0]
    assert not set("{}[]") & set(table), "raw Python"
