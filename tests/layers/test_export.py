"""The block leaves Python: TorchScript, torch.export, ONNX with onnxruntime, torch.compile."""

import shutil
import warnings

import pytest
import torch
from torch import nn

from nonlocal_det.layers import PAIRWISE_FUNCTIONS, POOLS, NonLocalBlock, evaluate_with

SIZES = [(9, 13), (16, 7), (5, 5), (64, 65)]  # odd sizes; the last is above the matrix budget without a pool
CASES = [(pairwise, "input") for pairwise in PAIRWISE_FUNCTIONS]
CASES += [("embedded_gaussian", "embedding"), ("embedded_gaussian", "none"), ("concatenation", "none")]


def make_block(pairwise, pool="input", ndim=2, norm="BN"):
    torch.manual_seed(0)
    block = NonLocalBlock(8, ndim=ndim, pairwise=pairwise, pool=pool, norm=norm).eval()
    nn.init.normal_(block.w_z.weight)
    if norm:
        nn.init.normal_(block.w_z.norm.weight)
    return block


def assert_parity(exported, block, sizes=SIZES, batch=1):
    for size in sizes:
        x = torch.randn(batch, 8, *size)
        with torch.no_grad(), evaluate_with("matrix"):
            expected = block(x)
        torch.testing.assert_close(exported(x), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(autouse=True)
def _only_news():
    """The exporters warn about themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(("pairwise", "pool"), CASES)
def test_script(pairwise, pool):
    block = make_block(pairwise, pool)
    scripted = torch.jit.script(block)
    with torch.no_grad():
        assert_parity(scripted, block, [*SIZES, (1, 1), (1, 6)], batch=2)


@pytest.mark.parametrize("norm", ["", "GN", "LN"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
def test_script_of_every_rank_and_norm(pairwise, ndim, norm, tmp_path):
    block = make_block(pairwise, ndim=ndim, norm=norm)
    torch.jit.script(block).save(tmp_path / "block.pt")
    loaded = torch.jit.load(tmp_path / "block.pt")
    with torch.no_grad():
        assert_parity(loaded, block, [(5, 7, 3)[:ndim]])


@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
def test_a_scripted_block_trains(pairwise):
    block = make_block(pairwise).double()
    x = torch.randn(2, 8, 5, 6, dtype=torch.float64)
    parameters = list(block.parameters())
    expected = torch.autograd.grad(block(x).square().sum(), parameters, retain_graph=True)
    actual = torch.autograd.grad(torch.jit.script(block)(x).square().sum(), parameters)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("pairwise", "pool"), CASES)
def test_trace(pairwise, pool):
    block = make_block(pairwise, pool)
    traced = torch.jit.trace(block, torch.randn(1, 8, 12, 14))
    with torch.no_grad():
        assert_parity(traced, block, batch=2)


@pytest.mark.parametrize(("pairwise", "pool"), CASES)
def test_torch_export(pairwise, pool):
    block = make_block(pairwise, pool)
    height, width = torch.export.Dim("height", min=4, max=512), torch.export.Dim("width", min=4, max=512)
    program = torch.export.export(
        block, (torch.randn(1, 8, 12, 14),), dynamic_shapes=({2: height, 3: width},)
    )
    assert_parity(program.module(), block)


@pytest.mark.parametrize(("pairwise", "pool"), CASES[:5])
def test_onnx(pairwise, pool, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    block = make_block(pairwise, pool)
    height, width = torch.export.Dim("height", min=4, max=512), torch.export.Dim("width", min=4, max=512)
    path = str(tmp_path / "block.onnx")
    torch.onnx.export(
        block,
        (torch.randn(1, 8, 12, 14),),
        path,
        dynamo=True,
        input_names=["x"],
        dynamic_shapes=({2: height, 3: width},),
        verbose=False,
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert_parity(lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), block)


@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
def test_onnx_by_tracing(pairwise, tmp_path):
    """The older exporter, which Detectron2's own tools use."""
    onnxruntime = pytest.importorskip("onnxruntime")
    block = make_block(pairwise)
    path = str(tmp_path / "block.onnx")
    torch.onnx.export(
        block,
        (torch.randn(1, 8, 12, 14),),
        path,
        dynamo=False,
        opset_version=17,
        input_names=["x"],
        dynamic_axes={"x": {2: "height", 3: "width"}},
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert_parity(lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), block)


def assert_compiled_parity(pairwise, **options):
    block = make_block(pairwise, norm="")
    compiled = torch.compile(block, fullgraph=True, **options)
    x = torch.randn(2, 8, 9, 11, requires_grad=True)
    leaves = [x, *block.parameters()]
    expected = torch.autograd.grad(block(x).square().mean(), leaves)
    actual = torch.autograd.grad(compiled(x).square().mean(), leaves)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
def test_compile_captures_one_graph(pairwise):
    assert_compiled_parity(pairwise, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
def test_compile(pairwise):
    assert_compiled_parity(pairwise)


@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
@pytest.mark.parametrize("pool", POOLS)
def test_traced_graph_has_no_custom_autograd(pairwise, pool):
    """Operation counters that read the trace would count it as nothing."""
    block = make_block(pairwise, pool)
    graph = torch.jit.trace(block, torch.randn(1, 8, 64, 65)).inlined_graph
    assert "PythonOp" not in str(graph)
