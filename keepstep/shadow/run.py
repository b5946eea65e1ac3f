"""`keepstep shadow`: `keepstep run` with the device replaced in every rank, and a verdict at the end."""

import os
import sys

from keepstep.launch.launcher import launch
from keepstep.launch.settings import LaunchSettings
from keepstep.observe.records import read_run
from keepstep.shadow.settings import ShadowSettings
from keepstep.shadow.verify import Verdict, judge


def run_shadow(settings: LaunchSettings, shadow: ShadowSettings) -> int:
    """Runs the job; returns its exit code, or 1 if what it left behind is not what it must be."""
    os.environ.update(shadow.variables())
    code = launch(settings)
    verdict = judge(read_run(settings.run_dir))
    print("\n".join(in_words(settings, shadow, verdict)), file=sys.stderr, flush=True)
    return code or (1 if verdict.problems else 0)


def in_words(settings: LaunchSettings, shadow: ShadowSettings, verdict: Verdict) -> list[str]:
    """What is said at the end."""
    told = verdict.summary
    lines = [
        f"keepstep: shadow run of {settings.replicas} replicas x {settings.ranks} ranks, {shadow.state_fraction:.3g} of the "
        f"state real: {told['steps']} steps, {told['units_committed']} units, {told['retries']} retries, "
        f"{len(told['kills'])} kills, a step {told['step_time_median_s'] or 0:.2f} s"
    ]
    if not told["steps"]:
        return [*lines, "keepstep: nothing was trained, so nothing is known of it"]
    if verdict.problems:
        return lines + [f"keepstep: found: {problem}" for problem in verdict.problems]
    equal = f"{len(told['state_digest'])} replicas ended with equal states, " if told["state_digest"] else ""
    return [*lines, f"keepstep: {equal}every unit was trained once, and every batch held data of its own"]
