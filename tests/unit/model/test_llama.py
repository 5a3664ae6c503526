"""Construction, initial weights, loss, optimizer groups, determinism."""

import pytest
import torch

from infini_llama.model.config import LlamaConfig
from infini_llama.model.llama import Llama, parameter_groups
from infini_llama.model.loss import cross_entropy_sum
from support.models import small


def test_config_goes_to_a_dict_and_back():
    assert LlamaConfig(**small().to_dict()) == small()
    with pytest.raises(TypeError, match="hidden_sizes"):
        LlamaConfig(**(small().to_dict() | {"hidden_sizes": 3}))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 30},
        {"hidden_size": 12, "num_attention_heads": 4},  # heads of 3: no pairs to rotate
        {"num_key_value_heads": 3},
        {"attention": "linear"},
        {"segment_length": 0},
        {"pre_norm": "no"},
        {"qk_norm": 1},
    ],
)
def test_impossible_configs_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        small(**changes)


@pytest.mark.parametrize("attention", ["softmax", "infini"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_built_on_meta_is_the_same(attention, tied):
    settings = small(attention=attention, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = Llama(settings)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(7)
    model.init_weights()
    torch.manual_seed(7)
    direct = Llama(settings)
    assert model.state_dict().keys() == direct.state_dict().keys()
    assert all(
        torch.equal(value, direct.state_dict()[name])
        for name, value in model.state_dict().items()
    )
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert not list(model.buffers())
    assert torch.equal(
        model(torch.tensor([[1, 2, 3]])), direct(torch.tensor([[1, 2, 3]]))
    )


def test_a_parameter_without_a_rule_is_not_left_uninitialised():
    model = Llama(small())
    model.register_parameter("scale", torch.nn.Parameter(torch.empty(3)))
    with pytest.raises(RuntimeError, match="scale"):
        model.init_weights()


def test_initial_weights():
    model = Llama(
        small(
            attention="infini",
            hidden_size=256,
            initializer_range=0.02,
            memory_maps=True,
        )
    )
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith(".gate"):
            assert (
                (parameter == 0).all()
                and parameter.dtype == torch.float32
                and parameter.shape == (4,)
            )
        elif name.endswith(".matrix"):
            assert torch.equal(parameter, torch.eye(64).expand(len(parameter), -1, -1))
            assert parameter.dtype == torch.float32
        elif name.endswith(".shift"):
            assert (parameter == 0).all() and parameter.dtype == torch.float32
        else:
            assert (
                abs(parameter.std().item() - 0.02) < 0.001
                and abs(parameter.mean().item()) < 0.001
            )


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_groups(tied):
    model = Llama(small(attention="infini", tie_word_embeddings=tied, memory_maps=True))
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {group["name"]: group for group in parameter_groups(model, 0.1)}
    of = {
        key: {names[parameter] for parameter in group["params"]}
        for key, group in groups.items()
    }
    assert [len(group["params"]) for group in groups.values()] == [
        len(of[key]) for key in groups
    ]
    assert of["decay"] | of["no_decay"] | of["gates"] | of["maps"] == set(
        names.values()
    )
    assert of["maps"] == {
        name for name in names.values() if ".self_attn.memory_" in name
    }
    assert len(of["maps"]) == 2 * 4
    assert of["gates"] == {f"model.layers.{i}.self_attn.gate" for i in range(2)}
    assert of["no_decay"] == {name for name in names.values() if "norm" in name} | {
        "model.embed_tokens.weight"
    }
    assert ("lm_head.weight" in of["decay"]) == (not tied)
    assert {key: group["weight_decay"] for key, group in groups.items()} == {
        "decay": 0.1,
        "no_decay": 0,
        "gates": 0,
        "maps": 0,
    }


def test_loss_is_a_sum_over_targets_in_fp32():
    logits = torch.randn(2, 5, 97)
    labels = torch.randint(0, 97, (2, 5))
    labels[0, 3:] = -100
    total, count = cross_entropy_sum(logits, labels)
    expected = -sum(
        logits[b, t].double().log_softmax(0)[labels[b, t]]
        for b in range(2)
        for t in range(5)
        if labels[b, t] >= 0
    )
    assert count == 8 and abs(total - expected) < 1e-4
    assert cross_entropy_sum(logits.bfloat16(), labels)[0].dtype == torch.float32
    torch_sum = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    assert torch.equal(total, torch_sum)
    nothing, none = cross_entropy_sum(logits, torch.full((2, 5), -100))
    assert nothing == 0 and none == 0
    model = Llama(small())
    ids = torch.randint(0, 97, (2, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.loss(ids, labels)[0].dtype == torch.float32
    assert torch.equal(
        model.loss(ids, labels)[0], cross_entropy_sum(model(ids), labels)[0]
    )
