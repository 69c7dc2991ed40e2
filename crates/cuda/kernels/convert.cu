// Conversions to the type of the module.
#include "packs.cuh"

template <class From> __device__ void converted(const From *from, T *to, i64 n) {
    map(from, to, n, [](float x) { return x; });
}

extern "C" __global__ void from_f32(const float *from, T *to, i64 n) { converted(from, to, n); }
extern "C" __global__ void from_bf16(const Bf16 *from, T *to, i64 n) { converted(from, to, n); }
extern "C" __global__ void from_f16(const F16 *from, T *to, i64 n) { converted(from, to, n); }
