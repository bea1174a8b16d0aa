// A simdgroup-matrix GEMM from loader, mma and store templates, in the way of array frameworks. D = A Bᵀ or A B.
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#define STEEL_CONST static constant constexpr const
#define STEEL_UNROLL _Pragma("clang loop unroll(full)")

using namespace metal;

constant bool align_M [[function_constant(200)]];
constant bool align_N [[function_constant(201)]];
constant bool has_bias [[function_constant(10)]];
constant bool use_bias = is_function_constant_defined(has_bias) && has_bias;

struct GEMMParams {
  const int M;
  const int N;
  const int K;
  const int lda;
  const int ldb;
  const int ldd;
};

template <typename OutT, typename InT>
struct TransformNone {
  static METAL_FUNC OutT apply(InT x) { return static_cast<OutT>(x); }
};

template <typename T, short BROWS, short BCOLS, short dst_ld, short tgp_size>
struct BlockLoader {
  STEEL_CONST short n_reads = (BCOLS * BROWS) / tgp_size;
  STEEL_CONST short TCOLS = BCOLS / n_reads;
  STEEL_CONST short TROWS = tgp_size / TCOLS;
  STEEL_CONST short vec_size = n_reads;

  const int src_ld;
  const short thread_idx;
  const short bi;
  const short bj;
  threadgroup T* dst;
  const device T* src;

  struct alignas(sizeof(T)) ReadVector {
    uint8_t v[sizeof(T) * vec_size];
  };

  METAL_FUNC BlockLoader(const device T* src_, const int src_ld_, threadgroup T* dst_,
                         ushort simd_group_id [[simdgroup_index_in_threadgroup]],
                         ushort simd_lane_id [[thread_index_in_simdgroup]])
      : src_ld(src_ld_),
        thread_idx(simd_group_id * 32 + simd_lane_id),
        bi(thread_idx / TCOLS),
        bj(vec_size * (thread_idx % TCOLS)),
        dst(dst_ + bi * dst_ld + bj),
        src(src_ + bi * src_ld + bj) {}

  METAL_FUNC void load_unsafe() const {
    STEEL_UNROLL
    for (short i = 0; i < BROWS; i += TROWS) {
      *((threadgroup ReadVector*)(&dst[i * dst_ld])) =
          *((const device ReadVector*)(&src[i * src_ld]));
    }
  }

  METAL_FUNC void load_safe(short2 src_tile_dim) const {
    src_tile_dim = src_tile_dim - short2(bj, bi);
    if (src_tile_dim.x <= 0 || src_tile_dim.y <= 0) {
      STEEL_UNROLL
      for (short i = 0; i < BROWS; i += TROWS) {
        STEEL_UNROLL
        for (short j = 0; j < vec_size; j++) {
          dst[i * dst_ld + j] = T(0);
        }
      }
      return;
    }
    bool tmp_idx[vec_size];
    T tmp_val[vec_size];
    STEEL_UNROLL
    for (short i = 0; i < BROWS; i += TROWS) {
      STEEL_UNROLL
      for (short j = 0; j < vec_size; j++) {
        tmp_idx[j] = (i < src_tile_dim.y) && (j < src_tile_dim.x);
      }
      STEEL_UNROLL
      for (short j = 0; j < vec_size; j++) {
        tmp_val[j] = src[(tmp_idx[j] ? i * src_ld + j : 0)];
      }
      STEEL_UNROLL
      for (short j = 0; j < vec_size; j++) {
        dst[i * dst_ld + j] = tmp_idx[j] ? tmp_val[j] : T(0);
      }
    }
  }

  METAL_FUNC void next() { src += BCOLS; }
};

template <typename T, typename AccumType, int BM, int BN, int BK, int WM, int WN, short ld>
struct BlockMMA {
  STEEL_CONST short kFrag = 8;
  STEEL_CONST short TM = BM / (kFrag * WM);
  STEEL_CONST short TN = BN / (kFrag * WN);
  typedef metal::simdgroup_matrix<AccumType, 8, 8> mat_type;
  typedef metal::vec<AccumType, 2> frag_type;

  frag_type results[TM * TN] = {frag_type(0)};
  short sm, sn, tm, tn;

  METAL_FUNC static constexpr short2 get_coord(ushort simd_lane_id) {
    const short qid = simd_lane_id / 4;
    const short fm = (qid & 4) + ((simd_lane_id / 2) % 4);
    const short fn = (qid & 2) * 2 + (simd_lane_id % 2) * 2;
    return short2{fn, fm};
  }

  METAL_FUNC BlockMMA(ushort simd_group_id, ushort simd_lane_id) {
    short2 simd_coord = get_coord(simd_lane_id);
    tm = kFrag * TM * (simd_group_id / WN);
    tn = kFrag * TN * (simd_group_id % WN);
    sm = simd_coord.y;
    sn = simd_coord.x;
  }

  METAL_FUNC static void frag_mma(thread frag_type& D, thread frag_type& A, thread frag_type& B) {
    mat_type D_mat;
    mat_type A_mat;
    mat_type B_mat;
    reinterpret_cast<thread frag_type&>(A_mat.thread_elements()) = A;
    reinterpret_cast<thread frag_type&>(B_mat.thread_elements()) = B;
    reinterpret_cast<thread frag_type&>(D_mat.thread_elements()) = D;
    simdgroup_multiply_accumulate(D_mat, A_mat, B_mat, D_mat);
    D = reinterpret_cast<thread frag_type&>(D_mat.thread_elements());
  }

  METAL_FUNC void mma(const threadgroup T* As, const threadgroup T* Bs) {
    STEEL_UNROLL
    for (short kk = 0; kk < BK; kk += kFrag) {
      frag_type A[TM], B[TN];
      simdgroup_barrier(mem_flags::mem_none);
      STEEL_UNROLL
      for (short i = 0; i < TM; i++) {
        const threadgroup T* p = As + (tm + i * kFrag + sm) * ld + kk + sn;
        A[i] = frag_type(static_cast<AccumType>(p[0]), static_cast<AccumType>(p[1]));
      }
      STEEL_UNROLL
      for (short j = 0; j < TN; j++) {
        const threadgroup T* p = Bs + (tn + j * kFrag + sn) * ld + kk + sm;
        B[j] = frag_type(AccumType(p[0]), AccumType(p[ld]));
      }
      simdgroup_barrier(mem_flags::mem_none);
      STEEL_UNROLL
      for (short i = 0; i < TM; i++) {
        STEEL_UNROLL
        for (short j = 0; j < TN; j++) {
          short j_serp = (i % 2) ? (TN - 1 - j) : j;
          frag_mma(results[i * TN + j_serp], A[i], B[j_serp]);
        }
      }
    }
  }

  template <typename U, typename Epilogue>
  METAL_FUNC void store(device U* D, const int ldd, short2 dims, thread const Epilogue& epilogue) const {
    STEEL_UNROLL
    for (short i = 0; i < TM; i++) {
      STEEL_UNROLL
      for (short j = 0; j < TN; j++) {
        const short r = tm + i * kFrag + sm, c = tn + j * kFrag + sn;
        STEEL_UNROLL
        for (short e = 0; e < 2; e++) {
          if (r < dims.y && c + e < dims.x) {
            D[r * ldd + c + e] = epilogue(results[i * TN + j][e], c + e);
          }
        }
      }
    }
  }
};

template <typename T, int BM, int BN, int BK, int WM, int WN, typename AccumType = float>
[[kernel, max_total_threads_per_threadgroup(WM * WN * 32)]] void gemm_nt(
    const device T* A [[buffer(0)]],
    const device T* B [[buffer(1)]],
    device T* D [[buffer(2)]],
    const constant GEMMParams* params [[buffer(3)]],
    const device T* bias [[buffer(4), function_constant(use_bias)]],
    uint3 tid [[threadgroup_position_in_grid]],
    uint simd_group_id [[simdgroup_index_in_threadgroup]],
    uint simd_lane_id [[thread_index_in_simdgroup]]) {
  constexpr short pad = 16 / sizeof(T);
  constexpr short ld = BK + pad;
  threadgroup T As[BM * ld];
  threadgroup T Bs[BN * ld];

  const int c_row = tid.y * BM;
  const int c_col = tid.x * BN;
  const size_t c_row_long = size_t(c_row), c_col_long = size_t(c_col);
  A += c_row_long * params->lda;
  B += c_col_long * params->ldb;
  D += c_row_long * params->ldd + c_col_long;

  const short tgp_bm = align_M ? short(BM) : short(min(BM, params->M - c_row));
  const short tgp_bn = align_N ? short(BN) : short(min(BN, params->N - c_col));
  thread BlockLoader<T, BM, BK, ld, WM * WN * 32> loader_a(A, params->lda, As, simd_group_id, simd_lane_id);
  thread BlockLoader<T, BN, BK, ld, WM * WN * 32> loader_b(B, params->ldb, Bs, simd_group_id, simd_lane_id);
  using mma_t = BlockMMA<T, AccumType, BM, BN, BK, WM, WN, ld>;
  thread mma_t mma_op(simd_group_id, simd_lane_id);

  for (int k = 0; k < params->K / BK; k++) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tgp_bm == BM) {
      loader_a.load_unsafe();
    } else {
      loader_a.load_safe(short2(BK, tgp_bm));
    }
    if (tgp_bn == BN) {
      loader_b.load_unsafe();
    } else {
      loader_b.load_safe(short2(BK, tgp_bn));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    mma_op.mma(As, Bs);
    loader_a.next();
    loader_b.next();
  }
  threadgroup_barrier(mem_flags::mem_none);
  auto epilogue = [&](AccumType x, short c) {
    return TransformNone<T, AccumType>::apply(use_bias ? x + AccumType(bias[c_col + c]) : x);
  };
  mma_op.store(D, params->ldd, short2(tgp_bn, tgp_bm), epilogue);
}

#define instantiate_gemm(tname, type, bm, bn, bk, wm, wn)                                        \
  template [[host_name("gemm_nt_" #tname "_bm" #bm "_bn" #bn "_bk" #bk)]] [[kernel]] decltype(   \
      gemm_nt<type, bm, bn, bk, wm, wn>) gemm_nt<type, bm, bn, bk, wm, wn>;

instantiate_gemm(float32, float, 32, 32, 16, 2, 2)
instantiate_gemm(float16, half, 64, 32, 32, 2, 2)
instantiate_gemm(bfloat16, bfloat, 32, 32, 16, 2, 2)
