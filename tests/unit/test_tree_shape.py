"""The shape of the control tree: everybody is in it once, a host is reached once, and it is flat."""

import pytest

from keepstep.runtime.tree_shape import TreeShape


def below(shape: TreeShape, run: range, depth: int = 0) -> dict[int, int]:
    """The depth of every rank in the run."""
    found = {run.start: depth}
    for child in shape.children(run):
        found |= below(shape, child, depth + 1)
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 50, 200])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("fan_out", [1, 2, 32])
def test_the_shape_is_a_tree(size: int, group: int, fan_out: int) -> None:
    shape = TreeShape(size=size, group=group, fan_out=fan_out)
    assert below(shape, range(size)).keys() == set(range(size))
    for rank in range(size):
        parent, run = shape.place(rank)
        children = shape.children(run)
        assert run.start == rank
        assert [r for child in children for r in child] == list(run)[1:], "what is below is cut, not sorted"
        assert len([child for child in children if child.start % group == 0]) <= fan_out
        if rank % group:
            assert parent == rank - rank % group, "within a host, everybody is below its first rank"
        for child in children:
            assert shape.place(child.start)[0] == rank


def test_a_big_replica_is_three_steps_deep() -> None:
    assert max(below(TreeShape(size=8192, group=8, fan_out=32), range(8192)).values()) == 3
