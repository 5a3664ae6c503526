"""Every attempt stays on record, whatever cut a line short."""

from tasks.train.run_folder import RunFolder, append_attempt, attempts


def test_a_line_cut_short_costs_only_itself(tmp_path):
    run = RunFolder(tmp_path)
    append_attempt(run, {"attempt": 1})
    with run.attempts.open("a") as file:
        file.write('{"attempt": 2, "mess')
    append_attempt(run, {"attempt": 3})
    append_attempt(run, {"attempt": 4})
    assert [record["attempt"] for record in attempts(run)] == [1, 3, 4]
