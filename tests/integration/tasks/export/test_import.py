"""Weights of other people's Llamas: what is taken in, what is refused, and that it is the same model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from infini_llama.configs.errors import ConfigError
from infini_llama.configs.loading import load_config, refuse_as_new
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import (
    ModelConfig,
    PipelineConfig,
    TrainingConfig,
)
from infini_llama.configs.variables import without_variables
from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama
from infini_llama.tasks.export.exporting import export
from infini_llama.tasks.export.importing import (
    folder_of,
    open_model,
    write_configuration,
)
from infini_llama.tasks.preprocess.sources.passkey import passkey_texts
from infini_llama.tasks.records.heads import HeadScores
from infini_llama.tasks.records.lineage import InitialWeights
from infini_llama.tasks.runs.run_folder import RunFolder
from infini_llama.tasks.storage.hf_folder import conversation_of, open_folder
from infini_llama.tasks.tokenizers.tokenizer import load
from infini_llama.tasks.train.binding import bind_run
from infini_llama.tasks.train.initial import initial_weights, refuse_unlike
from infini_llama.tasks.train.worker.initial_model import init_gates, load_pretrained
from support.models import small
from support.records import make_plan

from .conftest import SIZES


def imported(path, gate=None, **changes):
    model = Llama(LlamaConfig(**(open_folder(path).config.to_dict() | changes)))
    init_gates(model, TrainingConfig(init_from=str(path), init_gate=gate))
    load_pretrained(model, path)
    return model.eval()


def initial_of(path):
    return InitialWeights(path=str(path), digest="", vocab_size=0)


@pytest.mark.parametrize("gate", [None, 0.0, [1.0, 5.0]])
def test_infini_attention_in_its_place_leaves_short_texts_as_they_were(theirs, gate):
    path, model = theirs()
    infini = imported(path, gate, attention="infini", segment_length=16)
    ids = torch.randint(0, 300, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(
            infini(ids[:, :16]), model(ids[:, :16]).logits, rtol=0, atol=1e-5
        )
        assert torch.equal(infini(ids[:, :16]), imported(path)(ids[:, :16]))
        assert not torch.allclose(infini(ids)[:, 17:], imported(path)(ids)[:, 17:])
    gates = gate if isinstance(gate, list) else [-2.0 if gate is None else gate] * 2
    assert [layer.self_attn.gate.tolist() for layer in infini.model.layers] == [
        [value] * 4 for value in gates
    ]


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (None, [[0.0] * 4] * 2),
        (-3.0, [[-3.0] * 4] * 2),
        ([-3.0, 1.0], [[-3.0] * 4, [1.0] * 4]),
        ([[1, 2, 3, 4], 0], [[1, 2, 3, 4], [0] * 4]),
    ],
)
def test_random_weights_have_the_gates_that_are_set(gate, expected):
    model = Llama(small(attention="infini"))
    init_gates(model, TrainingConfig(init_gate=gate))
    assert [layer.self_attn.gate.tolist() for layer in model.model.layers] == expected


@pytest.mark.parametrize("attention", ["softmax", "local"])
def test_gates_of_a_configuration_whose_attention_has_no_memory_are_not_set(attention):
    model = Llama(small(attention=attention))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    init_gates(model, TrainingConfig(init_gate=[-3.0, 1.0]))
    assert all(
        torch.equal(weight, before[name]) for name, weight in model.named_parameters()
    )


@pytest.mark.parametrize(("layers", "others"), [(None, [0]), ([1], None)])
def test_an_exported_infini_model_comes_back_with_its_gates(export_of, layers, others):
    out, model = export_of(
        attention="infini", memory_update="delta", memory_layers=layers
    )
    back = imported(out)
    assert back.config == model.config
    assert all(
        torch.equal(tensor, back.state_dict()[name])
        for name, tensor in model.state_dict().items()
    )
    other = imported(out, -1.0, memory_layers=others)  # free to differ
    gates = {
        number: attention.gate.tolist()
        for number, attention in other.memory_layers().items()
    }
    kept = {
        number: attention.gate.tolist()
        for number, attention in model.memory_layers().items()
    }
    assert gates == {
        number: kept.get(number, [-1.0] * 4) for number in others or range(2)
    }


def test_a_folder_without_maps_begins_with_the_identity(export_of, dataset):
    out, model = export_of(attention="infini", memory_layers=[1])
    mapped = imported(out, memory_maps=True)
    refuse_unlike(initial_of(out), mapped.config, dataset)
    ids = torch.randint(0, 300, (2, 60))
    with torch.no_grad():
        assert torch.equal(mapped(ids), model(ids))
    assert torch.equal(
        mapped.memory_layers()[1].memory_k.matrix, torch.eye(8).expand(2, 8, 8)
    )


def test_maps_of_a_folder_are_kept_or_refused(export_of, dataset):
    out, model = export_of(attention="infini", memory_maps=True)
    back = imported(out)
    assert back.config == model.config
    assert all(
        torch.equal(tensor, back.state_dict()[name])
        for name, tensor in model.state_dict().items()
    )
    with pytest.raises(
        ConfigError, match=r"has unknown: model.layers.0.self_attn.memory_k.matrix"
    ):
        imported(out, memory_maps=False)
    without = replace(model.config, memory_maps=False)
    with pytest.raises(ConfigError, match=r"model.memory_maps: False here, True there"):
        refuse_unlike(initial_of(out), without, dataset)
    refuse_unlike(initial_of(out), replace(without, attention="local"), dataset)
    assert not imported(out, attention="local").memory_layers()


def test_a_model_that_gets_a_memory_gets_maps_and_others_stay_as_they_are(
    theirs, export_of, tmp_path
):
    path, _ = theirs()
    mapped, _ = export_of(attention="infini", memory_maps=True)
    for folder, attention, expected in (
        (path, "infini", True),
        (path, "local", False),
        (mapped, None, True),
        (mapped, "infini", True),
    ):
        start = tmp_path / "start.yaml"
        start.unlink(missing_ok=True)
        write_configuration(open_model(folder), start, attention, 8)
        assert load_config(start).model.memory_maps == expected


def test_import_writes_that_segments_see_the_one_before(theirs, export_of, tmp_path):
    path, _ = theirs()
    out, _ = export_of(attention="infini", attend_previous_segment=True)
    for folder, attention, sees, expected in (
        (path, "infini", False, False),
        (path, "infini", True, True),
        (path, "local", True, True),
        (out, None, False, True),
        (out, "infini", False, True),
    ):
        start = tmp_path / "start.yaml"
        start.unlink(missing_ok=True)
        write_configuration(
            open_model(folder), start, attention, 4, attend_previous_segment=sees
        )
        assert load_config(start).model.attend_previous_segment == expected
    with pytest.raises(
        ConfigError, match="--attend-previous-segment is for Infini-attention"
    ):
        write_configuration(
            open_model(path), tmp_path / "no.yaml", attend_previous_segment=True
        )


def test_a_memory_is_added_to_the_segments_of_the_folder(export_of, tmp_path):
    out, _ = export_of(attention="local", segment_length=8)
    write_configuration(open_model(out), tmp_path / "start.yaml", "infini")
    model = load_config(tmp_path / "start.yaml").model
    assert (model.attention, model.segment_length) == ("infini", 8)


def test_weights_learned_in_hard_segments_are_read_with_the_segment_before(
    export_of, dataset
):
    out, model = export_of(attention="infini", segment_length=8)
    sees = imported(out, attend_previous_segment=True, segment_length=16)
    refuse_unlike(initial_of(out), sees.config, dataset)
    state = sees.state_dict()
    assert all(
        torch.equal(state[name], weight) for name, weight in model.state_dict().items()
    )
    ids = torch.randint(0, 300, (2, 60))
    with torch.no_grad():
        assert not torch.equal(sees(ids), model(ids))


@pytest.mark.parametrize("tied", [False, True])
def test_a_padded_vocabulary_is_filled_and_exported_without_its_padding(
    theirs, run_of, tmp_path, tied
):
    path, model = theirs(tie_word_embeddings=tied)
    padded = imported(path, pad_vocab_to_multiple_of=128)
    assert (
        len(padded.lm_head.weight) % 128 == 0
        and not padded.lm_head.weight[padded.config.vocab_size :].any()
    )
    ids = torch.randint(0, 300, (2, 50))
    with torch.no_grad():
        torch.testing.assert_close(padded(ids), model(ids).logits, rtol=0, atol=2e-5)
    run, trained = run_of(tie_word_embeddings=tied, pad_vocab_to_multiple_of=128)
    record = export(run, tmp_path / "out", "latest", "float32", "5GB")
    back = imported(tmp_path / "out")
    size = trained.config.vocab_size
    assert len(back.lm_head.weight) == size < len(trained.lm_head.weight)
    assert record.parameters == sum(
        parameter.numel() for parameter in back.parameters()
    )
    again = imported(tmp_path / "out", pad_vocab_to_multiple_of=128).state_dict()
    for name, tensor in trained.state_dict().items():
        assert torch.equal(again[name][:size], tensor[:size]), name
    opened = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert opened.config.vocab_size == size
    with torch.no_grad():
        torch.testing.assert_close(
            opened(ids).logits, trained.eval()(ids), rtol=0, atol=1e-5
        )


def test_import_writes_a_configuration_of_the_folder(theirs, tmp_path):
    path, model = theirs(
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    record = write_configuration(open_model(path), tmp_path / "run.yaml")
    assert record.parameters == sum(
        parameter.numel() for parameter in model.parameters()
    )
    config = load_config(tmp_path / "run.yaml").model_dump(mode="json")
    assert (
        config["train"]["init_from"] == config["data"]["tokenizer"]["path"] == str(path)
    )
    fields = ModelConfig(**config["model"]).architecture(
        initial_weights(config["train"]["init_from"]).vocab_size, 2048
    )
    assert LlamaConfig(**fields) == open_folder(path).config
    again = write_configuration(
        open_model(path), tmp_path / "infini.yaml", "infini", 128
    )
    assert again.digest == record.digest
    section = yaml.safe_load((tmp_path / "infini.yaml").read_text())["model"]
    assert (section["attention"], section["segment_length"]) == ("infini", 128)
    with pytest.raises(ConfigError, match="exists"):
        refuse_as_new(tmp_path / "run.yaml")


def test_a_dollar_sign_in_the_folder_begins_no_variable(theirs, tmp_path):
    path, _ = theirs()
    folder = tmp_path / "a$b"
    path.rename(folder)
    write_configuration(open_model(folder), tmp_path / "run.yaml")
    config = without_variables(load_config(tmp_path / "run.yaml"))
    assert config.train.init_from == config.data.tokenizer.path == str(folder)


@pytest.mark.parametrize("sees_previous", [False, True])
def test_a_row_has_several_segments_however_long_they_are(
    theirs, tmp_path, sees_previous
):
    path, _ = theirs()
    folder = open_model(path)
    assert folder.config.max_position_embeddings < 4096
    output = tmp_path / "infini.yaml"
    write_configuration(
        folder,
        output,
        "infini",
        segment_length=4096,
        attend_previous_segment=sees_previous,
    )
    config = load_config(output)
    assert config.data.sequence_length >= 4 * config.model.segment_length == 4 * 4096


def test_the_home_folder_of_nobody_is_no_folder():
    with pytest.raises(ConfigError, match="~nobody-here"):
        open_folder(folder_of("~nobody-here/model", None))


@pytest.fixture
def starting(theirs, built, data):
    """A configuration that starts from a folder, its run's folder, and a claim of it."""
    home, reference = built
    path, _ = theirs()
    model = SIZES | {
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
    }
    config = load_config("tiny").model_dump(mode="json")
    config |= {
        "data": data(),
        "model": config["model"] | model,
        "train": config["train"] | {"init_from": str(path)},
    }
    config["runtime"] |= {"home": str(home), "name": "started"}
    run = RunFolder(home / "runs" / "started")

    def begin(**changes):
        now = config | {
            "model": config["model"] | changes.pop("model", {}),
            "train": config["train"] | changes,
        }
        return bind_run(PipelineConfig.model_validate(now), reference, make_plan())

    return path, run, begin


def test_a_run_records_the_digest_of_its_initial_weights(starting):
    path, _, begin = starting
    lineage = begin()
    assert lineage.init_from.digest == open_folder(path).digest()
    assert lineage.model.vocab_size == open_folder(path).config.vocab_size
    elsewhere = path.rename(path.with_name("moved"))
    moved = begin(init_from=str(elsewhere))
    assert moved.train.init_from == str(elsewhere) and moved.model == lineage.model
    assert moved.init_from.digest == lineage.init_from.digest
    assert begin(init_from=str(path)).init_from == moved.init_from, (
        "a run that has begun needs no folder"
    )

    tensors = load_file(elsewhere / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, elsewhere / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"train.init_from: blake3:\w+ before, blake3:\w+ now"
    ):
        begin(init_from=str(elsewhere))
    with pytest.raises(ConfigError, match=r"train\.init_from: blake3:"):
        begin(init_from=None, model={})


def test_a_run_that_began_without_weights_refuses_some(starting):
    _, _, begin = starting
    begin(init_from=None)
    with pytest.raises(ConfigError, match=r"train\.init_from: .*blake3:"):
        begin()


def test_another_architecture_or_tokenizer_is_refused_at_the_start(starting, dataset):
    path, run, begin = starting
    with pytest.raises(
        ConfigError, match=r"model.num_key_value_heads: 4 here, 2 there"
    ):
        begin(model={"num_key_value_heads": 4})
    assert not run.lineage.exists()
    begin(
        model={
            "attention": "infini",
            "segment_length": 8,
            "hidden_dropout": 0.1,
            "rope_theta": 5e5,
        }
    )
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[100:102]
    words[first], words[second] = words[second], words[first]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=f"data.tokenizer.path={path}"):
        refuse_unlike(initial_of(path), run.require_lineage().model, dataset)


def test_a_tokenizer_with_the_same_vocabulary_that_cuts_words_otherwise_is_refused(
    starting, dataset
):
    path, run, begin = starting
    begin()
    refuse_unlike(initial_of(path), run.require_lineage().model, dataset)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Punctuation", "behavior": "Isolated"},
            tokenizer["pre_tokenizer"],
        ],
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=f"other IDs.*data.tokenizer.path={path}"):
        refuse_unlike(initial_of(path), run.require_lineage().model, dataset)


def test_a_model_with_heads_that_retrieve_gets_what_teaches_its_memory(
    export_of, tmp_path
):
    out, _ = export_of(attention="softmax")
    heads = HeadScores(
        model="m",
        texts=2,
        found=2,
        retrieval=((0,) * 4, (0, 1, 0, 1)),
        induction=((1,) * 4,) * 2,
    )
    write_configuration(open_model(out), tmp_path / "start.yaml", "infini", 64, heads)
    assert "*id" not in (tmp_path / "start.yaml").read_text(), (
        "whoever names a text in one source would name it in all"
    )
    config = load_config(tmp_path / "start.yaml")
    assert config.model.memory_layers == [1] and config.train.init_gate == [
        [-5, 1, -5, 1]
    ]
    assert config.train.frozen_layers == 1 and config.model.memory_write_jitter > 1e6
    sources = {source.name: source for source in config.data.sources}
    assert {name for name, source in sources.items() if source.loss_on == "all"} == {
        "english"
    }
    assert {
        name for name, source in sources.items() if source.passkey.filler == "files"
    } == {
        "near",
        "middle",
        "far",
    }
    tokenizer = load(config.data.tokenizer)
    texts = passkey_texts(
        sources["far-repeated"].passkey.model_copy(update={"documents": 200})
    )
    longest = max(texts, key=len)
    tokens = len(tokenizer.encode(longest, add_special_tokens=False).ids)
    assert (
        config.data.sequence_length / 2
        < tokens
        < config.data.sequence_length
        == 12 * 64
    )
    assert sources["near-repeated"].passkey.repetitions == 1, (
        "what is around a number has more than three segments with this tokenizer"
    )
    for source in sources.values():
        made = source.passkey.model_copy(update={"documents": 20})
        for text in passkey_texts(made, prose=[" word"]):
            assert source.answer_after in text
    of_the_model = {"init_from", "init_gate", "frozen_layers"}
    ours = load_config(
        Path(__file__).parents[4] / "configs" / "infini_from_smollm2.yaml"
    )
    assert config.train.model_dump(exclude=of_the_model) == ours.train.model_dump(
        exclude=of_the_model
    )
    assert [(each.name, each.weight) for each in config.data.sources] == [
        (each.name, each.weight) for each in ours.data.sources
    ]


def test_a_model_with_a_memory_that_is_to_see_the_segment_before_gets_text(
    export_of, tmp_path
):
    folder = open_model(export_of(attention="infini", memory_layers=[1])[0])
    for attention in (None, "infini"):
        output = tmp_path / f"as-before-{attention}.yaml"
        write_configuration(folder, output, attention)
        config = load_config(output)
        assert not config.data.sources and config.train.frozen_layers == 0
    write_configuration(folder, tmp_path / "text.yaml", None, 32, None, True)
    config = load_config(tmp_path / "text.yaml")
    assert (
        config.model.attend_previous_segment and config.model.memory_write_jitter > 1e6
    )
    assert config.train.frozen_layers == 1, "as many as lie below the first memory"
    assert not config.data.sources and config.data.sequence_length == 4 * 32


def test_an_export_keeps_how_the_model_that_the_run_began_from_is_talked_to(
    theirs, run_of, tmp_path
):
    path, _ = theirs()
    words = Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab()
    first, last = sorted(words, key=words.__getitem__)[5:7]
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": first,
                "eos_token": {"content": last},
            }
        )
    )
    generation = {
        "temperature": 0.6,
        "eos_token_id": [words[last], 9],
        "pad_token_id": -1,
    }
    (path / "generation_config.json").write_text(json.dumps(generation))
    folder = RunFolder(run_of(attention="softmax")[0])
    folder.write(
        folder.lineage,
        changed(folder.require_lineage(), init_from=initial_weights(str(path))),
    )
    longest = json.loads((path / "config.json").read_text())["max_position_embeddings"]
    assert longest > folder.require_lineage().dataset.sequence_length
    shutil.rmtree(path)  # it is no longer needed
    export(folder.path, tmp_path / "out", "latest", "float32", "5GB")
    assert (
        AutoConfig.from_pretrained(tmp_path / "out").max_position_embeddings == longest
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == longest
    messages = [{"role": "user", "content": "green sky"}]
    said = AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(
        messages, tokenize=False
    )
    assert said == f"{first}green sky{last}"
    kept = GenerationConfig.from_pretrained(tmp_path / "out")
    assert kept.temperature == 0.6 and set(kept.eos_token_id) == {0, 2, words[last], 9}
    assert set(AutoConfig.from_pretrained(tmp_path / "out").eos_token_id) == {
        0,
        2,
        words[last],
        9,
    }
    # As transformers' Trainer does, which changes it before it saves.
    kept.max_new_tokens = 20
    kept.save_pretrained(tmp_path / "again")


def test_an_export_with_a_chat_template_has_the_special_tokens_of_its_folder(
    theirs, run_of, tmp_path
):
    """Also where they stand in the file that transformers 4 read, and without a bos if it has none."""
    path, _ = theirs()
    words = Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab()
    pad, last = sorted(words, key=words.__getitem__)[5:7]
    (path / "chat_template.jinja").write_text(
        "{{ bos_token }}{{ eos_token }}{{ sep_token }}{{ begin_token }}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "sep_token": pad,
        "extra_special_tokens": {"begin_token": last},
        "padding_side": "left",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    stated = {"eos_token": {"content": last}, "pad_token": pad}
    (path / "special_tokens_map.json").write_text(json.dumps(stated))
    folder = RunFolder(run_of(attention="softmax")[0])
    folder.write(
        folder.lineage,
        changed(folder.require_lineage(), init_from=initial_weights(str(path))),
    )
    export(folder.path, tmp_path / "out", "latest", "float32", "5GB")
    for place in (path, tmp_path / "out"):
        tokenizer = AutoTokenizer.from_pretrained(place)
        said = tokenizer.apply_chat_template([{"role": "user"}], tokenize=False)
        assert (said, tokenizer.pad_token) == (last + pad + last, pad)
        assert tokenizer.padding_side == "left"
    assert "has no padding token" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("stated", "samples"),
    [
        ({"do_sample": False, "temperature": 0.0}, False),
        ({"do_sample": False, "temperature": 0.7, "top_k": 0, "top_p": 0.9}, False),
        ({"do_sample": True, "temperature": 0}, False),
        ({"temperature": 0.0}, False),
        ({"do_sample": True, "temperature": 0.7}, True),
        ({"temperature": 0.7}, True),
        ({}, None),
    ],
)
def test_an_export_samples_only_where_the_model_that_the_run_began_from_does(
    theirs, run_of, tmp_path, stated, samples
):
    path, _ = theirs()
    (path / "generation_config.json").write_text(json.dumps(stated))
    folder = RunFolder(run_of(attention="softmax")[0])
    folder.write(
        folder.lineage,
        changed(folder.require_lineage(), init_from=initial_weights(str(path))),
    )
    export(folder.path, tmp_path / "out", "latest", "float32", "5GB")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.do_sample is samples
    assert model.generation_config.temperature == (0.7 if samples else None)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)
    model.generation_config.max_new_tokens = 20
    model.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize(
    "where", ["tokenizer_config.json", "additional_chat_templates"]
)
def test_an_export_keeps_every_chat_template(theirs, run_of, tmp_path, where):
    path, _ = theirs()
    templates = {
        "default": "chat: {{ messages[0].content }}",
        "tool_use": "tools: {{ messages[0].content }}",
    }
    if where == "tokenizer_config.json":
        stated = [{"name": name, "template": text} for name, text in templates.items()]
        (path / where).write_text(json.dumps({"chat_template": stated}))
    else:
        (path / where).mkdir()
        (path / "chat_template.jinja").write_text(templates["default"])
        (path / where / "tool_use.jinja").write_text(templates["tool_use"])
    folder = RunFolder(run_of(attention="softmax")[0])
    folder.write(
        folder.lineage,
        changed(folder.require_lineage(), init_from=initial_weights(str(path))),
    )
    export(folder.path, tmp_path / "out", "latest", "float32", "5GB")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == templates
    again = conversation_of(open_folder(tmp_path / "out"))
    assert again.chat_template == templates
