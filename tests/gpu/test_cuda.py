"""Generation and packed documents on CUDA; the numbers themselves are compared by test_correctness.py."""

import pytest
import torch

from infini_llama.model.backends import BACKENDS, flash_attention
from infini_llama.model.config import LlamaConfig
from infini_llama.model.generate import generate
from infini_llama.model.llama import Llama

pytestmark = pytest.mark.gpu


def model_of(attention: str) -> Llama:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(512, 128, 256, 2, 4, 2, 256, attention=attention, segment_length=32))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".gate"):
                parameter.normal_()
    return model


@pytest.mark.parametrize("attention", ["softmax", "infini"])
def test_greedy_text_equals_the_cpus(attention):
    model, prompt = model_of(attention), list(range(70))
    assert list(generate(model, prompt, 40)) == list(generate(model.to("cuda"), prompt, 40))


def there(backend):
    if backend == "flash2":
        try:
            flash_attention()
        except RuntimeError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize("kind", ["softmax", "infini"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_edited_document_changes_nothing_in_the_others(backend, kind):
    there(backend)
    torch.manual_seed(0)
    model = Llama(LlamaConfig(512, 256, 512, 2, 4, 2, 512, attention=kind, segment_length=64), backend).cuda()
    documents = torch.tensor([[0] * 130 + [1] * 200 + [2] * 70], device="cuda")
    before = torch.randint(0, 512, (1, 400), device="cuda")
    after = before.clone()
    after[0, 150] = (before[0, 150] + 1) % 512
    with torch.autocast("cuda", torch.bfloat16), torch.inference_mode():
        changed = (model(before, documents) != model(after, documents)).any(dim=2)[0]
    assert not changed[documents[0] != 1].any() and changed[150]
