"""Packaging that pyproject.toml cannot say: found packages plus the folder of config files."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["nonlocal_det", "nonlocal_det.*"]), "nonlocal_det.configs"],
    package_dir={"nonlocal_det.configs": "configs"},
    package_data={"nonlocal_det.configs": ["**/*.yaml"]},
)
