"""The completion script, in a shell."""

import subprocess

import pytest

from infini_llama.flows.cli.main import main


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("run conf", ["config.yaml", "confs"]),
        ("init --files conf", ["config.yaml", "confs"]),
        ("export tiny --output conf", ["confs"]),
        ("completion ba", ["bash"]),
    ],
)
def test_bash_completes_the_names_of_files(line, completed, tmp_path, capsys):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "confs").mkdir()
    assert main(["completion", "bash"]) == 0
    ask = f"COMP_WORDS=(infini-llama {line}); COMP_CWORD={len(line.split())}; _shtab_infini_llama"
    script = f'{capsys.readouterr().out}\n{ask}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert sorted(done.stdout.split()) == completed, done.stderr
