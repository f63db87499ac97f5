// Writes what stream_k.cuh computes, for comparison with the planner's Python: one thread a block.
#include "stream_k.cuh"

// items: for each block `most` records of nine integers (tile, k_begin, k_end, piece, pieces, slot, ticket, the
// slots of the tile's first and last piece), the unused ones left alone. counts: items of each block.
extern "C" __global__ void dump_items(long long* items, long long* counts, long long most, long long first_block,
                                      long long tiles, long long k, long long depth, long long whole_tiles,
                                      long long pieces, long long walkers) {
    tilewave::Decomposition d = {tiles, k, depth, whole_tiles, pieces, walkers};
    tilewave::Walk walk(d, first_block + blockIdx.x);
    tilewave::WorkItem item;
    long long count = 0;
    while (walk.next(item)) {
        if (count < most) {
            long long* out = items + (blockIdx.x * most + count) * 9;
            out[0] = item.tile;
            out[1] = item.k_begin;
            out[2] = item.k_end;
            out[3] = item.piece;
            out[4] = item.pieces;
            out[5] = item.slot;
            out[6] = item.ticket;
            out[7] = item.slot < 0 ? -1 : tilewave::slot_of(d, item, 0);
            out[8] = item.slot < 0 ? -1 : tilewave::slot_of(d, item, item.pieces - 1);
        }
        ++count;
    }
    counts[blockIdx.x] = count;
}

// places: batch, row and column of tile first_tile + blockIdx.x.
extern "C" __global__ void dump_places(long long* places, long long first_tile, long long tiles_m,
                                       long long tiles_n, long long band) {
    tilewave::TilePlace place = tilewave::place_of(first_tile + blockIdx.x, tiles_m, tiles_n, band);
    places[3 * blockIdx.x + 0] = place.batch;
    places[3 * blockIdx.x + 1] = place.row;
    places[3 * blockIdx.x + 2] = place.column;
}

// Every thread of every block arrives at ticket 0 with `pieces` pieces; arrived[block] becomes 1 in the last one.
extern "C" __global__ void dump_arrivals(unsigned int* tickets, int* arrived, long long pieces) {
    __shared__ int flag;
    tilewave::WorkItem item = {0, 0, 0, blockIdx.x, pieces, blockIdx.x, 0};
    bool last = tilewave::arrives_last(tickets, item, &flag);
    if (threadIdx.x == 0) arrived[blockIdx.x] = last;
}

// The same, but a block asks first whether the others have arrived: arrived[block] becomes 2 in the one that is told so.
extern "C" __global__ void dump_asking_arrivals(unsigned int* tickets, int* arrived, long long pieces) {
    __shared__ int flag;
    tilewave::WorkItem item = {0, 0, 0, blockIdx.x, pieces, blockIdx.x, 0};
    int told = tilewave::others_arrived(tickets, item, &flag) ? 2 : tilewave::arrives_last(tickets, item, &flag);
    if (threadIdx.x == 0) arrived[blockIdx.x] = told;
}
