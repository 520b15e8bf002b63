// Split TF32: two_launches for fp32. Each product is three of TF32 terms on the matrix unit (high times high, high
// times low both ways), which keeps 21 bits of each factor whatever its size: no scaling, and no range to leave.
// Prediction: at 4 x 1024 tokens of width 1024, 1,000 us beside 1,350 us unfused (700 of them products in FFMA at 50
//   TFLOP/s, 530 attention): three TF32 products reach 118 TFLOP/s at most, and half of that here.
// Answer: metrics/<machine>/bench_block.json and docs/block.md.
#include <algorithm>

#include "common/block_mma.cuh"
#include "common/block_split.cuh"

namespace tilerank {
namespace split_tf32 {

constexpr int kThreads = kGemmThreads;
constexpr int kUnitRows = block_split::kTeamRows;

// What a block has in shared memory, now for one thing, now for the other.
template <int D, bool kInOut>
union Memory {
    block_split::KeyStages<D> keys;
    GemmStage<float, kInOut> stages[kGemmStages];
    __host__ __device__ Memory() {}
};

// More of them on a multiprocessor hide each other's latency; wide heads need the registers more.
template <int D>
constexpr int kBlocksAMultiprocessor = D <= 64 ? 3 : 2;

template <int D, bool kInOut>
__global__ void __launch_bounds__(kThreads, kBlocksAMultiprocessor<D>)
    attend_and_project(BlockPlan plan, float factor) {
    DynamicShared memory;
    auto* tiles = memory.take<Memory<D, kInOut>>(1);
    SHARED(uint32_t, number_slot, [1]);
    const BlockWork work(plan);
    const int64_t all = work.all(plan);
    for (;;) {
        const int64_t number = take_number(plan, number_slot[0]);
        if (number >= all) return;
        if (number < work.attention) {
            const int64_t heads = plan.args.num_heads;
            const int64_t sequence = number / heads / plan.row_blocks;
            // Causal units differ in length: the longest come first.
            const int64_t at = number / heads % plan.row_blocks;
            const int64_t unit = plan.args.causal ? plan.row_blocks - 1 - at : at;
            block_split::attend<D>(plan, tiles->keys, sequence, unit, number % heads, factor,
                                   static_cast<int>(threadIdx.x), [] { __syncthreads(); });
            head_done(plan, sequence, unit);
        } else {
            project_out_tile<float, kInOut>(plan, tiles->stages, work, number - work.attention, number_slot[0]);
        }
    }
}

template <int D, bool kInOut>
tilerank_status launch_second(const BlockPlan& plan, void* stream) {
    const int64_t blocks =
        std::min<int64_t>(BlockWork(plan).all(plan), kBlocksAMultiprocessor<D> * std::max(multiprocessors(), 1));
    return launch_blocks("split_tf32", attend_and_project<D, kInOut>, blocks, kThreads,
                         DynamicShared::bytes<Memory<D, kInOut>>(1), stream, plan, scale_log2(plan.attention));
}

template <int D>
tilerank_status launch_for(const BlockArgs& args, void* workspace, void* stream) {
    const BlockPlan plan = make_plan(args, workspace, kUnitRows);
    const tilerank_status status = block_mma::launch_project<float>("split_tf32", plan, stream);
    if (status != TILERANK_OK) return status;
    return args.weight_layout == TILERANK_WEIGHTS_IN_OUT ? launch_second<D, true>(plan, stream)
                                                         : launch_second<D, false>(plan, stream);
}

}  // namespace split_tf32

size_t block_split_tf32_workspace(const BlockArgs& args) { return plan_bytes(args, split_tf32::kUnitRows); }

tilerank_status block_split_tf32(const BlockArgs& args, void* workspace, void* stream) {
    switch (args.head_dim) {
        case 32:
            return split_tf32::launch_for<32>(args, workspace, stream);
        case 64:
            return split_tf32::launch_for<64>(args, workspace, stream);
        case 80:
            return split_tf32::launch_for<80>(args, workspace, stream);
        case 96:
            return split_tf32::launch_for<96>(args, workspace, stream);
        default:
            return split_tf32::launch_for<128>(args, workspace, stream);
    }
}

}  // namespace tilerank
