// How the work of a product is cut and dealt to blocks: the device's copy of tilewave/planner/schedules.py.
//
// A tile of C is walked along K in slices of `depth` and has at least one slice, an empty one when K is 0. The
// host fills in a Decomposition; from it and its own index a block computes the items that it must do, in closed
// form. Names and arithmetic are those of the Python module, and a test compares the two item by item. All
// products stay within the total number of slices, which the host keeps below 2^63.
//
// Partial sums: each piece of a cut tile goes to its own slot of the workspace, then its block calls
// arrives_last(). The block that is told true sums the tile's slots in piece order and writes C. A block whose sums
// come first in that order may ask others_arrived() before it stores them: told true, it is the last, and keeps them
// in registers. No block waits for another, so any part of the GPU can be busy elsewhere; the sum's order is fixed,
// so the bits are the same in every run.
//
// Needs no toolkit header.
#pragma once

namespace tilewave {

typedef long long Index;

// The integers of one schedule of one product.
struct Decomposition {
    Index tiles;        // tiles of C, over all batches
    Index k;            // depth of the product
    Index depth;        // depth of a slice
    Index whole_tiles;  // the first so many blocks do one whole tile each
    Index pieces;       // the other tiles are cut into so many pieces, a block a piece, all first pieces first ...
    Index walkers;      // ... or, when this is not 0, so many blocks share their slices in even runs
};

// One block's walk along K in one tile: elements k_begin to k_end, exclusive.
struct WorkItem {
    Index tile;
    Index k_begin;
    Index k_end;
    Index piece;   // along K, of `pieces`; a whole tile is piece 0 of 1
    Index pieces;
    Index slot;    // where this piece's partial sums go, in tiles of C; -1: the tile is whole, write C
    Index ticket;  // the tile's counter; -1 likewise
};

__device__ __forceinline__ Index smaller(Index a, Index b) { return a < b ? a : b; }

// number / divisor, of which the one is not negative and the other positive. In 32 bits, if they fit: the compiler's own
// division of 64 bits is long and calls a routine, and every block would wait for its instructions.
__device__ __forceinline__ Index quotient(Index number, Index divisor) {
    if (((number | divisor) >> 32) == 0) return static_cast<unsigned>(number) / static_cast<unsigned>(divisor);
    unsigned long long rest = 0, result = number;
    int bits;
    asm volatile("mov.u32 %0, 64;" : "=r"(bits));  // known, it would be a reason to unroll what hardly ever runs
#pragma unroll 1
    for (; bits > 0; --bits) {
        rest = rest << 1 | result >> 63;
        result <<= 1;
        if (rest >= divisor) {
            rest -= divisor;
            ++result;
        }
    }
    return result;
}

// Where `part` begins when `total` is cut into `parts` even parts, the longer first.
__device__ __forceinline__ Index even_begin(Index total, Index parts, Index part) {
    Index base = quotient(total, parts);
    Index longer = total - base * parts;
    return part * base + smaller(part, longer);
}

// The part that holds `position`; no part may be empty.
__device__ __forceinline__ Index even_owner(Index total, Index parts, Index position) {
    Index base = quotient(total, parts);
    Index longer = total - base * parts;
    Index in_longer = longer * (base + 1);
    if (position < in_longer) return quotient(position, base + 1);
    return longer + quotient(position - in_longer, base);
}

__device__ __forceinline__ Index slices_of(const Decomposition& d) {
    return d.k > d.depth ? quotient(d.k - 1, d.depth) + 1 : 1;
}

__device__ __forceinline__ WorkItem make_item(const Decomposition& d, Index tile, Index begin, Index end,
                                              Index piece, Index pieces, Index slot, Index ticket) {
    WorkItem item;
    item.tile = tile;
    item.k_begin = smaller(begin * d.depth, d.k);
    item.k_end = smaller(end * d.depth, d.k);
    item.piece = piece;
    item.pieces = pieces;
    item.slot = slot;
    item.ticket = ticket;
    return item;
}

// The one item of a block that computes a tile alone.
__device__ __forceinline__ WorkItem whole_item(const Decomposition& d, Index tile) {
    WorkItem item;
    item.tile = tile;
    item.k_begin = 0;
    item.k_end = d.k;
    item.piece = 0;
    item.pieces = 1;
    item.slot = -1;
    item.ticket = -1;
    return item;
}

// The items of one block, in order: `Walk walk(d, block); WorkItem item; while (walk.next(item)) ...`.
// Only a walker has more than one item.
struct Walk {
    Decomposition d;
    Index block;
    Index slices;    // a tile
    Index position;  // of a walker, in the slices of the cut tiles laid end to end; of others 0, then 1
    Index run_end;

    __device__ __forceinline__ Walk(const Decomposition& decomposition, Index block_index)
        : d(decomposition), block(block_index), slices(slices_of(decomposition)), position(0), run_end(1) {
        if (block >= d.whole_tiles && d.walkers != 0) {
            Index total = (d.tiles - d.whole_tiles) * slices;
            position = even_begin(total, d.walkers, block - d.whole_tiles);
            run_end = even_begin(total, d.walkers, block - d.whole_tiles + 1);
        }
    }

    __device__ __forceinline__ bool next(WorkItem& item) {
        if (position >= run_end) return false;
        Index cut_tiles = d.tiles - d.whole_tiles;
        Index index = block - d.whole_tiles;
        if (index < 0) {
            item = whole_item(d, block);
            position = run_end;
        } else if (d.walkers == 0) {
            Index piece = quotient(index, cut_tiles);
            Index cut = index - piece * cut_tiles;
            bool shared = d.pieces > 1;
            item = make_item(d, d.whole_tiles + cut, even_begin(slices, d.pieces, piece),
                             even_begin(slices, d.pieces, piece + 1), piece, d.pieces,
                             shared ? cut * d.pieces + piece : -1, shared ? cut : -1);
            position = run_end;
        } else {
            Index total = cut_tiles * slices;
            Index cut = quotient(position, slices);
            Index tile_begin = cut * slices;
            Index end = smaller(run_end, tile_begin + slices);
            Index first = even_owner(total, d.walkers, tile_begin);
            Index pieces = even_owner(total, d.walkers, tile_begin + slices - 1) - first + 1;
            Index piece = index - first;
            bool shared = pieces > 1;
            item = make_item(d, d.whole_tiles + cut, position - tile_begin, end - tile_begin, piece, pieces,
                             shared ? 2 * index + (piece == 0) : -1, shared ? first : -1);
            position = end;
        }
        return true;
    }
};

// The slot of any piece of a cut item's tile: what the last arriver sums, piece by piece.
__device__ __forceinline__ Index slot_of(const Decomposition& d, const WorkItem& item, Index piece) {
    if (d.walkers == 0) return item.ticket * d.pieces + piece;
    return 2 * item.ticket + (piece == 0 ? 1 : 2 * piece);
}

// The place of a tile in C. Tiles go row by row in bands of `band` tile rows, down each column of a band before
// the next column, batch after batch; band 1 is row-major.
struct TilePlace {
    Index batch;
    Index row;
    Index column;
};

__device__ __forceinline__ TilePlace place_of(Index tile, Index tiles_m, Index tiles_n, Index band) {
    // Divisions take long, and every block waits for them: the first band of the first item needs one at most.
    TilePlace place = {0, 0, 0};
    const Index per_batch = tiles_m * tiles_n, per_band = band * tiles_n;
    if (tile >= per_batch) place.batch = quotient(tile, per_batch);
    const Index within = tile - place.batch * per_batch;
    Index first_row = 0;
    if (within >= per_band) first_row = quotient(within, per_band) * band;
    const Index offset = within - first_row * tiles_n;
    const Index rows = smaller(band, tiles_m - first_row);
    place.column = rows == 1 ? offset : quotient(offset, rows);
    place.row = first_row + offset - place.column * rows;
    return place;
}

// Called by all threads of a block after they stored their partial sums: true in every thread of the block that
// arrives last, when the slots of all pieces may be read (not through the read-only cache). The counter wraps to
// 0 at the last arrival, ready for the next launch. `flag` is one int of shared memory.
__device__ __forceinline__ bool arrives_last(unsigned int* tickets, const WorkItem& item, int* flag) {
    __threadfence();  // this thread's partial sums are visible before its block's ticket is taken
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned int last = static_cast<unsigned int>(item.pieces) - 1;
        *flag = atomicInc(tickets + item.ticket, last) == last;
    }
    __syncthreads();
    bool is_last = *flag != 0;
    __threadfence();  // no partial sum is read before the ticket was
    return is_last;
}

// Called by all threads of a block before they store the partial sums of a piece: not 0 in every thread if the blocks of
// all other pieces have arrived. Then their slots may be read, the counter is 0 again, and this block need not arrive.
__device__ __forceinline__ int others_arrived(unsigned int* tickets, const WorkItem& item, int* flag) {
    if (threadIdx.x == 0) {
        unsigned int* const counter = tickets + item.ticket;
        bool all = atomicAdd(counter, 0u) == static_cast<unsigned int>(item.pieces) - 1;
        if (all) atomicExch(counter, 0u);  // nobody else comes any more
        *flag = all;
    }
    __syncthreads();
    int all = *flag;
    __threadfence();  // no partial sum is read before the counter was
    return all;
}

}  // namespace tilewave
