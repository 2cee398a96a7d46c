"""A program on a CPU starts again with memory retained, once."""

import os
import subprocess
import sys

import pytest

from vocabjax import allocator
from vocabjax.allocator import RETAINED, restart_retaining

PROGRAM = """
import os, sys
from vocabjax.allocator import RETAINED, restart_retaining
restart_retaining()
print(sys.argv[1:], *(os.environ[name] for name in RETAINED))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="settings of glibc")
def test_the_program_starts_again_with_the_arguments_it_had() -> None:
    clean = {name: value for name, value in os.environ.items() if name not in RETAINED}
    words = ["--a", "b c"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env={**clean, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == f"{words} {' '.join(RETAINED.values())}\n"


@pytest.mark.parametrize("why", ["set by the user", "an accelerator", "another system"])
def test_it_goes_on_where_that_is_of_no_use(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("started again")

    monkeypatch.setattr(os, "execve", never)
    monkeypatch.setattr(sys, "platform", "darwin" if why == "another system" else "linux")
    for name in RETAINED:
        monkeypatch.delenv(name, raising=False)
    if why == "set by the user":
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
    if why == "an accelerator":
        monkeypatch.delenv("JAX_PLATFORMS")
        monkeypatch.setattr(allocator, "glob", lambda pattern: ["/dev/accel0"])
    restart_retaining()
