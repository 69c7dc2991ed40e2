// What a kernel sees of a GPU, for a run of the same source on the host. The threads of a block are fibers of one thread; a
// fiber runs until it waits for others or ends, so a barrier that is missing shows when the threads run in another order. There are two
// orders, in which what a GPU may do differs as far as can be (fibers.h).
#pragma once
#define HOST_RUN
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
// Whoever fills what a block's threads share before a launch has it lie together.
#ifdef SHARED_SECTION
#define __shared__ static __attribute__((section("shared_memory")))
#else
#define __shared__ static
#endif
#define __launch_bounds__(...)

struct Dim3 {
    unsigned x = 1, y = 1, z = 1;
};

using std::memcpy;

extern Dim3 threadIdx, blockIdx, blockDim, gridDim;

// Waits until all threads of the block have come here.
void __syncthreads();

// What the lanes of a warp do together. A GPU wants all of them at the same one.
enum class Together { SHUFFLE, BALLOT, MULTIPLY_ADD, MULTIPLIED, LOAD, LOAD_TURNED };

// Waits until all threads of the warp have come here, each with a `slot`; gives those of all, which stay until the next time. Where a
// lane has come to something else, another operation or the same with another `number`, the kernel is wrong.
const std::uint64_t *host_exchange(Together what, int number, std::uint64_t slot);

// Copies that a thread doesn't wait for: `bytes` of them, or as many zeros from nowhere. In one order they are made no earlier than
// its thread waits for the group that they are in, so who doesn't wait sees what was there before; in the other they are made at once,
// so who still reads what was there before sees what is new.
void host_copy_later(void *to, const void *from, std::size_t bytes);
void host_close_copies();
// Waits for all of the thread's groups but the last `left`.
void host_wait_for_copies(std::size_t left);

template <class V> V __shfl_xor_sync(unsigned, V value, int mask) {
    static_assert(sizeof(V) <= 8, "a value of a shuffle");
    std::uint64_t slot = 0;
    std::memcpy(&slot, &value, sizeof(V));
    std::memcpy(&value, host_exchange(Together::SHUFFLE, mask, slot) + ((threadIdx.x % 32) ^ mask), sizeof(V));
    return value;
}

inline unsigned __ballot_sync(unsigned, int mine) {
    const std::uint64_t *slots = host_exchange(Together::BALLOT, 0, mine != 0);
    unsigned all = 0;
    for (int lane = 0; lane < 32; lane++) all |= (unsigned)slots[lane] << lane;
    return all;
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }

template <class V> V atomicMin(V *at, V value) {
    const V before = *at;
    *at = value < before ? value : before;
    return before;
}
template <class V> V atomicMax(V *at, V value) {
    const V before = *at;
    *at = value > before ? value : before;
    return before;
}

template <class V> V host_copy(const void *from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}

template <class To, class From> To host_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}
inline float __uint_as_float(unsigned bits) { return host_bits<float>(bits); }
inline unsigned __float_as_uint(float x) { return host_bits<unsigned>(x); }
inline double __longlong_as_double(long long bits) { return host_bits<double>(bits); }
inline long long __double_as_longlong(double x) { return host_bits<long long>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((std::uint64_t)a * b >> 32); }

// Numbers of 16 bits, as the device's conversions make them.
inline float host_from_half(std::uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = std::ldexp((float)(exponent ? fraction + 1024 : fraction), (exponent ? exponent : 1) - 25);
    if (exponent == 31) size = fraction ? NAN : INFINITY;
    return bits >> 15 ? -size : size;
}

inline std::uint16_t host_to_half(float x) {
    const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return 0x7fff;
    const float size = std::fabs(x);
    if (size >= 65520.0f) return sign | 0x7c00;
    // Below the smallest normal number steps are as at that.
    int exponent = size < 6.103515625e-5f ? -14 : std::ilogb(size);
    const float steps = std::nearbyint(std::ldexp(size, 10 - exponent));
    const int fraction = (int)steps;
    return (std::uint16_t)(sign + ((exponent + 14) << 10) + fraction);
}
