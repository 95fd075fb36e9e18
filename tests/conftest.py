"""What every test shares: how hypothesis searches."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.testing
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tests.support.album import Album
    from tests.support.fake_clocks import FakeTime

# Workers share the cores, and tests are of small products: further threads would only wait for each other, and use the time up.
# To be said before a library looks; processes and notebooks that tests start hear it too.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"):
    os.environ.setdefault(_name, "1")
# Workers have the width of a terminal; what is printed here has none.
os.environ.pop("COLUMNS", None)

# The same examples every time: a change fails because of what it changed, never because of other random examples.
# Nor does it fail because a busy machine takes long to draw them.
calm = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("default", max_examples=50, derandomize=True, **calm)
# The search proper: more examples, new ones at every run; the printed blob reproduces a failure.
settings.register_profile("thorough", max_examples=1000, derandomize=False, **calm)
settings.load_profile("default")
# Examples would also be made of numbers in those of the project's files that are loaded: of which tests ran before in the process.
providers.is_local_module_file = lambda _: False

# An app's commands are made of their signatures once; made anew at each call in this process they take longer than most calls.
_runner: Any = typer.testing
_runner._get_command = lru_cache(maxsize=8)(_runner._get_command)


def pytest_collection(session: pytest.Session) -> None:
    """In a new clone half of a worker's collection is compilation of the tests: of two workers one begins at the end, so that each
    finds the bytecode of half of the files written by the other."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    if int(worker) % 2 == 0 or session.config.args != session.config.getini("testpaths"):
        return
    root = session.config.rootpath
    for path in sorted((root / "tests").rglob("test_*.py"), reverse=True):
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collection says what is wrong
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of garbage looks through it again; what is timed makes many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """No collection of garbage looks through what earlier files left: in a process that has run a thousand tests each takes
    seconds, and what is timed begins with one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def read_once() -> Iterator[None]:
    """Each public table is read, and compared with layers composed of it, once for all tests of a module: none is changed."""
    from calibrate.importers import aiconfigurator, bundled_profiles, vidur

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (aiconfigurator, "read"),
            (vidur, "read"),
            (bundled_profiles, "operations"),
            (bundled_profiles, "differences"),
        ):
            patch.setattr(module, name, cache(getattr(module, name)))
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads, and what a command sets for itself does not outlive its test."""
    import torch

    gc.freeze()  # a run that was timed before has let go of what was frozen
    was = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(was)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt: a shell that runs the tests in its background has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def album(monkeypatch: pytest.MonkeyPatch) -> Album:
    """Figures are asked for and not drawn, and there are no files of them."""
    from tests.support.album import Album

    return Album(monkeypatch)


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of a run are drawn and their files are left empty: for tests that ask which figures a run has, or of which rows."""
    import figures

    def empty(_: Figure, path: str | Path, formats: Sequence[str] = figures.FORMATS) -> list[Path]:
        paths = [Path(f"{path}.{name}") for name in formats]
        for each in paths:
            each.touch()
        return paths

    monkeypatch.setattr(figures, "save", empty)


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """Clocks of this process advance as the test says, and the peaks of the device are measured on little data."""
    from tests.support.fake_clocks import install_fake_time

    return install_fake_time(monkeypatch)
