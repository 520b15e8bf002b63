// The parts of balanced.cuh's blocks where all units cost the same and the host knows how many there are: found without
// looking at a length.
#pragma once

#include "common/balanced.cuh"

namespace tilerank {

// `each` units a block, one more in the first `more` blocks. None: units differ, or their number needs more than 32
// bits.
struct EqualParts {
    int each;
    int more;
};

inline EqualParts equal_parts(const AttentionArgs& args, int unit_rows, int64_t blocks) {
    const int64_t units = args.batch * args.heads * ((args.q_len + unit_rows - 1) / unit_rows);
    if (args.cu_seqlens_q != nullptr || args.key_lengths_type != TILERANK_LENGTHS_NONE || units >= (1 << 30)) {
        return {0, 0};
    }
    return {static_cast<int>(units / blocks), static_cast<int>(units % blocks)};
}

// find_places for them.
template <int kUnitRows>
__device__ __forceinline__ void find_equal_places(const AttentionArgs& args, const EqualParts& parts,
                                                  UnitPlace (&places)[2]) {
    const int units = (static_cast<int>(args.q_len) + kUnitRows - 1) / kUnitRows;
    const int heads = static_cast<int>(args.heads);
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
        const int block = static_cast<int>(blockIdx.x) + side;
        const int first = block * parts.each + min(block, parts.more);
        const int pair = first / units;
        const UnitPlace place = {pair / heads, pair % heads, first % units};
        if (side == 0) places[0] = place;
        if (side == 1) places[1] = place;
    }
}

}  // namespace tilerank
