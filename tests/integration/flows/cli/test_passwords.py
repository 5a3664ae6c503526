"""No password reaches the database of Prefect's server."""

from infini_llama.flows.cli.main import main


def test_a_run_through_prefect_is_refused_a_password_in_a_url(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("INFINI_LLAMA_HOME", str(tmp_path / "home"))
    file = tmp_path / "run.yaml"
    file.write_text('data: {files: ["ftp://me:hunter2@127.0.0.1/x.txt"]}')
    assert main(["run", str(file)]) == 64
    printed = capsys.readouterr()
    assert "data.files" in printed.err and "hunter2" not in printed.err + printed.out
