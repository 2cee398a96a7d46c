"""Where a run's numbers go: a progress bar, `metrics.jsonl`, and TensorBoard or W&B when asked for."""

import importlib
import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from vocabjax.errors import UserError
from vocabjax.files import misfit, write_atomic

Scalars = dict[str, float]


def extra(module: str, name: str) -> Any:
    """Imports an optional dependency. Raises UserError with the line that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{module} is not installed: pip install 'vocabjax[{name}]'") from error


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, `{"step": …, "tokens": …, …}`, appended and flushed."""

    def __init__(self, path: Path, resume_from: int) -> None:
        """Drops the lines after step `resume_from` (0: all of them), and a line that a kill cut short."""
        lines = read_metrics(path) if resume_from else []
        kept = [line for line in lines if line["step"] <= resume_from]
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a")

    def write(self, step: int, values: Scalars) -> None:
        self._file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The complete lines of a `metrics.jsonl`; an absent file has none.

    Raises:
      UserError: a line that no run wrote.
    """
    if not path.exists():
        return []
    lines: list[dict[str, float]] = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # cut short by a kill: what follows it is gone too
            break
        except UnicodeDecodeError as error:
            wrong: str | None = str(error)
        else:
            counts = {"step": int, "tokens": int}
            wrong = misfit(line, counts) or misfit(line, dict.fromkeys(line, int | float))
        if wrong is not None:
            raise UserError(f"{path} is damaged in line {number} ({wrong}); delete that line")
        lines.append(line)
    return lines


class Log:
    """Progress and metrics of one run. Only process 0 writes; on the others every method does nothing."""

    def __init__(
        self,
        directory: Path,
        *,
        name: str,
        steps: int,
        start: int,
        tokens_per_step: int,
        tensorboard: bool = False,
        wandb: bool = False,
        active: bool = True,
        quiet: bool = False,
    ) -> None:
        self._active = active
        self._steps, self._tokens_per_step = steps, tokens_per_step
        self._last = (start, time.perf_counter())
        self._console = Console(stderr=True, quiet=quiet or not active)
        self._metrics = MetricsFile(directory / "metrics.jsonl", start) if active else None
        self._board: Any = None
        self._wandb: Any = None
        if active and tensorboard:
            self._board = extra("tensorboardX", "tensorboard").SummaryWriter(
                str(directory / "tensorboard")
            )
        if active and wandb:
            self._wandb = extra("wandb", "wandb").init(
                project="vocabjax", name=name, id=name, resume="allow", dir=str(directory)
            )
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=steps, completed=start, status="compiling")
        self._name = name
        self._status = ""

    def __enter__(self) -> "Log":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
        if self._metrics is not None:
            self._metrics.close()
        for writer in (self._board, self._wandb):
            if writer is not None:
                writer.finish() if writer is self._wandb else writer.close()

    def train(self, step: int, values: Scalars) -> None:
        """Numbers of a training step; adds tokens per second since the last call, if a step has passed."""
        now = time.perf_counter()
        since, before = self._last
        self._last = (step, now)
        self._status = f"loss {values['train_loss']:.3f}"
        left = ""
        if step > since:
            speed = (step - since) * self._tokens_per_step / (now - before)
            values = {**values, "tokens_per_second": speed}
            self._status += f"  {speed:,.0f} tok/s"
            left = f"  {(self._steps - step) * self._tokens_per_step / speed:,.0f} s left"
        self._write(step, values)
        self._bar.update(self._task, completed=step, status=self._status)
        if not self._console.is_terminal:
            self.say(f"{self._name}  step {step}/{self._steps}  {self._status}{left}")

    def evaluation(self, step: int, values: Scalars) -> None:
        """Numbers of an evaluation. The time it took is not counted in tokens per second: see `resume_clock`."""
        self._write(step, values)
        text = "  ".join(f"{key} {value:.4f}" for key, value in values.items() if key != "tokens")
        self.say(f"{self._name}  step {step}  {text}")

    def resume_clock(self, step: int) -> None:
        """Starts the speed measurement anew, after compiling, evaluating or saving."""
        self._last = (step, time.perf_counter())

    def advance(self, step: int) -> None:
        """Moves the bar."""
        self._bar.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def _write(self, step: int, values: Scalars) -> None:
        if self._metrics is None:
            return
        self._metrics.write(step, values)
        if self._board is not None:
            for key, value in values.items():
                self._board.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)
