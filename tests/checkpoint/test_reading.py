"""Hostile, damaged and foreign weight files."""

import collections
import io
import os
import pickle
import struct

import numpy as np
import pytest
import torch

from nonlocal_det.checkpoint.reading import read_checkpoint
from nonlocal_det.errors import CheckpointError

# What Python 2's cPickle wrote, protocol 2, for {'blobs': {'w': numpy.array([[1, 2]], '<f4')}}: every string
# is a byte string (U), the array's data too.
PYTHON_2 = (
    b"\x80\x02}q\x01U\x05blobsq\x02}q\x03U\x01wq\x04cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\n"
    b"q\x06K\x00\x85U\x01b\x87Rq\x07(K\x01K\x01K\x02\x86cnumpy\ndtype\nq\x08U\x02f4K\x00K\x01\x87Rq\t(K\x03U\x01<"
    b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x08" + struct.pack("<2f", 1, 2) + b"tbss."
)


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, command, function=os.system):
        self.call = function, (command,)

    def __reduce__(self):
        return self.call


class Nested:
    """Asks for a harmless class, and for a hostile one as its state."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return collections.OrderedDict, (), {"weight": [(1, Hostile(self.command))]}


@pytest.fixture
def command(tmp_path):
    """A command that leaves a file behind; that it did not run is checked at the end."""
    trace = tmp_path / "executed"
    yield f"touch {trace}"
    assert not trace.exists()


def dump(protocol, value, path):
    path.write_bytes(pickle.dumps(value, protocol))
    return path


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_of_arrays_are_read_in_every_protocol(tmp_path, protocol):
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    value = collections.OrderedDict(
        plain=matrix,
        transposed=matrix.T,
        big_endian=matrix.astype(">f8"),
        half=matrix.astype(np.float16),
        counter=np.array(7),  # an array of no axes, as batch norms count
        empty=np.zeros((0, 4)),
        number=np.float32(0.5),
        nested={"lr": 0.1, "steps": [1, (2, "three")]},
    )
    found = read_checkpoint(dump(protocol, value, tmp_path / "a.pkl"))
    assert list(found) == list(value)
    for name in ("plain", "transposed", "big_endian", "half", "counter", "empty"):
        assert type(found[name]) is np.ndarray
        assert found[name].shape == value[name].shape
        assert found[name].dtype == value[name].dtype.newbyteorder("=")
        np.testing.assert_array_equal(found[name], value[name])
    assert found["number"] == 0.5
    assert found["nested"] == value["nested"]


def test_a_pickle_of_python_2_is_read(tmp_path):
    (tmp_path / "a.pkl").write_bytes(PYTHON_2)
    found = read_checkpoint(tmp_path / "a.pkl")
    np.testing.assert_array_equal(found["blobs"]["w"], [[1, 2]])


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch_save_are_read_whatever_their_name(tmp_path, zipped):
    state = torch.nn.BatchNorm2d(2).state_dict()
    saved = {"model": state, "iteration": 3, "best": np.float64(0.5), "seen": np.array([1, 2])}
    torch.save(saved, tmp_path / "a.pkl", _use_new_zipfile_serialization=zipped)
    found = read_checkpoint(tmp_path / "a.pkl")
    torch.testing.assert_close(dict(found["model"]), dict(state))
    assert found["model"]._metadata[""]["version"] == 2
    assert (found["iteration"], found["best"], list(found["seen"])) == (3, 0.5, [1, 2])


def test_safetensors_are_read(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"a": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "a.bin")
    (tmp_path / "a.bin").rename(tmp_path / "a.pth")
    torch.testing.assert_close(read_checkpoint(tmp_path / "a.pth")["a"], torch.ones(2, dtype=torch.bfloat16))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("make", [Hostile, Nested, lambda command: np.array([Hostile(command)], object)])
def test_a_pickle_that_calls_something_is_refused_by_name(tmp_path, command, protocol, make):
    path = dump(protocol, {"model": {"weight": make(command)}}, tmp_path / "evil.pkl")
    with pytest.raises(CheckpointError, match=rf"{path}.*{os.system.__module__}\.system") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pth_that_calls_something_is_refused_by_name(tmp_path, command, zipped):
    torch.save({"model": Hostile(command)}, tmp_path / "evil.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=rf"evil\.pth.*{os.system.__module__}\.system"):
        read_checkpoint(tmp_path / "evil.pth")


@pytest.mark.parametrize(
    ("function", "name"), [(eval, "eval"), (exec, "exec"), (getattr, "getattr"), (__import__, "__import__")]
)
def test_builtins_are_refused(tmp_path, function, name):
    path = dump(2, {"a": Hostile("1", function)}, tmp_path / "evil.pkl")
    with pytest.raises(CheckpointError, match=rf"\.{name};"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # GLOBAL, REDUCE
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",  # STACK_GLOBAL
        b"\x80\x02cos\nsystem\nU\x04true\x85\x81.",  # NEWOBJ
        b"\x80\x04\x8c\x0bcollections\x8c\x15OrderedDict.__class__\x93.",  # a path below an allowed name
        b"cnumpy.core.multiarray\nset_string_function\n.",  # a neighbour of an allowed name
        b"c_codecs\ndecode\n.",
        b"\x80\x04\x8c\x02os\x8c\x08sys\ntem\x1b\x93.",  # a name that would spoil the message
    ],
)
def test_every_way_to_name_a_function_is_refused(tmp_path, code):
    (tmp_path / "evil.pkl").write_bytes(code)
    with pytest.raises(CheckpointError, match="refused, as loading it would call") as caught:
        read_checkpoint(tmp_path / "evil.pkl")
    assert str(caught.value).isprintable()


ARRAY = (
    b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
    b"(I1\n(I%d\ntcnumpy\ndtype\n(S'%s'\ntR"
)


@pytest.mark.parametrize(
    "code",
    [
        ARRAY % (1, b"O8") + b"I00\nS'AAAAAAAA'\ntb.",  # objects, whose bytes would be pointers
        ARRAY % (1, b"V8") + b"I00\nS'AAAAAAAA'\ntb.",
        ARRAY % (9, b"f8") + b"I00\nS'AAAAAAAA'\ntb.",  # fewer bytes than the shape says
        ARRAY % (-1, b"f8") + b"I00\nS'AAAAAAAA'\ntb.",
        ARRAY % (1, b"f8") + b"I00\n(lI1\natb.",  # a list for bytes
        b"I1\nr\xff\xff\xff\x7f.",  # a memo of 2^31 places
        b"cnumpy\nndarray\n.",
        b"cnumpy\ndtype\n(S'f8'\ntR.",
        b"c_codecs\nencode\n(S'a'\nS'zlib_codec'\ntR.",
    ],
)
def test_arrays_that_lie_are_not_believed(tmp_path, code):
    (tmp_path / "evil.pkl").write_bytes(b"(dS'w'\n" + code[:-1] + b"s.")
    with pytest.raises(CheckpointError, match="not a checkpoint, or damaged"):
        read_checkpoint(tmp_path / "evil.pkl")


def test_a_type_whose_state_says_that_it_holds_objects_stays_a_number(tmp_path):
    code = ARRAY % (1, b"f8") + b"(I3\nS'|'\nNNNI-1\nI-1\nI63\ntbI00\nS'AAAAAAAA'\ntb."
    (tmp_path / "a.pkl").write_bytes(b"(dS'w'\n" + code[:-1] + b"s.")
    found = read_checkpoint(tmp_path / "a.pkl")["w"]
    assert found.dtype == np.float64
    assert found.tobytes() == b"AAAAAAAA"


def test_one_file_cannot_change_how_the_next_is_read(tmp_path):
    # BUILD with a pair sets attributes on whatever lies on the stack, here on an allowed function.
    evil = b"(dS'a'\nccollections\nOrderedDict\n(N(dS'__defaults__'\nI1\nstbs."
    (tmp_path / "evil.pkl").write_bytes(evil)
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "evil.pkl")
    good = dump(2, collections.OrderedDict(a=np.ones(2)), tmp_path / "good.pkl")
    np.testing.assert_array_equal(read_checkpoint(good)["a"], [1, 1])


def test_containers_that_hold_themselves_end(tmp_path):
    loop = {"w": np.ones(1)}
    loop["self"] = [loop]
    found = read_checkpoint(dump(2, loop, tmp_path / "a.pkl"))
    assert found["self"][0]["w"] is found["w"]


def test_a_truncated_file_is_damaged_at_every_length(tmp_path):
    whole = {}
    for name, save in {
        "a.pth": lambda file: torch.save({"w": torch.ones(3)}, file),
        "b.pth": lambda file: torch.save({"w": torch.ones(3)}, file, _use_new_zipfile_serialization=False),
        "c.pkl": lambda file: pickle.dump({"w": np.ones(3)}, file),
    }.items():
        save(buffer := io.BytesIO())
        whole[name] = buffer.getvalue()
    for name, data in whole.items():
        for length in (*range(1, 40, 3), len(data) // 2, len(data) - 9, len(data) - 1):
            (tmp_path / name).write_bytes(data[:length])
            with pytest.raises(CheckpointError, match=name):
                read_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    "content", [b"", b"GIF89a", b"<html>404</html>", b"\x00" * 64, b"I1\n.", b"(lI1\na."]
)
def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "a.pkl").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.pkl") as caught:
        read_checkpoint(tmp_path / "a.pkl")
    assert "\n" not in str(caught.value)


def test_a_module_or_a_missing_file(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pth")
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.linear\.Linear.*state_dict"):
        read_checkpoint(tmp_path / "module.pth")
    with pytest.raises(FileNotFoundError):
        read_checkpoint(tmp_path / "none.pth")
