"""The files that words mean, and where drawings go; the demo's tests go through the rest."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from nonlocal_det.errors import UsageError
from nonlocal_det.media.inputs import Inputs, find_inputs, plan_outputs, spare_inputs


def test_files_without_a_known_suffix_are_looked_into(tmp_path, data_dir):
    shutil.copy(data_dir / "video" / "archery.avi", tmp_path / "clip")
    Image.new("RGB", (4, 3)).save(tmp_path / "photo", format="JPEG")
    (tmp_path / "text").write_text("neither")
    assert find_inputs([str(tmp_path / "clip")]) == Inputs([], video=tmp_path / "clip")
    for name in ("photo", "text"):  # reading says what is wrong with the second
        assert find_inputs([str(tmp_path / name)]) == Inputs([tmp_path / name])
    assert find_inputs(["3"]) == Inputs([], video=3)


def test_outputs_of_videos(tmp_path):
    clip = Inputs([], video=Path("a/clip.mkv"))
    assert plan_outputs(clip, str(tmp_path / "new")) == [tmp_path / "new" / "clip.mp4"]
    assert plan_outputs(clip, str(tmp_path / "x" / "o.MKV")) == [tmp_path / "x" / "o.MKV"]
    assert plan_outputs(Inputs([], video=3), str(tmp_path)) == [tmp_path / "camera_3.mp4"]
    (tmp_path / "folder.mp4").mkdir()
    assert plan_outputs(clip, str(tmp_path / "folder.mp4")) == [tmp_path / "folder.mp4" / "clip.mp4"]
    assert plan_outputs(clip, None) == []
    with pytest.raises(UsageError, match="a video is written as"):
        plan_outputs(clip, str(tmp_path / "o.png"))


def test_a_video_is_spared(tmp_path):
    (tmp_path / "a.mp4").touch()
    (tmp_path / "b.mp4").hardlink_to(tmp_path / "a.mp4")
    inputs = Inputs([], video=tmp_path / "a.mp4")
    spare_inputs(inputs, [tmp_path / "c.mp4", None])
    with pytest.raises(UsageError, match=r"b\.mp4 is an input"):
        spare_inputs(inputs, [tmp_path / "b.mp4"])
    spare_inputs(Inputs([], video=0), [tmp_path / "b.mp4"])
