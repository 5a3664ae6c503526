"""What Git LFS and git-annex leave in a clone, in the place of any file that is given: a sentence, and nothing is trained on it."""

import gzip
import json

import pytest

from infini_llama.configs.deepspeed import read_json
from infini_llama.configs.errors import DataError
from infini_llama.configs.loading import load_config
from infini_llama.configs.pointers import pointer_in
from infini_llama.configs.schema.tokenizer import TokenizerConfig
from infini_llama.flows.cli.models import prompt_of
from infini_llama.tasks.storage.hf_folder import open_folder
from infini_llama.tasks.tokenizers.tokenizer import load
from support.stages import survey
from support.tokenizer_kinds import train_bpe

LFS = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:"
    + b"5e" * 32
    + b"\nsize 1843200\n"
)
EXTENDED = LFS.replace(b"oid", b"ext-0-foo sha256:" + b"ab" * 32 + b"\noid").replace(
    b"\n", b"\r\n"
)
KEY = b"/annex/objects/SHA256E-s1843200--" + b"5e" * 32 + b".txt"
POINTERS = {
    "LFS": (LFS, "git lfs pull"),
    "LFS with an extension": (EXTENDED, "git lfs pull"),
    "annex": (KEY + b"\n", "git annex get"),
    "annex link in a file": (
        b"../../.git/annex/objects/xK/9p/KEY/KEY",
        "git annex get",
    ),
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
}
LLAMA |= {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 64,
}
TEXTS = {
    "about pointers": b"A pointer begins with:\n" + LFS,
    "longer": LFS + b"x" * 1024,
    "another version": b"version 3\noid sha256:00\n",
    "annex mentioned": KEY + b" is a key.\n",
}


@pytest.mark.parametrize("name", POINTERS)
def test_pointers_are_recognized(name):
    content, cure = POINTERS[name]
    assert cure in (pointer_in(content) or "")


@pytest.mark.parametrize("name", TEXTS)
def test_text_about_pointers_is_text(name):
    assert pointer_in(TEXTS[name]) is None


@pytest.mark.parametrize("on_bad_input", ["fail", "skip"])
@pytest.mark.parametrize(
    "ending",
    ["txt", "jsonl", "csv", "tsv", "json", "parquet", "arrow", "jsonl.gz", "txt.zst"],
)
def test_a_text_that_is_one_is_refused_also_where_damaged_ones_are_skipped(
    data, tmp_path, ending, on_bad_input
):
    for name in ("held", "text"):
        (tmp_path / f"{name}.txt").write_text(f"good {name} " * 100)
    given = {
        "files": [f"{tmp_path}/text.txt"],
        "validation_files": [f"{tmp_path}/held.txt"],
    }
    given["files" if on_bad_input == "skip" else "validation_files"].append(
        str(tmp_path / f"a.{ending}")
    )
    (tmp_path / f"a.{ending}").write_bytes(LFS)
    with pytest.raises(DataError, match=r"git lfs pull") as refused:
        survey(data(**given, on_bad_input=on_bad_input))
    assert f"a.{ending}" in str(refused.value) and "1,843,200 bytes" in str(
        refused.value
    )


def test_a_compressed_pointer_and_a_link_without_its_file_are_refused(data, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "fine.txt").write_text("good " * 100)
    (text / "a.txt.gz").write_bytes(gzip.compress(LFS))
    with pytest.raises(DataError, match=r"a\.txt\.gz .*git lfs pull"):
        survey(data(files=[str(text)]))
    (text / "a.txt.gz").unlink()
    (text / "b.txt").symlink_to("../.git/annex/objects/xK/9p/KEY/KEY")
    for pattern in (text, text / "b.txt", text / "*.txt", text / "**/*.txt"):
        with pytest.raises(DataError, match=r"b\.txt .*git annex get"):
            survey(data(files=[str(pattern)], on_bad_input="skip"))
    (text / "b.txt").unlink()
    (text / "b.txt").symlink_to("removed.txt")
    with pytest.raises(DataError, match=r"b\.txt cannot be read \(No such file"):
        survey(data(files=[str(text)]))
    assert survey(data(files=[str(text)], on_bad_input="skip")).report.bad_files == 1


@pytest.mark.parametrize("annexed", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "added_tokens.json",
    ],
)
def test_a_model_folder_and_a_tokenizer_with_one_are_refused(tmp_path, name, annexed):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    train_bpe([], 257).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).unlink(missing_ok=True)
    if annexed:
        (tmp_path / name).symlink_to("../.git/annex/objects/xK/9p/KEY/KEY")
    else:
        (tmp_path / name).write_bytes(LFS)
    sentence = rf"{name} .*{'git annex get' if annexed else 'git lfs pull'}"
    with pytest.raises(DataError, match=sentence):
        open_folder(tmp_path)
    if "token" in name:
        with pytest.raises(DataError, match=sentence):
            load(TokenizerConfig(path=str(tmp_path)))


def test_a_prompt_has_no_byte_order_mark(tmp_path):
    (tmp_path / "prompt.txt").write_text("\ufeffOnce\ufeff")
    assert prompt_of(str(tmp_path / "prompt.txt")) == "Once\ufeff"


def test_settings_prompts_and_rank_files_that_are_pointers_are_refused(tmp_path):
    for name in ("run.yaml", "zero.json", "r50k.tiktoken", "prompt.txt"):
        (tmp_path / name).write_bytes(LFS)
    for read in (
        lambda: load_config(tmp_path / "run.yaml"),
        lambda: read_json(str(tmp_path / "zero.json")),
        lambda: load(TokenizerConfig(path=str(tmp_path / "r50k.tiktoken"))),
        lambda: load(
            TokenizerConfig(path=str(tmp_path / "r50k.tiktoken"), encoding="r50k_base")
        ),
        lambda: prompt_of(str(tmp_path / "prompt.txt")),
    ):
        with pytest.raises(DataError, match="git lfs pull"):
            read()
