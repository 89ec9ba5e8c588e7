"""A thread's registers do not depend on which threads its instructions ran together with.

Faults this catches: a register that keeps what another fragment wrote, loses what one wrote before the threads met
again, or is seen by a fragment that did not write it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.virtual_gpu import micro, virtual_gpu

Words = npt.NDArray[np.uint32]
THREADS, REGISTERS = 96, 3
_REGISTER = st.integers(0, REGISTERS - 1)
# (operation, result, two sources, the first and the last lane number of those that take part, whether by a branch)
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(("add", "xor", "mov")), _REGISTER, _REGISTER, _REGISTER,
        st.integers(0, 32), st.integers(-1, 31), st.booleans(),
    ),
    max_size=8,
)  # fmt: skip
Step = tuple[str, int, int, int, int, int, bool]


def statement(steps: list[Step]) -> str:
    """The steps as PTX on registers %x0 to %x2, which begin as multiples of the operand."""
    lines = [".reg .b32 %x<3>; .reg .b32 %lane; .reg .pred %p, %q; mov.u32 %lane, %laneid;"]
    lines += [f"mul.lo.u32 %x{k}, {{a0}}, {k + 1};" for k in range(REGISTERS)]
    for n, (name, d, a, b, low, high, branch) in enumerate(steps):
        operation = f"mov.b32 %x{d}, %x{a};" if name == "mov" else f"{name}.b32 %x{d}, %x{a}, %x{b};"
        operation = operation.replace("add.b32", "add.u32")
        lines.append(f"setp.ge.u32 %p, %lane, {low}; setp.le.s32 %q, %lane, {high}; and.pred %p, %p, %q;")
        lines.append(f"@!%p bra L{n}; {operation} L{n}:" if branch else f"@%p {operation}")
    lines += [f"mov.b32 {{d{k}}}, %x{k};" for k in range(REGISTERS)]
    return " ".join(lines)


def expected(steps: list[Step], x: Words) -> list[Words]:
    """What each thread computes on its own."""
    registers = [x * np.uint32(k + 1) for k in range(REGISTERS)]
    lane = np.arange(x.size) % 32
    for name, d, a, b, low, high, _ in steps:
        left, right = registers[a], registers[b]
        result = {"add": left + right, "xor": left ^ right, "mov": left}[name]
        registers[d] = np.where((lane >= low) & (lane <= high), result, registers[d])
    return registers


@pytest.mark.parametrize("schedule", ["fast", 3])
@given(steps=_STEPS, missing=st.sampled_from((0, 1, 40)))
def test_registers_are_per_thread(schedule: str | int, steps: list[Step], missing: int) -> None:
    """`missing` threads at the end leave at once, so that the others are a fragment from the start."""
    x = np.arange(7, 7 + THREADS - missing, dtype=np.uint32)
    with virtual_gpu("sm_90a", schedule=schedule) as gpu:
        got = micro.run(gpu, statement(steps), ("u32",) * REGISTERS, [("u32", x)], THREADS)
    for register, want in zip(got, expected(steps, x), strict=True):
        np.testing.assert_array_equal(register, want)
