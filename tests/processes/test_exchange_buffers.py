"""Every dtype that a gradient has, and every dtype that it may travel in, around real rings: exact, equal, repeatable."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from test_engine import SETTINGS, Member, configure

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.ids import QuorumId, Seq
from keepstep.runtime.engine_events import StepDone
from keepstep.training.exchange_buffers import exchange_buffer, wire_dtype_of
from keepstep.training.reference import ring_sum

SIZES = (0, 1, 2, 3, 5, 1023, 30_001)
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIRES = (None, torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module", params=["native", "in Python", "both", "native, two hosts"])
def members(request: pytest.FixtureRequest) -> Iterator[list[Member]]:
    """Rings that must all give the bits of the reference, whoever moves the chunks."""
    in_python = {"in Python": {0, 1, 2}, "both": {1}}.get(request.param, set())
    host = "127.0.0.2" if "two hosts" in request.param else "127.0.0.1"  # chunks have checksums
    elsewhere = replace(SETTINGS, link=replace(SETTINGS.link, shared_memory="two hosts" not in request.param))
    made = [Member(r, replace(elsewhere, native=r not in in_python), host) for r in range(3)]
    configure(made, 1)
    yield made
    for member in made:
        member.engine.close()


seqs = iter(range(1, 10_000))


def around(
    members: list[Member], inputs: list[list[torch.Tensor]], wire: torch.dtype | None
) -> list[list[torch.Tensor]]:
    """The outputs of each member."""
    seq = Seq(next(seqs))
    outputs = [[torch.full_like(x, 7) for x in mine] for mine in inputs]
    for member, mine, out in zip(members, inputs, outputs, strict=True):
        member.engine.begin(seq, QuorumId(1), len(mine))
        for number, (source, target) in enumerate(zip(mine, out, strict=True)):
            member.engine.submit(seq, number, exchange_buffer(source, target, wire))
    for member in members:
        assert member.next(StepDone) == StepDone(seq)
    return outputs


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [t.view(torch.uint8).numpy().tobytes() for t in tensors]


@pytest.mark.parametrize("dtype", GRADIENTS)
@pytest.mark.parametrize("wire", WIRES)
def test_sums_have_the_bits_of_the_reference(
    members: list[Member], dtype: torch.dtype, wire: torch.dtype | None
) -> None:
    torch.manual_seed(1)
    inputs = [[torch.randn(n).to(dtype) for n in SIZES] for _ in members]
    before = [bits(mine) for mine in inputs]
    outputs = around(members, inputs, wire)
    assert [bits(mine) for mine in inputs] == before, "an input was written"
    expected = [ring_sum([mine[i] for mine in inputs], SETTINGS, wire) for i in range(len(SIZES))]
    for mine in outputs:
        assert bits(mine) == bits(expected)
    assert bits(around(members, inputs, wire)[0]) == bits(expected), "a second run has other bits"


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_sums_of_integers_wrap_as_in_torch(members: list[Member], dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    info = torch.iinfo(dtype)
    inputs = [[torch.randint(info.min // 2, info.max, (n,), dtype=dtype) for n in SIZES] for _ in members]
    expected = [inputs[0][i] + inputs[1][i] + inputs[2][i] for i in range(len(SIZES))]
    for mine in around(members, inputs, None):
        assert bits(mine) == bits(expected)


def test_sixteen_bits_are_added_up_in_float32(members: list[Member]) -> None:
    """Rounded to bfloat16 after each addition, these would give another sum than the exact one, rounded once."""
    values = (1.0, 2.0**-9, 1.5 * 2.0**-8)
    inputs = [[torch.full((8,), v, dtype=torch.bfloat16)] for v in values]
    exact = torch.tensor(sum(values)).to(torch.bfloat16)
    for mine in around(members, inputs, None):
        assert (mine[0] == exact).all()


def test_what_travels_in_which_dtype() -> None:
    assert wire_dtype_of(torch.bfloat16) == torch.float32
    assert wire_dtype_of(torch.float32) == torch.float32
    assert wire_dtype_of(torch.float32, torch.bfloat16) == torch.bfloat16
    assert wire_dtype_of(torch.float64, torch.bfloat16) == torch.float64, "what was asked to be exact stays so"
    assert wire_dtype_of(torch.int64) == torch.int64
    with pytest.raises(ConfigError, match="wire_dtype must be"):
        wire_dtype_of(torch.float32, torch.int8)
