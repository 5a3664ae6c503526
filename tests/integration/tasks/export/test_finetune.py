"""Exported folders in transformers' Trainer, and the arguments of its models' forward pass."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers import LlamaConfig as TheirConfig

from infini_llama.tasks.export.modeling_infini_llama import (
    CACHE,
    InfiniLlamaConfig,
    InfiniLlamaForCausalLM,
)
from support.models import small

# Models that keep the keys of the whole text, trained at fewer tokens than the tests read.
SHORT = [
    {"qk_norm": True, "max_position_embeddings": 8},
    {
        "pre_norm": False,
        "max_position_embeddings": 8,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
]
PACKED = torch.tensor([[*range(9), *range(20), *range(11)], [*range(40)]])


def wrapped(**changes):
    """The class around the model, with random weights."""
    config = small(
        **({"num_hidden_layers": 3, "max_position_embeddings": 64} | changes)
    )
    return InfiniLlamaForCausalLM(InfiniLlamaConfig(config.to_dict())).eval()


def rows(count=8, length=24):
    """Rows of which each has another number of targets."""
    ids = torch.randint(0, 97, (count, length))
    labels = ids.clone()
    for row in range(count):
        labels[row, : 2 * row] = -100
    return ids, labels


def test_the_trainer_accumulates_the_gradient_of_one_batch(export_of, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    ids, labels = rows()
    data = [
        {"input_ids": row, "labels": label}
        for row, label in zip(ids, labels, strict=True)
    ]
    folder, _ = export_of(attention="infini")
    found = {}
    for accumulation in (1, 4):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        settings = TrainingArguments(
            output_dir=str(tmp_path / "trainer"),
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            logging_steps=1,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        expected = model(input_ids=ids, labels=labels).loss.item()
        trainer = Trainer(model=model, args=settings, train_dataset=data)
        trainer.train()
        logged = next(
            entry["loss"] for entry in trainer.state.log_history if "loss" in entry
        )
        assert logged == pytest.approx(expected, rel=1e-3)
        found[accumulation] = {
            name: value.detach().clone() for name, value in model.named_parameters()
        }
    for name, value in found[1].items():
        torch.testing.assert_close(found[4][name], value, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing_changes_memory_and_not_gradients(export_of):
    folder, _ = export_of(attention="infini")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    ids, labels = rows(2, 40)
    kept, gradients = [], []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        model.train().zero_grad()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, s=sizes: s.append(x.nbytes) or x, lambda x: x
        ):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        kept.append(sum(sizes))
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert kept[1] < kept[0] / 2
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("changes", [{"attention": "infini"}, {"qk_norm": True}])
def test_embeddings_in_place_of_ids(changes):
    model, ids = wrapped(**changes), torch.randint(0, 97, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    embeddings = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(ids).logits)
    padded = model(inputs_embeds=embeddings, attention_mask=mask).logits
    assert torch.equal(padded, model(ids, attention_mask=mask).logits)
    made = model.generate(
        inputs_embeds=embeddings[1:], max_new_tokens=12, do_sample=False
    )
    assert torch.equal(
        made, model.generate(ids[1:], max_new_tokens=12, do_sample=False)[:, 20:]
    )
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": embeddings}):
        with pytest.raises(ValueError, match="inputs_embeds"):
            model(**wrong)


@pytest.mark.parametrize(
    "changes", [{"attention": "infini"}, {"attention": "local"}, {"qk_norm": True}]
)
def test_position_ids_that_start_anew_begin_documents(changes):
    model, ids = wrapped(**changes), torch.randint(0, 97, (2, 40))
    logits = model(ids, position_ids=PACKED).logits
    documents = torch.tensor([[0] * 9 + [1] * 20 + [2] * 11, [0] * 40])
    assert torch.equal(logits, model._llama(ids, documents))
    edited = ids.clone()
    edited[:, 8] = (ids[:, 8] + 1) % 97
    changed = (model(edited, position_ids=PACKED).logits != logits).any(dim=2)
    assert changed[0, 8] and not changed[0, 9:].any() and changed[1, 9:].any()
    assert torch.equal(model(ids, position_ids=PACKED[1:]).logits, model(ids).logits), (
        "one document, for both rows"
    )


def test_padded_and_packed_rows():
    model, ids = wrapped(qk_norm=True), torch.randint(0, 97, (1, 40))
    positions = torch.cat([torch.ones(1, 6, dtype=torch.long), PACKED[:1, :34]], dim=1)
    mask = torch.cat(
        [torch.zeros(1, 6, dtype=torch.long), torch.ones(1, 34, dtype=torch.long)],
        dim=1,
    )
    logits = model(ids, position_ids=positions, attention_mask=mask).logits
    torch.testing.assert_close(
        logits[:, 6:15], model(ids[:, 6:15]).logits, rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        logits[:, 15:35], model(ids[:, 15:35]).logits, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    "changes",
    [{"attention": "infini"}, {"attention": "local"}, {"qk_norm": True}, *SHORT],
)
@torch.no_grad()
def test_a_cache_continues_where_it_was(changes):
    model, ids = wrapped(**changes), torch.randint(0, 97, (2, 40))
    whole = model(ids)
    assert whole.past_key_values is None
    for name in ("past_key_values", "cache"):  # the second is transformers 5.24's
        past = model(ids[:, :20], use_cache=True).past_key_values
        for start in range(20, 40, 5):
            output = model(ids[:, start : start + 5], use_cache=True, **{name: past})
            assert output.past_key_values is past and past.get_seq_length() == start + 5
            torch.testing.assert_close(
                output.logits, whole.logits[:, start : start + 5], rtol=0, atol=1e-5
            )
    with pytest.raises(ValueError, match="cache"):
        model(ids, past_key_values=past, cache=past)


@pytest.mark.parametrize(
    ("changes", "padding"),
    [
        ({"attention": "infini"}, 0),
        ({"attention": "local"}, 0),
        (SHORT[0], 0),
        (SHORT[1], 3),
    ],
)
def test_each_turn_of_a_conversation_continues_from_the_cache_of_the_last(
    changes, padding
):
    model, text = wrapped(**changes), torch.randint(0, 97, (2, 7))
    mask = torch.ones_like(text)
    mask[0, :padding] = 0
    options, past = (
        {
            "max_new_tokens": 9,
            "min_new_tokens": 9,
            "do_sample": False,
            "pad_token_id": 0,
        },
        {},
    )
    for _ in range(3):
        options |= {"attention_mask": mask, "return_dict_in_generate": True}
        made = model.generate(text, **options, **past)
        assert torch.equal(
            made.sequences, model.generate(text, use_cache=False, **options).sequences
        )
        past = {CACHE: made[CACHE]}
        text = torch.cat([made.sequences, torch.randint(0, 97, (2, 1))], dim=1)
        mask = torch.cat([mask, torch.ones(2, 10, dtype=torch.long)], dim=1)


@pytest.mark.parametrize(
    ("changes", "padding"), [({"attention": "infini"}, 0), ({"qk_norm": True}, 2)]
)
@torch.no_grad()
def test_tokens_that_a_mask_leaves_out_after_the_first_input_are_refused_with_a_cache(
    changes, padding
):
    model, text, mask = (
        wrapped(**changes),
        torch.randint(0, 97, (2, 13)),
        torch.ones(2, 13, dtype=torch.long),
    )
    mask[0, :padding] = 0
    past = model(text[:, :7], attention_mask=mask[:, :7], use_cache=True)[CACHE]
    model(text[:, 7:10], attention_mask=mask[:, :10], past_key_values=past)
    mask[1, 10:12] = 0
    with pytest.raises(ValueError, match="attention_mask"):
        model(text[:, 10:], attention_mask=mask, past_key_values=past)


@torch.no_grad()
def test_hidden_states_are_those_of_their_llama():
    ours = wrapped()
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
    )
    theirs = LlamaForCausalLM(
        TheirConfig(**{name: ours.config.infini_llama[name] for name in names})
    ).eval()
    theirs.load_state_dict(ours.state_dict())
    ids, mask = torch.randint(0, 97, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[0, 15:] = 0
    for more in ({}, {"use_cache": True}, {"attention_mask": mask}):
        pair = [
            model(ids, output_hidden_states=True, **more).hidden_states
            for model in (ours, theirs)
        ]
        assert len(pair[0]) == len(pair[1]) == 4
        for a, b in zip(*pair, strict=True):
            torch.testing.assert_close(a[0, :15], b[0, :15], rtol=0, atol=1e-5)
            torch.testing.assert_close(a[1], b[1], rtol=0, atol=1e-5)
    assert ours(ids).hidden_states is None
    positions = torch.tensor([3, 7])
    torch.testing.assert_close(
        ours(ids, logits_to_keep=positions).logits,
        theirs(ids, logits_to_keep=positions).logits,
    )
    assert torch.equal(ours(ids, return_dict=False)[0], ours(ids).logits)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"attention_mask": torch.ones(2, 1, 40, 40)}, "attention_mask"),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 40])}, "cu_seq_lens_q"),
        ({"position_ids": PACKED, "use_cache": True}, "use_cache"),
    ],
)
def test_unsupported_arguments_are_refused(arguments, word):
    with pytest.raises(ValueError, match=word):
        wrapped()(torch.randint(0, 97, (2, 40)), **arguments)


@pytest.mark.parametrize("kind", ["softmax", "infini"])
def test_the_example_on_the_card_runs_without_a_prompt(
    export_of, monkeypatch, capsys, kind
):
    monkeypatch.setattr(
        "builtins.input", lambda *_: pytest.fail("a question was asked")
    )
    folder, _ = export_of(attention=kind)
    card = (folder / "README.md").read_text()
    assert ("An Infini-Llama of" if kind == "infini" else "A Llama of") in card
    (program,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(compile(program.replace("FOLDER", str(folder)), "card", "exec"), {})
    assert capsys.readouterr().out
