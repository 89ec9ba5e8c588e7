"""`check`, `@kernel` and the pytest plugin judge other people's kernels: right ones pass, wrong ones are explained."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from moe_numerics.reference import elementwise, mxfp8
from moe_numerics.reference.formats import E4M3

import moe_numerics
from moe_numerics.cases import Case
from moe_numerics.checking import KernelError, UnexplainedBits, binding
from moe_numerics.drawing import draw_cases
from moe_numerics.paths import PathError
from moe_numerics.strategies import cases

CASE = Case("quantize.mxfp8_e4m3", counts=(3, 0, 40), hidden=64)


def quantised(scale_rule: str = "rceil"):  # type: ignore[no-untyped-def]
    contract = moe_numerics.profile("suite").replace(scale_rule=scale_rule)

    @moe_numerics.kernel("quantize.mxfp8_e4m3", inputs={"x": "x", "offsets": "offs"}, outputs={"codes": 0, "scales": 1})
    def mine(x: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        copy = mxfp8.quantize(x, -1, E4M3, contract)
        return copy.codes, copy.scales

    return mine


def test_a_right_kernel_passes() -> None:
    """Fault: a check that fails whatever it is given."""
    result = moe_numerics.check(quantised(), cases=6)
    assert result.passed
    result.raise_if_unexplained()
    assert {finding.output for finding in result} >= {"codes_rowwise", "scales_rowwise"}


def test_a_wrong_scale_rule_is_found_and_named() -> None:
    """Fault: a tolerance wide enough for a scale that is off by one exponent."""
    result = moe_numerics.check(quantised("floor"), cases=6)
    assert not result.passed
    assert result.nearest == "100% bit-equal under scale_rule=floor"
    with pytest.raises(UnexplainedBits, match="scales_rowwise"):
        result.raise_if_unexplained()


def test_padding_that_the_caller_zeroes_may_be_read() -> None:
    """Fault: a kernel judged on padding that its profile says holds zeros, or one that reads padding and may not."""

    def reads_padding(x: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        del counts
        return torch.stack([part.float().abs().nan_to_num(0).amax() for part in parts(x, offsets)])

    def parts(x: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
        return [torch.nn.functional.pad(x[a:b], (0, 0, 0, 1)) for a, b in itertools.pairwise(offsets.tolist())]

    names = {"x": "x", "offsets": "offsets", "counts": "counts"}
    mine = moe_numerics.kernel("quantize.mxfp8_e4m3", names, {"amax": 0}, profile="te")(reads_padding)
    finite = dataclasses.replace(binding(mine).space(), kinds=("gaussian",), allow_specials=False, max_elements=3000)
    assert finite.fills == ("zero",)
    drawn = draw_cases(12, 1, dataclasses.replace(finite, paddings=(True,)))
    assert moe_numerics.check(mine, cases=drawn).passed
    poisoned = [case.replace(padding_fill="inf", room=40) for case in drawn]
    assert not moe_numerics.check(mine, cases=poisoned).passed


def test_outputs_that_are_not_returned_are_unchecked() -> None:
    """Fault: outputs that nobody compared are counted as right."""
    result = moe_numerics.check(quantised(), cases=CASE)
    unchecked = {finding.output for finding in result if finding.unchecked}
    assert unchecked == {"codes_colwise", "scales_colwise", "amax"}


def test_cases_may_be_a_strategy() -> None:
    """Fault: a strategy is taken for a list."""
    mine = quantised()
    result = moe_numerics.check(mine, cases=cases(binding(mine).space()))
    assert result.passed
    assert result.cases > 1


def test_names_of_the_path_need_no_decorator() -> None:
    """Fault: an undecorated function with the path's own names is refused."""

    def plain(x: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor | None) -> dict[str, torch.Tensor]:
        return elementwise.quantize(x, offsets, counts, element=E4M3)

    space = dataclasses.replace(binding(plain, "quantize.mxfp8_e4m3").space(), alignments=(1,))
    assert moe_numerics.check(plain, "quantize.mxfp8_e4m3", cases=draw_cases(4, 1, space)).passed


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda x: 1 / 0, "raised ZeroDivisionError"),
        (lambda x: (x,), "returned 1 results"),
        (lambda x: ("codes", "scales"), "expected a tensor"),
        (lambda x: (x.view(torch.uint8), x.view(torch.uint8)), "codes_rowwise"),
        (lambda x: (x.zero_(), x), "wrote into its input"),
        (lambda x: (x.float(), x), "codes_rowwise"),
        (lambda x: None, "returned NoneType: expected one at 0"),
        (lambda x: (x.to(torch.float8_e5m2), x), "returned float8_e5m2 at 0: expected E4M3 codes"),
        (lambda x: (torch.empty_like(x, dtype=torch.uint8, device="meta"), x), "on meta at 0: expected cpu"),
    ],
    ids=[
        "raises",
        "too few results",
        "no tensors",
        "wrong shape",
        "writes into inputs",
        "wrong dtype",
        "nothing",
        "codes of another format",
        "wrong device",
    ],
)
def test_a_broken_callable_is_a_clear_error(body, message: str) -> None:  # type: ignore[no-untyped-def]
    """Fault: a callable that does not do what its binding says ends in a traceback of ours."""

    @moe_numerics.kernel("quantize.mxfp8_e4m3", inputs={"x": "x", "offsets": "offs"}, outputs={"codes": 0, "scales": 1})
    def broken(x: torch.Tensor, offs: torch.Tensor) -> object:
        return body(x)

    with pytest.raises(KernelError, match=message):
        moe_numerics.check(broken, cases=CASE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_kernel_that_needs_an_absent_gpu_says_so() -> None:
    """Fault: a traceback from the making of inputs, which names neither the kernel nor the device."""
    inputs = {"x": "x", "offsets": "offs"}

    @moe_numerics.kernel("quantize.mxfp8_e4m3", inputs, outputs={"codes": 0}, device="cuda")
    def mine(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(KernelError, match="mine needs device cuda, which cannot be used here: "):
        moe_numerics.check(mine, cases=CASE)


def test_codes_may_be_of_torchs_own_types() -> None:
    """Fault: a kernel that returns float8 tensors is refused, or its codes are converted."""

    @moe_numerics.kernel("quantize.mxfp8_e4m3", inputs={"x": "x", "offsets": "offs"}, outputs={"codes": 0, "scales": 1})
    def mine(x: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        copy = mxfp8.quantize(x, -1, E4M3)
        return copy.codes.view(torch.float8_e4m3fn), copy.scales.view(torch.float8_e8m0fnu)

    assert moe_numerics.check(mine, cases=CASE).passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "swiglu.fwd.mxfp8"}, "did you mean"),
        ({"inputs": {"x": "x"}}, "offsets"),
        ({"inputs": {"y": "x", "offsets": "offs"}}, "no input 'y'"),
        ({"outputs": {"nothing": 0}}, "no output 'nothing'"),
        ({"outputs": {}}, "outputs are empty"),
        ({"profile": "nobody"}, "profile 'nobody' is unknown"),
        ({"inputs": {"x": "z", "offsets": "offs"}}, "no argument 'z'"),
    ],
)
def test_a_wrong_binding_is_refused(arguments: dict[str, object], message: str) -> None:
    """Fault: a typing error in a decorator shows only when the kernel runs."""
    right = {"path": "quantize.mxfp8_e4m3", "inputs": {"x": "x", "offsets": "offs"}, "outputs": {"codes": 0}}
    with pytest.raises(PathError, match=message):

        @moe_numerics.kernel(**(right | arguments))  # type: ignore[arg-type]
        def mine(x: torch.Tensor, offs: torch.Tensor) -> None: ...


def test_the_plugin_judges_in_a_users_suite(tmp_path: Path) -> None:
    """Fault: the fixture is not found, passes a wrong kernel, or its failure says nothing."""
    (tmp_path / "test_mine.py").write_text(
        """
import torch, moe_numerics

@moe_numerics.kernel(path="relu.fwd.bf16", inputs={"x": "x", "offsets": "offs"}, outputs={"out": 0})
def right(x, offs):
    return torch.where(x <= 0, torch.zeros_like(x), x)

@moe_numerics.kernel(path="relu.fwd.bf16", inputs={"x": "x", "offsets": "offs"}, outputs={"out": 0})
def wrong(x, offs):
    return x

def test_right(moe_check):
    assert moe_check(right).passed

def test_wrong(moe_check):
    moe_check(wrong)
"""
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--moe-cases", "3", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ran.returncode == 1
    assert "1 failed, 1 passed" in ran.stdout
    assert "UnexplainedBits" in ran.stdout
    assert "first at row" in ran.stdout


def test_the_plugin_loads_neither_torch_nor_cutlass() -> None:
    """Fault: every pytest run on the machine pays for an import that it does not use."""
    code = "import moe_numerics.pytest_plugin, sys; print([m for m in ('torch', 'cutlass') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
