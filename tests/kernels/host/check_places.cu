// The parts that common/balanced.cuh cuts a line into: they cover it without a gap or an overlap and cost the same, to
// within a unit.
//     check_places        prints what is wrong and returns how much of it there is
#include <cstdio>
#include <vector>

#include "common/balanced.cuh"

namespace {

using namespace tilerank;

constexpr int kUnitRows = 64;

__global__ void write_places(AttentionArgs args, UnitPlace* places, bool early) {
    UnitPlace own[2];
    const int lane = static_cast<int>(threadIdx.x);
    if (early) {
        UnitPlace first = {-1, 0, 0};
        find_places_early<kUnitRows>(args, own, lane, [&](const UnitPlace& place, const SequencePlace& rows) {
            first = place;
            if (rows.k_len >= 0 && rows.k_begin != args.cu_seqlens_k[place.sequence]) first.sequence = -1;
        });
        if (first.sequence != own[0].sequence || first.head != own[0].head || first.unit != own[0].unit) {
            own[0].sequence = own[1].sequence = -1;  // told something else
        }
    } else {
        find_places<kUnitRows>(args, own, lane);
    }
    if (lane < 2) places[blockIdx.x * 2 + lane] = own[lane];
}

// Units and their cost in front of a place.
struct Before {
    int64_t units = 0;
    int64_t cost = 0;
};

int check(const char* name, const std::vector<int>& lengths, int heads, int blocks, bool early) {
    std::vector<int32_t> ends = {0};
    int longest = 0;
    for (const int length : lengths) {
        ends.push_back(ends.back() + length);
        longest = std::max(longest, length);
    }
    AttentionArgs args = {};
    args.batch = static_cast<int64_t>(lengths.size());
    args.heads = args.kv_heads = heads;
    args.q_len = args.k_len = longest;
    args.total_q = args.total_k = ends.back();
    args.cu_seqlens_q = args.cu_seqlens_k = ends.data();
    std::vector<UnitPlace> places(2 * static_cast<size_t>(blocks));
    const int error = launch(write_places, dim3(static_cast<unsigned>(blocks)), dim3(kWarpSize), 0, nullptr, args,
                             places.data(), early);
    if (error != 0) {
        std::printf("%s: %s\n", name, launch_error_text(error));
        return 1;
    }
    const auto before = [&](const UnitPlace& place) {
        Before sum;
        for (int sequence = 0; sequence < args.batch && sequence <= place.sequence; ++sequence) {
            const int64_t units = (lengths[sequence] + kUnitRows - 1) / kUnitRows;
            const int64_t passed = sequence < place.sequence ? units * heads : units * place.head + place.unit;
            sum.units += passed;
            sum.cost += passed * ((lengths[sequence] + kChunkKeys - 1) / kChunkKeys + kUnitCost);
        }
        return sum;
    };
    const Before all = before({static_cast<int>(args.batch), 0, 0});
    const double most = (longest + kChunkKeys - 1) / kChunkKeys + kUnitCost + 1;
    int failures = 0;
    int64_t units = 0;
    for (int block = 0; block < blocks; ++block) {
        const Before begin = before(places[block * 2]);
        const Before end = before(places[block * 2 + 1]);
        const double off = static_cast<double>(end.cost - begin.cost) - static_cast<double>(all.cost) / blocks;
        const bool right = begin.units == units && end.units >= units && off <= most && off >= -most;
        if (!right) {
            ++failures;
            std::printf("%s: block %d of %d has units %lld to %lld, behind %lld; it costs %.0f more than its part\n", name,
                        block, blocks, static_cast<long long>(begin.units), static_cast<long long>(end.units),
                        static_cast<long long>(units), off);
        }
        units = end.units;
    }
    if (units != all.units) {
        ++failures;
        std::printf("%s: %lld of %lld units\n", name, static_cast<long long>(units), static_cast<long long>(all.units));
    }
    return failures;
}

}  // namespace

int main() {
    std::vector<int> mixed;
    for (int sequence = 0; sequence < 50; ++sequence) mixed.push_back(60 + sequence * 197 % 453);
    std::vector<int> many;
    for (int sequence = 0; sequence < 1000; ++sequence) many.push_back(sequence * 37 % 130);
    int failures = 0;
    for (const bool early : {false, true}) {
        for (const int blocks : {1, 3, 132}) {
            failures += check("mixed", mixed, 12, blocks, early);
            failures += check("many", many, 12, blocks, early);
            failures += check("empty ones", {0, 0, 65, 0, 512, 0, 0}, 5, blocks, early);
            failures += check("one", {512}, 12, blocks, early);
            failures += check("none", {0, 0, 0}, 2, blocks, early);
            failures += check("as many as lanes", std::vector<int>(32, 100), 7, blocks, early);
        }
    }
    return failures;
}
