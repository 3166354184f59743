"""The command line, and what it refuses."""

import os
import pickle
import runpy
import sys

import pytest
import torch
import yaml

from nonlocal_det import get_config
from nonlocal_det.checkpoint.reading import read_checkpoint
from nonlocal_det.config.loading import CONFIG_ROOT
from nonlocal_det.convert.sources import SOURCES
from nonlocal_det.tools.convert_checkpoint import main

CONFIG = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
SMALL = ["--opts", "MODEL.RESNETS.RES2_OUT_CHANNELS", "16", "MODEL.RESNETS.WIDTH_PER_GROUP", "4"]
C, INNER = 64, 32


def block(prefix=""):
    """mmcv's NonLocal2d, whose block fits into res4 of the small net."""
    tensors = {}
    for part in ("g", "theta", "phi", "conv_out"):
        shape = (C, INNER) if part == "conv_out" else (INNER, C)
        tensors[f"{prefix}{part}.conv.weight"] = torch.randn(*shape, 1, 1)
        tensors[f"{prefix}{part}.conv.bias"] = torch.randn(shape[0])
    return tensors


@pytest.fixture
def saved(tmp_path):
    torch.save(block(), tmp_path / "in.pth")
    return tmp_path / "in.pth"


@pytest.fixture
def run(tmp_path, capsys):
    """A function (IN, *flags) -> (exit code, stdout, stderr); OUT is out.pth and the net is small."""

    def call(path, *flags, out="out.pth", config=CONFIG, small=SMALL):
        code = main([str(path), str(tmp_path / out), "--config-file", str(config), *map(str, flags), *small])
        return code, *capsys.readouterr()

    return call


def refused(result, *parts):
    code, _, err = result
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err
    return True


def test_it_converts_reports_and_writes_a_config(run, saved, tmp_path):
    code, out, err = run(saved)
    assert (code, err) == (0, "")
    for name in block():
        assert f"  {name} -> backbone.bottom_up.res4.non_local_5." in out
    assert "set: MODEL.NONLOCAL.POOL 'none' (was 'input')" in out
    assert out.endswith(f"wrote {tmp_path / 'out.pth'}\nwrote {tmp_path / 'out.yaml'}\n")
    cfg = get_config(tmp_path / "out.yaml")
    assert cfg.MODEL.NONLOCAL.POOL == "none"
    assert cfg.MODEL.RESNETS.WIDTH_PER_GROUP == 4  # overrides are in it too
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pth", "out.pth", "out.yaml"]
    found = read_checkpoint(tmp_path / "out.pth")["model"]
    theirs = torch.load(saved, weights_only=True)
    assert torch.equal(found["backbone.bottom_up.res4.non_local_5.w_z.bias"], theirs["conv_out.conv.bias"])


def test_it_runs_as_a_module(saved, tmp_path, monkeypatch, capsys):
    flags = [str(saved), str(tmp_path / "out.pth"), "--config-file", CONFIG, *SMALL]
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint", *flags])
    monkeypatch.delitem(sys.modules, "nonlocal_det.tools.convert_checkpoint")
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("nonlocal_det.tools.convert_checkpoint", run_name="__main__")
    assert stop.value.code == 0
    assert "8 tensors converted" in capsys.readouterr().out


def test_the_help_names_every_source(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("auto", *SOURCES))


def test_a_hostile_file_is_refused_by_name(run, tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    torch.save({"model": Hostile()}, tmp_path / "evil.pth")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps({"blobs": Hostile()}, 2))
    for name in ("evil.pth", "evil.pkl"):
        assert refused(run(tmp_path / name), name, f"{os.system.__module__}.system")
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--from", "caffe3"], "--from caffe3: not known; write auto or one of authors"),
        (["--from", "torchvision"], "not those of torchvision's ResNet; they look like mmdetection"),
        (["--to", "caffe2"], "invalid choice: 'caffe2'"),
        (["--place", "res4.5"], "write PREFIX=PLACE"),
        (["--place", "nl=res4.5"], "no such block in the file; there are ''"),
        (["--place", "=stem.1"], "'stem.1' is no place for a block; write one such as res4.5"),
        (["--unpadded-poool"], "unrecognized arguments"),
        (["--base", "none.pth"], "none.pth"),
    ],
)
def test_wrong_flags(run, saved, flags, message):
    assert refused(run(saved, *flags), message)


def test_wrong_settings(run, saved, tmp_path):
    assert refused(run(saved, config="none.yaml"), "none.yaml")
    assert refused(run(saved, small=["--opts", "MODEL.NONLOCAL.POOL"]), "KEY VALUE")
    assert refused(
        run(saved, small=[]), "another shape", "(32, 64, 1, 1) in the file, (512, 1024, 1, 1) in the model"
    )
    assert refused(run(saved, "--place", "=res5.1"), "another shape")  # res5 has more channels
    assert refused(run(saved, "--place", "=res4.9"), "MODEL.NONLOCAL.RES4", "outside the stage")
    assert refused(run(tmp_path / "none.pth"), "none.pth")
    assert not (tmp_path / "out.pth").exists()


def test_wrong_outputs(run, saved, tmp_path):
    before = saved.read_bytes()
    assert refused(run(saved, out="in.pth"), "is read for the conversion")
    assert refused(run(saved, "--overwrite", out="in.pth"), "is read for the conversion")
    os.symlink(saved, tmp_path / "link.pth")
    assert refused(run(saved, "--overwrite", out="link.pth"), "is read for the conversion")
    (tmp_path / "mine.yaml").write_text(f"_BASE_: {CONFIG_ROOT / CONFIG}\n")
    result = run(saved, "--overwrite", out="mine.pth", config=tmp_path / "mine.yaml")
    assert refused(result, "mine.yaml: is read for the conversion")
    assert refused(run(saved, out="out.pkl"), "give .pth or .safetensors")
    (tmp_path / "out.yaml").write_text("mine")
    assert refused(run(saved), "out.yaml: exists", "--overwrite")
    assert (tmp_path / "out.yaml").read_text() == "mine"
    assert run(saved, "--overwrite")[0] == 0
    assert "_BASE_" in yaml.safe_load((tmp_path / "out.yaml").read_text())
    (tmp_path / "folder.pth").mkdir()
    assert refused(run(saved, "--overwrite", out="folder.pth"), "exists")
    assert saved.read_bytes() == before


def test_a_failed_write_leaves_nothing(run, saved, tmp_path, monkeypatch):
    def fail(model, path):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device", str(path))

    run(saved)
    before = (tmp_path / "out.pth").read_bytes()
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        run(saved, "--overwrite")
    assert (tmp_path / "out.pth").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pth", "out.pth", "out.yaml"]


def test_blocks_that_do_not_agree(run, tmp_path):
    def check(tensors, *parts, flags=()):
        torch.save(tensors, tmp_path / "in.pth")
        assert refused(run(tmp_path / "in.pth", *flags), *parts)

    two = ("--place", "a=res4.2", "--place", "b=res4.3")
    check(block("a.") | block("b."), "the config asks for 1", "--place a=res4.5")
    check(block("a.") | block("b."), "two blocks", "res4.non_local_2", flags=[*two[:3], "b=res4.2"])
    with_norm = block("b.") | {f"b.conv_out.bn.{leaf}": torch.ones(C) for leaf in ("weight", "bias")}
    check(block("a.") | with_norm, "'a' and 'b' differ", flags=two)
    pooled = {
        name.replace("g.", "g.0.").replace("phi.", "phi.0."): value for name, value in block("b.").items()
    }
    check(block("a.") | pooled, "some blocks of the file pool and some do not", flags=two)
    check(
        block("") | {"g.0.conv.weight": torch.ones(INNER, C, 1, 1)}, "both g.conv.weight and g.0.conv.weight"
    )
    check(block("") | {"g.conv.weight": torch.ones(INNER, C, 3, 3)}, "a block's convs are 1x1")
    check(block("") | {"g.conv.weight": torch.ones(48, C, 1, 1)}, "64 channels and 48 inside")
    lacking = block("")
    del lacking["phi.conv.weight"]
    check(lacking, "phi.weight: not in the file")
    check(block("") | {"head.weight": torch.ones(1)}, "1 of their tensors have no place", "head.weight")
    check({"state_dict": {}}, "no weights by name")
    check({"a": torch.ones(1)}, "whose they are cannot be told by their names (a, ...)")
    check({"model": [1]}, "in.pth")


def damaged(kind):
    """A SlowFast block with one thing wrong."""
    tensors = {}
    for part in ("g", "theta", "phi", "out"):
        shape = (C, INNER) if part == "out" else (INNER, C)
        tensors[f"nl.conv_{part}.weight"] = torch.randn(*shape, 1, 1, 1)
        tensors[f"nl.conv_{part}.bias"] = torch.randn(shape[0])
    for leaf in ("weight", "bias", "running_mean", "running_var"):
        tensors[f"nl.bn.{leaf}"] = torch.ones(C)
    if kind in ("nl.bn.running_mean", "nl.conv_phi.bias", "nl.conv_theta.weight"):
        del tensors[kind]
    elif kind == "int8":
        tensors["nl.conv_g.weight"] = tensors["nl.conv_g.weight"].to(torch.int8)
    elif kind == "NaN":
        tensors["nl.conv_g.weight"][3] = torch.nan
    elif kind == "swapped":
        tensors["nl.conv_g.weight"] = tensors["nl.conv_g.weight"].transpose(0, 1)
    elif kind == "twice":
        tensors["nl.norm.weight"] = torch.ones(C)
    return tensors


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("whole", None),
        ("nl.bn.running_mean", "w_z.norm.running_mean: not in the file"),
        ("nl.conv_phi.bias", "phi.bias: not in the file"),
        ("nl.conv_theta.weight", "theta.weight: not in the file"),
        ("int8", "nl.conv_g.weight holds numbers of int8"),
        ("NaN", "nl.conv_g.weight holds NaN"),
        ("swapped", "has 32 channels and 64 inside"),
        ("twice", "both nl.bn.weight and nl.norm.weight would become w_z.norm.weight"),
    ],
)
def test_a_damaged_file_ends_in_one_line_and_no_output(run, tmp_path, suffix, kind, message):
    tensors = {name: value.contiguous() for name, value in damaged(kind).items()}
    path = tmp_path / f"in{suffix}"
    if suffix == ".pth":
        torch.save({"model_state": tensors}, path)
    else:
        pytest.importorskip("safetensors.torch").save_file(tensors, path)
    result = run(path, out=f"out{suffix}")
    if message is None:
        assert (result[0], result[2]) == (0, "")
        assert "  (not in the file) 1 filled in: counter" in result[1]
        assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, f"out{suffix}", "out.yaml"]
    else:
        assert refused(result, path.name, message)
        assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_a_checkpoint(run, tmp_path):
    for content in (b"", b"\x89PNG\r\n\x1a\n", b"PK\x03\x04 not a zip"):
        (tmp_path / "in.pth").write_bytes(content)
        assert refused(run(tmp_path / "in.pth"), "in.pth")
    assert refused(run(tmp_path), str(tmp_path))  # a folder
