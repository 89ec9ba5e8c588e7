"""The main loop of the Hopper grouped GEMMs: TMA in, wgmma, an epilogue that is a compile-time parameter.

Persistent and warp-specialised: one warp loads tiles of both operands into a ring of shared-memory stages, two
warpgroups multiply them, each 64 rows of a 128-row tile, or in turns, each a tile of 64 rows, so that one multiplies
while the other is in its epilogue. Every output element is one chain of wgmma over ascending K
with a float32 accumulator, so that its bits are those of `moe_numerics.reference.tensor_core`, model `sm_90.bf16`.

Rows past the expert's end belong to other experts or to nobody: they are multiplied too, which changes no other row,
and the epilogue stores none of them. Columns past the end likewise. Tokens past the end of a sum are overwritten with
zeros in shared memory, in both operands, so that not even a NaN there counts.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int16, Int32, Uint32, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from moe_numerics.fused.gemm_epilogue import gather_vectors
from moe_numerics.fused.gemm_problem import DEPTH, ROWS
from moe_numerics.fused.memory import MaybeTensor, store_words

__all__ = ["grouped_gemm_kernel", "launch_grouped_gemm"]

WARPGROUP = 128
CONSUMERS = 2
CONSUMER_THREADS = CONSUMERS * WARPGROUP
THREADS = WARPGROUP + CONSUMER_THREADS
LOAD_REGISTERS = 24
MATH_REGISTERS = 240
# Barriers 1 to 4 belong to the epilogues.
CONSUMER_BARRIER = 5
# Of two alternating warpgroups: whose turn it is to read stages, one barrier each.
TURN_BARRIER = 6
# In the last tiles of a sum the inputs of an epilogue are brought into L2, a part in each.
PREFETCHES = 32
# Elements of a line of a tile whose contiguous dimension is not K: 128 bytes, which swizzling permutes within itself.
LINE = 64


@cute.jit
def launch_grouped_gemm(
    problem: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    tiling: cutlass.Constexpr,
    left: cute.Tensor,
    right: cute.Tensor,
    offsets: cute.Tensor,
    counts: MaybeTensor,
    tensors: tuple[MaybeTensor, ...],
    multiprocessors: Int32,
    stream: Any,
) -> None:
    """Launch a grouped GEMM of the given problem; `tensors` are the epilogue's."""
    left_major, right_major = problem.majors
    operation = warpgroup.MmaF16BF16Op(
        BFloat16, Float32, (64, tiling.columns, 16), warpgroup.OperandSource.SMEM, left_major, right_major
    )
    together = 1 if tiling.alternating else CONSUMERS
    tiled_mma = cute.make_tiled_mma(cute.make_mma_atom(operation), (together, 1, 1))
    left_layout, right_layout = problem.left_layout(tiling), problem.right_layout(tiling)
    load = cpasync.CopyBulkTensorTileG2SOp()
    shared_load = load if tiling.cluster == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    left_atom, left_tiles = cpasync.make_tiled_tma_atom(
        load, problem.left(left), cute.slice_(left_layout, (None, None, 0)), (tiling.block_rows, DEPTH)
    )
    right_atom, right_tiles = cpasync.make_tiled_tma_atom(
        shared_load,
        problem.right(right),
        cute.slice_(right_layout, (None, None, 0)),
        (tiling.columns, DEPTH),
        num_multicast=tiling.cluster,
    )
    sizes = problem.sizes(left, right)
    most = problem.most_tiles(left, right, offsets, sizes, tiling)
    clusters = cutlass.max(cutlass.min(most, multiprocessors // tiling.cluster), Int32(1))
    epilogue.prepare(tensors, stream)
    grouped_gemm_kernel(
        problem,
        epilogue,
        tiling,
        tiled_mma,
        left_layout,
        right_layout,
        left_atom,
        left_tiles,
        right_atom,
        right_tiles,
        sizes,
        offsets,
        counts,
        tensors,
    ).launch(
        grid=[tiling.cluster, clusters, 1],
        block=[THREADS, 1, 1],
        cluster=[tiling.cluster, 1, 1],
        min_blocks_per_mp=1,
        stream=stream,
    )
    epilogue.finish(tensors, offsets, counts, stream)


@cute.jit
def _zero_lines(ring: cute.Tensor, rows: cutlass.Constexpr, stage: Int32, first: Int32, thread: Int32) -> None:
    """Zeros for tokens `first` and up in a stage of a ring whose tiles have lines of 64 rows (`ring` unswizzled)."""
    groups = rows // LINE
    for index in cutlass.range(thread, (DEPTH - first) * (groups * 8), CONSUMER_THREADS, unroll=1):
        line = index // 8
        pointer = ring.iterator + cute.crd2idx(((line % groups) * LINE, first + line // groups, stage), ring.layout)
        store_words((pointer + (index % 8) * 8).align(16), [Uint32(0)] * 4)


@cute.kernel
def grouped_gemm_kernel(
    problem: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    tiling: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    left_layout: cute.ComposedLayout,
    right_layout: cute.ComposedLayout,
    left_atom: cute.CopyAtom,
    left: cute.Tensor,
    right_atom: cute.CopyAtom,
    right: cute.Tensor,
    sizes: Any,
    offsets: cute.Tensor,
    counts: MaybeTensor,
    tensors: tuple[MaybeTensor, ...],
) -> None:
    """Thread blocks of a cluster (blockIdx.x) go through the tiles blockIdx.y, blockIdx.y + gridDim.y, ..."""
    thread, _, _ = cute.arch.thread_idx()
    rank, start, _ = cute.arch.block_idx()
    _, stride, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = thread % 32
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)

    memory = cutlass.memory.SmemAllocator()
    barriers = memory.allocate_array(cutlass.Int64, 2 * tiling.stages)
    shared = epilogue.allocate(memory, tiling.columns)
    left_ring = memory.allocate_tensor(BFloat16, left_layout.outer, 1024, left_layout.inner)
    right_ring = memory.allocate_tensor(BFloat16, right_layout.outer, 1024, right_layout.inner)

    # Warps that read a stage.
    reading_warps = WARPGROUP // 32 if tiling.alternating else CONSUMER_THREADS // 32
    ring = pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=tiling.stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, reading_warps * tiling.cluster),
        tx_count=(tiling.block_rows + tiling.columns) * DEPTH * 2,
        cta_layout_vmnk=cute.make_layout((1, tiling.cluster, 1, 1)),
        defer_sync=True,
    )
    pipeline.pipeline_init_arrive(cluster_shape_mn=cute.make_layout(tiling.cluster), is_relaxed=True)
    pipeline.pipeline_init_wait(cluster_shape_mn=cute.make_layout(tiling.cluster))

    row_tiles = problem.row_tiles(offsets, counts, sizes, tiling, lane)
    tiles = problem.tiles(offsets, row_tiles, sizes, tiling)

    if group == 0:
        cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
        if warp == 0:
            cpasync.prefetch_descriptor(left_atom)
            cpasync.prefetch_descriptor(right_atom)
            filling = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, tiling.stages)
            for index in cutlass.range(start, tiles, stride, unroll=1):
                place = problem.locate(offsets, counts, index, row_tiles, sizes, tiling, lane)
                left_source = cute.local_tile(
                    problem.left_source(left, place, place.first + rank * tiling.block_rows),
                    (tiling.block_rows, DEPTH),
                    (0, None),
                )
                right_source = cute.local_tile(
                    problem.right_source(right, place, sizes), (tiling.columns, DEPTH), (0, None)
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
                    rank,
                    cute.make_layout(tiling.cluster),
                    cute.group_modes(right_ring, 0, 2),
                    cute.group_modes(right_source, 0, 2),
                )
                depth_tiles = (place.depth + (DEPTH - 1)) // DEPTH
                for k in cutlass.range(depth_tiles, unroll=1):
                    if cutlass.const_expr(epilogue.prefetches):
                        turn = k - (depth_tiles - PREFETCHES * tiling.block_rows // ROWS)
                        if turn >= 0:
                            shift = rank * tiling.block_rows
                            epilogue.prefetch(place, shift, sizes.columns, turn, tiling.columns, tensors, lane)
                    ring.producer_acquire(filling)
                    arrived = ring.producer_get_barrier(filling)
                    cute.copy(left_atom, left_from[None, k], left_to[None, filling.index], tma_bar_ptr=arrived)
                    if cutlass.const_expr(tiling.cluster == 1):
                        cute.copy(right_atom, right_from[None, k], right_to[None, filling.index], tma_bar_ptr=arrived)
                    else:
                        cute.copy(
                            right_atom,
                            right_from[None, k],
                            right_to[None, filling.index],
                            tma_bar_ptr=arrived,
                            mcast_mask=Int16((1 << tiling.cluster) - 1),
                        )
                    filling.advance()
            ring.producer_tail(filling)
    else:
        cute.arch.setmaxregister_increase(MATH_REGISTERS)
        own = tiled_mma.get_slice(0 if tiling.alternating else (group - 1) * WARPGROUP)
        left_fragments = tiled_mma.make_fragment_A(own.partition_A(left_ring))
        right_fragments = tiled_mma.make_fragment_B(own.partition_B(right_ring))
        sums = cute.make_rmem_tensor(tiled_mma.partition_shape_C((tiling.block_rows, tiling.columns)), Float32)
        reading = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, tiling.stages)
        releasing = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, tiling.stages)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        first, step_over, shift = start, stride, rank * tiling.block_rows
        if cutlass.const_expr(tiling.alternating):
            first, step_over = start + (group - 1) * stride, CONSUMERS * stride
            # The threads of the second warpgroup count as those of rows 64 and up.
            shift = (rank - (group - 1)) * tiling.block_rows
            skipped = (sizes.depth + (DEPTH - 1)) // DEPTH
            reading.advance((group - 1) * skipped)
            releasing.advance((group - 1) * skipped)
        for index in cutlass.range(first, tiles, step_over, unroll=1):
            place = problem.locate(offsets, counts, index, row_tiles, sizes, tiling, lane)
            depth_tiles = (place.depth + (DEPTH - 1)) // DEPTH
            sums.fill(0.0)
            # A wait for a stage tells only neighbouring phases apart: the other warpgroup must be through with its own.
            # Compile-time conditions stand alone.
            if cutlass.const_expr(tiling.alternating):  # noqa: SIM102
                if index != start:
                    cute.arch.barrier(barrier_id=TURN_BARRIER + group - 1, number_of_threads=CONSUMER_THREADS)
            for k in cutlass.range(depth_tiles, unroll=1):
                ring.consumer_wait(reading)
                if cutlass.const_expr(problem.ragged_depth):
                    rest = place.depth - k * DEPTH
                    if rest < DEPTH:
                        for tile, rows, layout in (
                            (left_ring, ROWS, left_layout),
                            (right_ring, tiling.columns, right_layout),
                        ):
                            plain = cute.make_tensor(cute.recast_ptr(tile.iterator, dtype=BFloat16), layout.outer)
                            _zero_lines(plain, rows, reading.index, rest, thread - WARPGROUP)
                        cute.arch.fence_proxy("async.shared", space="cta")
                        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=CONSUMER_THREADS)
                warpgroup.fence()
                for step in cutlass.range_constexpr(DEPTH // 16):
                    at = (None, None, step, reading.index)
                    cute.gemm(tiled_mma, sums, left_fragments[at], right_fragments[at], sums)
                warpgroup.commit_group()
                # The stage before is free once its own products are done; this one's may still run.
                warpgroup.wait_group(1)
                if k > 0:
                    ring.consumer_release(releasing)
                    releasing.advance()
                reading.advance()
            if cutlass.const_expr(tiling.alternating):  # noqa: SIM102
                if index + stride < tiles:
                    cute.arch.barrier_arrive(
                        barrier_id=TURN_BARRIER + CONSUMERS - group, number_of_threads=CONSUMER_THREADS
                    )
            warpgroup.wait_group(0)
            if depth_tiles > 0:
                ring.consumer_release(releasing)
                releasing.advance()
            if cutlass.const_expr(problem.spread):
                gather_vectors(sums, lane)
            if cutlass.const_expr(tiling.alternating):
                # The other warpgroup's stages.
                reading.advance(depth_tiles)
                releasing.advance(depth_tiles)
            epilogue.write(sums, thread - WARPGROUP, place, shift, sizes.columns, tensors, shared)
