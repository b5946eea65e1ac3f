"""Arbitrary bytes, and right messages with something changed: only what a parser declares comes out of it."""

import random
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from targets import DEEP, TARGETS

CORPUS = Path(__file__).parent / "corpus"
FOUND = [(path.parent.name.replace("-", " "), path) for path in sorted(CORPUS.glob("*/*"))]


def changed(message: bytes, seed: int) -> bytes:
    """A few bits, bytes or pieces of it are others, missing or twice; numbers become very large or negative."""
    rng, data = random.Random(seed), bytearray(message)
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 8, 40))
        match rng.randrange(7):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = data[at : at + size] * rng.choice((1, 2, 50))
            case 3:
                data[at : at + size] = bytes([rng.choice((0, 0x7F, 0x80, 0xFF))]) * size
            case 4:
                del data[at:]
            case 5:  # a number in text
                digits = [i for i in range(len(data)) if 48 <= data[i] <= 57]
                if digits:
                    i = rng.choice(digits)
                    data[i : i + 1] = rng.choice(
                        (b"-1", b"1e9", b"9" * 18, b"9" * 400, b"null", b"[]", b'"x"', b"true")
                    )
            case _:
                data[at:at] = rng.choice(DEEP)
    return bytes(data)


def mutated(messages: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    return st.builds(changed, st.sampled_from(messages), st.integers(0, 1 << 32))


COMMON = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_right_is_taken(name: str) -> None:
    for example in TARGETS[name].examples:
        TARGETS[name].run(example)


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes(name: str) -> None:
    @COMMON
    @given(st.one_of(st.binary(max_size=200), st.sampled_from([b"", *DEEP])))
    def check(data: bytes) -> None:
        TARGETS[name].run(data)

    check()


@pytest.mark.parametrize("name", TARGETS)
def test_right_messages_with_something_changed(name: str) -> None:
    @settings(COMMON, max_examples=150)
    @given(mutated(TARGETS[name].examples))
    def check(data: bytes) -> None:
        TARGETS[name].run(data)

    check()


@pytest.mark.parametrize(("name", "path"), FOUND, ids=lambda x: x.name if isinstance(x, Path) else x)
def test_what_was_found_once(name: str, path: Path) -> None:
    """`make fuzz` writes what it finds into the corpus; there it stays."""
    TARGETS[name].run(path.read_bytes())


CLAIMS = [b"\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xff" * 32]


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_allocated_for_what_is_only_claimed(name: str) -> None:
    """Lengths of gigabytes in every place of a right message."""
    target = TARGETS[name]
    target.run(target.examples[0])  # what is imported and cached does not count
    example = target.examples[0]
    places = range(0, len(example), max(1, len(example) // 40))
    tracemalloc.start()
    try:
        before, began = tracemalloc.get_traced_memory()[0], time.monotonic()
        for at in places:
            for claim in CLAIMS:
                target.run(example[:at] + claim + example[at + len(claim) :])
        assert tracemalloc.get_traced_memory()[1] - before < 16 << 20
        assert time.monotonic() - began < 20
    finally:
        tracemalloc.stop()
