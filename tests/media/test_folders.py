"""Which file names stay in their image folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("detectron2")

from nonlocal_det.media.folders import outside


@pytest.fixture
def tree(tmp_path) -> Path:
    """images/a.jpg, images/deep/b.jpg, links in and out of images, and secret.jpg beside it."""
    (tmp_path / "images" / "deep").mkdir(parents=True)
    for name in ("images/a.jpg", "images/deep/b.jpg", "secret.jpg"):
        (tmp_path / name).touch()
    (tmp_path / "images_too").mkdir()
    (tmp_path / "images" / "in.jpg").symlink_to("deep/b.jpg")
    (tmp_path / "images" / "out.jpg").symlink_to("../secret.jpg")
    (tmp_path / "images" / "up").symlink_to("..")
    (tmp_path / "images" / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("images")
    return tmp_path


@pytest.mark.parametrize("root", ["images", "link", "images/", "images/deep/.."])
@pytest.mark.parametrize("absolute", [False, True])
def test_paths(tree, monkeypatch, root, absolute):
    monkeypatch.chdir(tree)
    folder = os.path.join(tree, root) if absolute else root
    inside = ["a.jpg", "deep/b.jpg", "in.jpg", "deep/../a.jpg", "not/there.jpg", "up/images/a.jpg", "a.jpg/"]
    leading_out = [
        "../secret.jpg",
        "../../etc/passwd",
        "/etc/passwd",
        "out.jpg",
        "up/secret.jpg",
        "deep/../../secret.jpg",
        "..",
        "../images_too/a.jpg",
        "http://host/a.jpg",
        "a\0.jpg/b",
    ]
    names = [*inside, *leading_out]
    paths = [name if "://" in name else os.path.join(folder, name) for name in names]
    assert [names[i] for i in outside(paths, [folder])] == leading_out


def test_addresses():
    root = "s3://bucket/images"
    paths = [f"{root}/a.jpg", f"{root}_too/a.jpg", f"{root}/../a.jpg", "/etc/passwd", "s3://other/a.jpg"]
    assert outside(paths, [root]) == [1, 2, 3, 4]


def test_several_folders(tree):
    paths = [str(tree / "images" / "a.jpg"), str(tree / "images_too" / "a.jpg"), str(tree / "secret.jpg")]
    assert outside(paths, [tree / "images", tree / "images_too"]) == [2]
    assert outside([], []) == []
    assert outside(paths, []) == [0, 1, 2]
