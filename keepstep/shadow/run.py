"""`keepstep shadow`: `keepstep run` with the device replaced in every rank, and a verdict at the end."""

import json
import os
import resource
import sys
from dataclasses import replace
from pathlib import Path

from keepstep.launch.launcher import launch
from keepstep.launch.settings import LaunchSettings
from keepstep.observe.records import Record, read_run
from keepstep.observe.summary import summarize
from keepstep.protocol.errors import ConfigError
from keepstep.shadow.measure import Memory, measure
from keepstep.shadow.patience import be_patient
from keepstep.shadow.settings import ShadowSettings
from keepstep.shadow.verify import Verdict, judge

DESCRIPTORS, DESCRIPTORS_MORE = 4, 512  # for a rank: its output, its log, its end; and for what else there is


def run_shadow(settings: LaunchSettings, shadow: ShadowSettings, json_file: Path | None = None) -> int:
    """Runs the job; returns its exit code, or 1 if what it left behind is not what it must be. Ranks inherit our environment."""
    ranks = settings.replicas * settings.ranks
    _have_descriptors(settings, DESCRIPTORS * ranks + DESCRIPTORS_MORE)
    shadow = replace(shadow, patience=ShadowSettings.patience_for(ranks))
    settings = replace(settings, finish_grace_s=settings.finish_grace_s * shadow.patience)
    os.environ.update(shadow.variables(os.environ))
    be_patient(shadow.patience)
    with Memory(settings.run_dir) as memory:
        code = launch(settings)
    run = read_run(settings.run_dir)
    verdict = judge(run)
    measured = measure(run, ranks=ranks, memory=memory, verdict=verdict)
    print("\n".join(in_words(settings, shadow, verdict, measured)), file=sys.stderr, flush=True)
    if json_file is not None:
        json_file.write_text(json.dumps(measured, indent=1) + "\n")
    return code or (1 if verdict.problems else 0)


def _have_descriptors(settings: LaunchSettings, needed: int) -> None:
    """Raises ConfigError if the launcher may not have so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        settings.take_back()
        raise ConfigError(f"a process may open {hard} files here, and so many ranks need {needed}: raise `ulimit -Hn`")
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def step_of(run_dir: Path) -> float:
    """The median of what a run's steps took, in seconds. Raises ConfigError if none was recorded."""
    found: float | None = summarize(read_run(run_dir))["step_time_median_s"]
    if found is None:
        raise ConfigError(f"--step-like {run_dir} holds no step of a run: name the --run-dir of one that has trained")
    return found


def in_words(settings: LaunchSettings, shadow: ShadowSettings, verdict: Verdict, measured: Record) -> list[str]:
    """What is said at the end."""
    told = verdict.summary
    lines = [
        f"keepstep: shadow run of {settings.replicas} replicas x {settings.ranks} ranks, {shadow.state_fraction:.3g} of the "
        f"state real: {told['steps']} steps, {told['units_committed']} units, {told['retries']} retries, "
        f"{len(told['kills'])} kills, a step {told['step_time_median_s'] or 0:.2f} s",
        f"keepstep: all trained {measured['start_s'] or 0:.1f} s after the start; "
        f"a rank has {measured['rank_mb'] or 0:.0f} MB of its own",
    ]
    if not told["steps"]:
        return [*lines, "keepstep: nothing was trained, so nothing is known of it"]
    if verdict.problems:
        return lines + [f"keepstep: found: {problem}" for problem in verdict.problems]
    equal = f"{len(told['state_digest'])} replicas ended with equal states, " if told["state_digest"] else ""
    return [*lines, f"keepstep: {equal}every unit was trained once, and every batch held data of its own"]
