"""A manifest that is not what it should be changes nothing: neither the model nor the optimizer."""

import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_parsers import mutated

from keepstep.protocol.errors import InvariantViolation
from keepstep.training.state import TrainingState


def trained() -> TrainingState:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return TrainingState(model, optimizer)


SOURCE = trained()
LAYOUT = SOURCE.to_layout()[0]
MANIFEST = LAYOUT.to_json()


def load(manifest: bytes) -> None:
    """Either all of it, or nothing and a sentence."""
    state = trained()
    before = state.digest()
    try:
        state.load(manifest, bytearray(LAYOUT.total))
    except InvariantViolation:
        if state.digest() != before:
            raise AssertionError("it was half loaded") from None


def test_the_right_one_is_loaded() -> None:
    state = trained()
    state.load(MANIFEST, bytearray(LAYOUT.total))
    assert not any(p.any() for p in state.model.parameters())


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.one_of(mutated((MANIFEST,)), st.binary(max_size=100)))
def test_any_other_bytes(manifest: bytes) -> None:
    load(manifest)


def row(index: int, field: int, value: Any) -> bytes:
    raw = json.loads(MANIFEST)
    raw["tensors"][index][field] = value
    return json.dumps(raw).encode()


@pytest.mark.parametrize(
    "manifest",
    [
        b"[" * 100_000,
        row(-1, 1, "torch.nothing"),
        row(-1, 2, [1 << 40, 1 << 40]),
        row(-1, 3, -64),
        row(-1, 4, 1 << 60),
        row(-1, 0, "optimizer/0/99/exp_avg"),
        row(-1, 0, "optimizer/0/exp_avg"),
        row(-1, 0, "../../etc/passwd"),
        json.dumps({**json.loads(MANIFEST), "total": 1 << 50}).encode(),
        json.dumps({**json.loads(MANIFEST), "values": {}}).encode(),
        json.dumps({**json.loads(MANIFEST), "values": {"groups": [], "optimizer": {}, "extra": {}}}).encode(),
        json.dumps({**json.loads(MANIFEST), "tensors": []}).encode(),
    ],
)
def test_what_cannot_be_meant_is_refused(manifest: bytes) -> None:
    state = trained()
    before = state.digest()
    with pytest.raises(InvariantViolation):
        state.load(manifest, bytearray(LAYOUT.total))
    assert state.digest() == before
