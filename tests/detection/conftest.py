"""Small versions of the built-in sets, made anew in a folder of the test's own."""

from __future__ import annotations

import pytest

from nonlocal_det.detection.synthetic import datasets as builtin


@pytest.fixture
def small_cache(tmp_path, monkeypatch):
    """The folder of an empty cache; ``nonlocal_people_*`` have 4 and 3 pictures until the test ends."""
    monkeypatch.setenv("NONLOCAL_DET_CACHE", str(tmp_path / "cache"))
    splits = {
        "nonlocal_people_train": builtin._Split(count=4, size=192, seed=0),
        "nonlocal_people_val": builtin._Split(count=3, size=192, seed=1),
    }
    monkeypatch.setattr(builtin, "_PEOPLE", splits)
    return tmp_path / "cache"
