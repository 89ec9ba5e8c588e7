"""Fast maths: within the bounds of the approximate instructions it is built on, and of nothing else.

Faults this catches: a bound that an H200's instructions do not keep, an exponential that overflows before it is
multiplied by 0, a constant that is a little off, fast maths where it has no form, an approximation in a kernel of exact
maths, or one in fast maths beyond those two.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import ActiveDevice, failure, kernel_examples, space, thorough
from moe_numerics.fused import compilation, maths
from test_ptx_scan import forbidden, instructions

from moe_numerics.activation_errors import FUNCTIONS, measure
from moe_numerics.cases import Case
from moe_numerics.fast_errors import EX2_ERROR, RCP_ERROR
from moe_numerics.paths import find_path, match_paths
from moe_numerics.running import run_case
from moe_numerics.strategies import cases
from moe_numerics.virtual_gpu import silicon_tables

PATHS = (
    ("swiglu.fwd.mxfp8_e4m3.fast", "virtual:sm_90a"),
    ("swiglu.bwd.bf16.fast", "virtual:sm_100a"),
    ("qgelu.bwd.bf16.fast", "virtual:sm_90a"),
    ("geglu.bwd.mxfp8_e4m3.fast", "virtual:sm_90a"),
)


def approximate(name: str, x: torch.Tensor) -> torch.Tensor:
    """What `name.approx.ftz.f32` gives on an H200, float64."""
    return silicon_tables.evaluate("sm_90a", name, x.view(torch.int32), True).view(torch.float32).double()


def test_the_instructions_of_an_h200_keep_to_their_bounds() -> None:
    """Significands of rcp, fractions of ex2 (every one in the thorough profile): exponents only shift them."""
    step = 1 if thorough() else 32
    significands = torch.arange(0x3F800000, 0x40000000, step, dtype=torch.int32).view(torch.float32)
    reciprocal = approximate("rcp", significands)
    ulp = torch.where(significands == 1, 1.0, 0.5) * 2.0**-23
    assert float(((reciprocal - 1 / significands.double()).abs() / ulp).max()) <= 1
    assert float((reciprocal * significands.double() - 1).abs().max()) <= RCP_ERROR
    assert float(reciprocal[0]) == 1
    fractions = torch.arange(0, 1 << 23, step, dtype=torch.int32).float() * 2.0**-23
    for x in (fractions, -fractions):
        exact = torch.from_numpy(np.exp2(x.double().numpy()))
        assert float((approximate("ex2", x) / exact - 1).abs().max()) <= EX2_ERROR


@pytest.mark.parametrize("name", ["silu", "silu'", "gelu'", "qgelu'"])
def test_the_table_holds_what_is_derived(name: str) -> None:
    from moe_numerics.activation_errors import error_of

    assert FUNCTIONS[name].fast is not None
    assert measure(name, "fast") == error_of(name, "fast")


@pytest.mark.parametrize(("path_id", "device"), PATHS, indirect=["device"])
@kernel_examples()
@given(data=st.data())
def test_drawn_cases_are_inside_the_bounds(path_id: str, device: ActiveDevice, data: st.DataObject) -> None:
    path = find_path(path_id)
    case = data.draw(cases(space(path)))
    result = run_case(path, case, path.contract("suite"), device)
    assert result.passed, failure(result)
    assert {finding.grade for finding in result.findings} <= {"bounded", "unchecked"}


@pytest.mark.parametrize("device", ["virtual:sm_90a", "virtual:sm_100a"], indirect=True)
def test_no_float_instruction_but_two_is_approximate(device: ActiveDevice) -> None:
    path = find_path("swiglu.bwd.mxfp8_e4m3.fast")
    case = Case(path.id, (3,), 64, prob=True)
    contract = path.contract("suite")
    with compilation.recording() as compiled:
        tensors = case.tensors(path.inputs)
        path.operation.fused(case, tensors, contract, path.operation.reference(case, tensors, contract))
    (ptx,) = (each.ptx for each in compiled)
    approximations = [opcode for _, opcode in instructions(ptx) if ".approx" in opcode]
    assert set(approximations) == {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"}
    rest = "\n".join(line for line in ptx.splitlines() if ".approx" not in line)
    assert forbidden(rest) == []


def test_fast_paths_are_graded_bounded() -> None:
    paths = match_paths("*.fast")
    assert {path.maths for path in paths} == {"fast"}
    assert {grade for path in paths for grade in path.profiles.values()} == {"bounded"}
    assert {path.contract("suite").maths for path in paths} == {"fast"}
    assert find_path("swiglu.fwd.bf16").contract("suite").maths == "exact"


def test_a_target_says_its_maths() -> None:
    assert maths.is_fast("sm_90a" + maths.FAST)
    assert not maths.is_fast("sm_90a")
