"""The main loop of the Blackwell grouped GEMMs: TMA in, tcgen05.mma, the epilogues of the Hopper kernels.

Persistent and warp-specialised: one warp loads tiles of both operands into a ring of shared-memory stages, one issues
products whose accumulators stand in tensor memory, and two warpgroups move those into registers, in the places in
which wgmma leaves them, and write the results while the next tile is multiplied. Every output element is one chain of
tcgen05.mma over ascending K with a float32 accumulator, so that its bits are those of
`moe_numerics.reference.tensor_core` for the model that `Operands.accumulator` names.

Rows past the expert's end belong to other experts or to nobody: they are multiplied too, which changes no other row,
and the epilogue stores none of them. Columns past the end likewise. Tokens past the end of a sum are overwritten with
zeros in shared memory, in both operands, so that not even a NaN there counts; NVFP4 codes, which have no NaN, get zeros
as scales there.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint32, pipeline
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cutlass_dsl import T
from moe_numerics.fused.blackwell_operands import LINE_BYTES
from moe_numerics.fused.blackwell_scales import (
    SCALE_THREADS,
    fill_tiles,
    first_block,
    left_lines,
    right_lines,
    scale_address,
    to_tensor_memory,
)
from moe_numerics.fused.gemm_activation import ActivationBackward
from moe_numerics.fused.gemm_epilogue import gather_vectors
from moe_numerics.fused.gemm_problem import ROWS, Place
from moe_numerics.fused.memory import MaybeTensor, store_words
from moe_numerics.fused.tensor_memory import after_thread_sync, before_thread_sync, epilogue_warp, load_accumulators

__all__ = ["blackwell_gemm_kernel", "launch_blackwell_gemm"]

WARPGROUP = 128
EPILOGUE_WARPS = 8
THREADS = WARPGROUP + 32 * EPILOGUE_WARPS
# Of the first warpgroup; its last two warps put scales together.
LOAD_WARP, MULTIPLY_WARP, FIRST_SCALE_WARP = 0, 1, 2
LOAD_REGISTERS = 40
EPILOGUE_REGISTERS = 232
TENSOR_COLUMNS = 512
# Of which the registers of the largest epilogue hold the accumulators at once.
MOST_COLUMNS = 128
# In the last tiles of a sum the inputs of an epilogue are brought into L2, a part in each.
PREFETCHES = 32


@cute.jit
def launch_blackwell_gemm(
    problem: cutlass.Constexpr,
    operands: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    tiling: cutlass.Constexpr,
    left: cute.Tensor,
    right: cute.Tensor,
    left_scales: MaybeTensor,
    right_scales: MaybeTensor,
    offsets: cute.Tensor,
    counts: MaybeTensor,
    tensors: tuple[MaybeTensor, ...],
    multiprocessors: Int32,
    stream: Any,
) -> None:
    """Launch a grouped GEMM of the given problem; `tensors` are the epilogue's."""
    left_major, right_major = problem.majors
    tiled_mma = operands.tiled_mma(problem.majors, tiling.columns)
    left_layout = operands.copied_layout(ROWS, tiling.stages, left_major)
    right_layout = operands.copied_layout(tiling.columns, tiling.stages, right_major)
    load = cpasync.CopyBulkTensorTileG2SOp()
    left_atom, left_tiles = cpasync.make_tiled_tma_atom(
        load, problem.left(left), cute.slice_(left_layout, (None, None, 0)), (ROWS, operands.depth)
    )
    right_atom, right_tiles = cpasync.make_tiled_tma_atom(
        load, problem.right(right), cute.slice_(right_layout, (None, None, 0)), (tiling.columns, operands.depth)
    )
    sizes = problem.sizes(left, right)
    most = problem.most_tiles(left, right, offsets, sizes, tiling)
    blocks = cutlass.max(cutlass.min(most, multiprocessors), Int32(1))
    epilogue.prepare(tensors, stream)
    blackwell_gemm_kernel(
        problem,
        operands,
        epilogue,
        tiling,
        tiled_mma,
        left_layout,
        right_layout,
        left_atom,
        left_tiles,
        right_atom,
        right_tiles,
        left_scales,
        right_scales,
        sizes,
        offsets,
        counts,
        tensors,
    ).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream)
    epilogue.finish(tensors, offsets, counts, stream)


@cute.jit
def _zero_lines(ring: cute.Tensor, rows: cutlass.Constexpr, stage: Int32, first: Int32, lane: Int32) -> None:
    """Zeros for tokens `first` and up in a stage of a ring whose tiles have lines of rows (`ring` unswizzled).

    A line is 128 bytes, which swizzling permutes within itself. A whole warp calls this.
    """
    depth = cute.size(ring, mode=[1])
    elements = 16 * 8 // ring.element_type.width
    groups = rows // (8 * elements)
    for index in cutlass.range(lane, (depth - first) * (groups * 8), 32, unroll=1):
        line = index // 8
        row = (line % groups) * (8 * elements)
        pointer = ring.iterator + cute.crd2idx((row, first + line // groups, stage), ring.layout)
        store_words((pointer + (index % 8) * elements).align(16), [Uint32(0)] * 4)


def _read_anew(register: str) -> Int32:
    """A special register, read wherever this is called.

    A value that lives on from before the roles of warps part would have to fit the registers of all of them: ptxas 13.0
    spills it, as the accumulators fill the low ones of the epilogue.
    """
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [],
            f"mov.u32 $0, %{register};",
            "=r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@cute.kernel
def blackwell_gemm_kernel(
    problem: cutlass.Constexpr,
    operands: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    tiling: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    left_layout: cute.ComposedLayout,
    right_layout: cute.ComposedLayout,
    left_atom: cute.CopyAtom,
    left: cute.Tensor,
    right_atom: cute.CopyAtom,
    right: cute.Tensor,
    left_scales: MaybeTensor,
    right_scales: MaybeTensor,
    sizes: Any,
    offsets: cute.Tensor,
    counts: MaybeTensor,
    tensors: tuple[MaybeTensor, ...],
) -> None:
    """Thread blocks go through the tiles blockIdx.x, blockIdx.x + gridDim.x, ..."""
    stride, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group = warp // (WARPGROUP // 32)
    depth = operands.depth
    # Tiles of scales along a line, and where scales stand in tensor memory.
    tiles_along = operands.blocks // 4
    scale_columns = tiles_along * (ROWS + tiling.columns) // 32
    accumulators = min(2, (TENSOR_COLUMNS - scale_columns) // tiling.columns)

    memory = cutlass.memory.SmemAllocator()
    barriers = memory.allocate_array(cutlass.Int64, 2 * tiling.stages)
    accumulator_barriers = memory.allocate_array(cutlass.Int64, 2 * accumulators)
    holder = memory.allocate_array(Int32, 1)
    width = min(tiling.columns, MOST_COLUMNS if isinstance(epilogue, ActivationBackward) else tiling.columns)
    shared = epilogue.allocate(memory, width)
    stage_bytes = tiles_along * (ROWS + tiling.columns) * 4
    if cutlass.const_expr(operands.scale_block):
        scale_barriers = memory.allocate_array(cutlass.Int64, 2 * tiling.stages)
        scale_ring = memory.allocate_tensor(Uint8, cute.make_layout(stage_bytes * tiling.stages), 128).iterator
    left_ring = memory.allocate_tensor(operands.copied, left_layout.outer, 1024, left_layout.inner)
    right_ring = memory.allocate_tensor(operands.copied, right_layout.outer, 1024, right_layout.inner)

    alone = cute.make_layout((1, 1, 1, 1))
    ring = pipeline.PipelineTmaUmma.create(
        barrier_storage=barriers,
        num_stages=tiling.stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        tx_count=(ROWS + tiling.columns) * LINE_BYTES,
        cta_layout_vmnk=alone,
        defer_sync=True,
    )
    finished = pipeline.PipelineUmmaAsync.create(
        barrier_storage=accumulator_barriers,
        num_stages=accumulators,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_WARPS),
        cta_layout_vmnk=alone,
        defer_sync=True,
    )
    if cutlass.const_expr(operands.scale_block):
        scaling = pipeline.PipelineAsyncUmma.create(
            barrier_storage=scale_barriers,
            num_stages=tiling.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, SCALE_THREADS // 32),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            cta_layout_vmnk=alone,
            defer_sync=True,
        )
    if warp == MULTIPLY_WARP:
        cute.arch.alloc_tmem(TENSOR_COLUMNS, holder)
        cute.arch.relinquish_tmem_alloc_permit()
        before_thread_sync()
    pipeline.pipeline_init_arrive()
    pipeline.pipeline_init_wait()
    after_thread_sync()

    if group == 0:
        cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
        if warp == LOAD_WARP:
            lane = _read_anew("laneid")
            row_tiles = problem.row_tiles(offsets, counts, sizes, tiling, lane)
            tiles = problem.tiles(offsets, row_tiles, sizes, tiling)
            cpasync.prefetch_descriptor(left_atom)
            cpasync.prefetch_descriptor(right_atom)
            filling = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, tiling.stages)
            for index in cutlass.range(_read_anew("ctaid.x"), tiles, stride, unroll=1):
                place = problem.locate(offsets, counts, index, row_tiles, sizes, tiling, lane)
                left_source = cute.local_tile(problem.left_source(left, place, place.first), (ROWS, depth), (0, None))
                right_source = cute.local_tile(
                    problem.right_source(right, place, sizes), (tiling.columns, depth), (0, None)
                )
                left_to, left_from = cpasync.tma_partition(
                    left_atom,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(left_ring, 0, 2),
                    cute.group_modes(left_source, 0, 2),
                )
                right_to, right_from = cpasync.tma_partition(
                    right_atom,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(right_ring, 0, 2),
                    cute.group_modes(right_source, 0, 2),
                )
                depth_tiles = (place.depth + (depth - 1)) // depth
                for k in cutlass.range(depth_tiles, unroll=1):
                    if cutlass.const_expr(epilogue.prefetches):
                        turn = k - (depth_tiles - PREFETCHES)
                        if turn >= 0:
                            epilogue.prefetch(place, Int32(0), sizes.columns, turn, tiling.columns, tensors, lane)
                    ring.producer_acquire(filling)
                    arrived = ring.producer_get_barrier(filling)
                    cute.copy(left_atom, left_from[None, k], left_to[None, filling.index], tma_bar_ptr=arrived)
                    cute.copy(right_atom, right_from[None, k], right_to[None, filling.index], tma_bar_ptr=arrived)
                    filling.advance()
            ring.producer_tail(filling)
        elif warp == MULTIPLY_WARP:
            lane = _read_anew("laneid")
            row_tiles = problem.row_tiles(offsets, counts, sizes, tiling, lane)
            tiles = problem.tiles(offsets, row_tiles, sizes, tiling)
            tensor_pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
            left_major, right_major = problem.majors
            left_fragments = operands.multiplied(tiled_mma, left_ring, True, left_major, left_layout.inner)
            right_fragments = operands.multiplied(tiled_mma, right_ring, False, right_major, right_layout.inner)
            shape = cute.append(tiled_mma.partition_shape_C((ROWS, tiling.columns)), accumulators)
            sums = cute.make_tensor(tensor_pointer, tiled_mma.make_fragment_C(shape).layout)
            left_factors = tensor_pointer.toint() + accumulators * tiling.columns
            right_factors = left_factors + tiles_along * (ROWS // 32)
            reading = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, tiling.stages)
            adding = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, accumulators)
            for index in cutlass.range(_read_anew("ctaid.x"), tiles, stride, unroll=1):
                place = problem.locate(offsets, counts, index, row_tiles, sizes, tiling, lane)
                depth_tiles = (place.depth + (depth - 1)) // depth
                finished.producer_acquire(adding)
                after_thread_sync()
                tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
                for k in cutlass.range(depth_tiles, unroll=1):
                    ring.consumer_wait(reading)
                    after_thread_sync()
                    if cutlass.const_expr(problem.summed_rows):
                        rest = place.depth - k * depth
                        if rest < depth:
                            for tile, rows, layout in (
                                (left_ring, ROWS, left_layout),
                                (right_ring, tiling.columns, right_layout),
                            ):
                                plain = cute.make_tensor(
                                    cute.recast_ptr(tile.iterator, dtype=operands.copied), layout.outer
                                )
                                _zero_lines(plain, rows, reading.index, rest, lane)
                            cute.arch.fence_proxy("async.shared", space="cta")
                            cute.arch.sync_warp()
                    if cutlass.const_expr(operands.scale_block):
                        scaling.consumer_wait(reading)
                        stage = scale_ring + reading.index * stage_bytes
                        to_tensor_memory(stage, left_factors, ROWS, tiles_along)
                        right_stage = stage + tiles_along * ROWS * 4
                        to_tensor_memory(right_stage, right_factors, tiling.columns, tiles_along)
                    for step in cutlass.range_constexpr(cute.size(left_fragments, mode=[2])):
                        if cutlass.const_expr(operands.scale_block):
                            tiled_mma.set(tcgen05.Field.SFA, scale_address(operands, left_factors, ROWS, step))
                            tiled_mma.set(
                                tcgen05.Field.SFB, scale_address(operands, right_factors, tiling.columns, step)
                            )
                        at = (None, None, step, reading.index)
                        cute.gemm(
                            tiled_mma,
                            sums[None, None, None, adding.index],
                            left_fragments[at],
                            right_fragments[at],
                            sums[None, None, None, adding.index],
                        )
                        tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
                    ring.consumer_release(reading)
                    if cutlass.const_expr(operands.scale_block):
                        scaling.consumer_release(reading)
                    reading.advance()
                finished.producer_commit(adding)
                adding.advance()
            finished.producer_tail(adding)
        elif cutlass.const_expr(operands.scale_block):
            lane = _read_anew("laneid")
            row_tiles = problem.row_tiles(offsets, counts, sizes, tiling, lane)
            tiles = problem.tiles(offsets, row_tiles, sizes, tiling)
            filling = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, tiling.stages)
            helper = (warp - FIRST_SCALE_WARP) * 32 + lane
            for index in cutlass.range(_read_anew("ctaid.x"), tiles, stride, unroll=1):
                place = problem.locate(offsets, counts, index, row_tiles, sizes, tiling, lane)
                left_matrix = left_lines(problem, left_scales)
                right_matrix = right_lines(problem, right_scales, place.expert)
                from_block = first_block(problem, operands.scale_block, place)
                per_block = depth // operands.blocks
                end_block = (place.depth + (per_block - 1)) // per_block
                depth_tiles = (place.depth + (depth - 1)) // depth
                for k in cutlass.range(depth_tiles, unroll=1):
                    scaling.producer_acquire(filling)
                    stage = scale_ring + filling.index * stage_bytes
                    fill_tiles(
                        left_matrix,
                        place.first,
                        place.end,
                        from_block,
                        k * operands.blocks,
                        end_block,
                        False,
                        ROWS,
                        tiles_along,
                        stage,
                        helper,
                    )
                    fill_tiles(
                        right_matrix,
                        place.column,
                        sizes.columns,
                        from_block,
                        k * operands.blocks,
                        end_block,
                        not problem.spread,
                        tiling.columns,
                        tiles_along,
                        stage + tiles_along * ROWS * 4,
                        helper,
                    )
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        scaling.producer_commit(filling)
                    filling.advance()
            scaling.producer_tail(filling)
    else:
        cute.arch.setmaxregister_increase(EPILOGUE_REGISTERS)
        lane = _read_anew("laneid")
        row_tiles = problem.row_tiles(offsets, counts, sizes, tiling, lane)
        tiles = problem.tiles(offsets, row_tiles, sizes, tiling)
        own = epilogue_warp(warp - WARPGROUP // 32)
        tensor_pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
        sums = cute.make_rmem_tensor(width // 2, Float32)
        first = tensor_pointer.toint() + ((own * 16) << 16)
        moving = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, accumulators)
        for index in cutlass.range(_read_anew("ctaid.x"), tiles, stride, unroll=1):
            place = problem.locate(offsets, counts, index, row_tiles, sizes, tiling, lane)
            finished.consumer_wait(moving)
            after_thread_sync()
            for part in cutlass.range(tiling.columns // width, unroll=1):
                if cutlass.const_expr(problem.ragged_depth):
                    if place.depth > 0:
                        load_accumulators(first + moving.index * tiling.columns + part * width, sums)
                    else:
                        sums.fill(0.0)
                else:
                    load_accumulators(first + moving.index * tiling.columns + part * width, sums)
                if part == tiling.columns // width - 1:
                    before_thread_sync()
                    with cute.arch.elect_one():
                        finished.consumer_release(moving)
                if cutlass.const_expr(problem.spread):
                    gather_vectors(sums, lane)
                there = Place(
                    place.expert, place.start, place.first, place.end, place.column + part * width, place.depth
                )
                epilogue.write(sums, own * 32 + lane, there, Int32(0), sizes.columns, tensors, shared)
            moving.advance()
    before_thread_sync()
    cute.arch.sync_threads()
    if warp == MULTIPLY_WARP:
        after_thread_sync()
        cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(Float32, 16, holder), TENSOR_COLUMNS)
