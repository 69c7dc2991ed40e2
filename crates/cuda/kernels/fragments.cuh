// Products of small matrices by a warp's units for them (tensor cores), and how their factors get to where these want them.
//
// One product adds 16 x 16 times 16 x 8 to sums of 16 x 8. The 32 lanes of the warp hold all three together, in registers of two
// neighbouring numbers of 16 bits, the first in the lower half, and sums in floats. Lane 4 r + p holds
// - of the left factor: row r, columns 2p and 2p + 1; the same of row r + 8; then both once more, eight columns on;
// - of the right factor: of column r, rows 2p and 2p + 1; the same eight rows on;
// - of the sums: row r, columns 2p and 2p + 1; the same of row r + 8.
// So two sums side by side, rounded, are a left factor without a number going to another lane (PTX ISA, "Matrix Fragments for
// mma.m16n8k16").
#pragma once
#include "numbers.cuh"

struct Left {
    u32 at[4];
};

__device__ inline int my_lane() { return (int)threadIdx.x % 32; }
// The row of the sums that a lane holds first; the other one is eight on.
__device__ inline int my_row() { return my_lane() / 4; }
// The column that it holds first of every eight; the other one is the next.
__device__ inline int my_column() { return my_lane() % 4 * 2; }

#ifdef HOST_RUN
inline int my_warp() { return (int)threadIdx.x / 32; }

template <class E> float half_of(u32 pair, int which) { return wide(E{(u16)(pair >> 16 * which)}); }

inline u32 pair_of(float low, float high) { return (u32)stored(low).bits | (u32)stored(high).bits << 16; }

// All lanes' registers are looked at by where the text above says that they lie.
inline void multiply_add(float (&sums)[4], const Left &left, u32 right0, u32 right1) {
    struct Registers {
        u32 left[4], right[2];
    } mine = {{left.at[0], left.at[1], left.at[2], left.at[3]}, {right0, right1}};
    const u64 *of = (const u64 *)host_exchange(Together::MULTIPLY_ADD, 0, (u64)&mine);
    for (int i = 0; i < 4; i++) {
        const int row = my_row() + i / 2 * 8, column = my_column() + i % 2;
        for (int k = 0; k < 16; k++) {
            const int beside = k % 8 / 2;
            const Registers &of_row = *(const Registers *)of[row % 8 * 4 + beside], &of_column = *(const Registers *)of[column * 4 + beside];
            const float x = half_of<T>(of_row.left[row / 8 + k / 8 * 2], k % 2), y = half_of<T>(of_column.right[k / 8], k % 2);
            sums[i] = fmaf(x, y, sums[i]);
        }
    }
    // Nobody goes on and forgets his registers before all have seen them.
    host_exchange(Together::MULTIPLIED, 0, 0);
}

// A GPU takes 16 bytes at a time from a multiple of 16 alone.
inline void check_alignment(u64 address) {
    if (address % 16 != 0) __builtin_trap();
}

template <bool TURNED> void load_matrices(const T *row, u32 (&to)[4]) {
    u64 rows[32];
    std::memcpy(rows, host_exchange(TURNED ? Together::LOAD_TURNED : Together::LOAD, 0, (u64)row), sizeof(rows));
    for (int i = 0; i < 4; i++) {
        u16 numbers[2];
        for (int j = 0; j < 2; j++) {
            const int r = TURNED ? my_column() + j : my_row(), c = TURNED ? my_row() : my_column() + j;
            check_alignment(rows[8 * i + r]);
            numbers[j] = ((const T *)rows[8 * i + r])[c].bits;
        }
        to[i] = (u32)numbers[0] | (u32)numbers[1] << 16;
    }
}

inline void copy_later(T *to, const T *from, bool is_there) {
    check_alignment((u64)to);
    check_alignment((u64)from);
    host_copy_later(to, is_there ? from : nullptr, 16);
}
inline void copy_number_later(float *to, const float *from, bool is_there) { host_copy_later(to, is_there ? from : nullptr, 4); }
inline void close_copies() { host_close_copies(); }
template <int LEFT> void wait_for_copies() { host_wait_for_copies(LEFT); }
#else
// Which of the block's warps this is: the same for all lanes, as the compiler is told by asking one of them.
__device__ inline int my_warp() { return __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); }

// Two numbers, rounded to the type.
__device__ inline u32 pair_of(Bf16, float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
__device__ inline u32 pair_of(F16, float low, float high) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
__device__ inline u32 pair_of(float low, float high) { return pair_of(T{}, low, high); }

#define MULTIPLY_ADD(TYPE)                                                                                                   \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "          \
        "{%0, %1, %2, %3};"                                                                                                  \
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                                         \
        : "r"(left.at[0]), "r"(left.at[1]), "r"(left.at[2]), "r"(left.at[3]), "r"(right0), "r"(right1))

__device__ inline void multiply_add(Bf16, float (&sums)[4], const Left &left, u32 right0, u32 right1) { MULTIPLY_ADD("bf16"); }
__device__ inline void multiply_add(F16, float (&sums)[4], const Left &left, u32 right0, u32 right1) { MULTIPLY_ADD("f16"); }

// `sums` += `left` times the right factor of these two registers.
__device__ inline void multiply_add(float (&sums)[4], const Left &left, u32 right0, u32 right1) {
    multiply_add(T{}, sums, left, right0, right1);
}

// Four matrices of 8 x 8 from shared memory: lane l says where row l % 8 of matrix l / 8 begins, at a multiple of 16 bytes. Of each
// matrix it gets row r, columns 2p and 2p + 1, as of a left factor; turned, column r of rows 2p and 2p + 1.
template <bool TURNED> __device__ void load_matrices(const T *row, u32 (&to)[4]) {
    const u32 at = (u32)__cvta_generic_to_shared(row);
    if (TURNED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(at)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(at)
                     : "memory");
    }
}

// Eight numbers on their way from global to shared memory, or zeros; both places are multiples of 16 bytes.
__device__ inline void copy_later(T *to, const T *from, bool is_there) {
    const u32 at = (u32)__cvta_generic_to_shared(to), bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(__cvta_generic_to_global(from)), "r"(bytes) : "memory");
}

// A single number likewise.
__device__ inline void copy_number_later(float *to, const float *from, bool is_there) {
    const u32 at = (u32)__cvta_generic_to_shared(to), bytes = is_there ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(__cvta_generic_to_global(from)), "r"(bytes) : "memory");
}

// Makes a group of the thread's copies since the last one.
__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all of the thread's groups but the last `LEFT` are there.
template <int LEFT> __device__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
#endif

// The left factor that two sums side by side are.
__device__ inline Left left_of(const float (&first)[4], const float (&second)[4]) {
    return {{pair_of(first[0], first[1]), pair_of(first[2], first[3]), pair_of(second[0], second[1]), pair_of(second[2], second[3])}};
}
