"""The report's exit code, what has changed since a run, and the card."""

import json
from pathlib import Path

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.patch_environment.doctor import doctor
from infini_llama.tasks.patch_environment.task import card
from support.machines import H100, begun, lay_out, record_of, settings


def test_the_exit_code_follows_the_worst_finding(tmp_path):
    well = doctor(settings(), tmp_path, machine=lay_out(tmp_path / "well"))
    busy = lay_out(tmp_path / "busy", gpus=[H100] * 2, busy=0)
    warned, strict = (
        doctor(settings(), tmp_path, machine=busy, strict=strict)
        for strict in (False, True)
    )
    ill = doctor(
        settings({"gpus": [7]}),
        tmp_path,
        machine=lay_out(tmp_path / "ill", gpus=[H100]),
    )
    assert [report.exit_code for report in (well, warned, strict, ill)] == [0, 0, 1, 64]
    assert well.plan.device == "cpu" and ill.plan is None
    for report, worst in ((warned, "warning"), (ill, "error")):
        assert report.findings[0].severity == worst and json.dumps(report.to_json())


def test_every_refused_setting_is_an_error(tmp_path):
    report = doctor(
        settings({"env": {"RANK": "0", "LOCAL_RANK": "0"}}),
        tmp_path,
        machine=lay_out(tmp_path),
    )
    assert report.exit_code == 64
    assert [finding.severity for finding in report.findings].count("error") == 2
    assert "environment.env.RANK=0" in report.findings[0].sentence


def test_without_a_configuration_only_the_machine_is_checked(tmp_path):
    assert doctor(None, tmp_path).plan is None and not list(Path(tmp_path).iterdir())


def test_a_comparison_reports_changes_and_their_effect_on_resume(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    before = lay_out(tmp_path / "before")
    begun(settings(), home, "first", machine=before)

    def since(machine, **environment):
        config = settings(environment)
        return doctor(config, home, home / "runs/first", machine).against

    same = since(before)
    assert same.to_json() == {
        "run": "first",
        "resume": "stays bitwise the same",
        "differences": [],
    }
    other = lay_out(
        tmp_path / "other",
        {"proc/cpuinfo": "model name: Epyc\nflags: fpu avx512_bf16\n"},
    )
    assert since(other).resume == "may no longer be bitwise the same"
    fewer = lay_out(
        tmp_path / "fewer", {"proc/self/status": "Cpus_allowed_list: 0-3\n"}
    )

    def changes(compared):
        return {
            change.name: (change.then, change.now, change.exactness)
            for change in compared.differences
        }

    kept = since(fewer)
    assert kept.resume == "stays bitwise the same", "as the resumed run's plan"
    assert changes(kept) == {"cores": (8, 4, "kept")}
    lost = since(fewer, threads=4)
    assert lost.resume == "is no longer bitwise the same"
    assert changes(lost) == {"threads": (8, 4, "lost"), "cores": (8, 4, "kept")}


def test_a_comparison_with_something_else_than_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no environment\.json"):
        doctor(None, tmp_path, tmp_path, lay_out(tmp_path))


def test_the_card_shows_plan_findings_and_patches(tmp_path):
    machine = lay_out(tmp_path / "machine", gpus=[H100] * 2, busy=1)
    begun(settings(), tmp_path, "run", machine=machine)
    text = card(record_of(tmp_path))
    assert (
        "| nproc_per_node | 1 |" in text
        and "- nproc_per_node: one worker per GPU" in text
    )
    assert (
        "| GPUs | H100 (85.9 GB), H100 (85.9 GB) |" in text
        and "**warning** GPU 1: " in text
    )
    assert "[adam-weight-decay](https://" in text and "**ok**" not in text
    table = text.split("### Why")[0]
    assert not set("{}[]") & set(table), "raw Python"
