"""Gradients to buckets and back."""

import pytest
import torch

from keepstep.protocol.errors import ConfigError
from keepstep.training.buckets import Buckets, FlatBuffer, plan


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def test_plan_packs_in_reverse_order_within_the_limit() -> None:
    slots, buckets = plan([(torch.float32, 10), (torch.float32, 6), (torch.float32, 4)], bucket_bytes=40)
    assert buckets == [(torch.float32, 10), (torch.float32, 10)]
    assert [(s.bucket, s.lo, s.hi) for s in slots] == [(1, 0, 10), (0, 4, 10), (0, 0, 4)]


def test_plan_never_mixes_dtypes_and_gives_a_large_one_its_own() -> None:
    _, buckets = plan([(torch.float32, 100), (torch.bfloat16, 2), (torch.float32, 2)], bucket_bytes=16)
    assert buckets == [(torch.float32, 2), (torch.bfloat16, 2), (torch.float32, 100)]


def exchange_alone(m: torch.nn.Module, b: Buckets, weight: float) -> list[int]:
    """One step with a ring of one; returns the order in which exchanges were handed on."""
    order: list[int] = []

    def submit(exchange: int, buffer: FlatBuffer) -> None:
        order.append(exchange)
        buffer.copy_through(0, buffer.nbytes)

    b.start(weight, submit)
    x = torch.arange(8.0).reshape(2, 4)
    m(x).square().mean().backward()
    b.finish(loss=2.5)
    return order


@pytest.mark.parametrize("weight", [1.0, 0.375])
def test_gradients_come_back_as_the_mean(weight: float) -> None:
    m = model()
    b = Buckets(list(m.named_parameters()), bucket_bytes=64)
    m(torch.arange(8.0).reshape(2, 4)).square().mean().backward()
    expected = [p.grad.clone() for p in m.parameters() if p.grad is not None]
    order = exchange_alone(m, b, weight)
    assert order == list(range(b.count))
    assert all(p.grad is None for p in m.parameters()), "the bucket holds the only copy"
    assert b.to_gradients(b.outputs) == (weight, 2.5)
    for p, g in zip(m.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_buckets_are_handed_on_during_backward_in_order() -> None:
    m = model()
    b = Buckets(list(m.named_parameters()), bucket_bytes=1)
    seen: list[int] = []
    b.start(1.0, lambda exchange, _: seen.append(exchange))
    m(torch.ones(1, 4)).sum().backward()
    assert seen == [0, 1, 2, 3], "all gradients but the scalars, before finish()"
    b.finish(0.0)
    assert seen == [0, 1, 2, 3, 4]


def test_an_unused_parameter_contributes_zero() -> None:
    m = model()
    m.extra = torch.nn.Parameter(torch.ones(3))  # type: ignore[assignment]
    b = Buckets(list(m.named_parameters()), bucket_bytes=1 << 20)
    b.inputs[0].fill_(7.0)
    exchange_alone(m, b, 1.0)
    b.to_gradients(b.outputs)
    assert torch.equal(m.extra.grad, torch.zeros(3))  # type: ignore[arg-type]


def test_a_second_backward_is_refused_with_advice() -> None:
    m = model()
    b = Buckets(list(m.named_parameters()), bucket_bytes=1 << 20)
    b.start(1.0, lambda *_: None)
    m(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ConfigError, match="accumulate=N"):
        m(torch.ones(1, 4)).sum().backward()


def test_accumulated_passes_are_handed_on_with_the_last() -> None:
    m = model()
    b = Buckets(list(m.named_parameters()), bucket_bytes=1 << 20)
    seen: list[int] = []
    b.start(1.0, lambda exchange, _: seen.append(exchange))
    b.arm(False)
    m(torch.ones(1, 4)).sum().backward()
    assert seen == []
    once = m[0].weight.grad.clone()  # type: ignore[union-attr]
    b.arm(True)
    m(torch.ones(1, 4)).sum().backward()
    slot = b.slots[0]
    torch.testing.assert_close(b.inputs[slot.bucket][slot.lo : slot.hi], 2 * once.reshape(-1))


def test_the_layout_digest_tells_models_apart() -> None:
    one, same = (
        Buckets(list(model().named_parameters()), bucket_bytes=64),
        Buckets(list(model().named_parameters()), bucket_bytes=64),
    )
    other = Buckets(list(torch.nn.Linear(4, 8).named_parameters()), bucket_bytes=64)
    assert one.layout_digest() == same.layout_digest() != other.layout_digest()


def test_a_model_without_gradients_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        Buckets([("w", torch.nn.Parameter(torch.ones(1), requires_grad=False))], bucket_bytes=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_reduce_adds_out_of_place(dtype: torch.dtype) -> None:
    source, target = torch.arange(6).to(dtype), torch.zeros(6, dtype=dtype)
    buffer = FlatBuffer(source, target)
    received = bytearray(buffer.input(0, buffer.nbytes))
    lo, hi = 2 * buffer.itemsize, 5 * buffer.itemsize
    buffer.reduce(lo, hi, memoryview(received)[lo:hi])
    assert target.tolist() == [0, 0, 4, 6, 8, 0]
    assert source.tolist() == [0, 1, 2, 3, 4, 5]
