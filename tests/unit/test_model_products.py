"""Products with weights, by either library."""

import pytest
import torch
import torch.nn.functional as F

from engine.model import products
from engine.model.products import Linear, Product, has_onednn, linear, onednn_product

needs_onednn = pytest.mark.skipif(not has_onednn(), reason="this torch was built without oneDNN")
BOTH = [F.linear, pytest.param(None, marks=needs_onednn, id="onednn")]


def use(product: Product | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = onednn_product() if product is None else product
    monkeypatch.setattr(products, "cpu_product", lambda: found)


@pytest.mark.parametrize("product", BOTH)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (3, 5, 40), (300, 512)])
@torch.inference_mode()
def test_both_libraries_multiply(
    product: Product | None, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(product, monkeypatch)
    torch.manual_seed(len(shape))
    x = torch.randn(shape)
    for weight in (torch.randn(9, shape[-1]), torch.randn(shape[-1], 9).T):
        expected = (x.double() @ weight.double().T).float()
        torch.testing.assert_close(linear(x, weight), expected, rtol=1e-5, atol=1e-4)
        biased = linear(x, weight, torch.ones(9))
        torch.testing.assert_close(biased, expected + 1, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("product", BOTH)
@torch.inference_mode()
def test_no_rows_and_slices_of_weights(
    product: Product | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(product, monkeypatch)
    weight = torch.randn(6, 8)
    assert linear(torch.empty(0, 8), weight).shape == (0, 6)
    x = torch.randn(4, 20)[:, 3:11]  # rows that do not lie next to each other
    for part in (weight[1:4], torch.randn(30, 8)[::3]):
        torch.testing.assert_close(linear(x, part), x @ part.T, rtol=1e-5, atol=1e-5)


def test_other_types_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_product", lambda: pytest.fail("for float32 alone"))
    layer = Linear(4, 3, dtype=torch.float64)
    x = torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ layer.weight.T + layer.bias)


@pytest.mark.parametrize(
    ("capability", "vendor", "fast"),
    [
        ("AVX2", "AuthenticAMD", True),
        ("AVX512", "AuthenticAMD", False),
        ("AVX512_BF16", "AuthenticAMD", False),
        ("AVX512", "GenuineIntel", True),
        ("AVX512", None, True),
    ],
)
def test_which_library_it_is(
    capability: str, vendor: str | None, fast: bool, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if vendor is not None:
        file.write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(products, "_CPUS", file)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(products, "has_onednn", lambda: True)
    made = products.cpu_product.__wrapped__()
    assert (made is F.linear) == fast
