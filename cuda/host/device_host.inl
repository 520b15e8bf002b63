// The g++ side of device.h, on the runtime. Included by device.h only.
#pragma once

namespace tilerank {

inline const char* launch_error_text(int) { return host::error_text(); }

template <typename... Parameters>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void*,
           typename Exactly<Parameters>::type... arguments) {
    auto call = [&] { kernel(arguments...); };
    return host::run_grid(
        grid, block, shared_bytes, [](void* context) { (*static_cast<decltype(call)*>(context))(); }, &call);
}

template <typename... Parameters>
int launch_overlapped(bool, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
                      typename Exactly<Parameters>::type... arguments) {
    return launch(kernel, grid, block, shared_bytes, stream, arguments...);
}

inline void wait_for_previous() {}
inline void let_next_begin() {}

template <typename Element>
Element* DynamicShared::take(size_t count) {
    used_ += bytes<Element>(count);
    return static_cast<Element*>(host::dynamic_shared(taken_++, count * sizeof(Element), bytes<Element>(count)));
}

template <typename Vector, typename Element>
Vector load_vector(const Element* address, host::Site site) {
    static_assert(sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);
    host::check_read(address, sizeof(Vector), sizeof(Vector), "load_vector", site);
    Vector value;
    std::memcpy(static_cast<void*>(&value), address, sizeof value);
    return value;
}

template <typename Vector, typename Element>
void store_vector(Element* address, Vector value, host::Site site) {
    static_assert(sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);
    host::check_write(address, sizeof(Vector), sizeof(Vector), "store_vector", site);
    std::memcpy(static_cast<void*>(address), &value, sizeof value);
}

template <int Bytes>
void copy_async(void* shared, const void* source, bool in_range, host::Site site) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16);
    host::copy_async(shared, source, Bytes, in_range, site);
}

inline void copy_async_commit() { host::copy_async_commit(); }

template <int Pending>
void copy_async_wait() {
    host::copy_async_wait(Pending);
}

inline void ldmatrix_x2(uint32_t (&fragment)[2], const void* row, host::Site site) {
    host::ldmatrix(fragment, row, 2, false, "ldmatrix_x2", site);
}

inline void ldmatrix_x4(uint32_t (&fragment)[4], const void* row, host::Site site) {
    host::ldmatrix(fragment, row, 4, false, "ldmatrix_x4", site);
}

inline void ldmatrix_x2_trans(uint32_t (&fragment)[2], const void* row, host::Site site) {
    host::ldmatrix(fragment, row, 2, true, "ldmatrix_x2_trans", site);
}

inline void ldmatrix_x4_trans(uint32_t (&fragment)[4], const void* row, host::Site site) {
    host::ldmatrix(fragment, row, 4, true, "ldmatrix_x4_trans", site);
}

template <>
inline void mma_m16n8k16<__half>(float (&accumulator)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                 host::Site site) {
    host::mma(accumulator, a, b, host::MmaType::kHalf, 16, "mma_m16n8k16<half>", site);
}

template <>
inline void mma_m16n8k16<__nv_bfloat16>(float (&accumulator)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                        host::Site site) {
    host::mma(accumulator, a, b, host::MmaType::kBfloat16, 16, "mma_m16n8k16<bfloat16>", site);
}

inline void mma_m16n8k8(float (&accumulator)[4], const uint32_t (&a)[2], uint32_t b, host::Site site) {
    host::mma(accumulator, a, &b, host::MmaType::kHalf, 8, "mma_m16n8k8", site);
}

inline void mma_m16n8k8_tf32(float (&accumulator)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], host::Site site) {
    host::mma(accumulator, a, b, host::MmaType::kTf32, 8, "mma_m16n8k8_tf32", site);
}

inline uint32_t to_tf32(float value) { return (host::bits_of_float(value) + 0x1000u) & 0xffffe000u; }

inline float exp2_approx(float value) {
    const float result = exp2f(value);
    return result < 0x1p-126f ? 0.0f : result;
}

inline float reciprocal_approx(float value) { return 1.0f / value; }

}  // namespace tilerank
