"""The command line, from configs to exit codes. Most of it runs in this process, on the eight devices of conftest."""

import ast
import dataclasses
import errno
import functools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small_runs import environment

from vocabjax import UserError, __version__, cli, find
from vocabjax.checkpoint import Checkpoints
from vocabjax.config import Config, differences, from_json, to_json
from vocabjax.flags import TrainFlags, parse, with_parts
from vocabjax.optim import NamedGroup, OptimConfig
from vocabjax.presets import PRESETS
from vocabjax.published import MODELS
from vocabjax.vocab.core import VocabConfig
from vocabjax.vocab.heads.linear import UntiedHead

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.py") if path.name != "__init__.py")
STEPS = 6
SMALL = (
    "--vocab.width 16 --trunk.layers 1 --trunk.heads 2 --trunk.kv-heads 1 --trunk.ffn 16 --data.vocab-size 300 "
    f"--data.length 16 --train.batch 8 --train.steps {STEPS} --train.eval-every 3 --train.checkpoint-every 3 "
    "--train.log-every 1 --optim.warmup 2"
).split()


def run(*words: str | Path) -> int:
    """The exit code of a command."""
    try:
        return cli.main([str(word) for word in words])
    except SystemExit as stop:  # --help
        return int(stop.code or 0)


def tree(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def start(*words: str | Path) -> subprocess.Popen[str]:
    """The command in a process of its own, which simulates its own devices."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


@pytest.fixture(scope="module", autouse=True)
def jax_started() -> Iterator[None]:
    # Or the first --devices here would decide how many devices the other tests have.
    assert len(jax.devices()) == 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        yield


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one finished run, `done`."""
    directory = tmp_path_factory.mktemp("runs")
    assert run(*train(corpus, directory, "done"), "--devices", "1") == 0
    return directory


def train(corpus: Path, runs: Path, name: str) -> list[str | Path]:
    where = ["--runs", runs, "--name", name, "--quiet"]
    return ["train", "tied", *SMALL, "--data.source", f"files:{corpus}", *where]


def fails(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one line that a refused command prints; its exit code is 2."""
    capsys.readouterr()
    assert run(*words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert printed.out == "" and "Traceback" not in printed.err
    return printed.err


# Configs


def test_configs_are_listed_with_their_summaries(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("configs") == 0
    configs, models, presets = capsys.readouterr().out.split("\n\n")
    docstrings = {path.stem: ast.get_docstring(ast.parse(path.read_text())) for path in CONFIGS}
    expected = [
        [[name, str(text).splitlines()[0]] for name, text in docstrings.items()],
        [[name, title] for name, (title, _) in MODELS.items()],
        [[name, preset.summary] for name, preset in PRESETS.items()],
    ]
    for printed, known in zip((configs, models, presets), expected, strict=True):
        assert [line.split(maxsplit=1) for line in printed.splitlines()[1:]] == known


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_short_and_says_what_to_expect(path: Path) -> None:
    source = path.read_text()
    docstring = ast.get_docstring(ast.parse(source)) or ""
    summary, command, expectation = docstring.split("\n\n")
    assert "\n" not in summary and summary.endswith(".")
    assert command.strip() == f"python run.py train {path.stem}"
    assert re.match(r"Expect: .*\d", expectation)  # a number, measured
    code = [line for line in source.split('"""')[2].splitlines() if line.strip()]
    assert path.stem in ("base", "three_way") or len(code) <= 15


DECODERS = [path for path in CONFIGS if path.stem != "three_way"]  # see test_encoder_decoder


@pytest.mark.parametrize("path", DECODERS, ids=lambda path: path.stem)
def test_every_config_dry_runs(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    V = 3000
    assert run("train", path.stem, "--dry-run", "--vocab.size", str(V), "--devices", "1") == 0
    config = find.load_config(path.stem)[1]
    D, trunk = config.vocab.width, config.trunk
    L, F, N, G, K = trunk.layers, trunk.ffn, trunk.heads, trunk.kv_heads, D // trunk.heads
    in_trunk = L * (D * K * (2 * N + 2 * G) + 3 * D * F + 2 * D) + D
    table, r = V * D, math.isqrt(V - 1) + 1
    primes = [p for p in range(4096, 5000) if all(p % k for k in range(2, 71))][: 2 * 2 * 4]
    bands = ((512, D), (1536, D // 4), (V - 2048, D // 16))
    rows, projections = sum(n * w for n, w in bands), sum(w * D for _, w in bands)
    formulas = {  # of each part's first lines; E, R, P = 16, and two layers with value embeddings
        "untied": 2 * table,
        "untied_bias": 2 * table + V,
        "tied_layernorm": table + 2 * D,
        "low_rank": table + D * 16 + V * 16,
        "pr_tied": table + D * D,
        "factorized": V * 16 + 16 * D,
        "albert": V * 16 + 2 * 16 + 16 * D + D + (D * 16 + 16 + 2 * 16) + V,
        "adaptive": rows + projections + rows + projections - D * D + 2 * D,
        "tied_adaptive": rows + projections + 2 * D,
        "mos": table + 4 * D * D + 4 * D,
        "moc": table + 4 * D * D + 4 * D,
        "augmented_loss": table,
        "over_decoding": table + D * D,
        "centred": 2 * table,
        "hash": 1024 * D + 2 * V + table,
        "compositional": (-(-V // r) + r) * D + table,
        "over_encoding": table + (8192 + D) * D // 2,
        "ple": table + V * L * 16 + L * (3 * D * 16 + D) + 16,
        "ple_article": table + V * L * 16 + L * 16 * D,
        "value_embeddings": table + 2 * (V * G * K + 12 * G),
        "tide": table + 2 * V * D + 2 * D + L * (D * 3 + D),
        "engram": table + sum(primes) * 16 + 2 * (2 * 128 * D + 4 * D + 3 * D),
    }
    formulas |= dict.fromkeys(("base", "tied", "tiny"), table)
    out = capsys.readouterr().out
    if (vocab := formulas.get(path.stem)) is not None:  # not of somebody's new config
        count = f"{in_trunk + vocab:,} parameters: {vocab:,} in the vocabulary"
        assert f"{count}, {in_trunk:,} in the trunk" in out
    assert "the data were not read" in out
    assert tree(tmp_path) == {}


def test_a_dry_run_counts_what_one_device_holds_and_allocates_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (
        "train untied --dry-run --vocab.size 1000001 --vocab.width 8192 --vocab.multiple 128 --trunk.layers 80 "
        "--trunk.heads 64 --trunk.kv-heads 8 --trunk.ffn 28672 --devices 8 --mesh data=2,model=4 --rules fsdp"
    )
    assert run(*words.split()) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if "f32[" in line}
    padded = -(-1_000_001 // 512) * 512  # a multiple of 128 on each of four shards
    assert rows["vocab/head/table"][1] == f"f32[{padded},8192]"
    assert rows["vocab/head/table"][-2:] == ["head", f"{padded * 8192 * 4 // 4:,}"]
    assert rows["trunk/layers/up"][-2:] == ["matrix", f"{80 * 8192 * 28672 * 4 // 8:,}"]
    assert "data=2, model=4 on 8" in out
    assert re.search(rf"^  embed +adamw +1 +{padded * 8192:,} ", out, re.MULTILINE)


def test_flags_reach_every_part(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    words = (
        "train tied --dry-run --vocab.head.softcap 30 --vocab.input.norm layernorm --vocab.input.scale 2.5 "
        "--optim.tied.lr 5 --optim.clip None --vocab.banned 1 2 --trunk.qk-norm --devices 1 --data.vocab-size 300"
    )
    assert run(*words.split(), "--data.source", f"files:{corpus}") == 0
    out = capsys.readouterr().out
    for setting in (
        "softcap=30.0", "norm=layernorm", "scale=2.5", "lr=5.0", "clip=None", "banned=[1, 2]", "qk_norm=True",
    ):  # fmt: skip
        assert setting in out
    assert "was read from the prepared data" in out


def test_another_kind_of_head_keeps_the_shared_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        '"""Mine."""\nfrom dataclasses import replace\nfrom vocabjax import TiedHead\n'
        "from vocabjax.configs.base import config as base\n"
        "config = replace(base, vocab=replace(base.vocab, size=300, head=TiedHead(softcap=7.0)))\n"
    )
    words = ["train", mine, "--dry-run", "--devices", "1", "--head", "untied"]
    assert run(*words, "--vocab.head.std", "0.5") == 0
    assert (
        "kind=untied  bias=False  scale=1.0  softcap=7.0  centre=False  mean_penalty=0.0  std=0.5"
        in capsys.readouterr().out
    )


# A memory, as a config of the user's own may bring one; it is never built here.
MEMORY = '''
from dataclasses import dataclass
from typing import ClassVar

from vocabjax.configs.base import config
from vocabjax.vocab.interfaces import MemoryConfig


@dataclass(frozen=True)
class Shelf(MemoryConfig):
    """Rows kept on a shelf.

    Attributes:
      rows: how many.
      scale: what they are multiplied by.
    """

    kind: ClassVar[str] = "shelf"
    rows: int
    scale: float = 1.0

    def build(self, context, trunk):
        raise NotImplementedError
'''


def test_every_setting_is_a_flag_of_a_memory_and_a_group_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MEMORY)
    words = [
        "--memory", "shelf", "--vocab.memories.0.rows", "7", "--memory", "shelf", "--vocab.memories.1.rows", "9",
        "--vocab.memories.1.scale", "0.5", "--group", "queries=trunk/*/q", "--optim.groups.0.group.lr", "3",
        "--group", "keys=trunk/*/k", "--optim.groups.1.group.frozen", "--head", "untied",
    ]  # fmt: skip
    config = with_parts(find.load_config(str(mine))[1], words)
    flags = parse(TrainFlags, "train mine", words, TrainFlags(config=config))
    values = json.loads(to_json(flags.config))
    assert values["vocab"]["memories"] == [
        {"kind": "shelf", "rows": 7, "scale": 1.0},
        {"kind": "shelf", "rows": 9, "scale": 0.5},
    ]
    groups = values["optim"]["groups"]
    assert [(g["name"], g["pattern"]) for g in groups] == [
        ("queries", "trunk/*/q"),
        ("keys", "trunk/*/k"),
    ]
    assert [(g["group"]["lr"], g["group"]["frozen"]) for g in groups] == [(3, False), (1, True)]

    # Every setting of that config: none is left without a flag. The kinds have --head, --input and --memory.
    settings: list[str] = []

    def walk(name: str, value: Any) -> None:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {str(index): part for index, part in enumerate(value)}
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{name}.{key}" if name else key, inner)
        elif not name.endswith(".kind"):
            settings.append(name)

    walk("", values)
    capsys.readouterr()
    assert run("train", mine, *words, "--help") == 0
    shown = set(re.findall(r"--[\w.-]+", capsys.readouterr().out))
    assert len(settings) > 60
    assert [s for s in settings if f"--{s.replace('_', '-')}" not in shown] == []
    assert "--vocab.memories.0.rows" in fails(capsys, "train", mine, "--memory", "shelf")


def test_a_group_of_ones_own_trains(
    corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*train(corpus, tmp_path, "frozen"), "--devices", "1", "--train.steps", "3"]
    group = ["--group", "queries=trunk/*/q", "--optim.groups.0.group.frozen"]
    assert run(*words, *group) == 0
    held = Checkpoints(tmp_path / "frozen" / "checkpoints").describe().leaves
    assert not [path for path in held if path.startswith("optimizer") and path.endswith("/q")]
    assert [path for path in held if path.startswith("optimizer") and path.endswith("/k")]
    assert run(*words, *group) == 0  # the same command again
    assert "finished already" in capsys.readouterr().out
    assert "optim.groups" in fails(capsys, *words)


@pytest.mark.parametrize("command", ["train tied", "eval", "sample", "inspect"])
def test_help_says_what_each_flag_is_for_and_fits_eighty_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*command.split(), "--help") == 0
    _, options = capsys.readouterr().out.split(" options", 1)
    assert max(map(len, options.splitlines())) <= 80
    # Beside the flag and what it takes, two spaces away, or below.
    told: dict[str, str] = {}
    for line in options.splitlines():
        if re.match(r"[│ ] --[a-z]", line):
            flag, _, text = line[2:].partition("  ")
            name = flag.split(maxsplit=1)[0].rstrip(",")
            told[name] = text.strip("│ ")
        elif told:
            told[name] += line.strip("│ ")
    assert "--runs" in told
    assert [name for name, text in told.items() if not text or text.startswith("(default")] == []


@pytest.mark.parametrize(
    "words",
    [
        "configs",
        "train untied --dry-run --vocab.size 4097 --devices 8 --mesh data=2,model=4 --rules fsdp,vocab=model+data",
        "train tied --dry-run --vocab.size 300 --devices 1 --group queries=trunk/*/q --optim.groups.0.group.lr 4",
    ],
)  # fmt: skip
def test_what_is_printed_fits_eighty_columns(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*words.split()) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_help_is_grouped_and_carries_the_configs_own_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # wider, groups may stand side by side
    assert run("train", "untied", "--help") == 0
    out = capsys.readouterr().out
    assert "vocab.head options" in out and re.search(r"--train.steps INT[^-]*\(default: 200\)", out)
    assert "--vocab.head.std" in out  # an untied head's own
    assert run() == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("train", "eval", "sample", "inspect", "experiment"))
    assert run("--version") == 0
    assert capsys.readouterr().out == f"vocabjax {__version__}\n"


def test_experiments_are_listed_and_get_their_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("experiment") == 0
    assert "tied_vs_untied  Does tying" in capsys.readouterr().out
    experiment = find.load_experiment("tied_vs_untied")
    given: list[str] = []
    monkeypatch.setattr(experiment, "main", given.extend)
    assert run("experiment", "tied_vs_untied", "--full", "--out", "here") == 0
    assert given == ["--full", "--out", "here"]


# Refusals

TRAIN = ["train", "tied", *SMALL, "--quiet"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("trian tied", "unknown command 'trian'; did you mean 'train'?"),
        ("train tiedd", "no config 'tiedd'; did you mean 'tied'"),
        ("train", "train needs a config first"),
        ("train none.py", "no config none.py"),
        ("train none.json", "cannot read none.json"),
        ("train tied --vocab.widht 3", "unknown flag --vocab.widht; did you mean '--vocab.width'"),
        ("train tied --lr 3", "unknown flag --lr; did you mean '--optim.lr'"),
        ("train tied --zzzzzz", "unknown flag --zzzzzz; see train tied --help"),
        ("train tied --dry-run yes", "unexpected argument 'yes'"),
        ("train tied --vocab.width wide", "--vocab.width"),
        ("train tied --vocab.input.norm layer", "--vocab.input.norm"),
        ("train tied --data.validation 3", "data.validation = 3.0 must lie between 0 and 1"),
        ("train tied --head tide", "--head: unknown kind 'tide'; did you mean 'tied'"),
        ("train tied --name ../elsewhere", "--name '../elsewhere' must be a plain name"),
        ("train tied --devices 1 --mesh data=3", "mesh data=3 needs 3 devices, but there are 1"),
        ("train tied --mesh data", "--mesh 'data': cannot read 'data'"),
        ("train tied --devices 8 --mesh data=4,tensor=2", "no rule uses axis 'tensor'"),
        ("train tied --rules fdsp", "unknown rule set 'fdsp'; did you mean 'fsdp'?"),
        ("train tied --optim.clip none", "--optim.clip: must be {None}|FLOAT, not 'none'"),
        ("train tied --optim.lr fast", "--optim.lr: must be a number, not 'fast'"),
        ("train tied --optim.groups.0.lr 3", "unknown flag --optim.groups.0.lr: --group NAME=PATTERN adds one"),
        ("train tied --vocab.memories.0.rows 3", "unknown flag --vocab.memories.0.rows: --memory KIND adds one"),
        ("train tied -- --dry-run", "unexpected argument '--'"),
        ("train tied --train.seed 999999999999999999999999", "train.seed = 999999999999999999999999 must be at least 0 and below 2^31"),
        ("train tied --train.steps 99999999999999999999", "train.steps = 99999999999999999999 must be"),
        ("train tied --data.vocab-size 99999999999999999999", "data.vocab_size = 99999999999999999999 must be"),
        ("train tied --dry-run --vocab.size 99999999999", "vocab.size = 99999999999 must be"),
        ("train tied --dry-run --vocab.size 300 --trunk.layers 99999999999999999999", "trunk.layers = 99999999999999999999 must be"),
        ("train tied --dry-run --vocab.size 300 --trunk.layers 1000000000", "trunk.layers = 1000000000 must be"),
        ("train tied --vocab.width 1 --trunk.heads 4", "set trunk.head_dim, or a width of 4"),
        ("train tied --train.keep-last 0 --dry-run", "train.keep_last = 0 must be"),
        ("train tied --processes 2", "--coordinator, --processes and --process-id go together"),
        ("train tied --optim.head.lr 5 --devices 1 --vocab.size 300 --dry-run", "the model is tied"),
        ("eval", "name or path of a run"),
        ("eval nothing", "no run 'nothing' in runs; known: none"),
        ("sample nothing", "no run 'nothing'"),
        ("inspect nothing", "no run 'nothing'"),
        ("experiment nothing", "no experiment 'nothing'"),
        ("configs please", "configs takes no arguments"),
    ],
)  # fmt: skip
def test_bad_words_are_answered_in_one_line(
    words: str,
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in fails(capsys, *words.split())
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--devices 8 --train.batch 12", "= 12 does not divide over the 8 shards of 'batch'"),
        ("--devices 8 --mesh data=2,model=4", "trunk.heads = 2 does not divide over the 4 shards"),
        (
            "--devices 1 --data.length 16 --vocab.objective.future 16",
            "future = 16 must be below data.length = 16",
        ),
        (
            f"--devices 1 --head mos --vocab.head.components {2**31}",
            f"vocab/head/latent would have the shape (16, {2**31}, 16): each size must be below",
        ),
        ("--devices 1 --trunk.heads 3", "trunk.heads = 3 must be a multiple of"),
        ("--devices 1 --vocab.size 10", "vocab.size = 10 is smaller than the tokenizer"),
        ("--devices 1 --train.batch 4096", "fewer than one batch of 4096"),
        ("--devices 1 --data.source files:none*.txt", "none*.txt"),
        (
            "--devices 8 --mesh data=2,model=4 --trunk.heads 4 --rules seq=data",
            "'batch' and 'seq' of one array",
        ),
        (
            "--devices 8 --mesh data=2,model=4 --trunk.heads 8 --rules heads=data+model",
            "'batch' and 'heads' of one array",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_run_is_made(
    words: str, told: str, capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    tried = [*train(corpus, tmp_path, "new"), "--trunk.kv-heads", "2", *words.split()]
    refusal = fails(capsys, *tried)
    assert told in refusal
    assert not (tmp_path / "new").exists()
    if "--vocab.size" not in words:  # or a dry run does not read the data
        assert fails(capsys, *tried, "--dry-run") == refusal


@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe\x80binary"])
def test_empty_and_binary_text_files_are_refused(
    content: bytes, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    words = [*TRAIN, "--devices", "1", "--runs", tmp_path / "runs"]
    assert "text.txt" in fails(capsys, *words, "--data.source", f"files:{text}")
    assert tree(tmp_path) == {"text.txt": content}


WRONG = (
    "from vocabjax.config import Config, TrainConfig, VocabConfig\nconfig = Config({})"  # in Python
)


def test_a_config_file_that_fails_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.py"
    for source, told in (
        ("import nonsense_module", "ModuleNotFoundError"),
        ("config = (", "SyntaxError"),
        ("config = 3", "no `config` of type"),
        (
            WRONG.format("train=TrainConfig(steps='many')"),
            "train.steps must be a whole number, not 'many'",
        ),
        (WRONG.format("vocab=VocabConfig(banned='1')"), "vocab.banned[0] must be a whole number"),
        (WRONG.format("vocab=VocabConfig(head=3)"), "wrong type"),
        (WRONG.format("train=None"), "wrong type"),
        (WRONG.format("train=TrainConfig(steps=print)"), "wrong type"),
        ("from vocabjax import UserError\nraise UserError('nonsense')", "nonsense"),
    ):
        bad.write_text(source)
        line = fails(capsys, "train", bad)
        assert str(bad) in line and told in line


def changed(path: str, value: Any) -> str:
    """The default config as JSON with one value replaced."""
    values = json.loads(to_json(Config()))
    *parents, name = path.split(".")
    functools.reduce(lambda node, key: node[key], parents, values)[name] = value
    return json.dumps(values)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("train.steps", 10.7, "train.steps must be a whole number, not 10.7"),
        ("train.steps", True, "train.steps must be a whole number, not True"),
        ("train.steps", None, "train.steps must be a whole number, not None"),
        ("vocab.size", "16", "vocab.size must be a whole number or null, not '16'"),
        ("vocab.banned", "12", "vocab.banned must be a list, not '12'"),
        ("vocab.banned", [1, "2"], "vocab.banned[1] must be a whole number, not '2'"),
        ("vocab.input.scale", "big", "vocab.input.scale must be 'none' or 'sqrt_width' or a number, not 'big'"),
        ("vocab.head", [], "vocab.head must be an object, not []"),
        ("vocab.head.kind", "tide", "vocab.head has the unknown kind 'tide'; did you mean 'tied'"),
        ("vocab.head.softcap", "30", "vocab.head.softcap must be a number or null, not '30'"),
        ("vocab.widht", 3, "vocab has no field 'widht'; did you mean 'width'?"),
        ("trunk.remat", "some", "trunk.remat must be 'none' or 'dots' or 'full', not 'some'"),
        ("trunk.qk_norm", 1, "trunk.qk_norm must be true or false, not 1"),
        ("optim.lr", "0.1", "optim.lr must be a number, not '0.1'"),
        ("optim.lr", 10**400, "optim.lr must be a number"),
        ("optim.groups", [{"name": "mine"}], "optim.groups[0].pattern is missing"),
        ("data.source", 5, "data.source must be a string, not 5"),
        ("data", [], "data must be an object, not []"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_by_name(path: str, value: Any, told: str) -> None:
    with pytest.raises(UserError) as refused:
        from_json(changed(path, value), "here.json")
    assert str(refused.value).startswith(f"here.json: {told}")


@pytest.mark.parametrize("text", ["[]", "5", "[" * 200_000, "1" * 5000])
def test_json_that_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"here\.json"):
        from_json(text, "here.json")


def test_a_whole_number_may_stand_for_a_number() -> None:
    config = from_json(changed("optim.lr", 1))
    assert config.optim.lr == 1 and type(config.optim.lr) is float
    assert from_json(to_json(config)) == config


def test_no_setting_may_be_nan() -> None:
    """Every number of the config, of an untied head and a group of one's own too."""
    config = Config(
        vocab=VocabConfig(size=300, head=UntiedHead(softcap=1.0, std=1.0)),
        optim=OptimConfig(schedule="wsd", groups=(NamedGroup("mine", "*"),)),
    )
    config.check()
    tried = []

    def walk(value: Any, rebuild: Callable[[Any], Config]) -> None:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for f in dataclasses.fields(value):
                inner = getattr(value, f.name)
                own = functools.partial(_with, rebuild, value, f.name)
                if "float" in str(f.type):
                    tried.append(f.name)
                    with pytest.raises(UserError, match=f.name):
                        own(math.nan).check()
                elif isinstance(inner, tuple) and inner:
                    walk(inner[0], lambda part, own=own: own((part,)))
                else:
                    walk(inner, own)

    walk(config, lambda whole: whole)
    assert len(tried) > 30


def _with(rebuild: Callable[[Any], Config], value: Any, name: str, inner: Any) -> Config:
    return rebuild(dataclasses.replace(value, **{name: inner}))


def test_nan_does_not_differ_from_nan() -> None:
    one, other = (from_json(changed("optim.lr", math.nan)) for _ in range(2))
    assert differences(one, other) == []
    assert differences(one, Config()) == ["optim.lr: 0.003 → nan"]


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(UserError, match="no config 'tiedd'"):
        run("train", "tiedd", "--debug")


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"), 2, "error: metrics.jsonl: No space"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), 1, "error: out of memory: lower --train.batch"),
        (jax.errors.JaxRuntimeError("INTERNAL: Error dispatching: Out of memory allocating 9 bytes"), 1, "error: out of memory"),
        (MemoryError(), 1, "error: out of memory"),
        (UserError("two\n lines"), 2, "error: two lines"),
    ],
)  # fmt: skip
def test_exit_codes(
    error: BaseException,
    code: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(words: list[str]) -> None:
        raise error

    monkeypatch.setattr(cli, "_dispatch", broken)
    assert run("train") == code
    printed = capsys.readouterr().err
    assert printed.startswith(told) and printed.count("\n") == 1


# A finished run


def test_a_finished_run_is_not_trained_again(
    runs: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(runs)
    capsys.readouterr()
    assert run(*train(corpus, runs, "done"), "--devices", "1") == 0
    out = capsys.readouterr().out
    summary = json.loads((runs / "done/summary.json").read_text())
    assert "finished already" in out
    assert f"loss {summary['validation']['loss']:.4f}" in out
    assert tree(runs) == before


def test_a_run_of_another_config_is_refused(
    runs: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(runs)
    words = [*train(corpus, runs, "done"), "--devices", "1", "--optim.lr", "0.5"]
    assert "optim.lr: 0.003 → 0.5" in fails(capsys, *words)
    (runs / "other").mkdir()
    (runs / "other/notes.txt").write_text("mine")
    assert "is not empty and not a run" in fails(
        capsys, *train(corpus, runs, "other"), "--devices", "1"
    )
    shutil.rmtree(runs / "other")
    assert tree(runs) == before


def evaluated(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    capsys.readouterr()
    assert run("eval", *words, "--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_eval_gives_the_numbers_of_training_at_any_batch_size_and_mesh(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(runs)
    lines = [json.loads(line) for line in (runs / "done/metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert set(losses) == {0, 3, STEPS}
    first = evaluated(capsys, "done", "--runs", runs, "--step", "3")
    assert first["loss"] == pytest.approx(losses[3], rel=1e-6)
    latest = evaluated(capsys, "done", "--runs", runs, "--step", "latest")
    assert latest["step"] == STEPS
    best = evaluated(capsys, "done", "--runs", runs)
    assert best["step"] == min((3, STEPS), key=lambda step: losses[step])
    for words in (["1"], ["2"], ["8"], ["8", "--mesh", "data=8"]):
        other = evaluated(capsys, "done", "--runs", runs, "--batch", *words)
        assert other["tokens"] == best["tokens"]
        assert [other[key] for key in ("nll", "perplexity", "bits_per_byte")] == pytest.approx(
            [best[key] for key in ("nll", "perplexity", "bits_per_byte")], rel=1e-6
        )
    assert tree(runs) == before


def test_eval_prints_a_table_and_reads_other_text(
    runs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    capsys.readouterr()
    assert run("eval", "done", "--runs", runs) == 0
    out = capsys.readouterr().out
    summary = json.loads((runs / "done/summary.json").read_text())["validation"]
    shown = (f"{summary[k]:.4f}" for k in ("loss", "bits_per_byte"))
    assert all(value in out for value in shown)
    assert sum(bool(re.match(r" +\d+ ", line)) for line in out.splitlines()) == 10  # deciles
    other = tmp_path / "other.txt"
    other.write_text("quite other words, never seen before\n" * 20)
    result = evaluated(capsys, "done", "--runs", runs, "--data", f"files:{other}")
    # A lone document is cut at a line's end: the last tenth is two lines.
    assert result["bytes"] == 2 * len("quite other words, never seen before\n")
    assert result["source"] == f"files:{other}"
    assert result["bits_per_byte"] == pytest.approx(result["nll"] / math.log(2) / result["bytes"])
    assert "no checkpoint of step 5; saved: 3, 6" in fails(
        capsys, "eval", "done", "--runs", runs, "--step", "5"
    )
    assert "--batch = 4 does not divide" in fails(
        capsys, "eval", "done", "--runs", runs, "--batch", "4", "--mesh", "data=8"
    )


def test_eval_says_when_the_data_have_changed(
    corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "text.jsonl"
    shutil.copy(corpus, text)
    assert run(*train(text, tmp_path, "moved"), "--devices", "1", "--train.steps", "3") == 0
    told = "The data have changed since the run was trained."
    first = evaluated(capsys, "moved", "--runs", tmp_path)
    assert first["data_changed"] is False
    text.write_text(text.read_text() + json.dumps({"text": "one document more"}) + "\n")
    second = evaluated(capsys, "moved", "--runs", tmp_path)
    assert second["data_changed"] is True
    assert run("eval", "moved", "--runs", tmp_path) == 0
    assert told in capsys.readouterr().out.splitlines()
    shutil.copy(corpus, text)
    assert evaluated(capsys, "moved", "--runs", tmp_path) == first
    assert run("eval", "moved", "--runs", tmp_path) == 0
    assert told not in capsys.readouterr().out


def test_sample_continues_each_prompt(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    words = ["sample", "done", "--runs", runs, "--max-tokens", "8", "--temperature", "0"]
    assert run(*words, "--prompt", "kilo mast", "--prompt", "né") == 0
    first, second = capsys.readouterr().out.split("---\n")
    assert first.startswith("kilo mast") and len(first) > len("kilo mast\n")
    assert second.startswith("né")
    assert run(*words, "--prompt", "né") == 0
    assert capsys.readouterr().out == second  # greedy, and the same alone
    assert run(*words, "--ids", "5", "6") == 0
    ids = [int(word) for word in capsys.readouterr().out.split()]
    assert ids[:2] == [5, 6] and len(ids) <= 10
    assert "top_p = 2.0 must be in (0, 1]" in fails(capsys, *words, "--top-p", "2")
    assert "token id 5000 at" in fails(capsys, *words, "--ids", "5000")
    for large in ("99999999999999999999", "9999999999999999999"):
        refusal = fails(capsys, *words, "--ids", "5", large)
        assert f"prompt 0: token id {large} at position 1 is outside [0, " in refusal
    assert "seed = 99999999999 must be" in fails(capsys, *words, "--seed", "99999999999")


def test_sampled_ids_that_the_tokenizer_lacks_are_shown(
    corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*train(corpus, tmp_path, "wide"), "--devices", "1", "--train.steps", "3"]
    assert run(*words, "--vocab.size", "3000") == 0
    capsys.readouterr()
    assert run("sample", "wide", "--runs", tmp_path, "--prompt", "kilo", "--max-tokens", "9") == 0
    out = capsys.readouterr().out
    # Hardly trained, so that nine in ten ids are beyond the 300 or less of the tokenizer.
    shown = [int(token) for token in re.findall(r"<(\d+)>", out)]
    assert out.startswith("kilo") and shown and all(300 <= token < 3000 for token in shown)


def test_inspect_describes_a_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(runs)
    capsys.readouterr()
    assert run("inspect", "done", "--runs", runs) == 0
    out = capsys.readouterr().out
    size = json.loads((runs / "done/data.json").read_text())["size"]
    assert "done: finished" in out
    assert "vocab.width: 64 → 16" in out
    assert re.search(rf"^ +{STEPS} +[\d.]+ +\d+ arrays, ", out, re.MULTILINE)
    assert f"{size * 16:,} in the vocabulary" in out
    assert tree(runs) == before


def test_inspect_says_what_a_run_started_from(
    runs: Path, corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(runs / "done", tmp_path / "source")
    words = [*train(corpus, tmp_path, "more"), "--devices", "1", "--train.steps", "3"]
    assert "no run 'sauce'" in fails(capsys, *words, "--init", "sauce")
    assert not (tmp_path / "more").exists()
    assert run(*words, "--init", "source") == 0
    best = evaluated(capsys, "source", "--runs", tmp_path)["step"]
    assert run("inspect", "more", "--runs", tmp_path) == 0
    assert f"run 'source', step {best}\n" in capsys.readouterr().out


def test_a_damaged_run_is_refused_and_left_alone(
    runs: Path, corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(runs / "done", tmp_path / "hurt")
    (tmp_path / "hurt/summary.json").unlink()
    for file in (tmp_path / "hurt/checkpoints" / str(STEPS)).rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            os.truncate(file, 500)
    before = tree(tmp_path)
    where = f"checkpoints/{STEPS}"
    evaluate = ["eval", "hurt", "--runs", tmp_path, "--step"]
    assert where in fails(capsys, *evaluate, "latest")
    assert where in fails(capsys, *train(corpus, tmp_path, "hurt"), "--devices", "1")
    assert run(*evaluate, "3") == 0
    assert tree(tmp_path) == before
    config = tmp_path / "hurt/config.json"
    config.write_text(config.read_text()[:100])
    assert "config.json: not valid JSON" in fails(capsys, "inspect", "hurt", "--runs", tmp_path)


def test_a_run_on_ids_alone_samples_from_ids(
    corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 20, 3000).astype(np.uint16))
    words = [*train(corpus, tmp_path, "ids"), "--devices", "1", "--train.steps", "3"]
    assert run(*words, "--data.source", f"tokens:{tmp_path}/ids.npy") == 0
    sample = ["sample", "ids", "--runs", tmp_path, "--max-tokens", "5"]
    assert "has no tokenizer: give token ids" in fails(capsys, *sample, "--prompt", "a")
    assert run(*sample, "--ids", "1", "2") == 0
    ids = [int(word) for word in capsys.readouterr().out.split()]
    assert ids[:2] == [1, 2] and len(ids) == 7 and max(ids) < 20
    result = evaluated(capsys, "ids", "--runs", tmp_path)
    assert result["bits_per_byte"] is None
    assert "has no tokenizer" in fails(
        capsys, "eval", "ids", "--runs", tmp_path, "--data", f"files:{corpus}"
    )


# A process of its own


@pytest.mark.timeout(200)
def test_a_stopped_run_on_eight_devices_is_inspected_and_resumed_on_one(
    runs: Path, corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [word for word in train(corpus, tmp_path, "stopped") if word != "--quiet"]
    process = start(*words, "--devices", "8", "--mesh", "data=4,model=2")
    assert process.stderr is not None
    for line in process.stderr:
        if "step 0" in line:  # evaluated; now it compiles the step, and hears signals
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=150)
    assert process.returncode == 128 + signal.SIGTERM
    stopped = re.search(r"stopped: stopped and saved at step (\d+); run the same command", err)
    assert stopped is not None and "Traceback" not in err
    step = int(stopped[1])
    assert 0 < step < STEPS

    capsys.readouterr()
    assert run("inspect", "stopped", "--runs", tmp_path) == 0
    out = capsys.readouterr().out
    assert f"step {step} of {STEPS} logged" in out
    size = json.loads((tmp_path / "stopped/data.json").read_text())["size"]
    assert re.search(rf"^ +{step} .* arrays, ", out, re.MULTILINE)
    assert f"{size * 16:,} in the vocabulary" in out
    assert evaluated(capsys, "stopped", "--runs", tmp_path)["step"] == step

    resume = re.search(r"resume with: run.py (train .*)", out)
    assert resume is not None
    assert run(*shlex.split(resume[1]), "--devices", "1", "--quiet") == 0
    resumed, whole = (
        json.loads((directory / "summary.json").read_text())["validation"]
        for directory in (tmp_path / "stopped", runs / "done")
    )
    assert resumed["tokens"] == whole["tokens"]
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-4)
