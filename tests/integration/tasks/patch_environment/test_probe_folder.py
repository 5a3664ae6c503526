"""Programs that a probe starts import no file of the current folder."""

from infini_llama.tasks.machine import Machine


def test_a_file_of_the_current_folder_is_no_module(tmp_path, monkeypatch):
    (tmp_path / "colorsys.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert Machine().run_python("-c", "import colorsys", seconds=60).returncode == 0
