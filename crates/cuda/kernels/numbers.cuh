// What values are stored as. Kernels compute in float, whatever that is.
#pragma once

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

struct Bf16 {
    u16 bits;
};

struct F16 {
    u16 bits;
};

__device__ inline float wide(float x) { return x; }
__device__ inline float wide(Bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// The nearest value of the type, the even one of two; what is too large becomes infinite and NaN stays NaN.
template <class To> __device__ To rounded(float x);

template <> __device__ inline float rounded<float>(float x) { return x; }

template <> __device__ inline Bf16 rounded<Bf16>(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    Bf16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
    return out;
#else
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return Bf16{(u16)(bits >> 16 | 0x40u)};
    return Bf16{(u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
#endif
}

#ifdef HOST_RUN
__device__ inline float wide(F16 x) { return host_from_half(x.bits); }
template <> __device__ inline F16 rounded<F16>(float x) { return F16{host_to_half(x)}; }
#else
__device__ inline float wide(F16 x) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
    return out;
}
template <> __device__ inline F16 rounded<F16>(float x) {
    F16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
    return out;
}
#endif

#ifdef ELEMENT
// What the tensors of this module hold.
typedef ELEMENT T;

__device__ inline T stored(float x) { return rounded<T>(x); }
#endif

// Before a loop that has to be unrolled, since it indexes what is to stay in registers, and before one that mustn't be.
#ifdef HOST_RUN
#define UNROLL
#define NO_UNROLL
#define UNROLL_FOUR
#else
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#define UNROLL_FOUR _Pragma("unroll 4")
#endif

#define INFINITY_F __uint_as_float(0x7f800000u)
#define NAN_F __uint_as_float(0x7fc00000u)

const float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// In one instruction, within two units in the last place; what would be subnormal is zero.
#ifdef HOST_RUN
inline float power_of_2(float x) { return exp2f(x); }
#else
__device__ inline float power_of_2(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
#endif

__device__ inline bool is_nan(float x) { return x != x; }

// The larger of two; a NaN on either side wins.
__device__ inline float larger(float a, float b) { return a > b || is_nan(a) ? a : b; }

// This gradient where a ReLU that gave `output` passes it on: above zero, and for a NaN.
__device__ inline float where_relu_passed(float grad, float output) { return output <= 0.0f ? 0.0f : grad; }
