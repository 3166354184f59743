"""Set-up and packaging: constraints, the Detectron2 wheel, the environment script, the project's wheel."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def load(name):
    """Import a script of the requirements folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, REQUIREMENTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheel_script():
    return load("detectron2_wheel")


@pytest.fixture
def setup_script():
    return load("setup_env")


def pins(python):
    """Return name to version for one Python, read from constraints.txt."""
    found = {}
    for line in (REQUIREMENTS / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        assert not specifier.version.endswith("*"), line
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} has two versions on Python {python}"
            found[name] = specifier.version
    return found


def declared():
    """Return what the project and Detectron2 ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    return [
        Requirement(line)
        for line in [*project["dependencies"], *extras, *load("detectron2_wheel").REQUIREMENTS]
    ]


# --- constraints.txt


@pytest.mark.parametrize("python", PYTHONS)
def test_one_version_that_fits_for_everything_declared(python):
    found = pins(python)
    assert {"torch", "torchvision", "setuptools", "wheel", "ninja"} <= set(found)
    for requirement in declared():
        name = canonicalize_name(requirement.name)
        assert requirement.specifier.contains(found[name]), f"{requirement} and {found[name]}"


def test_pins_reach_everything_that_is_asked_for_in_turn():
    found = pins(".".join(map(str, sys.version_info[:2])))
    todo = [
        (canonicalize_name(r.name), frozenset(r.extras)) for r in [*declared(), Requirement("torchvision")]
    ]
    seen = set()
    while todo:
        item = todo.pop()
        if item in seen:
            continue
        seen.add(item)
        name, extras = item
        assert name in found, f"{name} is not in constraints.txt"
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # opencv-python instead of -headless, ruff left out, ...
            continue
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                todo.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    assert len(seen) > 30


# --- detectron2_wheel.py


@pytest.fixture
def archive(tmp_path, wheel_script, monkeypatch):
    """A small stand-in for the archive, with all that makes the real one a bad wheel."""
    path = tmp_path / "sal_detectron2-0.7.2-cp310-none-any.whl"
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("detectron2/__init__.py", '__version__ = "0.7.2"\r\n# caf\u00e9\n')
        target.writestr("detectron2/model_zoo/configs/Base.yaml", "VERSION: 2\n")
        target.writestr("detectron2/_C.cpython-310-x86_64-linux-gnu.so", b"\x7fELF")
        target.writestr("tools/__init__.py", "")
        target.writestr("sal_detectron2-0.7.2.dist-info/LICENSE", "Apache License\n")
        target.writestr("sal_detectron2-0.7.2.dist-info/METADATA", "Requires-Dist: numpy<2\n")
    monkeypatch.setattr(wheel_script, "SOURCE_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_wheel_keeps_only_detectron2_byte_for_byte(archive, wheel_script, tmp_path):
    wheel = wheel_script.build(archive, tmp_path / "out")
    info = "detectron2-0.6+sal0.7.2.dist-info"
    with zipfile.ZipFile(wheel) as made, zipfile.ZipFile(archive) as source:
        kept = {"detectron2/__init__.py", "detectron2/model_zoo/configs/Base.yaml"}
        files = ("LICENSE", "METADATA", "WHEEL", "top_level.txt", "RECORD")
        assert set(made.namelist()) == kept | {f"{info}/{name}" for name in files}
        assert all(made.read(name) == source.read(name) for name in kept)
        metadata = made.read(f"{info}/METADATA").decode()
        record = dict(line.split(",", 1) for line in made.read(f"{info}/RECORD").decode().splitlines())
        for name in set(made.namelist()) - {f"{info}/RECORD"}:
            algorithm, digest = record[name].split(",")[0].split("=", 1)
            expected = hashlib.new(algorithm, made.read(name)).digest()
            assert base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)) == expected
    assert "Name: detectron2\n" in metadata
    assert "Requires-Dist: setuptools>=77.0.3,<80.9\n" in metadata
    assert "numpy<2" not in metadata
    assert "black" not in metadata


def test_wheel_installs(archive, wheel_script, tmp_path):
    wheel = wheel_script.build(archive, tmp_path / "out")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", str(tmp_path / "site"), str(wheel)], check=True)
    assert (tmp_path / "site" / "detectron2" / "__init__.py").is_file()


def test_wheel_is_the_same_wherever_it_is_made(archive, wheel_script, tmp_path):
    first, second = (wheel_script.build(archive, tmp_path / name).read_bytes() for name in ("a", "b"))
    assert first == second


def test_another_archive_is_refused(tmp_path):
    path = tmp_path / "other.whl"
    path.write_bytes(b"something else")
    command = [
        sys.executable,
        str(REQUIREMENTS / "detectron2_wheel.py"),
        str(tmp_path / "out"),
        "--archive",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert str(path) in line
    assert hashlib.sha256(b"something else").hexdigest() in line
    assert not (tmp_path / "out").exists()


# --- setup_env.py: what it refuses


def run_setup(*arguments):
    """Run the script where it can do nothing but refuse, and return its only line."""
    command = [sys.executable, str(REQUIREMENTS / "setup_env.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    return line


def fake_python(folder, **facts):
    """Write a command that answers like an interpreter of another version."""
    path = folder / "python"
    facts = {"executable": str(path), "prefix": str(folder), "detectron2": False, "missing": [], **facts}
    path.write_text(f"#!/bin/sh\necho '{json.dumps(facts)}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("version", [[3, 6, 8], [3, 9, 18], [3, 14, 0]])
def test_unsupported_python(tmp_path, version):
    python = fake_python(tmp_path, version=version)
    line = run_setup("--python", python, "--venv", tmp_path / "venv")
    assert f"{python} is Python {'.'.join(map(str, version))}" in line
    assert "make setup PYTHON=" in line
    assert not (tmp_path / "venv").exists()


def test_python_without_venv(tmp_path):
    python = fake_python(tmp_path, version=[3, 12, 3], missing=["ensurepip"])
    line = run_setup("--python", python, "--venv", tmp_path / "venv")
    assert "ensurepip" in line
    assert "apt install python3.12-venv" in line


def test_no_such_python(tmp_path):
    line = run_setup("--python", tmp_path / "nowhere", "--venv", tmp_path / "venv")
    assert str(tmp_path / "nowhere") in line


@pytest.mark.parametrize(
    "requirement", ["detectron2", "Detectron2>=0.6", "nowhere/detectron2", "detectron2-0.6-py3-none-any.whl"]
)
def test_detectron2_that_is_not_there(tmp_path, requirement):
    line = run_setup("--detectron2", requirement, "--venv", tmp_path / "venv")
    assert f"DETECTRON2={requirement}" in line
    assert "git+https" in line


def test_a_folder_of_the_users_is_left_alone(tmp_path):
    (tmp_path / "pyvenv.cfg").write_text("home = somewhere\n")
    line = run_setup("--venv", tmp_path)
    assert str(tmp_path) in line
    assert [path.name for path in tmp_path.iterdir()] == ["pyvenv.cfg"]


def test_an_old_python_can_read_the_script():
    # 3.6 is what a machine with an old default Python has; there the message of the version check must come.
    ast.parse((REQUIREMENTS / "setup_env.py").read_text(), feature_version=(3, 6))


# --- setup_env.py: when it works and when it does not


@pytest.fixture
def steps(setup_script, monkeypatch, tmp_path):
    """Replace what installs by notes of what would be installed where."""
    done = []

    def install_own(venv, python, detectron2):
        venv.mkdir(exist_ok=True)
        setup_script.write_stamp(venv, python["executable"], detectron2)
        (venv / "bin").mkdir(exist_ok=True)
        (venv / "bin" / "python").touch()
        done.append(detectron2)
        return venv / "bin" / "python"

    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch==2.0\n")
    versions = {"torch": "2.0", "torchvision": "0.15", "detectron2": "0.6"}
    monkeypatch.setattr(setup_script, "INPUTS", (constraints,))
    monkeypatch.setattr(setup_script, "find_python", lambda name: {**FACTS, "executable": name})
    monkeypatch.setattr(setup_script, "install_own", install_own)
    monkeypatch.setattr(setup_script, "install_project", lambda *_: None)
    monkeypatch.setattr(setup_script, "verify", lambda *_: versions)
    return done


FACTS = {"version": [3, 12, 1], "prefix": "/usr", "detectron2": False, "missing": []}


def test_a_second_call_does_nothing(setup_script, steps, tmp_path, capsys):
    venv = tmp_path / "venv"
    setup_script.setup("python3", "", venv)
    setup_script.setup("python3", "", venv)
    setup_script.setup("", "", venv)
    setup_script.setup("/usr/bin/python3.12", "", venv)  # the same interpreter by another name
    assert steps == [""]
    assert capsys.readouterr().out.count("up to date") == 3


def test_changed_constraints_make_it_anew(setup_script, steps, tmp_path):
    setup_script.setup("python3", "", tmp_path / "venv")
    (tmp_path / "constraints.txt").write_text("torch==2.1\n")
    setup_script.setup("python3", "", tmp_path / "venv")
    assert len(steps) == 2


def test_an_unfinished_one_is_made_anew(setup_script, steps, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(setup_script, "install_project", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            setup_script.setup("python3", "", tmp_path / "venv")
    setup_script.setup("", "", tmp_path / "venv")
    assert len(steps) == 2


def test_one_interrupted_while_the_old_is_removed_is_still_known(setup_script, tmp_path, monkeypatch):
    venv = tmp_path / "venv"
    (venv / "lib").mkdir(parents=True)
    setup_script.write_stamp(venv, "python3", "", "an old key")

    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(setup_script.shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setup_script.make_venv(venv, {**FACTS, "executable": "python3"}, "", system=False)
    assert setup_script.read_stamp(venv) == {"python": "python3", "detectron2": "", "key": ""}


def test_choices_are_kept_until_others_are_made(setup_script, steps, tmp_path):
    source = tmp_path / "detectron2"
    source.mkdir()
    setup_script.setup("python3", str(source), tmp_path / "venv")
    setup_script.setup("", "", tmp_path / "venv")  # `make test` after `make setup DETECTRON2=...`
    assert steps == [str(source)]
    setup_script.setup("", "git+https://example.org/detectron2", tmp_path / "venv")
    assert steps[1:] == ["git+https://example.org/detectron2"]


# --- setup_env.py: on top of a Python that has Detectron2


def make_package(site, name, version):
    """Put an installed package into a folder of packages."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_environment_on_top_of_a_virtual_environment(setup_script, tmp_path):
    parent = tmp_path / "parent"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(parent)], check=True)
    site = next(parent.glob("lib/python3*/site-packages"))
    for name, version in {"torch": "1.0+cu1", "torchvision": "1.1", "numpy": "1.2"}.items():
        make_package(site, name, version)
    # Detectron2 built from source is an editable install: a .pth file that names its folder.
    make_package(tmp_path / "source", "detectron2", "0.6")
    for module in ("config", "modeling"):
        (tmp_path / "source" / "detectron2" / f"{module}.py").touch()
    (site / "editable.pth").write_text(f"{tmp_path / 'source'}\n")

    facts = setup_script.find_python(str(parent / "bin" / "python"))
    assert facts["detectron2"]
    answer = setup_script.ask(facts["executable"], setup_script.PARENT_PROBE)
    assert answer["versions"] == {
        "torch": "1.0+cu1",
        "torchvision": "1.1",
        "numpy": "1.2",
        "detectron2": "0.6",
    }
    assert not answer["sees_base"]

    venv = tmp_path / "venv"
    subprocess.run([facts["executable"], "-m", "venv", "--without-pip", str(venv)], check=True)
    assert str(site) in setup_script.show_packages(venv / "bin" / "python", answer["path"])
    code = "import detectron2, json, torch; print(json.dumps([detectron2.__file__, torch.__version__]))"
    assert setup_script.ask(venv / "bin" / "python", code, cwd=tmp_path) == [
        str(tmp_path / "source" / "detectron2" / "__init__.py"),
        "1.0+cu1",
    ]
    # What is installed into the new environment comes first.
    make_package(next(venv.glob("lib/python3*/site-packages")), "torch", "3.0")
    assert setup_script.ask(venv / "bin" / "python", code, cwd=tmp_path)[1] == "3.0"


def test_constraints_keep_what_is_installed(setup_script):
    installed = {
        "torch": "2.4.0+cu121",
        "NumPy": "1.26.4",
        "ml_dtypes": "0.4",
        "odd": "unknown",
        "nonlocal_det": "0",
    }
    ours = '# note\ntorch==2.14.1\nnumpy==2.2.6; python_version < "3.11"\nml-dtypes==0.6.0\nonnx==1.23.2\n'
    with_ours, without_ours = setup_script.parent_constraints(installed, ours)
    kept = {"torch==2.4.0+cu121", "numpy==1.26.4", "ml-dtypes==0.4"}
    assert set(with_ours.splitlines()) == kept | {"onnx==1.23.2"}
    assert set(without_ours.splitlines()) == kept


def test_detectron2_that_cannot_be_imported(setup_script, tmp_path):
    site = tmp_path / "site"
    make_package(site, "detectron2", "0.6")
    (site / "detectron2" / "__init__.py").write_text("raise ImportError('libcudart.so.12 is missing')\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    facts = {**setup_script.find_python(str(python)), "executable": str(python)}
    with pytest.raises(setup_script.SetupError, match=r"libcudart\.so\.12 is missing.*DETECTRON2="):
        setup_script.install_on_top(tmp_path / "venv", facts)
    assert not (tmp_path / "venv").exists()


# --- the project's wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheel made from a checkout, and the one made from its source archive."""
    folder = tmp_path_factory.mktemp("packaging")
    checkout = folder / "checkout"
    checkout.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("nonlocal_det", "configs"):
        shutil.copytree(ROOT / name, checkout / name, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=checkout, check=True, capture_output=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "unpacked")  # made here a moment ago
    made = []
    for name, source in (("first", checkout), ("second", next((folder / "unpacked").iterdir()))):
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-build-isolation",
        ]
        subprocess.run([*command, "-w", str(folder / name), str(source)], check=True, capture_output=True)
        made.append(next((folder / name).glob("*.whl")))
    return made


def test_wheel_holds_every_module_and_every_config(wheels):
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "nonlocal_det").rglob("*.py")}
    expected |= {f"nonlocal_det/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = {name for name in archive.namelist() if ".dist-info/" not in name}
            (licence,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
            assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        assert expected <= names
        assert {name.split("/")[0] for name in names} == {"nonlocal_det"}


def test_installed_wheel_finds_its_configs(wheels, tmp_path):
    with zipfile.ZipFile(wheels[1]) as archive:
        archive.extractall(tmp_path)
    code = (
        "import nonlocal_det\n"
        "cfg = nonlocal_det.get_config('COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml')\n"
        "print(nonlocal_det.__file__, cfg.MODEL.NONLOCAL.RES4)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "nonlocal_det" / "__init__.py"), "[-1]"]


# --- make and CI


def test_make_lists_its_targets():
    done = subprocess.run(["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True)
    assert done.returncode == 0
    for target in ("setup", "test", "lint", "format", "demo"):
        assert f"make {target} " in done.stdout


def test_ci_script_can_be_run():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
