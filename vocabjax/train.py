"""Trains a config in a run directory: resumes by itself, evaluates, checkpoints, and stops cleanly when told to."""

import contextlib
import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import optax

from vocabjax.checkpoint import BEST_METRIC, Checkpoints
from vocabjax.config import Config, to_json
from vocabjax.data import Batch, Dataset, prepare, train_batches, windows_per_pass
from vocabjax.errors import IdError, UserError
from vocabjax.evaluate import Evaluation, Evaluator
from vocabjax.load import adopt, load_run, saved_step
from vocabjax.log import Log, Scalars, read_metrics
from vocabjax.mesh import Layout
from vocabjax.model import Blueprint, Params
from vocabjax.optim import make_optimizer
from vocabjax.plot import plot_run
from vocabjax.processes import require_same, together
from vocabjax.profile import TRACED, Profiler
from vocabjax.runs import Origin, Run, summary_dict
from vocabjax.sparse import Sparse
from vocabjax.state import State, abstract_state, init_state
from vocabjax.step import Arrays, Metrics, make_step, to_device


class Interrupted(Exception):
    """The run was told to stop (SIGTERM, SIGINT), has saved its state, and can be resumed."""

    def __init__(self, name: str, step: int, signal_number: int) -> None:
        super().__init__(
            f"{name}: stopped and saved at step {step}; run the same command to resume"
        )
        self.signal_number = signal_number


@dataclass(frozen=True)
class Summary:
    """The result of a finished run.

    Attributes:
      parameters, vocab_parameters, trunk_parameters: counts without padding.
      train_flops: model FLOPs of the whole run (see `Blueprint.train_flops`).
      tokens: positions trained on; passes: over the training windows.
      tokens_per_second: median of the logged speeds; None when nothing was timed, as in a run of one step.
      validation: the whole validation split, at the end.
      training: as many tokens of the training split, at the end, with the same weights.
      gap: validation loss − training loss, nats.
    """

    name: str
    parameters: int
    vocab_parameters: int
    trunk_parameters: int
    train_flops: int
    tokens: int
    passes: float
    tokens_per_second: float | None
    validation: Evaluation
    training: Evaluation
    gap: float


@dataclass(frozen=True)
class Setup:
    """A config made concrete: data, model and optimiser, nothing allocated."""

    config: Config
    dataset: Dataset
    layout: Layout
    blueprint: Blueprint
    optimizer: optax.GradientTransformation
    sparse: Sparse

    @property
    def tokens_per_step(self) -> int:
        """Positions, over all processes and microbatches."""
        return self.config.train.batch * self.config.data.length

    @staticmethod
    def of(config: Config, layout: Layout) -> "Setup":
        """Prepares the data and checks that everything fits together.

        Raises:
          UserError: what does not fit, and how to mend it.
        """
        check_fit(config, layout)
        dataset = prepare(config.data)
        config = config.with_size(dataset.size).with_separator(dataset.train.prefix_end)
        blueprint = Blueprint(config.vocab, config.trunk, layout, dataset.lexicon)
        optimizer = make_optimizer(config.optim, blueprint.infos.values(), config.train.steps)
        sparse = Sparse(config.optim, blueprint, config.train.steps)
        return Setup(config, dataset, layout, blueprint, optimizer, sparse)

    def batches(self) -> Any:
        """This process's training batches, from the first. Raises UserError when the text is too short for one."""
        settings = self.config.train
        index, count = self.layout.process_share()
        return train_batches(
            self.dataset.train,
            length=self.config.data.length,
            batch=settings.batch,
            accumulate=settings.accumulate,
            seed=settings.seed,
            process_index=index,
            process_count=count,
        )


def check_fit(config: Config, layout: Layout) -> None:
    """Refuses what cannot work, as far as it shows without data. Raises UserError."""
    config.check()
    layout.require(
        "train.batch / train.accumulate", "batch", config.train.batch // config.train.accumulate
    )
    layout.require("data.length", "seq", config.data.length)


def train(
    config: Config,
    directory: Path,
    layout: Layout,
    *,
    init: str | None = None,
    tensorboard: bool = False,
    wandb: bool = False,
    profile: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Trains to the end and returns the summary as plain values; a finished run only returns it.

    A directory with checkpoints of the same config is resumed, exactly: same parameters, same batches.

    Args:
      init: a run (its name beside this one, or its path) whose best parameters this one starts from, instead of fresh
        ones; it must have the same tokenizer. The run remembers it: resuming does not need it again.
      profile: traces a few steps into `profile/` of the run's directory, and says where their time went.

    Raises:
      UserError: bad settings or data, or a loss that is not finite; with several processes, on all of them.
      IdError: an id or label that does not exist; found one step late, when the device's count arrives.
      Interrupted: after saving, on SIGTERM or SIGINT.
    """
    with jax.set_mesh(layout.mesh), contextlib.ExitStack() as held:
        setup, batches = together(lambda: _set_up(config, layout))
        require_same("data", setup.dataset.fingerprint)
        require_same("settings", to_json(setup.config))
        origin = together(lambda: _origin(directory, init, setup))
        require_same("first parameters", repr(origin))
        # Agreed on once: a shared file system may show one process less than another.
        done, latest = together(lambda: _progress(Run(directory)))
        require_same("state of the run", f"finished: {done is not None}, last checkpoint: {latest}")
        params = None
        if origin is not None and done is None and latest is None:
            params = _start_from(origin, directory, setup)
        if done is None:
            held.enter_context(together(lambda: _alone(Run(directory), latest)))
        run = _open(directory, setup, origin)
        if done is not None:
            return done
        settings = setup.config.train
        checkpoints = Checkpoints(
            run.checkpoints, keep_last=settings.keep_last, keep_best=settings.keep_best
        )
        with contextlib.closing(checkpoints):
            state = _state(setup, checkpoints, latest, batches, params)
            # Only process 0 opens the log, and it may fail.
            log = together(
                lambda: Log(
                    run.directory,
                    name=run.name,
                    steps=settings.steps,
                    start=latest or 0,
                    tokens_per_step=setup.tokens_per_step,
                    tensorboard=tensorboard,
                    wandb=wandb,
                    active=jax.process_index() == 0,
                    quiet=quiet,
                )
            )
            profiler = Profiler(run.directory / "profile") if profile else None
            trainer = _Trainer(setup, run, checkpoints, log, batches, state, profiler)
            summary = summary_dict(trainer.fit())
        if jax.process_index() == 0:
            run.finish(summary)
        return summary


def _set_up(config: Config, layout: Layout) -> tuple[Setup, Any]:
    setup = Setup.of(config, layout)
    return setup, setup.batches()


def _origin(directory: Path, init: str | None, setup: Setup) -> Origin | None:
    """What the run starts from: as it recorded itself or, where it is new, the best checkpoint that `init` has by now.

    Raises:
      UserError: the run started from something else; or there is no such run.
    """
    run, runs = Run(directory), directory.parent
    if run.exists():
        origin = run.origin()
        # Its source may be gone by now: `init` is compared as `Run.open` would look for it.
        given = [] if init is None else [Run(p).name_from(runs) for p in (runs / init, Path(init))]
        if given and (origin is None or origin.run not in given):
            started = "fresh parameters" if origin is None else f"run {origin.run!r}"
            raise UserError(
                f"{directory} was started from {started}, not from {init!r}; choose another --name"
            )
        return origin
    if init is None:
        return None
    source = Run.open(init, runs)
    return Origin(source.name_from(runs), saved_step(source), source.facts()["fingerprint"])


def _progress(run: Run) -> tuple[dict[str, Any] | None, int | None]:
    """The result of the run, if it is finished; its last checkpoint, if it has one."""
    return run.summary(), Checkpoints(run.checkpoints).latest()


def _start_from(origin: Origin, directory: Path, setup: Setup) -> Params:
    """The parameters of another run, for this model.

    Raises:
      UserError: they do not fit, stand for other tokens, or are not there any more.
    """

    def look() -> Run:
        source = Run.open(origin.run, directory.parent)
        if source.facts()["fingerprint"] != origin.fingerprint:
            raise UserError(
                f"run {source.name!r} is no longer the one that {directory} starts from: it was trained on other data"
            )
        theirs, ours = source.tokenizer(), setup.dataset.tokenizer
        if (theirs and theirs.to_str()) != (ours and ours.to_str()):
            mend = f"add --data.tokenizer {source.directory / 'tokenizer.json'}"
            if theirs is None:
                mend = (
                    "it was trained on token ids: give it more of them as --data.source tokens:FILE"
                )
            elif ours is None:
                mend = "it was trained on text, not on token ids: give a text as --data.source"
            raise UserError(
                f"run {source.name!r} has another tokenizer, so its rows mean other tokens; {mend}"
            )
        Checkpoints(source.checkpoints).describe(origin.step)
        return source

    source, multiple = together(look), setup.config.vocab.multiple
    # Outside `together`: the processes restore and compare arrays with one another.
    return adopt(setup.blueprint, load_run(source, setup.layout, origin.step, multiple=multiple))


def _alone(run: Run, latest: int | None) -> contextlib.AbstractContextManager[object]:
    """Keeps other commands out of the run while it is trained.

    Raises:
      UserError: another process trains it, or did so after its last checkpoint was looked for.
    """
    if jax.process_index() != 0:
        return contextlib.nullcontext()
    with contextlib.ExitStack() as held:
        held.enter_context(run.lock())
        if _progress(run) != (None, latest):
            raise UserError(f"{run.directory} is being trained by another process; try again")
        return held.pop_all()


def _open(directory: Path, setup: Setup, origin: Origin | None) -> Run:
    """The run; process 0 makes its directory before the others look."""

    def create() -> Run:
        return Run.create(directory, setup.config, setup.dataset, origin)

    together(lambda: create() if jax.process_index() == 0 else None)
    return together(create)


def _state(
    setup: Setup, checkpoints: Checkpoints, step: int | None, batches: Any, params: Params | None
) -> State:
    """The state saved at `step`, and the batches are moved to where they were; None: step 0, of `params` or fresh ones."""
    if step is None:
        fresh = setup.blueprint.init(setup.config.train.seed) if params is None else params
        return init_state(setup.optimizer, fresh, setup.sparse.catch_up)
    state: State = checkpoints.restore(
        abstract_state(setup.blueprint, setup.optimizer, setup.sparse.catch_up),
        batches,
        logical=setup.blueprint.logical_shapes(),
        step=step,
    )
    return state


class _Trainer:
    def __init__(
        self,
        setup: Setup,
        run: Run,
        checkpoints: Checkpoints,
        log: Log,
        batches: Any,
        state: State,
        profiler: Profiler | None,
    ) -> None:
        self.profiler = profiler
        self.setup, self.run, self.checkpoints, self.log = setup, run, checkpoints, log
        self.batches, self.state = batches, state
        self.resumed_at = int(state.step)
        self.step_fn = make_step(
            setup.blueprint, setup.optimizer, setup.config.train.seed, setup.sparse
        )
        self.evaluator = Evaluator(setup.blueprint, setup.dataset.counts_V)
        self.pending: tuple[int, Metrics, Batch] | None = None
        self.settled = self.resumed_at
        self.window: list[Scalars] = []  # of the settled steps that are not logged yet

    def fit(self) -> Summary:
        settings, profiler = self.setup.config.train, self.profiler
        held = contextlib.nullcontext() if profiler is None else contextlib.closing(profiler)
        with self.log, _stop_signals() as stop, held:
            if self.resumed_at:
                self.log.say(f"{self.run.name}  resumed at step {self.resumed_at}")
            evaluation = None if self.resumed_at else self._evaluate(0)
            for step in range(self.resumed_at + 1, settings.steps + 1):
                host = self._next_batch()
                batch = to_device(self.setup.layout, host, None, "batch", "seq")
                self.state, metrics = self.step_fn(self.state, batch)
                self._settle()
                self.pending = (step, metrics, host)
                self.log.advance(step)
                if profiler is not None:
                    self._profile(profiler, batch, metrics)
                if step == self.resumed_at + 1:  # it compiled, so it is logged without a speed
                    jax.block_until_ready(metrics)
                    self.log.resume_clock(step)
                    self._settle()
                is_last = step == settings.steps
                stopped = self._stopped(stop, step)
                evaluation = None
                if is_last or step % settings.eval_every == 0:
                    self._pause()
                    evaluation = self._evaluate(step)
                is_due = is_last or step % settings.checkpoint_every == 0
                if is_due or stopped:
                    # A stop that is not due leaves rows as they are: the resumed run then goes on to the same bits.
                    self._pause(catch_up=is_due)
                    self._save(step, evaluation)
                if stopped and not is_last:
                    self.checkpoints.wait()
                    raise Interrupted(self.run.name, step, stop.signal_number)
            if evaluation is None:  # killed between the last checkpoint and the summary
                evaluation = self._measure(settings.steps)  # it has been logged
            self.checkpoints.wait()
        if jax.process_index() == 0:
            plot_run(self.run.directory)
        return self._summary(*evaluation)

    def _profile(self, profiler: Profiler, batch: Arrays, metrics: Metrics) -> None:
        def program() -> str:
            return self.step_fn.lower(self.state, batch).compile().as_text() or ""

        if text := profiler.after_step(metrics, program):
            self.log.say(
                f"{self.run.name}  profile of {TRACED} steps in {profiler.directory}\n{text}"
            )

    def _next_batch(self) -> Batch:
        host = next(self.batches)
        return {**host, "targets": self.setup.blueprint.sizes.ignore_banned(host["targets"])}

    def _settle(self, flush: bool = False) -> None:
        """Reads the metrics of the step before (one step late, so that the device never waits for the host)."""
        if self.pending is not None:
            step, metrics, host = self.pending
            self.pending = None
            values = {name: float(value) for name, value in metrics._asdict().items()}
            if values["invalid"]:
                self._raise_invalid(step, host)
            for name, value in values.items():
                self._require_finite(name, step, value)
            self.window.append(values)
            self.settled = step
        if self.window and (flush or self.settled % self.setup.config.train.log_every == 0):
            mean = {name: float(np.mean([m[name] for m in self.window])) for name in self.window[0]}
            self.window = []
            self.log.train(
                self.settled,
                {
                    "tokens": self.settled * self.setup.tokens_per_step,
                    "train_loss": mean["nll"],
                    "objective": mean["loss"],
                    "lse2": mean["lse2"],
                    "gradient_norm": mean["gradient_norm"],
                },
            )

    def _pause(self, catch_up: bool = True) -> None:
        """Reads all metrics and, for those who look at the parameters, brings every row of sparse tables up to date."""
        self._settle(flush=True)
        if catch_up:
            self.state = self.setup.sparse.flush(self.state)

    def _raise_invalid(self, step: int, host: Batch) -> None:
        where = f"training batch of step {step}"
        try:
            self.setup.blueprint.sizes.check_ids(host["ids"])
            self.setup.blueprint.sizes.check_labels(host["targets"])
        except IdError as error:
            raise IdError(f"{where}: {error}") from None
        raise IdError(f"{where}: another process read an id or label that does not exist")

    def _require_finite(self, name: str, step: int, value: float) -> None:
        if not math.isfinite(value):
            raise UserError(
                f"the {name.replace('_', ' ')} of step {step} is {value}: lower --optim.lr, or lengthen --optim.warmup; "
                + self.checkpoints.last_saved()
            )

    def _evaluate(self, step: int) -> tuple[Evaluation, Evaluation]:
        """`_measure`, logged."""
        validation, training = self._measure(step)
        values = {
            "tokens": step * self.setup.tokens_per_step,
            BEST_METRIC: validation.loss,
            "training_sample_loss": training.loss,
        }
        if validation.bits_per_byte is not None:
            values["validation_bits_per_byte"] = validation.bits_per_byte
        self.log.evaluation(step, values)
        self.log.resume_clock(step)
        return validation, training

    def _measure(self, step: int) -> tuple[Evaluation, Evaluation]:
        """Of the validation split, and of as many tokens of the training split."""
        dataset, data = self.setup.dataset, self.setup.config.data
        sample = replace(
            dataset.train, tokens=dataset.train.tokens[: len(dataset.validation.tokens)], bytes=None
        )
        settings = self.setup.config.train
        batch = settings.batch // settings.accumulate
        validation, training = (
            self.evaluator(self.state.params, stream, data.length, batch)
            for stream in (dataset.validation, sample)
        )
        self._require_finite("validation_loss", step, validation.loss)
        self._require_finite("training_sample_loss", step, training.loss)
        return validation, training

    def _save(self, step: int, evaluation: tuple[Evaluation, Evaluation] | None) -> None:
        metrics = {BEST_METRIC: evaluation[0].loss} if evaluation else None
        logical = self.setup.blueprint.logical_shapes()
        self.checkpoints.save(step, self.state, self.batches, logical=logical, metrics=metrics)
        self.log.resume_clock(step)

    def _stopped(self, stop: "_Stop", step: int) -> bool:
        if jax.process_count() == 1:
            return stop.signal_number != 0
        # All processes must leave at the same step; JAX's service tells them of each other's SIGTERM.
        from jax.experimental import multihost_utils

        return bool(multihost_utils.reached_preemption_sync_point(step))

    def _summary(self, validation: Evaluation, training: Evaluation) -> Summary:
        blueprint, length = self.setup.blueprint, self.setup.config.data.length
        tokens = self.setup.config.train.steps * self.setup.tokens_per_step
        per_pass = windows_per_pass(self.setup.dataset.train, length) * length
        lines = read_metrics(self.run.directory / "metrics.jsonl")
        speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
        return Summary(
            name=self.run.name,
            parameters=blueprint.count(),
            vocab_parameters=blueprint.count("vocab/"),
            trunk_parameters=blueprint.count("trunk/"),
            train_flops=blueprint.train_flops(length) * tokens,
            tokens=tokens,
            passes=tokens / per_pass,
            tokens_per_second=float(np.median(speeds)) if speeds else None,
            validation=validation,
            training=training,
            gap=validation.loss - training.loss,
        )


class _Stop:
    signal_number = 0


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Notes SIGTERM and SIGINT instead of dying; a second SIGINT dies. Only in a main thread."""
    stop = _Stop()
    if jax.process_count() > 1:  # SIGTERM is JAX's: it tells all processes, see `_stopped`
        stop.signal_number = signal.SIGTERM
        yield stop
        return

    def note(number: int, _: FrameType | None) -> None:
        stop.signal_number = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        previous = [signal.signal(number, note) for number in numbers]
    except ValueError:  # not the main thread: the host program owns the signals
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
