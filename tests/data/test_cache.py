from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from nonlocal_det.data.cache import cache_root, cached_directory

fork = multiprocessing.get_context("fork")


def write_files(directory: Path, log: Path | None = None, pause: float = 0.0) -> None:
    if log is not None:
        with log.open("a") as stream:
            stream.write("built\n")
    (directory / "images").mkdir()
    for index in range(5):
        (directory / "images" / f"{index}.png").write_bytes(b"pixels" * (index + 1))
        time.sleep(pause)
    (directory / "annotations.json").write_text('{"images": []}')


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NONLOCAL_DET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_root_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NONLOCAL_DET_CACHE", raising=False)
    assert cache_root() == tmp_path / ".cache" / "nonlocal_det"
    monkeypatch.setenv("NONLOCAL_DET_CACHE", "")
    assert cache_root() == tmp_path / ".cache" / "nonlocal_det"
    monkeypatch.setenv("NONLOCAL_DET_CACHE", "~/elsewhere")
    assert cache_root() == tmp_path / "elsewhere"


def test_made_once_and_then_found(cache, tmp_path):
    for _ in range(3):
        directory = cached_directory("set-1", lambda target: write_files(target, tmp_path / "log"))
    assert directory == cache / "set-1"
    assert (tmp_path / "log").read_text() == "built\n"
    assert folders(cache) == ["set-1"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "images" / "3.png").unlink(),
        lambda d: (d / "images" / "3.png").write_bytes(b""),
        lambda d: (d / "annotations.json").write_text('{"images": ['),
        lambda d: (d / "annotations.json").write_text('{"imagex": []}'),  # as long as before
        lambda d: (d / "manifest.json").unlink(),
        lambda d: (d / "manifest.json").write_text("{"),
        lambda d: (d / "images" / "extra.png").write_bytes(b"x"),
    ],
)
def test_damage_is_found_and_the_folder_made_again(cache, damage):
    directory = cached_directory("set-1", write_files)
    before = files_of(directory)
    damage(directory)
    assert files_of(directory) != before
    cached_directory("set-1", write_files)
    assert files_of(directory) == before
    assert folders(cache) == ["set-1"]


def test_a_failed_build_leaves_nothing(cache):
    def fail(directory: Path) -> None:
        write_files(directory)
        raise RuntimeError("no more ideas")

    with pytest.raises(RuntimeError, match="no more ideas"):
        cached_directory("set-1", fail)
    assert folders(cache) == []


def test_a_process_that_is_killed_half_way_does_no_harm(cache):
    process = fork.Process(target=cached_directory, args=("set-1", lambda d: write_files(d, pause=5)))
    process.start()
    deadline = time.monotonic() + 20
    while not list(cache.glob(".set-1.*.tmp/images/0.png")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (cache / "set-1").exists()
    assert len(folders(cache)) == 1  # what it left behind

    directory = cached_directory("set-1", write_files)
    assert len(files_of(directory)) == 7
    assert folders(cache) == ["set-1"]


def test_processes_at_the_same_time_share_one_build(cache, tmp_path):
    def work() -> None:
        directory = cached_directory("set-1", lambda d: write_files(d, tmp_path / "log", pause=0.05))
        assert len(files_of(directory)) == 7

    processes = [fork.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"
    assert folders(cache) == ["set-1"]


def test_who_comes_second_without_a_lock_uses_what_is_there(cache):
    def overtaken(directory: Path) -> None:
        write_files(directory)
        # What another machine may do meanwhile when the drive's locks do not work.
        cached_directory("elsewhere", write_files).rename(cache / "set-1")

    directory = cached_directory("set-1", overtaken)
    assert len(files_of(directory)) == 7
    assert folders(cache) == ["set-1"]


def test_a_cache_that_cannot_be_written_names_folder_and_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NONLOCAL_DET_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"file.set-1.*NONLOCAL_DET_CACHE"):
        cached_directory("set-1", write_files)
