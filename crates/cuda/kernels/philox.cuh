// The random numbers of the engine, word for word: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011), addressed by seed, stream
// and index.
#pragma once
#include "numbers.cuh"

struct Words {
    u32 word[4];
};

__device__ inline Words philox(u64 seed, u64 stream, u64 index) {
    u32 c[4] = {(u32)index, (u32)(index >> 32), (u32)stream, (u32)(stream >> 32)};
    u32 k[2] = {(u32)seed, (u32)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const u64 a = (u64)c[0] * 0xD2511F53u, b = (u64)c[2] * 0xCD9E8D57u;
        const u32 before[2] = {c[1], c[3]};
        c[0] = (u32)(b >> 32) ^ before[0] ^ k[0];
        c[1] = (u32)b;
        c[2] = (u32)(a >> 32) ^ before[1] ^ k[1];
        c[3] = (u32)a;
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    return {{c[0], c[1], c[2], c[3]}};
}

// The number in [0, 1) that the upper 24 bits of a word stand for.
__device__ inline float unit(u32 word) { return (float)(word >> 8) * (1.0f / 16777216.0f); }

// The natural logarithm of a whole number above 0, in operations that round alike everywhere.
__device__ inline double even_log(double x) {
    const i64 bits = __double_as_longlong(x);
    const double mantissa = __longlong_as_double((bits & ((1ll << 52) - 1)) | (1023ll << 52));
    const bool is_large = mantissa > 1.41421356237309504880;
    const double m = is_large ? mantissa / 2.0 : mantissa;
    const double exponent = (double)((int)(bits >> 52) - 1023 + (is_large ? 1 : 0));
    // ln m = 2 artanh s.
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double sum = 1.0 / 19.0;
    for (int n = 17; n >= 1; n -= 2) sum = sum * z + 1.0 / (double)n;
    return exponent * 0.693147180559945309417 + 2.0 * s * sum;
}

// The cosine of `turns` / 2^24 full turns, of which there is less than one.
__device__ inline double even_cos(u32 turns) {
    const u32 quarter = (turns + (1u << 21)) >> 22;
    const double rest = (double)((int)turns - (int)(quarter << 22)) * (1.57079632679489661923 / 4194304.0);
    const double z = rest * rest;
    double cosine = 1.0, sine = 1.0;
    for (int n = 16; n >= 2; n -= 2) {
        cosine = 1.0 - z * (1.0 / (double)(n * (n - 1))) * cosine;
        sine = 1.0 - z * (1.0 / (double)(n * (n + 1))) * sine;
    }
    const double size = quarter & 1 ? rest * sine : cosine;
    return (quarter + 1) & 2 ? -size : size;
}

// The number of the normal distribution that two words stand for (Box and Muller).
__device__ inline double normal_of(u32 a, u32 b) {
    const double one_less_a = (double)(16777216 - (int)(a >> 8));
    return sqrt(-2.0 * (even_log(one_less_a) - 24.0 * 0.693147180559945309417)) * even_cos(b >> 8);
}
