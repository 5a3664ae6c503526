"""A text has the same IDs wherever it is encoded for a run."""

import json
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from infini_llama.configs.schema import TrainingConfig
from infini_llama.flows.cli.main import main
from infini_llama.tasks.preprocess.stage import preprocess
from infini_llama.tasks.preprocess.tokens.reader import held_out_prompt
from infini_llama.tasks.preprocess.tokens.shards import map_shard
from infini_llama.tasks.records.lineage import Conversation
from infini_llama.tasks.runs import generation
from infini_llama.tasks.runs.generation import Writer, generate
from infini_llama.tasks.runs.load import load_run
from infini_llama.tasks.runs.reading import reading_of
from infini_llama.tasks.train.worker.callbacks import samples
from infini_llama.tasks.verify_data.checks import verify
from support.trained_runs import trained_run

START = "<|im_start|>"
END = "<|im_end|>"
ANSWER = f"{START}assistant\n"
CHATS = [
    f"{START}user\nSay {number % 10} of {number}{END}\n{ANSWER}{number % 10}{END}"
    for number in range(100, 160)
]
PROMPT = f"{START}user\nSay 7 of 777{END}\n{ANSWER}"


@pytest.fixture
def chat_tokenizer(tmp_path):
    """The path of a tokenizer over bytes whose end of text is a marker of chats, too."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END, START],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(CHATS, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def chat_run(chat_tokenizer, data, tmp_path, ranks):
    """make(split_special_tokens): a run on chats, its folder and its dataset's reference."""
    lines = [json.dumps({"text": text}) for text in CHATS]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))

    def make(split_special_tokens, **changes):
        section = data(
            files=[f"{tmp_path}/chats.jsonl"],
            loss_on="answer",
            answer_after=ANSWER,
            sequence_length=64,
            packing="padded",
            tokenizer={
                "path": str(chat_tokenizer),
                "eos": END,
                "split_special_tokens": split_special_tokens,
            },
            **changes,
        )
        home = tmp_path / f"home-{split_special_tokens}"
        reference = preprocess(section, home)
        return trained_run(home, reference, section)[0], reference

    return make


def documents_of(dataset):
    offsets, values = map_shard(next(dataset.glob("train/*.arrow")))
    return [values[first:last].tolist() for first, last in pairwise(offsets.tolist())]


@pytest.mark.parametrize("split_special_tokens", [True, False])
def test_documents_prompts_and_the_default_sample_have_the_same_ids(
    chat_run, split_special_tokens, monkeypatch, tmp_path
):
    run, reference = chat_run(split_special_tokens)
    dataset = run.parents[1] / reference.path
    content = json.loads((dataset / "manifest.json").read_text())
    assert content["content"]["text_yields_special_tokens"] is not split_special_tokens
    assert (
        content["meta"]["data"]["tokenizer"]["split_special_tokens"]
        is split_special_tokens
    )
    encoder = reading_of(run).encoder
    ids = encoder.encode(PROMPT)
    assert (encoder.tokenizer.token_to_id(START) in ids) is not split_special_tokens
    documents = documents_of(dataset)
    assert all(ids[:2] == document[:2] for document in documents)
    texts = [
        encoder.tokenizer.decode(each[:-1], skip_special_tokens=False)
        for each in documents
    ]
    assert (
        set(texts) <= set(CHATS)
        and [[*encoder.encode(t), 0] for t in texts] == documents
    )
    written = list[list[list[int]]]()

    class Recorded(Writer):
        def __init__(self, model, tokenizer, prompts, *rest):
            written.append([*prompts])
            super().__init__(model, tokenizer, prompts, *rest)

    for module in (generation, samples):
        monkeypatch.setattr(module, "Writer", Recorded)
    loaded = load_run(run)
    generate(loaded, [PROMPT], max_new_tokens=1)
    (tmp_path / "prompt.txt").write_text(PROMPT)
    more = [
        "--prompt-file",
        str(tmp_path / "prompt.txt"),
        "--max-new-tokens",
        "1",
        "--json",
    ]
    assert main(["generate", str(run), "--prompt", PROMPT, *more]) == 0
    settings = TrainingConfig(sample_tokens=1)
    (sample,) = samples.sample_texts(loaded.model, dataset, settings, Conversation())
    assert written[:2] == [[ids], [ids, ids]]
    assert written[2] == [held_out_prompt(dataset, encoder.tokenizer)]
    assert written[2] == [encoder.encode(sample.prompt)]
    assert sample.prompt.startswith(START) and sample.prompt.endswith(ANSWER)


@pytest.mark.parametrize("split_special_tokens", [True, False])
def test_a_dataset_with_markers_passes_the_deep_check(
    chat_run, split_special_tokens, caplog
):
    run, reference = chat_run(split_special_tokens)
    report = verify(reference, run.parents[1], "deep")
    assert any("decoded and encoded again" in check.detail for check in report.checks)
    warned = [line for line in caplog.messages if "split_special_tokens=false" in line]
    assert len(warned) == split_special_tokens and all(
        f"{END}, {START}" in line for line in warned
    )


def test_text_without_markers_is_not_warned_of(built, data, caplog):
    preprocess(data(), built[0])
    assert "split_special_tokens" not in caplog.text


@pytest.mark.parametrize(
    ("written", "prompt"),
    [
        ("Say 7.", "Say 7."),
        ("Say 7.\n", "Say 7."),
        ("Say 7.\r\n", "Say 7."),
        ("Say 7.\n\n", "Say 7.\n"),
        (PROMPT, PROMPT),
        (f"{PROMPT}\n", PROMPT),
        (PROMPT.removesuffix("\n"), PROMPT.removesuffix("\n")),
    ],
)
def test_one_line_end_of_a_prompt_file_is_dropped_unless_prompts_end_with_it(
    chat_run, tmp_path, capsys, written, prompt
):
    run, _ = chat_run(True)
    (tmp_path / "prompt.txt").write_bytes(written.encode())
    given = [
        "--prompt-file",
        str(tmp_path / "prompt.txt"),
        "--max-new-tokens",
        "1",
        "--json",
    ]
    assert main(["generate", str(run), *given]) == 0
    assert json.loads(capsys.readouterr().out)["texts"][0]["prompt"] == prompt
