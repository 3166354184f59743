"""Files are whole or absent."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource

import pytest
import torch

from nonlocal_det.files import hash_file, whole_file, write_whole


class TestWriteWhole:
    def test_content_and_hash(self, tmp_path):
        digest = write_whole(tmp_path / "a", lambda file: [file.write(b"12"), file.write(b"3")])
        assert (tmp_path / "a").read_bytes() == b"123"
        assert digest == hashlib.sha256(b"123").hexdigest() == hash_file(tmp_path / "a")
        assert os.listdir(tmp_path) == ["a"]

    def test_a_failure_leaves_the_old_content(self, tmp_path):
        write_whole(tmp_path / "a", lambda file: file.write(b"old"))

        def fail(file) -> None:
            file.write(b"new")
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            write_whole(tmp_path / "a", fail)
        with pytest.raises(FileNotFoundError):
            write_whole(tmp_path / "none" / "a", fail)
        assert (tmp_path / "a").read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["a"]

    @pytest.mark.parametrize("size", [10, 100_000])
    def test_no_space_is_said_as_such(self, tmp_path, size):
        write_whole(tmp_path / "a.pth", lambda file: file.write(b"old"))
        tensors = [torch.zeros(size) for _ in range(10)]
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # of one file
        try:
            with pytest.raises(OSError, match="File too large"):
                write_whole(tmp_path / "a.pth", lambda file: torch.save(tensors, file))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (tmp_path / "a.pth").read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["a.pth"]


class TestWholeFile:
    def test_it_appears_at_the_end_as_a_plain_open_makes_it(self, tmp_path):
        target = tmp_path / "a.b.npz"
        with whole_file(target) as path:
            assert (path.parent.parent, path.name) == (tmp_path, "a.b.npz")
            assert path.parent.name.startswith(".")
            path.write_text("new")
            assert not target.exists()
        assert target.read_text() == "new"
        (tmp_path / "plain").write_text("")
        assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode
        with whole_file(target) as path:
            path.write_text("newer")
        assert target.read_text() == "newer"
        assert sorted(os.listdir(tmp_path)) == ["a.b.npz", "plain"]

    @pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
    def test_an_error_leaves_the_old_content(self, tmp_path, error):
        (tmp_path / "a").write_text("old")

        def write() -> None:
            with whole_file(tmp_path / "a") as path:
                path.write_text("new")
                raise error

        with pytest.raises(error):
            write()
        assert (tmp_path / "a").read_text() == "old"
        assert os.listdir(tmp_path) == ["a"]

    def test_errors_have_the_name_that_was_asked_for(self, tmp_path):
        with pytest.raises(FileNotFoundError) as caught, whole_file(tmp_path / "none" / "a.txt") as path:
            path.write_text("new")
        assert str(caught.value) == f"[Errno 2] No such file or directory: '{tmp_path / 'none' / 'a.txt'}'"
        (tmp_path / "folder").mkdir()
        with pytest.raises(IsADirectoryError) as caught, whole_file(tmp_path / "folder") as path:
            path.write_text("new")
        assert str(caught.value) == f"[Errno 21] Is a directory: '{tmp_path / 'folder'}'"
        assert os.listdir(tmp_path) == ["folder"]

    def test_several_appear_together(self, tmp_path):
        def write(fail: bool) -> None:
            with contextlib.ExitStack() as stack:
                for name in "ba":
                    stack.enter_context(whole_file(tmp_path / name)).write_text("new")
                if fail:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            write(fail=True)
        assert os.listdir(tmp_path) == []
        write(fail=False)
        assert sorted(os.listdir(tmp_path)) == ["a", "b"]
