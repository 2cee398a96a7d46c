"""Training in processes of its own: killed, joined, and disagreeing."""

import json
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_runs import drop_speed, environment

from vocabjax.checkpoint import Checkpoints
from vocabjax.log import read_metrics

ROOT = Path(__file__).parent.parent


def command(corpus: Path, runs: Path, *flags: str, steps: int = 12) -> list[str]:
    """The words of a small training; those of `flags` come on top."""
    small = (
        "--vocab.width 16 --trunk.layers 1 --trunk.heads 4 --trunk.kv-heads 1 --trunk.ffn 16 --data.vocab-size 300 "
        f"--data.length 16 --train.batch 8 --train.steps {steps} --train.eval-every 6 --train.checkpoint-every 2 "
        f"--train.log-every 1 --optim.warmup 2 --quiet --name run --data.source files:{corpus} --runs {runs}"
    ).split()
    return ["train", "untied", *small, *flags]


def start(words: list[str], directory: Path | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *words],
        cwd=directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that one device trains, with nothing in its way; of a process too, or its last bits may be others."""
    runs = tmp_path_factory.mktemp("whole")
    ((code, errors),) = ended([start(command(corpus, runs, "--devices", "1"))])
    assert code == 0, errors
    return runs / "run"


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    del summary["tokens_per_second"]
    return summary


def test_a_run_killed_at_arbitrary_moments_resumes_to_the_same_bits(
    whole: Path, corpus: Path, tmp_path: Path
) -> None:
    words, run = command(corpus, tmp_path, "--devices", "1"), tmp_path / "run"
    chance = random.Random(0)
    kills = 0
    for _ in range(40):
        process = start(words)
        seen = progress(run)
        # Wait until it has moved, then kill it at a moment of its own: while stepping, saving or evaluating.
        deadline = time.monotonic() + 120
        while process.poll() is None and progress(run) == seen and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.15)
        if process.poll() is None and kills < 3:
            process.kill()
            kills += 1
        _, errors = process.communicate(timeout=240)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors.decode()
    assert kills, "the run was never killed"
    assert summary_of(run) == summary_of(whole)
    assert drop_speed(read_metrics(whole / "metrics.jsonl")) == drop_speed(
        read_metrics(run / "metrics.jsonl")
    )


def progress(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def joined(words: list[str], directories: list[Path]) -> list[subprocess.Popen[bytes]]:
    """One process of the command in each directory, all of one job."""
    with socket.socket() as listener:  # a free port, so that tests side by side do not meet
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    join = ["--coordinator", f"localhost:{port}", "--processes", str(len(directories))]
    return [
        start([*words, *join, "--process-id", str(index)], directory)
        for index, directory in enumerate(directories)
    ]


def ended(processes: list[subprocess.Popen[bytes]]) -> list[tuple[int, str]]:
    """Exit code and standard error of each."""
    try:
        errors = [process.communicate(timeout=240)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


@pytest.mark.parametrize("mesh", ["data=4,model=1", "data=2,model=2", "data=1,model=4"])
def test_two_processes_train_like_one_device(
    mesh: str, whole: Path, corpus: Path, tmp_path: Path
) -> None:
    words = command(corpus, tmp_path, "--devices", "2", "--mesh", mesh)
    for code, errors in ended(joined(words, [tmp_path] * 2)):
        assert code == 0, errors
    one, two = summary_of(whole), summary_of(tmp_path / "run")
    assert two["validation"]["loss"] == pytest.approx(one["validation"]["loss"], rel=1e-5)
    assert two["training"]["nll"] == pytest.approx(one["training"]["nll"], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("lose", ("process 1 failed; its own output says why", "no file matches 'text.jsonl'")),
        ("edit", ("process 0 has other data than process 1", "process 1 has other data than process 0")),
    ],
)  # fmt: skip
def test_what_one_process_cannot_use_ends_both(
    change: str, told: tuple[str, str], corpus: Path, tmp_path: Path
) -> None:
    directories = [tmp_path / "first", tmp_path / "second"]
    for directory in directories:
        directory.mkdir()
        shutil.copy(corpus, directory / "text.jsonl")
    mine = directories[1] / "text.jsonl"
    if change == "lose":
        mine.unlink()
    else:
        mine.write_text(mine.read_text() + json.dumps({"text": "one document more"}) + "\n")
    words = command(Path("text.jsonl"), tmp_path / "runs", "--devices", "1", "--mesh", "data=2")
    for (code, errors), told_here in zip(ended(joined(words, directories)), told, strict=True):
        assert code == 2
        assert told_here in errors and "Traceback" not in errors
    assert not (tmp_path / "runs").exists()


def test_processes_that_see_other_states_of_the_run_all_stop(
    whole: Path, corpus: Path, tmp_path: Path
) -> None:
    """As on a shared file system that is slow to show one process what another wrote."""
    directories = [tmp_path / "first", tmp_path / "second"]
    words = command(corpus, Path("runs"), "--devices", "1", "--mesh", "data=2")
    shown, late = (directory / "runs" / "run" for directory in directories)
    for run in (shown, late):
        shutil.copytree(whole, run)

    def all_stop() -> None:
        before = [sorted(directory.rglob("*")) for directory in directories]
        for index, (code, errors) in enumerate(ended(joined(words, directories))):
            assert code == 2
            assert f"process {index} has other state of the run than process {1 - index}" in errors
            assert "Traceback" not in errors
        assert [sorted(directory.rglob("*")) for directory in directories] == before

    (late / "summary.json").unlink()
    all_stop()
    (shown / "summary.json").unlink()
    shutil.rmtree(late / "checkpoints" / "12")
    all_stop()


def test_sigterm_to_one_process_stops_both_at_one_step(corpus: Path, tmp_path: Path) -> None:
    words = command(corpus, tmp_path, "--devices", "1", "--mesh", "data=2", steps=100_000)
    processes = joined(words, [tmp_path] * 2)
    deadline = time.monotonic() + 200
    while progress(tmp_path / "run") < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)
    ends = ended(processes)
    steps = set()
    for code, errors in ends:
        assert code == 128 + signal.SIGTERM, errors
        stopped = re.search(r"run: stopped and saved at step (\d+)", errors)
        assert stopped is not None and "Traceback" not in errors
        steps.add(int(stopped[1]))
    assert steps == {Checkpoints(tmp_path / "run" / "checkpoints").latest()}
