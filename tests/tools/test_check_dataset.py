"""The command line of check_dataset: exit codes, output as text and JSON, and the mended file."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from nonlocal_det.detection.annotations.coco_file import read_coco
from nonlocal_det.tools.check_dataset import main

ROOT = Path(__file__).parents[2]
SHARED = ROOT / "../shared/data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")


def document():
    return {
        "images": [{"id": 1, "file_name": "größe.png", "width": 40, "height": 30}],
        "categories": [{"id": 4, "name": "Haselnuß"}],
        "annotations": [
            {
                "id": 1,
                "image_id": 1,
                "category_id": 4,
                "bbox": [4, 4, 10, 8],
                "iscrowd": False,
                "segmentation": {"size": [30, 40], "counts": [124, 8, 22, 8, 1038]},
            }
        ],
    }


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "nüsse.json"
    path.write_text(json.dumps(document(), ensure_ascii=False), encoding="utf-8")
    return path


def run(capsys, *args):
    """Return exit code, stdout and stderr."""
    code = main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_warnings_are_lines_and_exit_code_0(capsys, source):
    code, out, err = run(capsys, source)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == f"{source}: 1 image, 1 annotation, 1 category"
    assert lines[-1] == "0 kinds of error, 4 kinds of warning"
    assert len(lines) == 6
    for line in lines[1:-1]:
        assert line.startswith("warning: ")
        assert "Detectron2 " in line
        assert "Fix: " in line
        assert ": 1 (" in line


def test_errors_are_exit_code_2(capsys, source):
    broken = document()
    broken["annotations"][0]["bbox"] = [1, 1, 0, 0]
    source.write_text(json.dumps(broken))
    code, out, err = run(capsys, source)
    assert (code, err) == (2, "")
    assert "error: box of zero or negative size: 1 (annotation 1). Detectron2 drops " in out


def test_wants(capsys, source):
    assert run(capsys, source, "--masks")[0] == 0
    code, out, _ = run(capsys, source, "--keypoints")
    assert code == 2
    assert "keypoints are wanted" in out
    assert "picture is not there" in run(capsys, source, source.parent)[1]


def test_against(capsys, source, tmp_path):
    other = document()
    other["categories"][0]["name"] = "Walnuß"
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    code, out, _ = run(capsys, source, "--against", path)
    assert code == 2
    assert "only here: 'Haselnuß'" in out
    assert out.splitlines()[-1].endswith(
        f"1 kind of error, 4 kinds of warning; compared with {path}: classes differ"
    )
    code, out, _ = run(capsys, source, "--against", source)
    assert code == 0
    assert out.splitlines()[-1].endswith(f"; compared with {source}: the classes agree")


def test_json(capsys, source):
    code, out, _ = run(capsys, source, "--json", "--keypoints")
    result = json.loads(out)
    assert code == 2
    assert (result["images"], result["annotations"], result["categories"]) == (1, 1, 1)
    assert (result["errors"], result["warnings"]) == (1, 4)
    kinds = {finding["kind"]: finding for finding in result["findings"]}
    assert kinds["iscrowd_bool"] == {
        "kind": "iscrowd_bool",
        "severity": "warning",
        "count": 1,
        "examples": ["annotation 1"],
        "what": "iscrowd that is true or false",
        "detectron2": "takes false for 0 and true for 1",
        "fix": "write 0 or 1",
        "mended": True,
    }


def test_write_fixed(capsys, source, tmp_path):
    before = source.read_bytes()
    target = tmp_path / "fixed.json"
    code, out, _ = run(capsys, source, "--write-fixed", target)
    assert code == 0
    assert f"{target}: written; mended " in out
    assert source.read_bytes() == before
    code, out, _ = run(capsys, target)
    assert (code, out.splitlines()[1:]) == (0, ["0 kinds of error, 0 kinds of warning"])
    fixed = json.loads(target.read_text(encoding="utf-8"))
    assert fixed["categories"] == [{"id": 1, "name": "Haselnuß"}]
    assert fixed["annotations"][0]["area"] == 16
    assert sorted(os.listdir(tmp_path)) == ["fixed.json", "nüsse.json"]
    assert target.stat().st_mode & 0o777 == source.stat().st_mode & 0o777


def test_never_onto_the_input(capsys, source, tmp_path):
    before = source.read_bytes()
    (tmp_path / "link.json").symlink_to(source)
    os.link(source, tmp_path / "hard.json")
    for target in (source, tmp_path / "link.json", tmp_path / "hard.json"):
        code, out, err = run(capsys, source, "--write-fixed", target)
        assert (code, out) == (2, "")
        assert err.startswith("error: --write-fixed")
        assert "is the input" in err
    assert source.read_bytes() == before


def test_failed_write_leaves_nothing(capsys, source, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "disk")

    target = tmp_path / "fixed.json"
    target.write_text("of before")
    monkeypatch.setattr("nonlocal_det.tools.check_dataset.json.dump", full)
    with pytest.raises(OSError, match="No space left"):
        run(capsys, source, "--write-fixed", target)
    assert target.read_text() == "of before"
    assert sorted(os.listdir(tmp_path)) == ["fixed.json", "nüsse.json"]


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "the following arguments are required: JSON"),
        (["none.json"], "none.json: no such file"),
        (["{source}", "none"], "none: no such image folder"),
        (["{source}", "--against", "none.json"], "none.json: no such file"),
        (["{source}", "--write-fixed", "none/out.json"], "no such folder"),
        (["{source}", "--fix"], "--fix"),
        (["."], "a folder"),
    ],
)
def test_wrong_input_is_one_line(capsys, source, args, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *(arg.format(source=source) for arg in args))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert part in err


@needs_shared
def test_as_a_command():
    command = [sys.executable, "-m", "nonlocal_det.tools.check_dataset", str(SHARED / "nuclei/train.json")]
    done = subprocess.run([*command, str(SHARED / "nuclei/images"), "--masks"], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"24 images, 465 annotations, 1 category" in done.stdout


def write_large(path, count):
    """Write a file of ``count`` annotations, each with the usual polygon of COCO's: about 500 characters."""
    polygon = json.dumps([[round(100 + 3.7 * i % 300, 2) for i in range(66)]])
    with path.open("w") as file:
        file.write('{"categories": [{"id": 1, "name": "nut"}], "images": [')
        images = count // 7 + 1
        file.write(
            ", ".join(
                f'{{"id": {i}, "file_name": "{i}.jpg", "width": 640, "height": 480}}' for i in range(images)
            )
        )
        file.write('], "annotations": [')
        for i in range(count):
            start = ", " if i else ""
            file.write(
                f'{start}{{"segmentation": {polygon}, "area": 702.5, "iscrowd": 0, "image_id": {i % images}, '
                f'"bbox": [73.25, 119.5, 38.75, 40.5], "category_id": 1, "id": {i + 1}}}'
            )
        file.write("]}")


def test_memory_of_reading(tmp_path):
    count = 10_000
    write_large(tmp_path / "large.json", count)
    tracemalloc.start()
    try:
        read_coco(tmp_path / "large.json")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # 3 GB is the limit for COCO's 860,000 annotations, with 0.5 GB for Python and the libraries.
    assert peak / count * 860_000 < 2.5e9


@pytest.mark.slow
def test_as_large_as_cocos_training_set(tmp_path):
    write_large(tmp_path / "large.json", 860_000)
    script = (
        "import resource, sys; from nonlocal_det.tools.check_dataset import main; code = main(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024); sys.exit(code)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "large.json"), "--masks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    *_, verdict, peak = done.stdout.splitlines()
    assert verdict == "0 kinds of error, 0 kinds of warning"
    assert int(peak) < 3e9
