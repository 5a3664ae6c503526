"""Ranks of which one cannot compile go on together in eager mode."""

from pathlib import Path

from infini_llama.tasks.train.worker.strategies.compiling import CompileRecord
from support.laboratory import torchrun
from support.records import make_plan


def test_one_rank_that_cannot_compile_turns_compilation_off_for_all(tmp_path, server):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    plan = make_plan(compile="block", nproc_per_node=2)
    (run_dir / "plan.json").write_text(plan.model_dump_json())
    program = Path(__file__).parent / "exactness/compiling.py"
    torchrun(server, 2, tmp_path / "log", program, str(run_dir))
    words = [(run_dir / f"rank-{rank}").read_text().split() for rank in range(2)]
    assert [is_eager for is_eager, _ in words] == ["True", "True"]
    assert CompileRecord.model_validate_json(
        (run_dir / "compile.json").read_bytes()
    ).reason
