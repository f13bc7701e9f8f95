"""The wheel works outside the repository, and takes no name but `reactor`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPO

from reactor import embedded


def build(source: Path, target: Path, *options: str) -> list[Path]:
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", target, source], check=True, capture_output=True, timeout=300
    )  # fmt: skip
    return sorted(target.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, built from the sdist, and the sdist."""
    wheel, sdist = build(REPO, tmp_path_factory.mktemp("dist"))
    assert (wheel.suffix, sdist.suffix) == (".whl", ".gz")
    return wheel, sdist


def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


async def test_the_wheel_takes_one_top_level_name_and_carries_sql_and_handlers_inside(built):
    files = members(built[0])

    assert {name.split("/")[0] for name in files} == {"reactor", "memory_reactor-0.1.0.dist-info"}
    assert {f"reactor/_sql/{path.name}" for path in (REPO / "sql").glob("*.sql")} <= set(files)
    assert {f"reactor/_handlers/{path.name}" for path in (REPO / "handlers").glob("*.py")} <= set(files)
    assert {f"reactor/{path.name}" for path in (REPO / "reactor").glob("*.py")} | {"reactor/py.typed"} <= set(files)
    assert "reactor = reactor.__main__:main" in files["memory_reactor-0.1.0.dist-info/entry_points.txt"].decode()


async def test_the_wheel_of_the_sdist_is_the_wheel_of_the_repository(built, tmp_path):
    [direct] = build(REPO, tmp_path, "--wheel")

    assert members(direct) == members(built[0])


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder that is no clone of ours, where a project keeps a handlers package of its own."""
    folder = tmp_path / "project"
    (folder / "handlers").mkdir(parents=True)
    (folder / "handlers" / "__init__.py").write_text("whose = 'theirs'\n")
    (folder / "handlers" / "broken.py").write_text("raise SystemExit('their module was imported')\n")
    (folder / "sql").mkdir()
    (folder / "sql" / "0001_theirs.sql").write_text("drop table everything;\n")
    yield folder
    data = embedded._data_folder((folder / ".reactor").resolve())
    if not data.is_relative_to(tmp_path):  # as root
        for left in data.parent.glob(f"{data.name}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


async def test_installed_into_an_empty_environment_the_demo_runs_beside_handlers_of_ones_own(built, outside, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    programs = tmp_path / "venv" / "bin"
    subprocess.run(
        [programs / "python", "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", f"{built[0]}[embedded]"],
        check=True, capture_output=True, cwd=outside, timeout=600,
    )  # fmt: skip
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("REACTOR_", "VOYAGE_", "DATABASE_", "PYTHON"))
    }

    shown = subprocess.run(
        [programs / "reactor", "demo"], cwd=outside, env=clean, capture_output=True, text=True, timeout=300, check=False
    )
    theirs = subprocess.run(
        [programs / "python", "-c", "import reactor, handlers; print(handlers.whose, reactor.__file__)"], cwd=outside, env=clean, capture_output=True, text=True, check=True
    )  # fmt: skip

    assert shown.returncode == 0, shown.stderr
    assert "every row is a memory" in shown.stdout
    assert "Quando publicar?" in shown.stdout  # found by a question in other words
    assert "their module" not in shown.stdout + shown.stderr
    assert (outside / ".reactor").is_dir()
    whose, home = theirs.stdout.split()
    assert whose == "theirs"
    assert Path(home).is_relative_to(tmp_path / "venv")
