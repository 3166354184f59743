"""Make ``.venv`` with Detectron2, this project and everything they need, at fixed versions.

``make setup`` calls this. Where Detectron2 comes from is decided in this order:

1. ``DETECTRON2=<pip requirement>`` (a git+https address, a folder, a wheel): an environment of its own with
   the torch and torchvision of constraints.txt, then that requirement.
2. ``PYTHON`` imports Detectron2 already: the environment is made on top of that interpreter's packages, which
   all stay as they are.
3. Neither: an environment of its own with the wheel that detectron2_wheel.py makes.

A choice that is not given is taken from the ``.venv`` that is there; ``rm -r .venv`` forgets it. A finished
environment carries a stamp and is left alone until its inputs change; an unfinished one is made anew.

Only the standard library is used, and nothing newer than Python 3.6 (so no capture_output), so that a Python
that is too old gets the message below instead of a SyntaxError.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OLDEST, NEWEST = (3, 10), (3, 13)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CONSTRAINTS = HERE / "constraints.txt"
INPUTS = (
    CONSTRAINTS,
    HERE / "setup_env.py",
    HERE / "detectron2_wheel.py",
    ROOT / "pyproject.toml",
    ROOT / "setup.py",
)
STAMP = "nonlocal_det_setup.json"

ANOTHER_PYTHON = "name a Python 3.10 to 3.13, for example make setup PYTHON=python3.12"
ANOTHER_DETECTRON2 = "name another, make setup DETECTRON2=<git+https address, folder or wheel>"

# What an interpreter is asked before anything is made. Any Python can run it.
PROBE = """
import json, sys
facts = {"version": list(sys.version_info[:3]), "executable": sys.executable, "prefix": sys.prefix}
if sys.version_info >= (3, 10):
    from importlib.util import find_spec
    spec = find_spec("detectron2")
    facts["detectron2"] = bool(spec and spec.origin)
    facts["missing"] = [name for name in ("venv", "ensurepip") if find_spec(name) is None]
print(json.dumps(facts))
"""

# What the interpreter that the environment is put on top of is asked. pyvenv.cfg says whether a virtual
# environment shows the packages of the interpreter below it.
PARENT_PROBE = """
import json, pathlib, sys
from importlib.metadata import distributions
import detectron2.config, detectron2.modeling, torchvision
versions = {}
for found in distributions():
    name = found.metadata["Name"]
    if name:
        versions.setdefault(name, found.version)
sees_base = True
if sys.prefix != sys.base_prefix:
    lines = (pathlib.Path(sys.prefix) / "pyvenv.cfg").read_text().lower().split("\\n")
    sees_base = "include-system-site-packages=true" in [line.replace(" ", "") for line in lines]
print(json.dumps({"versions": versions, "sees_base": sees_base, "path": sys.path}))
"""

# torch and the licence field of pyproject.toml need setuptools 77.0.3, detectron2.model_zoo pkg_resources.
SETUPTOOLS_PROBE = """
import pkg_resources, setuptools
assert tuple(int(part) for part in setuptools.__version__.split(".")[:3]) >= (77, 0, 3)
"""

# Run outside of the checkout, so that what is found is what was installed.
FINAL_PROBE = """
import detectron2, detectron2.model_zoo, json, nonlocal_det, torch, torchvision
print(json.dumps({
    "detectron2": detectron2.__version__,
    "torch": torch.__version__,
    "torchvision": torchvision.__version__,
    "nonlocal_det": nonlocal_det.__file__,
}))
"""


class SetupError(Exception):
    """Something that the user has to mend; the text is one line that says what and how."""


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"setup: {text}", flush=True)


def normal(name: str) -> str:
    """Return a package name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def run_quietly(command: "list[str]", **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """Run a command without showing what it prints."""
    pipe = subprocess.PIPE
    return subprocess.run(command, stdout=pipe, stderr=pipe, **options)


def ask(python: "str | Path", code: str, *, cwd: Path = HERE, env: "dict[str, str] | None" = None) -> Any:
    """Run ``code`` in ``python`` and return the JSON value on the last line that it prints.

    Raises:
        SetupError: ``python`` cannot be run or the code failed; the text is the last line of its message.
    """
    try:
        done = run_quietly([str(python), "-c", code], cwd=str(cwd), env=env)
    except OSError as error:
        raise SetupError(str(error)) from error
    output, message = done.stdout.decode().strip(), done.stderr.decode().strip()
    if done.returncode:
        raise SetupError(message.split("\n")[-1] if message else f"exit code {done.returncode}")
    return json.loads(output.split("\n")[-1])


def succeeds(python: Path, code: str) -> bool:
    """Return whether ``code`` runs in ``python`` without an error."""
    return run_quietly([str(python), "-c", code], cwd=str(HERE)).returncode == 0


def find_python(name: str) -> "dict[str, Any]":
    """Return the facts of the interpreter ``name`` (a path or a command).

    Raises:
        SetupError: there is no such interpreter, its version is not supported, or it lacks venv.
    """
    path = shutil.which(name)
    if path is None:
        raise SetupError(f"there is no command {name}: {ANOTHER_PYTHON}")
    try:
        facts = ask(path, PROBE)
    except SetupError as error:
        raise SetupError(f"{path} does not run ({error}): {ANOTHER_PYTHON}") from error
    executable, version = facts["executable"], ".".join(str(part) for part in facts["version"])
    if not OLDEST <= tuple(facts["version"][:2]) <= NEWEST:
        raise SetupError(f"{executable} is Python {version}, which is not supported: {ANOTHER_PYTHON}")
    if facts["missing"]:
        raise SetupError(
            f"{executable} lacks {' and '.join(facts['missing'])}: install it (Debian, Ubuntu: "
            f"apt install python{version.rpartition('.')[0]}-venv) or {ANOTHER_PYTHON}"
        )
    return facts


def read_requirement(text: str) -> str:
    """Return the value of DETECTRON2 with a path made absolute.

    Raises:
        SetupError: there is no such path, or it is the bare name: nobody owns that on the package index, so
            anybody could take it.
    """
    path = Path(text).expanduser()
    if path.exists():
        return str(path.resolve())
    if re.fullmatch(r"detectron2\s*([=<>!~].*)?", text, re.IGNORECASE):
        raise SetupError(f"DETECTRON2={text} is a name that Detectron2 does not own: {ANOTHER_DETECTRON2}")
    if "://" not in text and ("/" in text or text.endswith(".whl")):
        raise SetupError(f"DETECTRON2={text} is not there: {ANOTHER_DETECTRON2}")
    return text


def make_key(python: "dict[str, Any]", detectron2: str) -> str:
    """Return a hash of everything that the environment depends on."""
    digest = hashlib.sha256()
    for path in INPUTS:
        digest.update(path.read_bytes())
    wheel = Path(detectron2)
    state = wheel.stat() if detectron2 and wheel.is_file() else None
    # Not the executable's name: python3 and python3.12 are one interpreter.
    interpreter = [python["prefix"], python["version"], python["detectron2"]]
    made_from = [str(ROOT), interpreter, detectron2, state and [state.st_size, state.st_mtime]]
    digest.update(json.dumps(made_from).encode())
    return digest.hexdigest()


def read_stamp(venv: Path) -> "dict[str, str]":
    """Return what the last set-up wrote into ``venv``: ``python``, ``detectron2`` and ``key``.

    Raises:
        SetupError: the folder holds something that this script did not make.
    """
    stamp = venv / STAMP
    if stamp.is_file():
        try:
            return json.loads(stamp.read_text())
        except ValueError:  # cut off while it was written
            return {}
    if venv.exists() and any(venv.iterdir()):
        raise SetupError(f"{venv} was not made by make setup: move or remove it, then run make setup again")
    return {}


def write_stamp(venv: Path, python: str, detectron2: str, key: str = "") -> None:
    """Write the stamp; one without a key says that the set-up has not finished."""
    stamp = {"python": python, "detectron2": detectron2, "key": key}
    (venv / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")


def make_venv(venv: Path, python: "dict[str, Any]", detectron2: str, *, system: bool) -> Path:
    """Make an empty environment with pip in it and return its interpreter."""
    venv.mkdir(parents=True, exist_ok=True)
    write_stamp(venv, python["executable"], detectron2)  # before all else: however far this comes, it is ours
    for path in venv.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(str(path))
        elif path.name != STAMP:
            path.unlink()
    command = [python["executable"], "-m", "venv", *(["--system-site-packages"] if system else []), str(venv)]
    if subprocess.run(command).returncode:
        raise SetupError(f"{' '.join(command)} failed (see above): mend that, or {ANOTHER_PYTHON}")
    return venv / "bin" / "python"


def show_packages(venv_python: Path, parent_path: "list[str]") -> "list[str]":
    """Let the environment see every folder of packages that its parent sees, and return those added.

    ``--system-site-packages`` shows the packages of the base interpreter. Where the parent is a virtual
    environment itself, its own packages are not among them; nor is what came through PYTHONPATH.
    """
    code = "import json, sys, sysconfig; print(json.dumps([sys.path, sysconfig.get_path('purelib')]))"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own_path, site_packages = ask(venv_python, code, env=env)
    known = {os.path.realpath(folder) for folder in own_path}
    missing = [p for p in parent_path if p and os.path.isdir(p) and os.path.realpath(p) not in known]
    if missing:
        # addsitedir and not bare paths: the parent may hold .pth files, of editable installs for example.
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in missing]
        (Path(site_packages) / "_nonlocal_det_parent.pth").write_text("".join(lines))
    return missing


def parent_constraints(versions: "dict[str, str]", ours: str) -> "tuple[str, str]":
    """Return constraints that keep the parent's packages: with our pins for names that it lacks, and without.

    Args:
        versions: name to version of all that is installed in the parent.
        ours: the text of constraints.txt.
    """
    kept = {normal(name): version for name, version in versions.items() if normal(name) != "nonlocal-det"}
    lines = [
        f"{name}=={version}\n"
        for name, version in sorted(kept.items())
        if re.fullmatch(r"\d[\w.!+-]*", version)  # pip stops at a line with a version that it cannot read
    ]
    added = [
        f"{line}\n"
        for line in ours.splitlines()
        if line and not line.startswith("#") and normal(line.split("==")[0]) not in kept
    ]
    return "".join(lines + added), "".join(lines)


def pip_install(venv_python: Path, what: str, *arguments: str) -> None:
    """Run one ``pip install``.

    Raises:
        SetupError: it failed; pip has printed why.
    """
    options = ("--disable-pip-version-check", "--no-input")
    command = [str(venv_python), "-m", "pip", "install", *options, *arguments]
    if subprocess.run(command, cwd=str(ROOT)).returncode:
        raise SetupError(
            f"pip could not install {what} (see above): mend that, then run make setup again; network, proxy "
            "and index are pip's own settings (pip config list)"
        )


def pip_check(venv_python: Path) -> "list[str]":
    """Return the lines of ``pip check`` that name a problem."""
    done = run_quietly([str(venv_python), "-m", "pip", "--disable-pip-version-check", "check"])
    return done.stdout.decode().strip().split("\n") if done.returncode else []


def install_on_top(venv: Path, python: "dict[str, Any]") -> "tuple[Path, list[Path], list[str]]":
    """Make the environment on top of a Python that has Detectron2.

    Returns:
        The interpreter, the constraint files to try one after the other, and the problems that ``pip check``
        finds in the parent.
    """
    executable = python["executable"]
    try:
        parent = ask(executable, PARENT_PROBE)
    except SetupError as error:
        raise SetupError(
            f"{executable} has Detectron2 but cannot import it ({error}): mend it, or {ANOTHER_DETECTRON2}"
        ) from error
    venv_python = make_venv(venv, python, "", system=parent["sees_base"])
    if tuple(python["version"]) < (3, 12):  # venv puts an old setuptools there, which would hide the parent's
        run_quietly([str(venv_python), "-m", "pip", "uninstall", "--yes", "setuptools"])
    added = show_packages(venv_python, parent["path"])
    if added:
        say(f"packages are also taken from {', '.join(added)}")
    problems = pip_check(venv_python)
    for line in problems:
        say(f"already so in {python['prefix']}: {line}")
    versions = parent["versions"]
    if not succeeds(venv_python, SETUPTOOLS_PROBE):
        versions = {name: version for name, version in versions.items() if normal(name) != "setuptools"}
        pip_install(venv_python, "setuptools", "--quiet", "-c", str(CONSTRAINTS), "setuptools")
    with_ours, without_ours = parent_constraints(versions, CONSTRAINTS.read_text())
    files = [venv / "constraints.txt", venv / "constraints-parent.txt"]
    files[0].write_text(with_ours)
    files[1].write_text(without_ours)
    return venv_python, files, problems


def install_own(venv: Path, python: "dict[str, Any]", detectron2: str) -> Path:
    """Make an environment of its own with torch, torchvision and Detectron2, and return its interpreter.

    The build tools come first and builds are not isolated, so that their versions are fixed too.
    """
    venv_python = make_venv(venv, python, detectron2, system=False)
    pinned = ("--no-build-isolation", "-c", str(CONSTRAINTS))
    if detectron2:
        say("installing torch and torchvision (several GB)")
        tools = ("setuptools", "wheel", "ninja")
        pip_install(venv_python, "torch and torchvision", *pinned, "torch", "torchvision", *tools)
        say(f"installing {detectron2}")
        pip_install(venv_python, f"DETECTRON2={detectron2}", *pinned, detectron2)
        return venv_python
    pip_install(venv_python, "setuptools and wheel", "--quiet", *pinned, "setuptools", "wheel")
    with tempfile.TemporaryDirectory() as folder:
        say("making a Detectron2 wheel from an archive of the package index")
        if subprocess.run([str(venv_python), str(HERE / "detectron2_wheel.py"), folder]).returncode:
            raise SetupError(
                f"no Detectron2 wheel could be made (see above): mend that, or {ANOTHER_DETECTRON2}"
            )
        say("installing torch, torchvision and Detectron2 (several GB)")
        what = ("torch", "torchvision", str(next(Path(folder).glob("*.whl"))))
        pip_install(venv_python, "torch, torchvision and Detectron2", *pinned, *what)
    return venv_python


def install_project(venv_python: Path, constraints: "list[Path]") -> None:
    """Install the project, editable and with its test tools, under the first constraints that fit."""
    # opencv-python and opencv-python-headless overwrite each other: either will do.
    opencv = [] if succeeds(venv_python, "import cv2") else ["opencv-python-headless"]
    say("installing the project")
    for path in constraints:
        arguments = ("--quiet", "--no-build-isolation", "-c", str(path), "-e", ".[test,lint]", *opencv)
        try:
            pip_install(venv_python, "the project", *arguments)
        except SetupError:
            if path == constraints[-1]:
                raise
            say("trying again with the versions that are installed there, without our own pins")
        else:
            break


def verify(venv: Path, venv_python: Path, known_problems: "list[str]") -> "dict[str, str]":
    """Check the finished environment and return the versions in it.

    Raises:
        SetupError: ``pip check`` finds a new problem, or what was installed cannot be imported.
    """
    problems = [line for line in pip_check(venv_python) if line not in known_problems]
    if problems:
        raise SetupError(f"pip check finds: {'; '.join(problems)}")
    try:
        versions = ask(venv_python, FINAL_PROBE, cwd=venv)
    except SetupError as error:
        raise SetupError(f"the environment was made but does not work: {error}") from error
    if ROOT not in Path(versions["nonlocal_det"]).resolve().parents:
        raise SetupError(f"{versions['nonlocal_det']} hides this checkout: uninstall nonlocal-det there")
    return versions


def setup(python_name: str, detectron2: str, venv: Path) -> None:
    """Make or keep the environment ``venv``.

    Args:
        python_name: interpreter; empty for the one of the environment that is there, else the running one.
        detectron2: pip requirement; empty for the choice made for the environment that is there, if any.
        venv: folder.
    """
    start = time.time()
    last = read_stamp(venv)
    python = find_python(python_name or last.get("python") or sys.executable)
    wanted = detectron2 or last.get("detectron2")
    requirement = read_requirement(wanted) if wanted else ""
    key = make_key(python, requirement)
    if last.get("key") == key and (venv / "bin" / "python").exists():
        say(f"{venv.name} is up to date")
        return
    constraints, problems = [CONSTRAINTS], []
    if requirement or not python["detectron2"]:
        venv_python = install_own(venv, python, requirement)
    else:
        say(f"{python['executable']} has Detectron2: it stays as it is, with all its packages")
        venv_python, constraints, problems = install_on_top(venv, python)
    install_project(venv_python, constraints)
    versions = verify(venv, venv_python, problems)
    write_stamp(venv, python["executable"], requirement, key)
    say(
        f"{venv.name} is ready after {time.time() - start:.0f} s: "
        f"Python {'.'.join(str(part) for part in python['version'])}, torch {versions['torch']}, "
        f"torchvision {versions['torchvision']}, detectron2 {versions['detectron2']}"
    )


def main() -> None:
    """Read the arguments and make the environment."""
    parser = argparse.ArgumentParser(description="Make .venv; the head of this file says how.")
    parser.add_argument("--python", default="", help="interpreter to make it with, Python 3.10 to 3.13")
    parser.add_argument("--detectron2", default="", help="pip requirement that Detectron2 is installed from")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder (default: %(default)s)")
    args = parser.parse_args()
    try:
        setup(args.python, args.detectron2.strip(), Path(os.path.abspath(str(args.venv))))
    except SetupError as error:
        sys.exit(f"setup: error: {error}")
    except KeyboardInterrupt:
        sys.exit("setup: interrupted; run it again to start anew")


if __name__ == "__main__":
    main()
