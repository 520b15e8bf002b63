// What the entry points of every operation share: how a row is found, what it serves, and how a refusal reads.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "common/variant.h"

// Returns from the calling function when an argument is not what the header asks for.
#define REQUIRE(condition, ...)                                                  \
    do {                                                                         \
        if (!(condition)) return refuse(TILERANK_INVALID_ARGUMENT, __VA_ARGS__); \
    } while (false)

#define PASS_ON(call)                             \
    do {                                          \
        const tilerank_status passed = (call);    \
        if (passed != TILERANK_OK) return passed; \
    } while (false)

namespace tilerank {
namespace dispatch {

constexpr uintptr_t kWorkspaceAlignment = 256;

struct Flag {
    uint32_t bit;
    const char* name;
};
constexpr Flag kDtypes[] = {
    {1u << TILERANK_FP32, "fp32"}, {1u << TILERANK_FP16, "fp16"}, {1u << TILERANK_BF16, "bf16"}};
constexpr Flag kLayouts[] = {{TILERANK_LAYOUT_PADDED, "padded"}, {TILERANK_LAYOUT_PACKED, "packed"}};
constexpr Flag kMasks[] = {{TILERANK_SERVES_KEY_LENGTHS, "key_lengths"},
                           {TILERANK_SERVES_CAUSAL, "causal"},
                           {TILERANK_SERVES_BOOLEAN, "boolean"},
                           {TILERANK_SERVES_ADDITIVE, "additive"}};

// A list for messages, cut where the buffer ends.
struct Text {
    char text[256] = "";
    size_t used = 0;

    void add(const char* item) {
        const int wrote = std::snprintf(text + used, sizeof(text) - used, "%s%s", used == 0 ? "" : ", ", item);
        if (wrote > 0) used = used + wrote < sizeof(text) ? used + wrote : sizeof(text) - 1;
    }
};

template <size_t count>
Text names(uint32_t bits, const Flag (&flags)[count]) {
    Text list;
    for (const Flag& flag : flags) {
        if (bits & flag.bit) list.add(flag.name);
    }
    if (list.used == 0) list.add("none");
    return list;
}

// The row called name among an operation's rows, or null with the refusal recorded.
template <typename Variant>
const Variant* find_variant(const char* name, const Variant* variants, int32_t count) {
    Text known;
    for (int32_t i = 0; i < count; ++i) {
        if (name != nullptr && std::strcmp(variants[i].info.name, name) == 0) return &variants[i];
        known.add(variants[i].info.name);
    }
    refuse(TILERANK_UNKNOWN_VARIANT, "variant is %s; this library has: %s", name == nullptr ? "NULL" : name,
           known.text);
    return nullptr;
}

inline tilerank_status check_size(const char* field, int64_t value, int64_t lowest) {
    REQUIRE(value >= lowest, "%s is %lld; it must be %lld or more", field, static_cast<long long>(value),
            static_cast<long long>(lowest));
    return TILERANK_OK;
}

inline tilerank_status check_pointer(const char* field, const void* pointer, uintptr_t alignment) {
    REQUIRE(pointer != nullptr, "%s is NULL; it must point to the data", field);
    REQUIRE(reinterpret_cast<uintptr_t>(pointer) % alignment == 0, "%s is %p; it must be a multiple of %d bytes", field,
            pointer, static_cast<int>(alignment));
    return TILERANK_OK;
}

inline tilerank_status check_dtype(int32_t dtype) {
    REQUIRE(dtype >= TILERANK_FP32 && dtype <= TILERANK_BF16, "dtype is %d; allowed: 0 (fp32), 1 (fp16), 2 (bf16)",
            dtype);
    return TILERANK_OK;
}

inline uintptr_t element_bytes(int32_t dtype) { return dtype == TILERANK_FP32 ? 4 : 2; }

inline tilerank_status check_served_dtype(const tilerank_variant& row, int32_t dtype) {
    if (row.dtypes & (1u << dtype)) return TILERANK_OK;
    return refuse(TILERANK_UNSUPPORTED, "variant %s: dtype is %s; it serves: %s", row.name, kDtypes[dtype].name,
                  names(row.dtypes, kDtypes).text);
}

inline tilerank_status check_served_head_dim(const tilerank_variant& row, int64_t head_dim) {
    if (row.head_dim_count == 0) return TILERANK_OK;
    Text served;
    for (int32_t i = 0; i < row.head_dim_count; ++i) {
        if (row.head_dims[i] == head_dim) return TILERANK_OK;
        char number[16];
        std::snprintf(number, sizeof(number), "%d", row.head_dims[i]);
        served.add(number);
    }
    return refuse(TILERANK_UNSUPPORTED, "variant %s: head_dim is %d; it serves: %s", row.name,
                  static_cast<int>(head_dim), served.text);
}

// wanted: TILERANK_SERVES_... bits of the call.
inline tilerank_status check_served_masks(const tilerank_variant& row, uint32_t wanted) {
    if ((wanted & ~row.masks) == 0) return TILERANK_OK;
    return refuse(TILERANK_UNSUPPORTED, "variant %s: the call restricts keys by %s; it serves: %s", row.name,
                  names(wanted, kMasks).text, names(row.masks, kMasks).text);
}

inline tilerank_status check_served_keys(const tilerank_variant& row, const char* field, int64_t keys) {
    if (row.max_k_len == 0 || keys <= row.max_k_len) return TILERANK_OK;
    return refuse(TILERANK_UNSUPPORTED, "variant %s: %s is %lld; it serves: up to %lld", row.name, field,
                  static_cast<long long>(keys), static_cast<long long>(row.max_k_len));
}

// Is the memory what the row asked for?
inline tilerank_status check_workspace(const char* name, const void* workspace, size_t workspace_bytes, size_t needed) {
    if (needed > 0 && (workspace == nullptr || workspace_bytes < needed)) {
        return refuse(TILERANK_WORKSPACE, "variant %s: workspace_bytes is %zu; it needs %zu", name,
                      workspace == nullptr ? 0 : workspace_bytes, needed);
    }
    if (needed > 0 && reinterpret_cast<uintptr_t>(workspace) % kWorkspaceAlignment != 0) {
        return refuse(TILERANK_WORKSPACE, "variant %s: workspace is %p; it must be a multiple of %d bytes", name,
                      workspace, static_cast<int>(kWorkspaceAlignment));
    }
    return TILERANK_OK;
}

}  // namespace dispatch
}  // namespace tilerank
