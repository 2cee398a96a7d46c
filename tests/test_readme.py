"""What the documents show runs."""

import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import layout_on
from small_runs import config_of

from vocabjax import cli, find
from vocabjax import config as configuration
from vocabjax.config import from_json, to_json
from vocabjax.flags import EvalFlags, SampleFlags, TrainFlags, parse, with_parts
from vocabjax.forecast.commands import AdviseFlags, CountFlags, PlanFlags
from vocabjax.train import Setup, train
from vocabjax.vocab import heads
from vocabjax.vocab.interfaces import HeadConfig

ROOT = Path(__file__).parent.parent


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


def test_the_library_section_runs() -> None:
    (code,) = python_blocks("README.md")
    code = code.replace("50_257", "257").replace("768", "16").replace("128", "8")
    code += "\nassert jnp.isfinite(loss.total) and z_BTV.shape[:2] == (8, 1)\n"
    exec(compile(code, "README.md", "exec"), {})


def test_the_loss_alone_runs() -> None:
    (code,) = python_blocks("docs/performance.md")
    code = code.replace("50_257", "257").replace("768", "16").replace("(8, 128", "(8, 4")
    code += "\nassert jnp.allclose(each.total.mean(), loss.nll / loss.weight)\n"
    exec(compile(code, "performance.md", "exec"), {})


def test_the_variant_of_the_guide_trains(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file beside its siblings: a new head is found, trained, saved and read back without touching anything else."""
    (code,) = python_blocks("docs/add_a_variant.md")
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "temperature.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(heads, "__path__", [*heads.__path__, str(tmp_path / "heads")])
    configuration._import_parts.cache_clear()
    head = configuration.kinds(HeadConfig)["temperature"]()
    assert type(head).__module__ == "vocabjax.vocab.heads.temperature"
    config = config_of(corpus, head=head, steps=3)
    assert from_json(to_json(config)) == config
    summary = train(config, tmp_path / "run", layout_on("data=2,model=4"), quiet=True)
    plain = replace(config, vocab=replace(config.vocab, head=type(head).__mro__[1]()))
    others = Setup.of(plain, layout_on("data=2,model=4")).blueprint.count()
    assert summary["parameters"] == others + 1


SHOWN = [
    *re.findall(r"^python run\.py (.+)$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE),
    *re.findall(r"^  run\.py (.+)$", cli.OVERVIEW, re.MULTILINE),
]


@pytest.mark.parametrize("line", SHOWN)
def test_every_command_shown_is_understood(line: str) -> None:
    command, *words = shlex.split(line)
    of_config: dict[str, Any] = {
        "train": TrainFlags,
        "count": CountFlags,
        "advise": AdviseFlags,
        "plan": PlanFlags,
    }
    if command in of_config:
        config = with_parts(find.load_config(words[0])[1], words[1:])
        kind = of_config[command]
        parse(kind, command, words[1:], kind(config=config)).config.check()
    else:
        parse({"eval": EvalFlags, "sample": SampleFlags}[command], command, words)


PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("experiments/**/*.md")),
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_importing_the_library_touches_no_device_and_no_data_pipeline() -> None:
    code = textwrap.dedent(
        """
        import sys
        import vocabjax
        from jax._src import xla_bridge
        assert not xla_bridge._backends, "a backend was started"
        heavy = {"grain", "tokenizers", "matplotlib", "orbax", "tyro"} & set(sys.modules)
        assert not heavy, heavy
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
