"""Coverage-guided fuzzing of the same targets: `make fuzz SECONDS=N` runs each of them for N seconds.

    python tests/hostile/fuzz.py all SECONDS        one process a target, one after the other; a table at the end
    python tests/hostile/fuzz.py TARGET SECONDS     one target, in this process

What is found is written to `corpus/TARGET/`, where `test_parsers.py` runs it from then on. Needs atheris (the extra `fuzz`).
"""

import contextlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
RSS_MIB = 2048
CASE_S = 10
INSTRUMENTED = [
    "keepstep.protocol", "keepstep.runtime.wire", "keepstep.runtime.handshake", "keepstep.runtime.links",
    "keepstep.runtime.shared_memory", "keepstep.runtime.tree", "keepstep.runtime.tree_wire",
    "keepstep.runtime.decided", "keepstep.runtime.etcd_view", "keepstep.runtime.state_connection",
    "keepstep.runtime.state_fetcher", "keepstep.runtime.environment", "keepstep.runtime.faults",
    "keepstep.runtime.checkpoint_store", "keepstep.observe", "http.client", "json.decoder",
]  # fmt: skip


def folder(name: str) -> Path:
    return CORPUS / name.replace(" ", "-")


def one(name: str, seconds: int) -> None:
    """Never returns: libFuzzer ends the process."""
    import logging

    import atheris

    logging.disable(logging.CRITICAL)
    with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
        from targets import TARGETS
    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as seeds:
        for number, example in enumerate(target.examples):
            (Path(seeds) / f"example-{number}").write_bytes(example)
        for path in folder(name).glob("*"):
            (Path(seeds) / path.name).write_bytes(path.read_bytes())
        found = f"-artifact_prefix={folder(name)}/"
        limits = [f"-max_total_time={seconds}", f"-timeout={CASE_S}", f"-rss_limit_mb={RSS_MIB}", "-max_len=8192"]
        atheris.Setup([sys.argv[0], seeds, found, *limits, "-print_final_stats=1"], target.run)
        atheris.Fuzz()


def all_of_them(seconds: int) -> int:
    from targets import TARGETS

    failed = []
    print(f"{'target':<18}{'runs':>12}{'edges':>8}  result", flush=True)
    for name in TARGETS:
        folder(name).mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [sys.executable, __file__, name, str(seconds)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        said = done.stdout + done.stderr
        runs = re.findall(r"number_of_executed_units: (\d+)", said)[-1:] or re.findall(r"^#(\d+)", said, re.M)[-1:]
        edges = re.findall(r"cov: (\d+)", said)[-1:]
        print(
            f"{name:<18}{(*runs, '-')[0]:>12}{(*edges, '-')[0]:>8}  {'ok' if not done.returncode else 'FOUND'}",
            flush=True,
        )
        if done.returncode:
            failed.append(name)
            print(said[-4000:], flush=True)
        with contextlib.suppress(OSError):  # it holds something
            folder(name).rmdir()
    print(f"fuzz: {len(TARGETS)} targets, {seconds} s each, {len(failed)} with findings: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    if sys.argv[1] == "all":
        sys.exit(min(1, all_of_them(int(sys.argv[2]))))
    one(sys.argv[1], int(sys.argv[2]))
