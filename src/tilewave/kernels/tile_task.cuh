// What a block that walks through tiles is at, kept in shared memory: in registers it would be dead weight in the loop
// over K, and every thread would compute it.
#pragma once

#include "gemm_args.cuh"

namespace tilewave {

struct Task {
    Walk walk;
    WorkItem work;
    TilePlace place;
    int more;  // whether there is a work item
    int last;  // the flag of arrives_last()
};

// Moves on to the block's next work item, its first if `first`; false when there is none. All threads must be done with
// the item before it; those that used shared memory behind a barrier are.
__device__ __forceinline__ bool next_task(const GemmArgs& args, Task* task, bool first) {
    if (!first && args.cut.walkers == 0) return false;  // only walkers have more than one
    if (threadIdx.x == 0) {
        if (blockIdx.x < args.cut.whole_tiles) {  // spared the divisions by which a cut is dealt out
            task->work = whole_item(args.cut, blockIdx.x);
            task->more = first;
        } else {
            if (first) task->walk = Walk(args.cut, blockIdx.x);
            task->more = task->walk.next(task->work);
        }
        if (task->more) task->place = place_of(task->work.tile, args.tiles_m, args.tiles_n, args.band);
    }
    __syncthreads();
    return task->more != 0;
}

}  // namespace tilewave
