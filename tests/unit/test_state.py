"""The state as bytes that peers read while training goes on."""

import json
import threading

import pytest
import torch

from keepstep.protocol.errors import ConfigError, InvariantViolation
from keepstep.protocol.ids import Incarnation, Seq, Step
from keepstep.protocol.messages import Reader, StateName
from keepstep.training.state import TrainingState


def name(step: int, lineage: int = 1) -> StateName:
    return StateName(step=Step(step), lineage=Seq(lineage))


def reader(life: str = "a", since: int = 1) -> Reader:
    return Reader(incarnation=Incarnation(life), since=Seq(since))


class Replica:
    """A tiny model, its optimizer, and the state over both."""

    def __init__(self, seed: int, copy_bytes_max: int = 1 << 40) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.state = TrainingState(
            self.model,
            self.optimizer,
            extra={"scheduler": self.scheduler},
            copy_bytes_max=copy_bytes_max,
            wait_s=5.0,
        )

    def train(self) -> None:
        self.model(torch.ones(2, 5)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


def fetch(source: TrainingState, state: StateName, piece: int = 64) -> tuple[bytes, bytearray]:
    manifest = source.manifest(state)
    assert manifest is not None
    import json

    total = json.loads(manifest)["total"]
    parts = [source.read(state, lo, min(lo + piece, total)) for lo in range(0, total, piece)]
    assert all(part is not None for part in parts)
    return manifest, bytearray().join(part for part in parts if part is not None)


def test_a_fetched_state_is_the_same_bits_and_trains_on_alike() -> None:
    healthy, fresh = Replica(0), Replica(1)
    for _ in range(3):
        healthy.train()
    healthy.state.after_write(name(3))
    assert healthy.state.digest() != fresh.state.digest()
    fresh.state.load(*fetch(healthy.state, name(3)))
    assert healthy.state.digest() == fresh.state.digest()
    healthy.train()
    fresh.train()
    assert healthy.state.digest() == fresh.state.digest()
    assert fresh.optimizer.param_groups[0]["lr"] == healthy.optimizer.param_groups[0]["lr"] != 0.01


def test_copy_before_write_keeps_what_has_not_been_read() -> None:
    healthy, fresh = Replica(0), Replica(1)
    healthy.train()
    healthy.state.after_write(name(1))
    before = healthy.state.digest()
    manifest, whole = fetch(healthy.state, name(1))
    healthy.state.serve({reader(): name(1)})
    head = healthy.state.read(name(1), 0, 128)
    copied = healthy.state.before_write()
    assert copied == len(whole) - 128
    healthy.train()
    healthy.state.after_write(name(2))
    assert healthy.state.read(name(1), 0, 128) is None, "read once, then overwritten"
    tail = healthy.state.read(name(1), 128, len(whole))
    assert head is not None
    assert tail is not None
    fresh.state.load(manifest, bytearray(head + tail))
    assert fresh.state.digest() == before != healthy.state.digest()
    healthy.state.serve({})
    assert healthy.state.read(name(1), 128, 256) is None


def test_nothing_is_copied_when_nobody_wants_it_or_everything_was_read() -> None:
    healthy = Replica(0)
    healthy.state.after_write(name(0))
    assert healthy.state.before_write() == 0
    healthy.state.after_write(name(1))
    healthy.state.serve({reader(): name(1)})
    fetch(healthy.state, name(1))
    assert healthy.state.before_write() == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({reader("a"): name(1)}, {reader("a"): name(1), reader("b"): name(1)}),  # one more
        ({reader("a"): name(1), reader("b"): name(1)}, {reader("a"): name(1), reader("b"): name(1)}),  # always two
        ({reader("a"): name(1)}, {reader("b"): name(1)}),  # the first died
        ({reader("a", 1): name(1)}, {reader("a", 2): name(1)}),  # it dropped what it had and starts over
        ({}, {reader("a"): name(1)}),  # what nobody we know of has read
    ],
)
def test_no_reader_loses_what_only_another_one_has_read(
    first: dict[Reader, StateName], second: dict[Reader, StateName]
) -> None:
    healthy = Replica(0)
    healthy.train()
    healthy.state.after_write(name(1))
    healthy.state.serve(first)
    want = fetch(healthy.state, name(1))
    healthy.state.serve(second)
    healthy.state.read(name(1), 0, 128)
    kept = 128 if len(second) == 1 else 0
    assert healthy.state.before_write() == len(want[1]) - kept
    healthy.train()
    healthy.state.after_write(name(2))
    assert healthy.state.read(name(1), kept, len(want[1])) == want[1][kept:]


def test_nothing_is_kept_for_a_reader_that_has_everything() -> None:
    """From other sources, say: it has read nothing here. Decisions go on naming it for a while."""
    source = Replica(0)
    source.state.after_write(name(1))
    source.state.serve({reader(): name(1)})
    source.state.done(reader())
    source.state.serve({reader(): name(1)})
    assert source.state.before_write() == 0
    source.state.after_write(name(2))
    source.state.serve({reader(since=2): name(2)})
    assert source.state.before_write() > 0, "it fetches once more, and is another reader"


def test_of_two_readers_the_other_one_is_still_served() -> None:
    source = Replica(0)
    source.state.after_write(name(1))
    want = fetch(source.state, name(1))
    source.state.serve({reader("a"): name(1), reader("b"): name(1)})
    source.state.done(reader("a"))
    assert source.state.before_write() == len(want[1])
    source.train()
    source.state.after_write(name(2))
    assert source.state.read(name(1), 0, len(want[1])) == want[1]
    source.state.done(reader("b"))
    assert source.state.read(name(1), 0, len(want[1])) is None, "nobody wants it any more: its memory is free"


def test_who_is_done_leaves_alone_what_is_kept_for_ourselves() -> None:
    source = Replica(0)
    source.state.after_write(name(1))
    source.state.keep(reader("us"), name(1))
    source.state.serve({reader(): name(1)})
    source.state.done(reader())
    assert source.state.kept
    assert source.state.before_write() > 0


def test_it_is_known_while_the_live_state_is_kept_for_ourselves() -> None:
    """So that time spent on a copy counts as held up by a checkpoint, and only then."""
    source = Replica(0)
    source.state.after_write(name(0))
    source.state.serve({reader(): name(0)})
    assert not source.state.kept
    source.state.keep(reader("us"), name(0))
    assert source.state.kept
    source.state.before_write()
    assert not source.state.kept, "it is overwritten: its copy is kept, not the live one"
    source.state.after_write(name(1))
    assert not source.state.kept
    source.state.keep(reader("us"), name(1))
    source.state.keep(reader("us"), None)
    assert not source.state.kept


def test_the_same_readers_again_are_no_news() -> None:
    """Every decision names them: what they have read is not copied again and again."""
    healthy = Replica(0)
    healthy.state.after_write(name(1))
    healthy.state.serve({reader(): name(1)})
    fetch(healthy.state, name(1))
    healthy.state.serve({reader(): name(1), reader("b"): name(0)})
    assert healthy.state.before_write() == 0


def test_a_copy_over_the_limit_is_not_made() -> None:
    healthy = Replica(0, copy_bytes_max=16)
    healthy.state.after_write(name(1))
    healthy.state.serve({reader(): name(1)})
    assert healthy.state.before_write() == 0
    healthy.state.after_write(name(2))
    assert healthy.state.manifest(name(1)) is None


def test_a_reader_waits_for_a_state_that_is_about_to_be_reached() -> None:
    healthy = Replica(0)
    healthy.state.after_write(name(0))
    healthy.state.before_write()
    healthy.state.serve({reader(): name(1)})
    got: list[bytes | None] = []
    waiting = threading.Thread(target=lambda: got.append(healthy.state.manifest(name(1))))
    waiting.start()
    healthy.train()
    healthy.state.after_write(name(1))
    waiting.join(5.0)
    assert got
    assert got[0] is not None


def test_a_state_of_another_model_is_refused_whole() -> None:
    healthy, other = (
        Replica(0),
        TrainingState(torch.nn.Linear(5, 7), torch.optim.SGD([torch.ones(1)], lr=0.1)),
    )
    healthy.state.after_write(name(1))
    with pytest.raises(InvariantViolation, match="does not fit"):
        other.load(*fetch(healthy.state, name(1)))


def test_a_state_that_is_not_json_is_refused_at_the_start() -> None:
    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"f": object()}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="neither a tensor nor JSON"):
        TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), extra={"odd": Odd()})


def test_a_reader_gets_the_state_even_while_other_parameters_are_registered() -> None:
    """As FSDP2 does in forward and backward: whole parameters whose memory it frees, in the place of the sharded ones."""
    source = Replica(0)
    source.state.after_write(name(3))
    kept = dict(source.model.named_parameters())
    for module in source.model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, key, torch.nn.Parameter(torch.zeros_like(parameter)))
            getattr(module, key).data.untyped_storage().resize_(0)
    manifest, data = fetch(source.state, name(3))
    for entry in json.loads(manifest)["tensors"]:
        path, _, _, lo, hi, _ = entry
        parameter = kept.get(path.removeprefix("model/"))
        if parameter is not None:
            assert bytes(data[lo:hi]) == parameter.detach().numpy().tobytes()
