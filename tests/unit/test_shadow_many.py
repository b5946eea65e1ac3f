"""What lets hundreds of ranks share one machine: dense memory, longer waits, descriptors, and who steps aside."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.launch.settings import LaunchSettings
from keepstep.protocol.errors import ConfigError
from keepstep.runtime import tree
from keepstep.shadow import dense, patience
from keepstep.shadow.measure import sample
from keepstep.shadow.run import _have_descriptors
from keepstep.shadow.settings import WAITS_S, ShadowSettings

SIZE = 208  # of an object


def test_what_is_made_after_filling_lies_side_by_side() -> None:
    """Before it, the next objects would go to the holes that were left here, on a page each."""
    holes = [bytes(SIZE - 33) for _ in range(20_000)]
    del holes[::50]
    dense.fill()
    fresh = [bytes(SIZE - 33) for _ in range(30)]
    pages = {id(each) >> 12 for each in fresh}
    assert len(pages) <= 30 * SIZE // 4096 + 2


def test_every_wait_grows_with_the_ranks_and_what_was_asked_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ShadowSettings(patience=4.0).variables({"KEEPSTEP_STRAGGLER_S": "7"})
    assert {name: float(told[name]) for name in WAITS_S} == {
        name: 7.0 if name == "KEEPSTEP_STRAGGLER_S" else 4 * seconds for name, seconds in WAITS_S.items()
    }
    before = [(module, name, getattr(module, name)) for module, names in patience.WAITS for name in names]
    for module, name, seconds in before:
        monkeypatch.setattr(module, name, seconds)  # so that it is put back
    patience.be_patient(4.0)
    assert [getattr(module, name) for module, name, _ in before] == [4 * seconds for *_, seconds in before]
    assert tree.TICK_S == 10.0


def test_other_ranks_than_leaders_are_sampled() -> None:
    lives = [range(100 * r, 100 * r + 16) for r in range(8)]
    assert sorted(pid // 100 for pid in sample(lives)) == list(range(8))
    assert len({pid % 100 for pid in sample(lives)}) == 8
    assert sample([]) == []


def test_more_ranks_than_files_may_be_open_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    settings = LaunchSettings.checked(script, (), replicas=1, ranks=1, run_dir=tmp_path / "run")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this machine has no limit")
    with pytest.raises(ConfigError, match=f"a process may open {hard} files here"):
        _have_descriptors(settings, hard + 1)
    assert not (tmp_path / "run").exists(), "it can be used for the next try"


def test_a_rank_that_is_asked_to_steps_aside() -> None:
    code = (
        "import os\nfrom keepstep.launch.child import step_aside\nstep_aside(os.environ)\nprint(os.getpriority(0, 0))"
    )
    env = {**os.environ, "KEEPSTEP_NICE": "15"}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert int(said) == 15
