"""The main loop of the Hopper grouped GEMMs: TMA in, wgmma, an epilogue that is a compile-time parameter.

Persistent and warp-specialised: one warp loads tiles of both operands into a ring of shared-memory stages, two
warpgroups multiply them, each 64 rows of a 128-row tile. Every output element is one chain of wgmma over ascending K
with a float32 accumulator, so that its bits are those of `moe_numerics.reference.tensor_core`, model `sm_90.bf16`.

The weights' rows are permuted inside blocks of 32 while they are loaded, so that a thread's accumulators are 8
neighbouring columns of each block (wgmma itself spreads them as pairs over the block; PTX ISA, "Register Fragments
and Shared Memory Matrix Layouts" of wgmma). What follows works on the same vectors as the elementwise kernels.

Rows past the expert's end belong to other experts or to nobody: they are multiplied too, which changes no other row,
and the epilogue stores none of them. Columns past the end likewise.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int16, Int32, Int64, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from moe_numerics.fused.gemm_schedule import count_row_tiles, find_row_tile, locate_columns

__all__ = ["ROWS", "Tiling", "grouped_gemm_kernel", "launch_grouped_gemm"]

ROWS = 128
DEPTH = 64
BLOCK = 32
WARPGROUP = 128
CONSUMERS = 2
THREADS = (1 + CONSUMERS) * WARPGROUP
CONSUMER_WARPS = CONSUMERS * WARPGROUP // 32
LOAD_REGISTERS = 40
MATH_REGISTERS = 232


@dataclass(frozen=True)
class Tiling:
    """Shape of a thread block's tile (128 rows), of the ring of stages and of the cluster.

    `cluster` thread blocks work on neighbouring row tiles of one expert and share the weights they load.
    """

    columns: int = 256
    stages: int = 4
    cluster: int = 2

    @property
    def rows(self) -> int:
        """Rows of a cluster's tile."""
        return ROWS * self.cluster


def _smem_layout(rows: int, stages: int) -> cute.ComposedLayout:
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    return cute.tile_to_shape(atom, (rows, DEPTH, stages), order=(0, 1, 2))


def _permuted_rows(weights: cute.Tensor) -> cute.Tensor:
    """Weights [E, N, K] as [E * N, K] with row 8 j + 2 q + b of each block of 32 standing for row 8 q + 2 j + b."""
    experts, columns, depth = weights.shape
    stride = Int64(depth)
    blocks = experts * (columns // BLOCK)
    layout = cute.make_layout(
        (((2, 4, 4), blocks), depth), stride=(((stride, 8 * stride, 2 * stride), BLOCK * stride), 1)
    )
    return cute.make_tensor(weights.iterator, layout)


@cute.jit
def launch_grouped_gemm(
    epilogue: cutlass.Constexpr,
    tiling: cutlass.Constexpr,
    target: cutlass.Constexpr,
    x: cute.Tensor,
    weights: cute.Tensor,
    offsets: cute.Tensor,
    counts,
    tensors,
    multiprocessors: Int32,
    stream,
):  # type: ignore[no-untyped-def]
    """Launch the kernel: x [capacity, K] times weights[e] [N, K] transposed, for the rows of each expert e."""
    tiled_mma = cute.make_tiled_mma(
        cute.make_mma_atom(
            warpgroup.MmaF16BF16Op(
                BFloat16,
                Float32,
                (64, tiling.columns, 16),
                warpgroup.OperandSource.SMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        ),
        (CONSUMERS, 1, 1),
    )
    x_layout = _smem_layout(ROWS, tiling.stages)
    w_layout = _smem_layout(tiling.columns, tiling.stages)
    load = cpasync.CopyBulkTensorTileG2SOp()
    load_shared = load if tiling.cluster == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    x_atom, x_tensor = cpasync.make_tiled_tma_atom(
        load, x, cute.slice_(x_layout, (None, None, 0)), (ROWS, DEPTH)
    )
    w_atom, w_tensor = cpasync.make_tiled_tma_atom(
        load_shared,
        _permuted_rows(weights),
        cute.slice_(w_layout, (None, None, 0)),
        (tiling.columns, DEPTH),
        num_multicast=tiling.cluster,
    )
    columns = weights.shape[1]
    column_tiles = (columns + (tiling.columns - 1)) // tiling.columns
    most = (x.shape[0] // tiling.rows + offsets.shape[0] - 1) * column_tiles
    clusters = cutlass.max(cutlass.min(most, multiprocessors // tiling.cluster), Int32(1))
    epilogue.prepare(tensors, stream)
    grouped_gemm_kernel(
        epilogue,
        tiling,
        target,
        tiled_mma,
        x_layout,
        w_layout,
        x_atom,
        x_tensor,
        w_atom,
        w_tensor,
        columns,
        x.shape[1],
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


@cute.kernel
def grouped_gemm_kernel(
    epilogue: cutlass.Constexpr,
    tiling: cutlass.Constexpr,
    target: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    x_layout: cute.ComposedLayout,
    w_layout: cute.ComposedLayout,
    x_atom: cute.CopyAtom,
    x: cute.Tensor,
    w_atom: cute.CopyAtom,
    w: cute.Tensor,
    columns: Int32,
    depth: Int32,
    offsets: cute.Tensor,
    counts,
    tensors,
):  # type: ignore[no-untyped-def]
    """Thread blocks of a cluster (blockIdx.x) go through the tiles blockIdx.y, blockIdx.y + gridDim.y, ..."""
    thread, _, _ = cute.arch.thread_idx()
    rank, start, _ = cute.arch.block_idx()
    _, step, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = thread % 32
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)

    memory = cutlass.memory.SmemAllocator()
    barriers = memory.allocate_array(cutlass.Int64, 2 * tiling.stages)
    shared = epilogue.allocate(memory)
    x_ring = memory.allocate_tensor(BFloat16, x_layout.outer, 1024, x_layout.inner)
    w_ring = memory.allocate_tensor(BFloat16, w_layout.outer, 1024, w_layout.inner)

    cluster_layout = cute.make_layout((1, tiling.cluster, 1, 1))
    ring = pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=tiling.stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, CONSUMER_WARPS * tiling.cluster),
        tx_count=(ROWS + tiling.columns) * DEPTH * 2,
        cta_layout_vmnk=cluster_layout,
        defer_sync=True,
    )
    pipeline.pipeline_init_arrive(cluster_shape_mn=cute.make_layout(tiling.cluster), is_relaxed=True)
    pipeline.pipeline_init_wait(cluster_shape_mn=cute.make_layout(tiling.cluster))

    column_tiles = (columns + (tiling.columns - 1)) // tiling.columns
    depth_tiles = (depth + (DEPTH - 1)) // DEPTH
    row_tiles = count_row_tiles(offsets, counts, tiling.rows, lane)
    tiles = row_tiles * column_tiles

    if group == 0:
        cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
        if warp == 0:
            cpasync.prefetch_descriptor(x_atom)
            cpasync.prefetch_descriptor(w_atom)
            filling = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, tiling.stages)
            for tile in cutlass.range(start, tiles, step, unroll=1):
                row_tile, column_tile = locate_columns(tile, row_tiles, column_tiles)
                expert, _, first, _ = find_row_tile(offsets, counts, row_tile, tiling.rows, lane)
                x_source = cute.local_tile(
                    cute.domain_offset((first + rank * ROWS, 0), x), (ROWS, DEPTH), (0, None)
                )
                block = expert * (columns // BLOCK) + column_tile * (tiling.columns // BLOCK)
                w_source = cute.local_tile(
                    cute.domain_offset((((0, 0, 0), block), 0), w), (tiling.columns, DEPTH), (0, None)
                )
                x_to, x_from = cpasync.tma_partition(
                    x_atom, 0, cute.make_layout(1), cute.group_modes(x_ring, 0, 2), cute.group_modes(x_source, 0, 2)
                )
                w_to, w_from = cpasync.tma_partition(
                    w_atom,
                    rank,
                    cute.make_layout(tiling.cluster),
                    cute.group_modes(w_ring, 0, 2),
                    cute.group_modes(w_source, 0, 2),
                )
                for k in cutlass.range(depth_tiles, unroll=1):
                    ring.producer_acquire(filling)
                    arrived = ring.producer_get_barrier(filling)
                    cute.copy(x_atom, x_from[None, k], x_to[None, filling.index], tma_bar_ptr=arrived)
                    if cutlass.const_expr(tiling.cluster == 1):
                        cute.copy(w_atom, w_from[None, k], w_to[None, filling.index], tma_bar_ptr=arrived)
                    else:
                        cute.copy(
                            w_atom,
                            w_from[None, k],
                            w_to[None, filling.index],
                            tma_bar_ptr=arrived,
                            mcast_mask=Int16((1 << tiling.cluster) - 1),
                        )
                    filling.advance()
            ring.producer_tail(filling)
    else:
        cute.arch.setmaxregister_increase(MATH_REGISTERS)
        own = tiled_mma.get_slice((group - 1) * WARPGROUP)
        x_fragments = tiled_mma.make_fragment_A(own.partition_A(x_ring))
        w_fragments = tiled_mma.make_fragment_B(own.partition_B(w_ring))
        sums = cute.make_rmem_tensor(
            tiled_mma.partition_shape_C((ROWS, tiling.columns)), Float32
        )
        reading = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, tiling.stages)
        releasing = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, tiling.stages)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        for tile in cutlass.range(start, tiles, step, unroll=1):
            row_tile, column_tile = locate_columns(tile, row_tiles, column_tiles)
            expert, expert_start, first, end = find_row_tile(offsets, counts, row_tile, tiling.rows, lane)
            sums.fill(0.0)
            for k in cutlass.range(depth_tiles, unroll=1):
                ring.consumer_wait(reading)
                warpgroup.fence()
                for step_k in cutlass.range_constexpr(DEPTH // 16):
                    at = (None, None, step_k, reading.index)
                    cute.gemm(tiled_mma, sums, x_fragments[at], w_fragments[at], sums)
                warpgroup.commit_group()
                # The stage before is free once its own products are done; this one's may still run.
                warpgroup.wait_group(1)
                if k > 0:
                    ring.consumer_release(releasing)
                    releasing.advance()
                reading.advance()
            warpgroup.wait_group(0)
            if depth_tiles > 0:
                ring.consumer_release(releasing)
                releasing.advance()
            epilogue.write(
                sums,
                thread - WARPGROUP,
                expert,
                expert_start,
                first + rank * ROWS,
                end,
                column_tile * tiling.columns,
                columns,
                tensors,
                shared,
            )
