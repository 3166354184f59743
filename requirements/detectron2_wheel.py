"""Write a pure-Python ``detectron2`` wheel from the PyPI package ``sal-detectron2``.

Detectron2 is not on PyPI under its own name. Where there is no compiler or no access to its
repository, ``sal-detectron2`` 0.7.2 stands in: its Python files are upstream's of 2024-04-17
(a59f056). As published it does not install cleanly on every Python (a tag for CPython 3.10, a compiled
extension for CUDA 12, a stray top-level ``tools`` package, requirements that are too narrow or absent),
so the archive is downloaded with its hash checked and only its ``detectron2/`` Python and YAML files are
packed, byte for byte, under the name that other packages ask for.

Only the standard library is used: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SOURCE = "sal-detectron2"
SOURCE_VERSION = "0.7.2"
SOURCE_SHA256 = "491af0c7f79bdb2d178e46f6cb16a97c4ac968d45c41ea3f6b6435d59bbee561"
VERSION = f"0.6+sal{SOURCE_VERSION}"
WHEEL_NAME = f"detectron2-{VERSION}-py3-none-any.whl"

# What upstream's setup.py asks for at a59f056, less black (a formatter), and setuptools in the range that
# torch (>= 77.0.3) and detectron2.model_zoo (pkg_resources, deprecated with a warning from 80.9) share.
REQUIREMENTS = (
    "Pillow>=7.1",
    "matplotlib",
    "pycocotools>=2.0.2",
    "termcolor>=1.1",
    "yacs>=0.1.8",
    "tabulate",
    "cloudpickle",
    "tqdm>4.29.0",
    "tensorboard",
    "fvcore>=0.1.5,<0.1.6",
    "iopath>=0.1.7,<0.1.10",
    "omegaconf>=2.1,<2.4",
    "hydra-core>=1.1",
    "packaging",
    "setuptools>=77.0.3,<80.9",
)


def download(folder: Path) -> Path:
    """Download the archive with ``pip`` and return its path; pip refuses another hash."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{SOURCE}=={SOURCE_VERSION} --hash=sha256:{SOURCE_SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    which = ["--no-deps", "--only-binary=:all:", "--python-version", "3.10", "--require-hashes"]
    subprocess.run([*pip, *which, "--dest", str(folder), "-r", str(requirement)], check=True)
    return next(folder.glob("sal_detectron2-*.whl"))


def metadata() -> str:
    """Return the METADATA file of the wheel."""
    lines = [
        "Metadata-Version: 2.1",
        "Name: detectron2",
        f"Version: {VERSION}",
        f"Summary: The Python files of Detectron2, repacked from {SOURCE} {SOURCE_VERSION}",
        "Home-page: https://github.com/facebookresearch/detectron2",
        "License: Apache-2.0",
        "License-File: LICENSE",
        "Requires-Python: >=3.10",
        *(f"Requires-Dist: {requirement}" for requirement in REQUIREMENTS),
    ]
    return "\n".join(lines) + "\n"


def record_line(name: str, data: bytes) -> str:
    """Return one line of RECORD: name, urlsafe base64 of the SHA-256 without padding, size."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}"


def build(archive: Path, output: Path) -> Path:
    """Write the wheel made from ``archive`` into the folder ``output`` and return its path.

    Raises:
        ValueError: the archive is not the file that this script was written for.
    """
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SOURCE_SHA256:
        raise ValueError(f"{archive}: SHA-256 is {found}, expected {SOURCE_SHA256}")
    info = f"detectron2-{VERSION}.dist-info"
    files: dict[str, bytes] = {}
    with zipfile.ZipFile(archive) as source:
        for name in source.namelist():
            if name.startswith("detectron2/") and name.endswith((".py", ".yaml")):
                files[name] = source.read(name)
            elif name.endswith(".dist-info/LICENSE"):
                files[f"{info}/LICENSE"] = source.read(name)
    files[f"{info}/METADATA"] = metadata().encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: detectron2_wheel\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/top_level.txt"] = b"detectron2\n"
    record = [record_line(name, data) for name, data in files.items()] + [f"{info}/RECORD,,"]
    files[f"{info}/RECORD"] = ("\n".join(record) + "\n").encode()

    output.mkdir(parents=True, exist_ok=True)
    wheel = output / WHEEL_NAME
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in files.items():
            # A fixed date makes the wheel the same byte for byte wherever it is made.
            target.writestr(zipfile.ZipInfo(name, (2024, 4, 17, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return wheel


def main() -> None:
    """Download the archive, or take the one named, and write the wheel."""
    parser = argparse.ArgumentParser(description="Write a pure-Python detectron2 wheel.")
    parser.add_argument("output", type=Path, help="folder that the wheel is written to")
    parser.add_argument("--archive", type=Path, help=f"{SOURCE} {SOURCE_VERSION}, already downloaded")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(build(args.archive or download(Path(folder)), args.output))
        except subprocess.CalledProcessError:
            sys.exit(f"{SOURCE}=={SOURCE_VERSION} could not be downloaded: pip's message is above")
        except (OSError, ValueError) as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
