from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
from torch import nn

pytest.importorskip("detectron2")

from nonlocal_det.checkpoint.checkpointer import NonLocalCheckpointer
from nonlocal_det.checkpoint.index import CheckpointIndex, SavedFile
from nonlocal_det.errors import CheckpointError
from nonlocal_det.files import hash_file


class TestIndex:
    def test_files_are_kept_in_order(self, tmp_path):
        index = CheckpointIndex(tmp_path)
        assert index.files() == []
        a, b, c = (SavedFile(name, "0", name != "b") for name in "abc")
        for file in (a, b, c, a):
            index.add(file)
        assert CheckpointIndex(tmp_path).files() == [b, c, a]
        index.remove("c")
        index.remove("none")
        assert CheckpointIndex(tmp_path).files() == [b, a]

    def test_a_new_run_starts_its_own_with_its_first_file(self, tmp_path):
        CheckpointIndex(tmp_path).add(SavedFile("old", "0"))
        index = CheckpointIndex(tmp_path)
        index.start()
        assert index.files() == []
        assert [file.name for file in CheckpointIndex(tmp_path).files()] == ["old"]
        index.add(SavedFile("new", "0"))
        assert [file.name for file in CheckpointIndex(tmp_path).files()] == ["new"]

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"checkpoints": [{"name": 1}]}', "\xff"])
    def test_a_damaged_one_is_empty(self, tmp_path, text):
        (tmp_path / "checkpoints.json").write_text(text, encoding="latin1")
        assert CheckpointIndex(tmp_path).files() == []


def make(folder: Path, value: float = 0.0, **options) -> NonLocalCheckpointer:
    """A checkpointer of a model with one number."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return NonLocalCheckpointer(model, str(folder), **options)


def save(folder: Path, *values: int, **options) -> None:
    for value in values:
        make(folder, value, **options).save(f"model_{value:07d}", iteration=value)


def resumed(folder: Path) -> float:
    checkpointer = make(folder, -1)
    checkpointer.resume_or_load("")
    return checkpointer.model.weight.item()


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "gone":
        path.unlink()
        return
    if kind == "truncated":
        data = data[:-100]
    elif kind == "empty":
        data = bytearray()
    else:
        data[{"first bit": 0, "bit in the middle": len(data) // 2, "last bit": -1}[kind]] ^= 1
    path.write_bytes(data)


DAMAGE = ["gone", "empty", "truncated", "first bit", "bit in the middle", "last bit"]


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_one_before_a_damaged_one_is_used(tmp_path, caplog, kind):
    save(tmp_path, 1, 2, 3)
    assert resumed(tmp_path) == 3
    damage(tmp_path / "model_0000003.pth", kind)
    assert resumed(tmp_path) == 2
    what = "is not there" if kind == "gone" else "is damaged (its hash differs"
    assert f"'model_0000003.pth', which {what}" in caplog.text
    assert "going on from model_0000002.pth, saved before it" in caplog.text
    damage(tmp_path / "model_0000002.pth", kind)
    assert resumed(tmp_path) == 1
    damage(tmp_path / "model_0000001.pth", kind)
    with pytest.raises(CheckpointError, match=r"'model_0000003\.pth', which is .*delete it to start"):
        resumed(tmp_path)


@pytest.mark.parametrize("kind", ["empty", "truncated", "first bit"])
def test_without_hashes_a_file_is_intact_if_it_can_be_read(tmp_path, kind):
    save(tmp_path, 1, 2)
    (tmp_path / "checkpoints.json").unlink()
    assert resumed(tmp_path) == 2
    damage(tmp_path / "model_0000002.pth", kind)
    with pytest.raises(CheckpointError, match="is damaged"):
        resumed(tmp_path)


def test_only_what_was_saved_before_is_gone_back_to(tmp_path):
    save(tmp_path, 1, 2, 3)
    (tmp_path / "last_checkpoint").write_text("model_0000002.pth")
    assert resumed(tmp_path) == 2
    damage(tmp_path / "model_0000002.pth", "truncated")
    assert resumed(tmp_path) == 1


def test_files_of_an_earlier_run_and_the_best_are_not_gone_back_to(tmp_path):
    save(tmp_path, 5, 6)
    new = make(tmp_path, 1)
    new.resume_or_load("", resume=False)
    new.save("model_0000001")
    best = make(tmp_path, 9)
    best.resumable = False
    best.tag_last_checkpoint = lambda name: None
    best.save("model_best")
    save(tmp_path, 2)
    damage(tmp_path / "model_0000002.pth", "gone")
    assert resumed(tmp_path) == 1
    damage(tmp_path / "model_0000001.pth", "gone")
    with pytest.raises(CheckpointError, match="is not there"):
        resumed(tmp_path)


@pytest.mark.parametrize("kind", DAMAGE[1:])
def test_damaged_weights_are_refused(tmp_path, kind):
    save(tmp_path, 1)
    path = tmp_path / "model_0000001.pth"
    make(tmp_path).load(str(path))
    damage(path, kind)
    with pytest.raises(CheckpointError, match=re_path(path)):
        make(tmp_path).load(str(path))
    if kind == "last bit":  # which PyTorch does not look at
        (tmp_path / "checkpoints.json").unlink()
        make(tmp_path).load(str(path))


def re_path(path: Path) -> str:
    return f"weights {path}: (damaged: its hash differs|an empty file)".replace(".", r"\.")


def test_old_ones_are_pruned(tmp_path):
    make(tmp_path, 0, keep=2).save("model_final")
    make(tmp_path, 0, keep=2).save("model_best")
    (tmp_path / "model_0000000.pth").write_bytes(b"of another program")
    save(tmp_path, 1, 2, 3, 4, keep=2)
    numbers = {0, 3, 4}
    assert {path.name for path in tmp_path.glob("*.pth")} == {
        "model_final.pth",
        "model_best.pth",
        *(f"model_{number:07d}.pth" for number in numbers),
    }
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000004.pth"


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"model_0000002\.pth cannot be written \(File too large\)"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {path.name for path in tmp_path.iterdir()} == {
        "model_0000001.pth",
        "last_checkpoint",
        "checkpoints.json",
    }
    assert resumed(tmp_path) == 1


def count_calls(real, calls: list, last: int):
    """Wrap a function so that the process is killed by call number ``last`` of all that share ``calls``."""

    def call(*args, **kwargs):
        if len(calls) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(real)
        return real(*args, **kwargs)

    return call


def test_a_kill_at_any_step_of_saving_leaves_a_whole_run(tmp_path):
    """Kill before each call that changes the disk, one after the other."""
    step, status = -1, signal.SIGKILL
    while status == signal.SIGKILL:
        step += 1
        folder = tmp_path / str(step)
        folder.mkdir()
        save(folder, 1, 2, 3, keep=3)
        child = os.fork()
        if child == 0:
            calls: list = []
            for name in ("open", "fsync", "replace", "unlink", "remove"):
                setattr(os, name, count_calls(getattr(os, name), calls, step))
            save(folder, 4, keep=3)
            make(folder, 5).save("model_0000004")  # the same name again
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert resumed(folder) in (3, 4, 5)
        # No file that the list names is damaged, and the next save puts everything right.
        for file in CheckpointIndex(folder).files():
            assert not (folder / file.name).exists() or hash_file(folder / file.name) == file.sha256
        save(folder, 6, keep=3)
        assert resumed(folder) == 6
        assert not list(folder.glob("*.partial"))
    assert status == 0
    assert step > 15
