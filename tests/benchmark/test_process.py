import os
import signal
import subprocess
import sys

import pytest
import torch

pytest.importorskip("detectron2")

from nonlocal_det.benchmark.process import Runner, seconds_in_turn
from nonlocal_det.errors import MeasurementError

MIB = 1 << 20


class Allocate:
    """A step that holds some memory, and then needs more for a moment."""

    def __init__(self, held, extra):
        self.device = torch.device("cpu")
        self.held, self.extra = torch.ones(held * MIB // 4), extra
        self.info = os.getpid()

    def warm_up(self):
        torch.ones(50 * MIB // 4)  # must not count

    def __call__(self):
        torch.ones(self.extra * MIB // 4)


class Fail:
    def __init__(self, how):
        self.device, self.how = torch.device("cpu"), how

    def warm_up(self):
        pass

    def __call__(self):
        if self.how == "memory":
            torch.empty(1 << 60)
        elif self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("broken")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells resident memory")
def test_memory_is_the_peak_above_what_is_held():
    with Runner(Allocate, 30, 20) as runner:
        assert runner.memory / MIB == pytest.approx(20, abs=1.5)


def test_each_in_a_process_of_its_own():
    with Runner(Allocate, 1, 1) as first, Runner(Allocate, 1, 1) as second:
        assert len({first.info, second.info, os.getpid()}) == 3
        assert first.seconds() > 0


@pytest.mark.parametrize("how", ["memory", "killed"])
def test_out_of_memory_is_one_line(how):
    with pytest.raises(MeasurementError, match="memory ran out") as caught:
        Runner(Fail, how)
    assert "\n" not in str(caught.value)


def test_other_failures_show_their_traceback():
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*ZeroDivisionError: broken"):
        Runner(Fail, "otherwise")


class Recorded:
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def seconds(self):
        self.calls.append(self.name)
        return 1.0


def test_turns_change_their_order():
    calls = []
    runners = [Recorded("a", calls), Recorded("b", calls)]
    assert seconds_in_turn(runners, 3) == [[1.0] * 3, [1.0] * 3]
    assert "".join(calls) == "abbaab"


def test_stops_when_the_time_is_up():
    runners = [Recorded("a", []), Recorded("b", [])]
    assert seconds_in_turn(runners, 9, least_rounds=2, budget_s=0)[0] == [1.0] * 2


def test_imports_leave_cuda_alone():
    """A process that has asked for CUDA devices cannot fork others that use them."""
    code = (
        "import torch; torch._C._cuda_getDeviceCount = lambda: 1 / 0\n"
        "import nonlocal_det.benchmark.block, nonlocal_det.benchmark.detector"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
