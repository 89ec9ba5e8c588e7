"""Property 2: experts in another order give the same numbers, each in its new place.

Faults this catches: a tile that starts at a multiple of its size instead of at its expert's first row, rows of two
experts in one block, an expert found from the wrong offset, a result that depends on where a row lies.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import (
    ActiveDevice,
    assert_same,
    few_paths,
    given_tensors,
    kernel_examples,
    moved,
    part_of,
    reference_and_kernels,
    space,
    stochastic,
)

from moe_numerics.paths import Path, find_path
from moe_numerics.strategies import cases

# The random bits of stochastic rounding are keyed by the number of the expert, which a permutation changes: then scales
# and amax move, and codes, which another draw rounds, do not (property 12 holds them to their neighbours).
PATHS = [*(path for path in few_paths() if not stochastic(path)), find_path("quantize.nvfp4.rht.sr")]


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.id)
@kernel_examples()
@given(data=st.data())
def test_permuting_experts_permutes_outputs(path: Path, device: ActiveDevice, data: st.DataObject) -> None:
    case = data.draw(cases(space(path)))
    order = data.draw(st.permutations(range(len(case.counts))))
    moved_case = case.replace(counts=tuple(case.counts[e] for e in order), values={})
    regions = [torch.arange(case.offsets[e], case.offsets[e + 1]) for e in order]
    rows = torch.cat([*regions, torch.arange(case.offsets[-1], case.capacity)])
    tensors = moved(path, case.tensors(path.inputs), rows, order)

    contract = path.contract("suite", device.target)
    plain = device.run(path, case, contract).outputs
    permuted = device.run(path, given_tensors(moved_case, tensors), contract).outputs
    for spec in path.outputs_of(case):
        if spec.rows == "buffer" or (stochastic(path) and spec.name.startswith("codes")):
            continue
        for place, expert in enumerate(order):
            assert_same(
                spec,
                part_of(spec, path.experts(case), expert, plain[spec.name]),
                part_of(spec, path.experts(moved_case), place, permuted[spec.name]),
                f"expert {expert} moved to place {place}",
            )
