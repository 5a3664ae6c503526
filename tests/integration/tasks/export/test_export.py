"""Exported folders, opened by transformers itself."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as their_logging

from infini_llama.configs.errors import ConfigError
from infini_llama.model.hf import is_of_memory
from infini_llama.tasks.export import exporting
from infini_llama.tasks.export.exporting import export, export_trained, write_model
from infini_llama.tasks.runs.checkpoints import committed, read_state
from infini_llama.tasks.runs.load import load_run
from infini_llama.tasks.runs.mirror import Mirror
from infini_llama.tasks.storage.artifacts import Damaged, file_checksum, has_all_files
from infini_llama.tasks.storage.tensors import model_tensors
from infini_llama.tasks.train.worker.checkpointer import save_checkpoint
from support.models import generate

their_logging.disable_progress_bar()


def exported(run, output, **changes):
    return export(
        run,
        output,
        **(
            {"checkpoint": "latest", "dtype": "float32", "max_shard_size": "5GB"}
            | changes
        ),
    )


def opened(folder, **more):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **more
    )
    assert not any(report.values()), report
    return model.eval()


def greedy(model, prompt, length):
    made = model.generate(
        torch.tensor([prompt]), max_new_tokens=length, do_sample=False
    )[0].tolist()
    assert made[: len(prompt)] == prompt
    return made[len(prompt) :]


def ours(model, prompt, length, end=0):
    """As theirs, which ends with the end-of-text token instead of before it."""
    tokens = generate(model, prompt, length, stop_id=end)
    return tokens if len(tokens) == length else [*tokens, end]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": YARN},
        {"hidden_act": "gelu", "attention_dropout": 0.1, "hidden_dropout": 0.2},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"head_dim": 24},
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {"tie_word_embeddings": False, "num_key_value_heads": 4, "rope_theta": 500.0},
    ],
)
def test_models_within_hugging_face_llama_open_without_custom_code(
    run_of, tmp_path, changes
):
    run, model = run_of(**changes)
    assert exported(run, tmp_path / "out").custom_code == () and not list(
        (tmp_path / "out").glob("*.py")
    )
    theirs = opened(tmp_path / "out")
    assert type(theirs).__name__ == "LlamaForCausalLM" and theirs.dtype == torch.float32
    ids = torch.randint(0, 300, (2, 100))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=0, atol=2e-5)
    assert greedy(theirs, [7, 8, 9], 30) == ours(model, [7, 8, 9], 30)


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": True},
        {"pre_norm": False},
        {"attention": "local"},
        {"attention": "infini"},
        {"attention": "infini", "tie_word_embeddings": False},
        {"attention": "infini", "memory_update": "delta_bounded", "rope_scaling": YARN},
        {"attention": "infini", "memory_maps": True},
        {"attention": "infini", "attend_previous_segment": True},
        {"attention": "local", "attend_previous_segment": True},
    ],
)
def test_models_beyond_hugging_face_llama_include_their_code(run_of, tmp_path, changes):
    run, model = run_of(**changes)
    assert exported(run, tmp_path / "out").custom_code
    theirs = opened(tmp_path / "out", trust_remote_code=True)
    assert type(theirs).__module__.startswith("transformers_modules.")
    assert theirs._llama.__module__.startswith("transformers_modules."), (
        "the code of the folder, not the installed one"
    )
    assert theirs.state_dict().keys() == model.state_dict().keys()
    ids = torch.randint(0, 300, (2, 100))
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, model(ids))
    for prompt in ([5], ids[0].tolist()):
        assert greedy(theirs, prompt, 30) == ours(model, prompt, 30)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "infini"},
        {"attention": "infini", "attend_previous_segment": True},
        {"attention": "local"},
        {"qk_norm": True},
    ],
)
def test_every_generated_token_has_the_logits_of_a_full_forward_pass(
    export_of, changes
):
    folder, _ = export_of(**changes)
    theirs = opened(folder, trust_remote_code=True)
    ids = torch.randint(1, 300, (2, 37))
    options = {
        "min_new_tokens": 40,
        "max_new_tokens": 40,
        "do_sample": False,
        "pad_token_id": 0,
    }
    for more in ({}, {"prefill_chunk_size": 5}):
        made = theirs.generate(
            ids, return_dict_in_generate=True, output_logits=True, **options, **more
        )
        with torch.no_grad():
            expected = theirs(made.sequences).logits[:, 36:-1]
        torch.testing.assert_close(
            torch.stack(made.logits, 1), expected, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "infini"},
        {"attention": "infini", "attend_previous_segment": True},
        {"qk_norm": True},
    ],
)
def test_generation_of_a_padded_batch_and_of_beams(export_of, changes):
    folder, model = export_of(**changes)
    theirs = opened(folder, trust_remote_code=True)
    prompts = [torch.randint(1, 300, (length,)).tolist() for length in (3, 20, 9)]
    ids, mask = (
        torch.zeros(3, 20, dtype=torch.long),
        torch.zeros(3, 20, dtype=torch.long),
    )
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :], mask[row, -len(prompt) :] = torch.tensor(prompt), 1
    made = theirs.generate(
        ids, attention_mask=mask, max_new_tokens=25, do_sample=False, pad_token_id=0
    )
    for row, prompt in enumerate(prompts):
        single = ours(model, prompt, 25)
        assert made[row, 20:].tolist()[: len(single)] == single
    # Beams share states that must follow them; without any, every step reads the whole text anew.
    beams = {
        "max_new_tokens": 25,
        "num_beams": 4,
        "do_sample": False,
        "pad_token_id": 0,
    }
    cached = theirs.generate(ids, attention_mask=mask, **beams)
    assert torch.equal(
        cached, theirs.generate(ids, attention_mask=mask, use_cache=False, **beams)
    )


def test_rows_padded_on_either_side_have_the_logits_of_their_own_tokens(export_of):
    folder, model = export_of(attention="infini")
    theirs = opened(folder, trust_remote_code=True)
    row = torch.randint(0, 300, (1, 20))
    padding = torch.full((1, 5), 3)
    ids = torch.cat([torch.cat([padding, row], 1), torch.cat([row, padding], 1)])
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, 20:] = 0
    with torch.no_grad():
        logits = theirs(ids, attention_mask=mask).logits
        expected = model(row)[0]
    torch.testing.assert_close(logits[0, 5:], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[1, :20], expected, rtol=0, atol=1e-5)


def test_the_loss_of_an_infini_model_is_that_of_the_next_token(export_of):
    folder, model = export_of(attention="infini")
    theirs = opened(folder, trust_remote_code=True)
    ids = torch.randint(0, 300, (2, 20))
    loss = theirs(ids, labels=ids).loss
    total, count = model.loss(ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(loss, total / count)
    loss.backward()
    assert theirs.model.layers[0].self_attn.gate.grad.abs().sum() > 0


def test_shards_with_an_index_hold_every_tensor_once(run_of, tmp_path):
    run, model = run_of(attention="infini")
    record = exported(run, tmp_path / "out", max_shard_size="20KB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(record.files) > 3 and set(index["weight_map"].values()) == set(
        record.files
    )
    found = {}
    for file in record.files:
        with safe_open(tmp_path / "out" / file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (no dict)
                assert index["weight_map"][name] == file and name not in found
                found[name] = tensors.get_tensor(name)
    state = model.state_dict()
    assert found.keys() == state.keys() - {"lm_head.weight"}, (
        "a tied head is the embedding"
    )
    assert all(torch.equal(found[name], state[name]) for name in found)
    theirs = opened(tmp_path / "out", trust_remote_code=True)
    assert all(
        torch.equal(tensor, state[name]) for name, tensor in theirs.state_dict().items()
    )


@pytest.mark.parametrize("maps", [False, True])
def test_bfloat16_exports_compute_in_bfloat16_and_keep_weights_of_the_memory_fp32(
    run_of, tmp_path, maps
):
    run, model = run_of(attention="infini", memory_maps=maps)
    exported(run, tmp_path / "out", dtype="bfloat16")
    theirs = opened(tmp_path / "out", trust_remote_code=True)
    exported(run, tmp_path / "wide")
    narrowed = opened(tmp_path / "wide", trust_remote_code=True, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for state in (stored, theirs.state_dict(), narrowed.state_dict()):
        kinds = {name: tensor.dtype for name, tensor in state.items()}
        assert len(list(filter(is_of_memory, kinds))) == (10 if maps else 2)
        assert {kind for name, kind in kinds.items() if is_of_memory(name)} == {
            torch.float32
        }
        assert {kind for name, kind in kinds.items() if not is_of_memory(name)} == {
            torch.bfloat16
        }
    ids = torch.randint(0, 300, (1, 40))
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(ids).logits.float(), model(ids), rtol=0, atol=0.3
        )
        assert theirs.generate(ids, max_new_tokens=5, do_sample=False).shape[1] <= 45


def test_the_tokenizer_is_the_datasets(run_of, tmp_path):
    run, _ = run_of()
    exported(run, tmp_path / "out")
    theirs, (_, ours, _) = (
        AutoTokenizer.from_pretrained(tmp_path / "out"),
        load_run(run),
    )
    for text in (
        "the cat sat",
        " self.value = {x: 1}\n\t«größer» 日本語 🙂",
        "",
        "None:\n    return",
        "don 't , stop .",
    ):
        ids = ours.encode(text, add_special_tokens=False).ids
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert (theirs.eos_token, theirs.eos_token_id, len(theirs)) == (
        "<|endoftext|>",
        0,
        ours.get_vocab_size(),
    )
    assert AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == 0


def test_the_files_name_the_source_of_the_weights(run_of, tmp_path):
    run, _ = run_of("told")
    record = exported(run, tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", "pt") as tensors:
        metadata = tensors.metadata()
    assert metadata["format"] == "pt"
    assert (metadata["infini_llama.run"], metadata["infini_llama.step"]) == (
        "told",
        "7",
    )
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for fact in (
        "# told",
        f"{record.parameters:,}",
        "3,584",
        "5.5000 nats",
        "2.2500",
        metadata["infini_llama.dataset_digest"],
    ):
        assert fact in card, fact
    assert metadata["infini_llama.weights_sha256"] in card


def test_the_same_run_gives_the_same_bytes(run_of, tmp_path):
    run, _ = run_of(attention="infini")
    for name in ("a", "b"):
        exported(run, tmp_path / name)
    first, second = (
        {p.name: file_checksum(p) for p in (tmp_path / n).iterdir()} for n in ("a", "b")
    )
    assert first == second and "modeling_infini_llama.py" in first


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint": "step-00000008"}, "no checkpoint 'step-00000008'"),
        ({"checkpoint": "../../run"}, "no checkpoint '../../run'"),
        ({"max_shard_size": "some"}, "--max-shard-size some"),
        ({"max_shard_size": "infGB"}, "--max-shard-size infGB"),
        ({"max_shard_size": "-5GB"}, "--max-shard-size -5GB"),
        ({"max_shard_size": "0.0GB"}, "--max-shard-size 0.0GB"),
    ],
)
def test_unsupported_exports_are_reported_and_leave_nothing(
    run_of, tmp_path, changes, words
):
    run, _ = run_of()
    before = set(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=words):
        exported(run, tmp_path / "out", **changes)
    assert set(tmp_path.iterdir()) == before


def test_a_folder_with_something_in_it_is_not_written_into(run_of, tmp_path):
    run, _ = run_of()
    (tmp_path / "full").mkdir()
    exported(run, tmp_path / "full")
    with pytest.raises(ConfigError, match="exists"):
        exported(run, tmp_path / "full")


def test_a_folder_below_a_file_and_a_type_that_is_too_small_are_refused(
    run_of, tmp_path
):
    run, model = run_of(attention="softmax")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        exported(run, tmp_path / "file" / "below" / "out")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = 1e5
    state = read_state(committed(run / "checkpoints")[0].path)
    state.step = 8
    save_checkpoint(run / "checkpoints", 8, model_tensors(model), state.to_json())
    with pytest.raises(
        ConfigError, match=r"float16.*layers\.0\.mlp\.down_proj.*100000"
    ):
        exported(run, tmp_path / "out", dtype="float16")
    assert exported(run, tmp_path / "out", dtype="bfloat16").step == 8


def test_a_checkpoint_under_another_number_is_not_exported(run_of, tmp_path):
    run, _ = run_of()
    folder = run / "checkpoints"
    shutil.copytree(folder / "step-00000007", folder / "step-00000016")
    with pytest.raises(Damaged, match="step-00000016"):
        exported(run, tmp_path / "copy", checkpoint="step-00000016")
    assert exported(run, tmp_path / "latest").step == 7


def test_after_training_the_newest_checkpoint_is_exported_once_and_replaced_as_a_whole(
    run_of, tmp_path
):
    run, model = run_of(attention="infini")
    folder = export_trained(run)
    assert folder == run / "export" and has_all_files(
        folder, "export", committed(run / "checkpoints")[0].digest
    )
    theirs = opened(folder, trust_remote_code=True)
    ids = torch.randint(0, 300, (1, 30))
    assert torch.equal(theirs(ids).logits, model(ids))
    written = (folder / "manifest.json").stat()
    assert (
        export_trained(run) == folder and (folder / "manifest.json").stat() == written
    )
    mirror = Mirror(str(tmp_path / "mirror"), run.parents[1])
    assert mirror.keep(folder, "export") > 0 and mirror.has(folder)

    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    state = read_state(committed(run / "checkpoints")[0].path)
    state.step = 8
    save_checkpoint(run / "checkpoints", 8, model_tensors(model), state.to_json())
    assert export_trained(run) == folder and not mirror.has(folder)
    assert torch.equal(opened(folder, trust_remote_code=True)(ids).logits, model(ids))
    assert sorted(path.name for path in run.glob("*export*")) == [
        "export",
        "export.lock",
    ]
    (folder / "config.json").unlink()
    assert has_all_files(export_trained(run), "export")


def test_what_others_put_beside_an_export_stays(run_of):
    run, model = run_of()
    folder = export_trained(run)
    (folder / "model-q8.gguf").write_bytes(b"mine")
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("mine")
    first = (folder / "manifest.json").read_bytes()
    state = read_state(committed(run / "checkpoints")[0].path)
    state.step = 8
    save_checkpoint(run / "checkpoints", 8, model_tensors(model), state.to_json())
    assert export_trained(run) == folder
    assert (folder / "manifest.json").read_bytes() != first
    assert (folder / "model-q8.gguf").read_bytes() == b"mine"
    assert (folder / "notes" / "a.txt").read_text() == "mine"
    assert not folder.with_name("export.before").exists()


def test_two_commands_export_a_run_one_after_the_other(run_of, monkeypatch):
    run, _ = run_of()
    written, others = [], []

    def write_while_another_begins(*arguments):
        written.append(arguments)
        if not others:
            others.append(commands.submit(export_trained, run))
            time.sleep(0.5)
        return write_model(*arguments)

    monkeypatch.setattr(exporting, "write_model", write_while_another_begins)
    with ThreadPoolExecutor(1) as commands:
        assert export_trained(run) == others[0].result() == run / "export"
    assert len(written) == 1 and has_all_files(run / "export", "export")
