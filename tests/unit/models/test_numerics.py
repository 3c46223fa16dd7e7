"""Operations whose bits do not depend on the batch; the claims hold where the self-test says so."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from everlong.models import numerics as numerics_module
from everlong.models.numerics import (
    CausalAttention,
    Numerics,
    NumericsUnavailable,
    causal_mask,
    linear,
    plain_attention,
    self_test,
    silu,
    steady,
    tiled_attention,
)
from everlong.models.numerics_env import prepare_process, required_environment


@pytest.fixture(autouse=True, scope="module")
def machine_can():
    try:
        self_test()
    except NumericsUnavailable as error:
        pytest.skip(str(error))


def reference_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
    """In float64, a loop over heads: what the formula says."""
    repeats = q.shape[2] // k.shape[2]
    heads = []
    for head in range(q.shape[2]):
        scores = q[:, :, head] @ k[:, :, head // repeats].transpose(1, 2) * scale
        ahead = torch.arange(k.shape[1]) > positions[..., None]
        heads.append(scores.masked_fill(ahead, -torch.inf).softmax(-1) @ v[:, :, head // repeats])
    return torch.stack(heads, 2)


def random_qkv(batch: int, queries: int, keys: int, heads: int = 4, groups: int = 2, width: int = 32):
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(batch, queries, heads, width, generator=generator)
    k, v = torch.randn(2, batch, keys, groups, width, generator=generator)
    return q, k, v


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 15, 16, 17, 33, 100, 256, 500])
@pytest.mark.parametrize(("inner", "outer"), [(128, 64), (128, 344), (344, 128), (128, 264)])
def test_a_products_row_depends_on_that_row_alone(inner: int, outer: int, rows: int):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(512, inner, generator=generator), torch.randn(outer, inner, generator=generator)
    alone = torch.cat([linear(x[i : i + 1], weight, Numerics.ALIGNED) for i in range(0, 512, 7)])
    whole = linear(x, weight, Numerics.ALIGNED)
    assert torch.equal(whole[::7], alone)
    assert torch.equal(linear(x[5 : 5 + rows], weight, Numerics.ALIGNED), whole[5 : 5 + rows])
    assert torch.allclose(whole.double(), x.double() @ weight.double().T, atol=1e-4)


@pytest.mark.parametrize("numerics", Numerics)
def test_bfloat16_weights_are_upcast_only_in_aligned_numerics(numerics: Numerics):
    torch.manual_seed(0)
    x, weight = torch.randn(4, 32), torch.randn(16, 32).bfloat16()
    out = linear(x, weight, numerics)
    assert out.dtype == (torch.float32 if numerics is Numerics.ALIGNED else torch.bfloat16)
    exact = x.double() @ weight.double().T
    assert ((out.double() - exact).abs().max() < 1e-4) == (numerics is Numerics.ALIGNED)


@pytest.mark.parametrize("size", [1, 3, 63, 64, 65, 1032, 40000])
def test_an_elementwise_function_does_not_feel_the_arrays_size(size: int):
    x = torch.randn(40100, generator=torch.Generator().manual_seed(0))
    whole = steady(torch.exp, x)
    assert torch.equal(steady(torch.exp, x[50 : 50 + size]), whole[50 : 50 + size])
    assert torch.allclose(whole, x.exp(), rtol=1e-6)
    assert torch.allclose(silu(x, Numerics.ALIGNED), F.silu(x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 32), (3, 3, 16), (8, 1, 64)])
@pytest.mark.parametrize("numerics", Numerics)
def test_attention_and_its_gradient_equal_float64(numerics: Numerics, heads: int, groups: int, width: int):
    q, k, v = (t.requires_grad_() for t in random_qkv(2, 21, 150, heads, groups, width))
    positions = torch.stack([torch.arange(129, 150), torch.arange(0, 21)])
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out = CausalAttention(positions, width**-0.5, numerics)(q, k, v)
    expected = reference_attention(*exact, positions, width**-0.5)
    assert torch.allclose(out.double(), expected, atol=2e-6)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    for ours, theirs in zip((q, k, v), exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.allclose(ours.grad.double(), theirs.grad, rtol=1e-4, atol=2e-5)


def test_decoding_prefill_and_chunks_give_the_same_attention_bits():
    q, k, v = random_qkv(1, 200, 200)
    positions = torch.arange(200)[None]
    whole = tiled_attention(q, k, v, positions, 0.2)
    for chunk in (1, 3, 16, 64, 77):
        parts = [
            tiled_attention(q[:, a : a + chunk], k[:, : a + chunk], v[:, : a + chunk], positions[:, a : a + chunk], 0.2)
            for a in range(0, 200, chunk)
        ]
        assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("batch", [1, 2, 7, 16, 33])
def test_sequences_decoded_together_have_the_bits_of_each_alone(batch: int):
    q, k, v = random_qkv(batch, 1, 190)
    positions = (torch.arange(batch) * 37 % 190)[:, None]
    together = tiled_attention(q, k, v, positions, 0.2)
    for b in range(batch):
        held = int(positions[b]) + 1
        one = (t[b : b + 1] for t in (q, k[:, :held], v[:, :held], positions))
        assert torch.equal(tiled_attention(*one, 0.2)[0], together[b])


def test_keys_behind_the_query_change_no_bit_and_get_no_gradient():
    q, k, v = random_qkv(1, 20, 200)
    positions = torch.arange(50, 70)[None]
    out = tiled_attention(q, k, v, positions, 0.2)
    other_k, other_v = k.clone(), v.clone()
    other_k[:, 70:] += 50
    other_v[:, 70:] *= -3
    other_k.requires_grad_()
    again = tiled_attention(q, other_k, other_v, positions, 0.2)
    assert torch.equal(out, again)
    again.sum().backward()
    assert other_k.grad is not None
    assert other_k.grad[:, 70:].eq(0).all()


def test_aligned_numerics_take_the_tiles_and_fast_ones_torchs_kernel():
    q, k, v = random_qkv(1, 20, 20)
    positions = torch.arange(20)[None]
    plain = plain_attention(q, k, v, causal_mask(positions, 20, q.shape[2] // k.shape[2], q.dtype), 0.2)
    assert torch.equal(CausalAttention(positions, 0.2, Numerics.FAST)(q, k, v), plain)
    tiled = tiled_attention(q, k, v, positions, 0.2)
    assert torch.equal(CausalAttention(positions, 0.2, Numerics.ALIGNED)(q, k, v), tiled)


@pytest.mark.parametrize("beyond", [1, 300], ids=["any batch", "only batches over 300 rows"])
def test_the_self_test_finds_a_product_that_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch, beyond: int):
    def moody(x: Tensor, weight: Tensor, numerics: Numerics) -> Tensor:
        return F.linear(x, weight) * (1 + 1e-6 * (len(x) > beyond))

    monkeypatch.setattr(numerics_module, "linear", moody)
    with pytest.raises(NumericsUnavailable, match=r"numerics=aligned needs .*product of .*set numerics to fast"):
        self_test()


def test_the_self_test_takes_other_shapes_than_the_toys():
    self_test(hidden_size=96, intermediate_size=256, vocab_size=1000, head_dim=32, num_heads=3, num_kv_heads=1)


def test_the_self_test_finds_attention_that_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch):
    def moody(q, k, v, positions, scale):
        return tiled_attention(q, k, v, positions, scale) * (1 + 1e-6 * (q.shape[1] > 64))

    monkeypatch.setattr(numerics_module, "tiled_attention", moody)
    with pytest.raises(NumericsUnavailable, match="attention of"):
        self_test()


def test_light_modules_load_no_torch():
    code = (
        "import sys, everlong.models, everlong.models.config, everlong.models.numerics_env, everlong.models.llama.config;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(p for p in sys.path if p)})


def test_only_aligned_numerics_ask_for_an_environment():
    assert required_environment("fast") == {}
    assert required_environment("aligned") == {"MKL_CBWR": "AVX512,STRICT"}


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "to be restored")
    monkeypatch.delenv("MKL_CBWR")

    def make(vendor):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
        return tmp_path / "cpuinfo"

    return make


def test_a_worker_in_this_process_gets_its_environment_before_torch_is_loaded(cpu, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    prepare_process("aligned", cpu("GenuineIntel"))
    assert os.environ["MKL_CBWR"] == "AVX512,STRICT"


def test_an_intel_cpu_with_torch_loaded_and_no_word_to_mkl_is_refused(cpu, monkeypatch):
    intel = cpu("GenuineIntel")
    with pytest.raises(ValueError, match="MKL_CBWR=AVX512,STRICT in the environment before torch"):
        prepare_process("aligned", intel)
    assert "MKL_CBWR" not in os.environ
    prepare_process("fast", intel)
    monkeypatch.setenv("MKL_CBWR", "AVX512,STRICT")
    prepare_process("aligned", intel)


def test_another_cpu_is_left_to_the_self_test(cpu):
    prepare_process("aligned", cpu("AuthenticAMD"))
    assert os.environ["MKL_CBWR"] == "AVX512,STRICT"
