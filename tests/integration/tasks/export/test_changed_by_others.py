"""What other programs do to an exported folder: resized vocabularies, changed settings, other auto classes, other accounts."""

import os

import pytest
import torch
from accelerate import (
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DynamicCache,
)

from infini_llama.tasks.storage.hf_folder import open_folder


@pytest.fixture
def folder(export_of):
    return export_of(attention="infini")[0]


def opened(folder, kind=AutoModelForCausalLM, **more):
    return kind.from_pretrained(folder, trust_remote_code=True, **more).eval()


def test_a_resized_vocabulary_is_saved_and_loaded(folder, tmp_path):
    model = opened(folder)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 3)
    model.save_pretrained(tmp_path / "resized")
    again = opened(tmp_path / "resized")
    assert (
        again.get_input_embeddings().weight.shape[0]
        == size + 3
        == open_folder(tmp_path / "resized").config.vocab_size
    )
    ids = torch.randint(0, size, (2, 20))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_weights_that_a_folder_lacks_are_initialised(export_of):
    folder = export_of(attention="infini", memory_maps=True)[0]
    plain = opened(folder)
    more = opened(folder, num_hidden_layers=3)
    kept = plain.state_dict()
    for name, weight in more.state_dict().items():
        if name in kept:
            assert torch.equal(weight, kept[name]), name
    last = more.model.layers[2]
    deviation = plain._llama.config.initializer_range
    assert last.mlp.up_proj.weight.std().item() == pytest.approx(deviation, rel=0.2)
    assert (last.input_layernorm.weight == 1).all()
    assert (last.self_attn.gate == 0).all()
    identity = torch.eye(last.self_attn.memory_k.matrix.shape[-1])
    assert (last.self_attn.memory_k.matrix == identity).all()


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_filled_in_where_accelerate_left_them_empty(export_of, tied):
    folder = export_of(attention="infini", tie_word_embeddings=tied)[0]
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.tie_weights()
    weights = str(folder / "model.safetensors")
    model = load_checkpoint_and_dispatch(model, weights, device_map={"": "cpu"})
    ids = torch.randint(0, 300, (2, 20))
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, opened(folder)(ids).logits)


def test_the_setting_of_a_cache_is_one_of_the_configuration(folder):
    assert opened(folder).config.use_cache is True
    assert opened(folder, use_cache=False).config.use_cache is False


def test_a_cache_without_a_memory_is_refused(folder):
    model = opened(folder)
    ids = torch.randint(0, 300, (2, 20))
    with pytest.raises(ValueError, match="DynamicCache"):
        model(ids, past_key_values=DynamicCache())


def test_rows_of_a_vocabulary_that_grows_are_drawn(folder):
    model = opened(folder)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 30, mean_resizing=False)
    rows = model.get_input_embeddings().weight[size:]
    deviation = model._llama.config.initializer_range
    assert rows.std().item() == pytest.approx(deviation, rel=0.2)


def test_settings_given_on_loading_are_applied(folder):
    assert opened(folder, attention_dropout=0.5)._llama.config.attention_dropout == 0.5
    config = AutoConfig.from_pretrained(
        folder, trust_remote_code=True, num_hidden_layers=1
    )
    assert (
        len(
            AutoModelForCausalLM.from_config(
                config, trust_remote_code=True
            ).model.layers
        )
        == 1
    )


def test_sdpa_is_accepted_and_auto_model_gives_hidden_states(folder):
    model, base = opened(folder, attn_implementation="sdpa"), opened(folder, AutoModel)
    ids = torch.randint(0, 300, (2, 20))
    with torch.no_grad():
        assert torch.equal(
            model.lm_head(base(ids).last_hidden_state), model(ids).logits
        )


def test_a_device_map_keeps_the_layers_together(folder):
    """Each is called by other names than forward, where nothing moves its inputs."""
    model = opened(folder)
    size = sum(parameter.nbytes for parameter in model.parameters())
    memory = {0: size // 2, 1: 2 * size}
    devices = infer_auto_device_map(
        model, max_memory=memory, no_split_module_classes=model._no_split_modules
    )
    assert set(devices.values()) == {1}


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_modes_of_the_umask(export_of, umask):
    before = os.umask(umask)
    try:
        folder, _ = export_of()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        0o666 & ~umask
    }


def test_the_documented_padding_hides_no_end_of_text(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    tokenizer.pad_token = tokenizer.eos_token
    end = tokenizer.eos_token_id
    rows = [
        {"input_ids": row, "labels": row} for row in ([5, 6, end], [5, 6, 7, 8, end])
    ]
    labels = DataCollatorForSeq2Seq(tokenizer)(rows)["labels"]
    assert (labels == end).sum() == 2 and (labels == -100).sum() == 2


def test_a_plain_card_has_no_infini_keys(export_of):
    card = (export_of()[0] / "README.md").read_text()
    assert "| hidden_size |" in card and not [
        name for name in ("segment_length", "memory_") if f"| {name}" in card
    ]
