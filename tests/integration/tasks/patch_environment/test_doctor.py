"""The report's exit code, what it says since a run, and the card."""

import json

from infini_llama.tasks.patch_environment.card import card
from infini_llama.tasks.patch_environment.doctor import doctor
from infini_llama.tasks.records.plan import EnvironmentRecord
from support.machines import H100, begun, lay_out, settings


def test_the_exit_code_follows_the_worst_finding(tmp_path):
    well = doctor(settings(), tmp_path, machine=lay_out(tmp_path / "well"))
    busy = lay_out(tmp_path / "busy", gpus=[H100] * 2, busy=0)
    warned, strict = (doctor(settings(), tmp_path, machine=busy, strict=strict) for strict in (False, True))
    ill = doctor(settings({"gpus": [7]}), tmp_path, machine=lay_out(tmp_path / "ill", gpus=[H100]))
    assert [report.exit_code for report in (well, warned, strict, ill)] == [0, 0, 1, 64]
    for report, worst in ((warned, "warning"), (ill, "error")):
        assert report.findings[0].severity == worst and json.dumps(report.to_json())


def test_a_run_resumed_on_another_machine_reports_differences_before_its_first_step(tmp_path, caplog):
    begun(settings(), tmp_path, "run", machine=lay_out(tmp_path / "here"))
    caplog.clear()
    there = lay_out(tmp_path / "there", {"proc/cpuinfo": "model name: Epyc\nflags: fpu\n"}, gpus=[H100])
    plan = begun(settings(), tmp_path, "run", machine=there)
    assert plan.device == "cpu", "a run stays where it began"
    assert all(word in caplog.text for word in ("Xeon", "Epyc"))
    assert "['H100']" in caplog.text


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
