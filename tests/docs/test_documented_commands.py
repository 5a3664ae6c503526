"""Every command that a page shows, run as it stands there; with small models, so that all of them take minutes.

The guide has its own test (test_first_hour.py), and so has what needs a server, a cluster or a second machine: ELSEWHERE.
"""

import re
from pathlib import Path

import pytest
import yaml

from infini_llama.configs.loading import load_config
from support.shell import shell

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem != "quickstart"),
]
BLOCK = re.compile(r"^( *)```bash\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^ *(infini-llama .+?)(?: {2,}# .*)?$", re.MULTILINE)
INLINE = re.compile(r"`(infini-llama [^`\n]+)`")
PLACEHOLDERS = {
    "CONFIG": "configs/tiny.yaml",
    "RUN": "tiny",
    "DATASET": "latest",
    "TEXT": "import",
    "DIR": "exported",
}
PLACEHOLDERS |= {
    "A": "tiny",
    "B": "tiny_infini",
    "D": "latest",
    "FILE": "page.html",
    "HF_DIR": "~/models/Llama-3.2-1B",
    "cuda": "auto",
}
# What makes something before what looks at it.
ORDER = (
    "import ",
    "run ",
    "train ",
    "preprocess ",
    "verify ",
)
ELSEWHERE = {
    r"infini-llama (serve|deploy)\b|nightly": "tests/integration/prefect/test_triggers.py",
    r"train\.parallel=deepspeed": "tests/integration/test_deepspeed.py",
    r"environment\.launcher=srun|sbatch": "tests/integration/test_srun.py",
    r"infini-llama join\b|environment\.nnodes=2": "tests/integration/test_nodes.py",
    r"environment\.nproc_per_node=8|configs/gpu\.yaml": "tests/gpu/test_cuda.py",
    r"infini-llama (init\b|run (my|llama)\.yaml|(report|generate|export) (my|llama)\b)": "tests/docs/test_first_hour.py",
    r"SmolLM2-135M-Instruct|remember|(language|reach)(-2|\.yaml)": "tests/integration/test_pretrained.py",
    r"evaluate \S+ --passkey --segments": "tests/unit/tasks/evaluate/test_passkey.py",
    r"infini-llama import meta-llama/": "tests/integration/tasks/export/test_hub.py",
}
SMALL = {
    "data": {
        "sequence_length": 64,
        "validation_fraction": 0.2,
        "tokenizer": {"vocab_size": 400},
    },
    "model": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "train": {
        "max_steps": 4,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "warmup_steps": 1,
        "eval_steps": 2,
    },
}
SMALL["model"] |= {"num_key_value_heads": 2, "segment_length": 16}
SMALL["train"] |= {"save_steps": 2}


def substituted(command: str) -> str:
    """The command with names in place of placeholders."""
    return re.sub(
        r"(?<![\w/=-])[A-Z_]+\b|\bcuda\b",
        lambda word: PLACEHOLDERS.get(word[0], word[0]),
        command,
    )


def commands() -> list[str]:
    """Of all pages, each once; a longer run after the plain one, and what removes something last."""
    shown = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [
            line for _, block in BLOCK.findall(text) for line in SHOWN.findall(block)
        ]
        inline = INLINE.findall(text)
        lines += [
            line
            for line in inline
            if " " in line.removeprefix("infini-llama ") or line.endswith("runs")
        ]
        shown += [substituted(line) for line in lines if not re.search(r"[…\[]", line)]

    def place(command: str) -> int:
        if "max_steps=" in command or " gc " in command:
            return 60
        return next(
            (
                n
                for n, name in enumerate(ORDER)
                if command.startswith(f"infini-llama {name}")
            ),
            50,
        )

    return sorted(dict.fromkeys(shown), key=place)


def write_folder(folder: Path) -> None:
    """What a reader of the pages has: texts, configurations, a folder of Hugging Face's."""
    (folder / "texts").mkdir()
    for number in range(60):
        text = f"def count_{number}(cats):\n    '''How many of {number} cats are there.'''\n    return cats + {number}\n"
        (folder / f"texts/{number}.txt").write_text(text * 20)
    (folder / "book.txt").write_text("import os\n" * 300)
    (folder / "notes.jsonl").write_text('{"text": "import sys, then import os"}\n' * 30)
    (folder / "docs").mkdir()
    (folder / "docs/page.md").write_text("# A page\n\nclass Reader: reads.\n" * 20)
    (folder / "configs").mkdir()
    for file in (ROOT / "configs").glob("*.yaml"):
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        for section, changes in SMALL.items():
            config[section] |= changes
        config.get("environment", {}).pop("nproc_per_node", None)
        if config["data"].get("source") == "passkey":
            config["data"]["passkey"]["documents"] = 200
        elif "sources" not in config["data"]:
            config["data"] |= {"source": "files", "files": ["texts"]}
        (folder / "configs" / file.name).write_text(yaml.safe_dump(config))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_command_of_the_pages(tmp_path):
    write_folder(tmp_path)
    local = [
        command
        for command in commands()
        if not any(re.search(words, command) for words in ELSEWHERE)
    ]
    assert len(local) > 30
    for options in (
        "",
        " runtime.name=long data.sequence_length=1024",
    ):  # some pages begin with a run of others
        shell(f"infini-llama run configs/tiny.yaml --no-prefect{options}", tmp_path)
    shell("infini-llama run configs/tiny_infini.yaml --no-prefect", tmp_path)
    shell("infini-llama export long --output models/Llama-3.2-1B", tmp_path)
    for command in local:
        if "--output start.yaml" in command:  # each is shown as the first one
            (tmp_path / "start.yaml").unlink(missing_ok=True)
        shell(command, tmp_path)
        if "--output start.yaml" in command:  # "name your text in it"
            config = yaml.safe_load(
                (tmp_path / "start.yaml").read_text(encoding="utf-8")
            )
            config["data"] |= {"files": ["texts"]}
            config["train"] |= SMALL["train"]
            (tmp_path / "start.yaml").write_text(yaml.safe_dump(config))


def test_commands_run_elsewhere_have_a_test():
    for words, test in ELSEWHERE.items():
        assert (ROOT / test).is_file() and any(
            re.search(words, command) for command in commands()
        ), words


def test_the_nightly_tutorial_changes_the_configuration_that_init_writes(tmp_path):
    (tmp_path / "incoming.txt").write_text("once upon a time " * 1000)
    page = (ROOT / "docs/prefect.md").read_text(encoding="utf-8")
    (changes,) = re.findall(r"^sed -i .*?^END$", page, re.MULTILINE | re.DOTALL)
    shell(
        f"infini-llama init nightly.yaml --files incoming.txt --quiet\n{changes}",
        tmp_path,
    )
    config = load_config(tmp_path / "nightly.yaml")
    (nightly,) = config.deployment.schedules
    scheduled = load_config(tmp_path / "nightly.yaml", nightly.overrides)
    assert [one.runtime.name for one in (config, scheduled)] == [
        "nightly-{date}-{time}",
        "nightly-{date}",
    ]
    assert scheduled.data.tokenizer.path == "tokenizer.json"
