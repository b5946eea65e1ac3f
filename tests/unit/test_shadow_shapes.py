"""Tensors without values: shapes are checked, kernels are skipped, and what needs values says so."""

from collections.abc import Iterator

import pytest
import torch

from keepstep.protocol.errors import ConfigError
from keepstep.shadow.settings import ShadowSettings
from keepstep.shadow.shapes import META, Moved, ShapesOnly


@pytest.fixture
def mode() -> Iterator[ShapesOnly]:
    with ShapesOnly() as entered, Moved():
        yield entered


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_what_is_made_on_or_moved_to_a_device_has_no_values(mode: ShapesOnly, device: str | torch.device) -> None:
    for tensor in (
        torch.zeros(2, 3, device=device),
        torch.ones(2, 3).to(device),
        torch.ones(2, 3).to(device, torch.float16),
    ):
        assert tensor.device == META
        assert tensor.shape == (2, 3)
    assert torch.ones(2).cuda().device == META


def test_values_stay_where_all_operands_have_some(mode: ShapesOnly) -> None:
    assert torch.add(torch.ones(2), 1).tolist() == [2, 2]


def test_shapes_are_checked_and_dtypes_promoted(mode: ShapesOnly) -> None:
    weight = torch.ones(4, 3, device="cuda", dtype=torch.float16)
    assert (torch.ones(2, 4, dtype=torch.float16) @ weight).shape == (2, 3)
    assert (weight + torch.ones(4, 3)).dtype == torch.float32
    with pytest.raises(RuntimeError):
        torch.ones(2, 5, dtype=torch.float16) @ weight


def test_numbers_are_one_and_truth_is_false(mode: ShapesOnly) -> None:
    loss = torch.zeros((), device="cuda")
    assert loss.item() == 1.0
    assert float(loss.cpu()) == 1.0
    assert not torch.isnan(loss)
    assert torch.isfinite(loss).all()
    assert not loss > 0


def test_a_tensor_with_values_that_is_added_to_keeps_them(mode: ShapesOnly) -> None:
    total = torch.tensor(5.0)
    total += torch.zeros((), device="cuda")
    assert total.item() == 5.0


def test_what_needs_values_is_refused(mode: ShapesOnly) -> None:
    with pytest.raises(ConfigError, match=r"needs the values of a tensor on the device \(aten.nonzero\)"):
        torch.ones(3, device="cuda").nonzero()


def test_backward_brings_gradients_without_values(mode: ShapesOnly) -> None:
    weight = torch.ones(3, 4, device="cuda", requires_grad=True)
    torch.nn.functional.cross_entropy(torch.ones(2, 3) @ weight, torch.tensor([0, 1])).backward()
    assert weight.grad is not None
    assert (weight.grad.device, weight.grad.shape) == (META, (3, 4))


@pytest.mark.parametrize("wrong", [{"step_s": -1.0}, {"state_fraction": 1.5}, {"state_fraction": float("nan")}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        ShadowSettings(**wrong)
    assert ShadowSettings.from_env(ShadowSettings(step_s=0.5).variables({})) == ShadowSettings(step_s=0.5)
