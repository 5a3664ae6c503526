"""data.loss_on: answer, prepared by several processes."""

import json

from infini_llama.tasks.preprocess.tokens.shards import map_prompts
from support.stages import preprocess


def test_any_number_of_workers_writes_the_same_prompts(data, tmp_path, digests, small_parts):
    texts = tmp_path / "texts"
    texts.mkdir()
    lines = [f"{number} {'word ' * (number % 7)}\nA: {number}" for number in range(200)]
    for first in range(0, 200, 10):
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines[first : first + 10])
        (texts / f"{first:03d}.jsonl").write_text(text, encoding="utf-8")
    for workers in (1, 2):
        answers = {"loss_on": "answer", "answer_after": "\nA: "}
        found = preprocess(data(files=[str(texts)], num_workers=workers, **answers), tmp_path / str(workers))
        shards = sorted((tmp_path / str(workers) / found["path"] / "train").glob("*.arrow"))
        assert len(shards) > 2 and all((map_prompts(shard) > 0).all() for shard in shards)
    assert digests(tmp_path / "1" / "datasets") == digests(tmp_path / "2" / "datasets")
