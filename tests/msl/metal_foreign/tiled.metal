// A matmul with tiles in threadgroup arrays declared in the kernel, as tutorials write it. C[M, N] = A[M, K] B[K, N].
#include <metal_stdlib>
using namespace metal;

#define TILE 16

struct Sizes {
    uint M, N, K;
};

kernel void matmul_naive(device const float* A [[buffer(0)]],
                         device const float* B [[buffer(1)]],
                         device float* C [[buffer(2)]],
                         constant Sizes& sizes [[buffer(3)]],
                         uint2 gid [[thread_position_in_grid]]) {
    if (gid.x >= sizes.N || gid.y >= sizes.M) return;
    float sum = 0.0;
    for (uint k = 0; k < sizes.K; k++) {
        sum += A[gid.y * sizes.K + k] * B[k * sizes.N + gid.x];
    }
    C[gid.y * sizes.N + gid.x] = sum;
}

kernel void matmul_tiled(device const float* A [[buffer(0)]],
                         device const float* B [[buffer(1)]],
                         device float* C [[buffer(2)]],
                         constant Sizes& args [[buffer(3)]],
                         uint2 tid [[thread_position_in_threadgroup]],
                         uint2 tgid [[threadgroup_position_in_grid]]) {
    threadgroup float As[TILE][TILE];
    threadgroup float Bs[TILE][TILE + 1];
    const Sizes sizes = args;
    const uint row = tgid.y * TILE + tid.y, col = tgid.x * TILE + tid.x;
    float sum = 0;
    for (uint t = 0; t < (sizes.K + TILE - 1) / TILE; ++t) {
        const uint ka = t * TILE + tid.x, kb = t * TILE + tid.y;
        As[tid.y][tid.x] = (row < sizes.M && ka < sizes.K) ? A[row * sizes.K + ka] : 0.0f;
        Bs[tid.y][tid.x] = (kb < sizes.K && col < sizes.N) ? B[kb * sizes.N + col] : 0.0f;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        #pragma unroll
        for (uint k = 0; k < TILE; ++k) {
            sum = fma(As[tid.y][k], Bs[k][tid.x], sum);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (row < sizes.M && col < sizes.N) {
        C[row * sizes.N + col] = sum;
    }
}

// Four columns per thread, vector loads.
kernel void matmul_vec4(const device float4* A [[buffer(0)]],
                        const device float4* B [[buffer(1)]],
                        device float4* C [[buffer(2)]],
                        constant uint3& mnk [[buffer(3)]],
                        uint2 gid [[thread_position_in_grid]]) {
    const uint n4 = mnk.y / 4, k4 = mnk.z / 4;
    float4 acc = float4(0.0);
    for (uint k = 0; k < k4; k++) {
        float4 a = A[gid.y * k4 + k];
        acc += a.x * B[(4 * k + 0) * n4 + gid.x];
        acc += a.y * B[(4 * k + 1) * n4 + gid.x];
        acc += a.z * B[(4 * k + 2) * n4 + gid.x];
        acc += a.w * B[(4 * k + 3) * n4 + gid.x];
    }
    C[gid.y * n4 + gid.x] = acc;
}
