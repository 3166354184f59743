"""The images' recipes: pinned as the project is, not run by root, complete, and with a health check."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
CONSTRAINTS = dict(
    line.split(";")[0].strip().split("==")
    for line in (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    if "==" in line and not line.startswith("#")
)


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, each with its arguments in one line."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines()]


def arguments(path: Path, name: str) -> list[str]:
    return [rest for found, rest in instructions(path) if found == name]


def final_stage(path: Path) -> list[tuple[str, str]]:
    found = instructions(path)
    return found[max(i for i, (name, _) in enumerate(found) if name == "FROM") :]


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def dockerfile(request) -> Path:
    return request.param


def test_both_are_there():
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


def test_base_images_are_exact(dockerfile):
    images = [rest.split()[0] for rest in arguments(dockerfile, "FROM")]
    assert len(images) == 2
    for image in images:
        name, version = re.fullmatch(r"([\w/]+):(\d+\.\d+\.\d+)-[\w.-]+", image).groups()
        if name == "python":
            assert (3, 10) <= tuple(map(int, version.split(".")[:2])) <= (3, 13)
        else:
            assert name == "nvidia/cuda"
            # The compiler's CUDA is the one that PyTorch brings.
            assert CONSTRAINTS["cuda-toolkit"].startswith(f"{version}.")


def test_packages_are_at_the_projects_versions(dockerfile):
    commands = [part for rest in arguments(dockerfile, "RUN") for part in rest.split("&&")]
    installs = [command for command in commands if "pip install" in command]
    assert len(installs) >= 3
    for command in installs:
        assert "-c requirements/constraints.txt" in command
        assert "--no-build-isolation" in command  # else a build takes any version of its tools
        assert not re.search(r"[=<>~]=", command)  # versions stand in the constraints alone
        words = command.split("constraints.txt")[1].split()
        names = [word for word in words if re.fullmatch(r"[a-z][\w-]*", word)]
        assert all(name in CONSTRAINTS for name in names), names


def test_what_the_project_asks_for_has_a_version():
    section = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("\n]")[0]
    names = re.findall(r'^\s+"([\w-]+)', section, re.MULTILINE)
    assert len(names) > 8
    assert {name.lower() for name in names} <= set(CONSTRAINTS)


def test_detectron2_is_the_tested_one():
    commits = {
        match
        for path in (ROOT / "README.md", ROOT / "docker" / "Dockerfile.cuda")
        for match in re.findall(r"facebookresearch/detectron2\.git@(\w+)", path.read_text())
    }
    assert len(commits) == 1
    assert len(commits.pop()) == 40
    cuda = (ROOT / "docker" / "Dockerfile.cuda").read_text()
    assert re.search(r'^ARG TORCH_CUDA_ARCH_LIST="(\d+\.\d;)+\d+\.\d\+PTX"$', cuda, re.MULTILINE)
    assert "FORCE_CUDA=1" in cuda
    assert "requirements/detectron2_wheel.py" in (ROOT / "docker" / "Dockerfile.cpu").read_text()


def test_it_does_not_run_as_root(dockerfile):
    users = [rest for name, rest in final_stage(dockerfile) if name == "USER"]
    assert users
    for user in users:
        assert all(int(number) > 0 for number in user.split(":"))
    names = [name for name, _ in final_stage(dockerfile)]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))


def test_how_it_starts(dockerfile):
    stage = dict(final_stage(dockerfile))
    assert stage["ENTRYPOINT"] == '["python", "-m", "nonlocal_det.tools.train"]'
    assert 'CMD ["python", "/opt/healthcheck.py"]' in stage["HEALTHCHECK"]
    variables = dict(re.findall(r"(\w+)=(\S+)", stage["ENV"]))
    assert variables["DETECTRON2_DATASETS"] == "/workspace/data"
    assert stage["WORKDIR"] == "/workspace"


def test_what_is_copied_is_sent_to_the_build(dockerfile):
    rules = [x for x in (ROOT / ".dockerignore").read_text().splitlines() if x and not x.startswith("#")]
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert all((ROOT / path).exists() for path in kept)
    sources = [
        word for rest in arguments(dockerfile, "COPY") if "--from" not in rest for word in rest.split()[:-1]
    ]
    assert {"nonlocal_det", "configs", "pyproject.toml", "docker/healthcheck.py"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == path or fnmatch(source, f"{path}/*") for path in kept), source
    # What the package's metadata names must be there to build it.
    needed = re.findall(r'"(README\.md|LICENSE)"', (ROOT / "pyproject.toml").read_text())
    assert set(needed) <= set(sources)


def test_compose():
    content = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    assert set(content["services"]) == {"cuda", "cpu"}
    for name, service in content["services"].items():
        build = service["build"]
        context = (ROOT / "docker" / build["context"]).resolve()
        assert context == ROOT
        assert (context / build["dockerfile"]).name == f"Dockerfile.{name}"
        targets = {volume["target"]: volume.get("read_only", False) for volume in service["volumes"]}
        assert targets == {"/workspace/data": True, "/workspace/output": False}
        assert not re.search(r":-0|root", service["user"])
        assert service["stop_grace_period"]
        assert service["shm_size"]
        assert "no-new-privileges:true" in service["security_opt"]
    (device,) = content["services"]["cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert "deploy" not in content["services"]["cpu"]


@pytest.mark.skipif(
    not Path("/proc/1").exists() or not shutil.which("ps"), reason="needs Linux's /proc and ps"
)
def test_health(tmp_path):
    def check(allowed: float) -> int:
        environment = {**os.environ, "HEALTH_OUTPUT": str(tmp_path), "HEALTH_MAX_AGE": str(allowed)}
        done = subprocess.run(
            [sys.executable, ROOT / "docker" / "healthcheck.py"],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert "last sign of life" in done.stdout, done.stderr
        return done.returncode

    # "Running for", by another tool.
    since_start = int(subprocess.check_output(["ps", "-o", "etimes=", "-p", "1"], text=True))
    assert check(since_start + 10) == 0
    assert check(since_start - 10) == 1
    log = tmp_path / "run" / "log.txt"
    log.parent.mkdir()
    log.touch()
    assert check(min(60, since_start - 10)) == 0
    old = time.time() - since_start / 2
    os.utime(log, (old, old))
    assert check(since_start / 3) == 1
    assert check(since_start * 3 / 4) == 0
