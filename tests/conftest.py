"""Eight CPU devices, a compilation cache shared by all tests, and a small corpus."""

import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Before jax is imported: flags are read once. Appended, so that the caller's own survive. Programs here are tiny and run
# a few times: optimising them would take most of the suite's time.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        # A quarter of the time to compile; JAX 0.12 has the new emitters only.
        "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "",
    ]
)
# As `launch.py` says: threads enough for collectives that wait.
os.environ.setdefault("PJRT_NPROC", "32")
os.environ.setdefault(
    "MALLOC_MMAP_MAX_", "0"
)  # else commands in processes of their own start twice
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without libtpu, tests that need its compiler are reported as deselected."""
    if find_spec("libtpu") is None:
        left_out = [item for item in items if item.get_closest_marker("tpu")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A .jsonl of sixty documents in an invented language of forty words; its cache dies with it."""
    import numpy as np

    directory = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("aeiklmnoprst"), 5)) for _ in range(40)]
    documents = [" ".join(random.choice(words, 30)) for _ in range(60)]
    path = directory / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VOCABJAX_CACHE", str(directory / "cache"))
        yield path


@pytest.fixture(scope="session")
def dictionary(corpus: Path) -> Path:
    """The same documents as entries: two words, a line's end, the rest."""
    path = corpus.parent / "dictionary.jsonl"
    texts = [json.loads(line)["text"].split(" ", 2) for line in corpus.read_text().splitlines()]
    entries = [f"{first} {second}\n{rest}" for first, second, rest in texts]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in entries))
    return path


@pytest.fixture(scope="session")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(summary, final parameters, directory) of a finished run on one device; tests leave it as it is."""
    from models import layout_on
    from small_runs import ONE, config_of, trained

    directory = tmp_path_factory.mktemp("reference") / "run"
    return (*trained(config_of(corpus), directory, layout_on(ONE)), directory)
