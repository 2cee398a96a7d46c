"""Run directories: what a kill may leave, which code is kept, which data an old run is read on."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import config_of

from vocabjax import UserError, files, runs
from vocabjax.config import Config
from vocabjax.data import DataConfig, Dataset, prepare
from vocabjax.data import tokenizer as tokenizing
from vocabjax.load import run_data
from vocabjax.log import read_metrics
from vocabjax.runs import Origin, Run


def dataset_of(config: Config) -> tuple[Config, Dataset]:
    dataset = prepare(config.data)
    return config.with_size(dataset.size), dataset


# Making a run


def test_a_kill_while_a_run_is_made_leaves_nothing_in_the_way(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory as it was before and after each file got its name, temporary files and all."""
    config, dataset = dataset_of(config_of(corpus))
    moments: list[Path] = []
    real = os.replace

    def keep() -> None:
        moments.append(tmp_path / f"moment{len(moments)}")
        shutil.copytree(tmp_path / "run", moments[-1])

    def replace_and_keep(source: Path, target: Path) -> None:
        keep()
        real(source, target)
        keep()

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", replace_and_keep)
        Run.create(tmp_path / "run", config, dataset, Origin("other", 3, "abc"))
    made = {path.name for path in (tmp_path / "run").iterdir()}
    temporary = {path.name for moment in moments for path in moment.iterdir()} - made
    assert {f"{name}.tmp" for name in made} == temporary
    for moment in moments:
        (moment / "counts.npy").write_bytes(b"cut short")
        was_run = Run(moment).exists()
        run = Run.create(moment, config, dataset, Origin("another", 5, "abc"))
        assert run.origin() == (Origin("other", 3, "abc") if was_run else Origin("another", 5, "abc"))  # fmt: skip
        if not was_run:
            np.testing.assert_array_equal(run.counts(), dataset.counts_V)
    assert sum(Run(moment).exists() for moment in moments) == len(moments)


def test_a_foreign_file_is_never_written_over(corpus: Path, tmp_path: Path) -> None:
    config, dataset = dataset_of(config_of(corpus))
    for name in ("notes.txt", "config.json.bak", "data.tmp"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / name).write_text("mine")
        with pytest.raises(UserError, match="is not empty and not a run"):
            Run.create(directory, config, dataset)
        assert [path.name for path in directory.iterdir()] == [name]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_atomic(path, "\ud800")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            files.write_atomic(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_corrected_command_replaces_a_run_of_which_nothing_was_saved(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, dataset = dataset_of(config_of(corpus))
    directory = tmp_path / "run"
    Run.create(directory, config, dataset)
    (directory / "metrics.jsonl").write_text('{"step": 0, "tokens": 0}\n')
    (directory / "code.patch").write_text("of the run before")
    (directory / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir(parents=True)  # a killed save's
    corrected = replace(config, train=replace(config.train, batch=4))
    assert capsys.readouterr().err == ""
    run = Run.create(directory, corrected, dataset)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{directory} holds a run of another config: train.batch: 8 → 4" in line
    assert "replaced" in line
    assert run.config() == corrected
    assert not (directory / "metrics.jsonl").exists()
    Run.create(directory, corrected, dataset)
    assert capsys.readouterr().err == ""

    np.save(tmp_path / "ids.npy", np.arange(400) % 20)  # other data: their tokenizer goes too
    ids = replace(config, data=DataConfig(source=f"tokens:{tmp_path}/ids.npy"))
    ids = replace(ids, vocab=replace(ids.vocab, size=None))
    run = Run.create(directory, *dataset_of(ids))
    assert run.tokenizer() is None
    assert len(run.counts()) == run.facts()["size"] == 20


@pytest.mark.parametrize("saved", ["checkpoints/3", "checkpoints/3.mine", "summary.json"])
def test_a_run_of_which_anything_was_saved_is_never_replaced(
    saved: str, corpus: Path, tmp_path: Path
) -> None:
    config, dataset = dataset_of(config_of(corpus))
    run = Run.create(tmp_path / "run", config, dataset)
    (run.directory / saved).mkdir(parents=True)
    before = {path: path.stat().st_mtime_ns for path in run.directory.rglob("*")}
    with pytest.raises(UserError, match=r"another config: train\.batch: 8 → 4; choose another"):
        Run.create(run.directory, replace(config, train=replace(config.train, batch=4)), dataset)
    assert {path: path.stat().st_mtime_ns for path in run.directory.rglob("*")} == before


HOLD = """
import sys, time
from pathlib import Path
from vocabjax.runs import Run
lock = Run(Path(sys.argv[1])).lock()
print("held", flush=True)
time.sleep(100)
"""


def unsupported(*_: Any) -> None:
    raise OSError(errno.ENOTSUP, "Operation not supported")


def test_a_run_is_locked_until_its_process_dies(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "run"
    words = [sys.executable, "-c", HOLD, str(directory)]
    holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"{directory} is being trained by another process"):
            Run(directory).lock()
        with monkeypatch.context() as patch:  # a file system without locks
            patch.setattr(files.fcntl, "flock", unsupported)
            Run(directory).lock().close()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
    with Run(directory).lock():
        assert Run.create(directory, *dataset_of(config_of(corpus))).exists()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty and not a run"):
        Run(tmp_path / "foreign").lock()
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["notes.txt"]


def test_a_tokenizer_that_is_gone_is_named_and_written_again(corpus: Path, tmp_path: Path) -> None:
    config, dataset = dataset_of(config_of(corpus))
    run = Run.create(tmp_path / "run", config, dataset)
    path = run.directory / "tokenizer.json"
    content = path.read_bytes()
    path.unlink()
    for read in (run.tokenizer, lambda: run_data(run)):
        with pytest.raises(UserError, match=f"{path} is missing; .* writes it again"):
            read()
    Run.create(run.directory, config, dataset)
    assert path.read_bytes() == content


@pytest.mark.parametrize("change", ["gone", "cut", "shorter", "others", "text"])
def test_counts_that_are_not_the_runs_are_named_and_written_again(
    change: str, corpus: Path, tmp_path: Path
) -> None:
    """A head that sorts ids by frequency would take them for other rows, silently."""
    config, dataset = dataset_of(config_of(corpus))
    run = Run.create(tmp_path / "run", config, dataset)
    path, counts_V = run.directory / "counts.npy", run.counts()
    damaged = {"shorter": counts_V[:-1], "others": counts_V + 1, "text": counts_V.astype(str)}
    if change == "gone":
        path.unlink()
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:50])
    else:
        np.save(path, damaged[change])
    with pytest.raises(UserError, match=f"{path}.*; .*the command that .* writes it again") as told:
        run.lexicon()
    assert "\n" not in str(told.value)
    path.unlink(missing_ok=True)
    Run.create(run.directory, config, dataset)
    np.testing.assert_array_equal(run.counts(), dataset.counts_V)


READERS: dict[str, Callable[[Run], Any]] = {
    "data.json": lambda run: (run.facts(), run.origin()),
    "code.json": Run.code,
    "summary.json": Run.summary,
    "metrics.jsonl": lambda run: read_metrics(run.directory / "metrics.jsonl"),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "content",
    [b"{}\n", b"[]\n", b"5\n", b"null\n", b'{"a": 1}\n', b'{"step": "1", "tokens": 2}\n', b'"\xe9"\n',
     b'{"fingerprint": "a", "init": {"foo": 1}}\n', b'{"fingerprint": "a", "init": 5}\n'],
)  # fmt: skip
def test_a_damaged_file_is_named_with_how_to_mend_it(
    name: str, content: bytes, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    mend = {"summary.json": "delete it", "metrics.jsonl": "delete that line"}
    with pytest.raises(UserError) as caught:
        READERS[name](Run(tmp_path))
    assert str(tmp_path / name) in str(caught.value)
    assert mend.get(name, "restore it from a copy") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_line_cut_short_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "tokens": 8 * step, "train_loss": 1.5} for step in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines)[:-5])
    assert read_metrics(path) == lines[:2]


# Its code


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / ".gitignore").write_text("ignored\n")
    (folder / "model.py").write_text("depth = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.setattr(runs, "CHECKOUT", folder)
    return folder


def test_the_patch_rebuilds_the_code_that_ran(checkout: Path, corpus: Path, tmp_path: Path) -> None:
    changed = {
        "model.py": b"depth = 2\n",
        "staged.py": b"staged = True\n",
        "new folder/née.py": "été = 1\n".encode(),
        "empty.py": b"",
        "latin.py": b"# \xe9t\xe9\n",
    }
    for name, content in changed.items():
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_bytes(content)
    git(checkout, "add", "staged.py")
    (checkout / "ignored").write_text("secret")
    (checkout / "book.txt").write_text("secret")
    (checkout / "large.py").write_bytes(b"#" * ((1 << 20) + 1))
    os.utime(checkout / ".gitignore", (0, 0))  # the index is stale: git would like to refresh it
    before = {path: path.read_bytes() for path in (checkout / ".git").rglob("*") if path.is_file()}

    run = Run.create(tmp_path / "run", *dataset_of(config_of(corpus)))
    assert {path: path.read_bytes() for path in (checkout / ".git").rglob("*") if path.is_file()} == before  # fmt: skip
    code = run.code()
    assert code["commit"] == git(checkout, "rev-parse", "HEAD").strip()
    assert code["uncommitted_changes"] is True
    patch = run.directory / "code.patch"
    assert (
        b"# left out, as it is large or no code: large.py (1,048,577 bytes)" in patch.read_bytes()
    )
    assert b"secret" not in patch.read_bytes()
    git(tmp_path, "clone", "-q", str(checkout), "clone")
    git(tmp_path / "clone", "apply", str(patch))
    rebuilt = tmp_path / "clone"
    assert {name: (rebuilt / name).read_bytes() for name in changed} == changed
    assert not (rebuilt / "ignored").exists()


def test_a_clean_checkout_has_no_patch_and_a_new_file_alone_makes_one(
    checkout: Path, corpus: Path, tmp_path: Path
) -> None:
    config, dataset = dataset_of(config_of(corpus))
    clean = Run.create(tmp_path / "clean", config, dataset)
    assert clean.code()["uncommitted_changes"] is False
    assert not (clean.directory / "code.patch").exists()
    (checkout / "variant.py").write_text("kind = 'new'\n")
    dirty = Run.create(tmp_path / "dirty", config, dataset)
    assert dirty.code()["uncommitted_changes"] is True
    assert "+kind = 'new'" in (dirty.directory / "code.patch").read_text()


def test_an_installed_copy_knows_no_commit(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it lies inside somebody else's repository."""
    git(tmp_path, "init", "-q")
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(runs, "CHECKOUT", tmp_path / "site-packages")
    run = Run.create(tmp_path / "run", *dataset_of(config_of(corpus)))
    assert (run.code()["commit"], run.code()["uncommitted_changes"]) == (None, None)
    assert not (run.directory / "code.patch").exists()


# Its data


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VOCABJAX_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of an old text\n" for i in range(400)))
    return path


def run_on(data: DataConfig, directory: Path) -> tuple[Run, Dataset]:
    config, dataset = dataset_of(replace(config_of(Path("unused")), data=data))
    return Run.create(directory, config, dataset), dataset


def test_unchanged_data_are_those_of_training(text: Path, tmp_path: Path) -> None:
    run, trained = run_on(DataConfig(source=f"files:{text}", vocab_size=300), tmp_path / "run")
    before = sorted((tmp_path / "cache").iterdir())
    dataset, changed = run_data(run)
    assert not changed
    assert dataset.fingerprint == trained.fingerprint
    assert sorted((tmp_path / "cache").iterdir()) == before  # nothing was tokenized again


def test_changed_data_are_read_in_the_runs_tokens(text: Path, tmp_path: Path) -> None:
    run, trained = run_on(DataConfig(source=f"files:{text}", vocab_size=300), tmp_path / "run")
    new = "".join(f"row {i} of newer words\n" for i in range(500))
    text.write_text(new)
    dataset, changed = run_data(run)
    assert changed
    assert dataset.tokenizer is not None and trained.tokenizer is not None
    assert dataset.tokenizer.get_vocab() == trained.tokenizer.get_vocab()
    tokens = [*dataset.train.tokens[1:-1], *dataset.validation.tokens[1:-1]]
    assert dataset.tokenizer.decode(tokens) == new


def test_a_tokenizer_file_may_go_and_the_data_are_still_the_same(
    text: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.json"
    tokenizing.save(tokenizing.train_bpe([text.read_text()], 290, "<|endoftext|>"), mine)
    data = DataConfig(source=f"files:{text}", tokenizer=str(mine))
    run, trained = run_on(data, tmp_path / "run")
    mine.unlink()
    dataset, changed = run_data(run)
    assert not changed
    np.testing.assert_array_equal(dataset.validation.tokens, trained.validation.tokens)


def test_changed_token_files_are_told(tmp_path: Path, text: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(400) % 20)
    run, _ = run_on(DataConfig(source=f"tokens:{path}"), tmp_path / "run")
    assert run_data(run)[1] is False
    np.save(path, np.arange(600) % 20)
    dataset, changed = run_data(run)
    assert changed and len(dataset.train.tokens) + len(dataset.validation.tokens) == 600
    np.save(path, np.arange(600))
    with pytest.raises(UserError, match=r"vocab\.size = 20 is smaller"):
        run_data(run)
