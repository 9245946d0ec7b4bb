// The block-scaled FP8 product on the CPU's matrix unit (AMX), rounded as FP8 tensor cores do it:
//
//   C[m, n] = sum over groups g of  (sa[g, m] * sb[g, n]) * (sum over k in g of A[m, k] * B[n, k])
//
// A and B hold FP8 values as BF16 (every one is exact), so products are exact and the inner sum is
// tdpbf16ps into FP32. Each group's sum then goes through memory once: one FP32 product of scales
// and one FMA into C, groups in order. No element's arithmetic depends on threads or on blocking.
//
// Packed operands. The unit multiplies tiles of 16 rows and 32 k. Rows are padded with zeros to whole
// panels of 32, each group to whole steps of 32 k. Tiles lie in the order in which they are read:
//
//   panel > group > half of the panel > step > tile
//
// Left tiles are [16 rows][32 k]; right tiles [16 pairs of k][16 rows][2 k], as the unit wants them.
// A right operand may hold E4M3 codes instead, one byte per element: half the bytes from memory,
// which is all that counts with few rows on the left. They are expanded to BF16 on their way.
// Scales are [groups][rows, padded to whole panels].

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <vector>

namespace {

constexpr int BLOCK = 16, PANEL = 32, STEP = 32;
constexpr int TILE = 1024, CODES = 512;  // bytes of a tile, of one of codes
constexpr size_t KEPT = 1 << 20;         // bytes of the right operand to stay in a core's L2 cache
constexpr int AHEAD = 2048;              // bytes by which codes are fetched from memory in advance

// GOMP_parallel of the OpenMP runtime that PyTorch uses: a second pool of threads beside PyTorch's
// would fight it for the cores. Whoever of its threads comes takes the next piece.
using Pool = void (*)(void (*)(void*), void*, unsigned, unsigned);

template <class F>
void share(Pool pool, int threads, int pieces, F piece) {
  if (threads == 1 || pieces == 1) {
    for (int i = 0; i < pieces; ++i) piece(i);
    return;
  }
  struct Work {
    std::atomic<int> next;
    int pieces;
    F& piece;
  } work{{0}, pieces, piece};
  auto take = [](void* data) {
    Work& w = *static_cast<Work*>(data);
    for (int i; (i = w.next++) < w.pieces;) w.piece(i);
  };
  pool(take, &work, threads, 0);
}

// Tile instructions read and write memory of which GCC's intrinsics do not tell the compiler: from
// here on, what was written lies in memory, and what `p` points into may change.
void publish(const void* p) { asm volatile("" ::"r"(p) : "memory"); }

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Where the groups lie in a packed operand, in steps.
struct Groups {
  std::vector<int> first, count;
  int steps = 0;
  Groups(const int* sizes, int n) : first(n), count(n) {
    for (int g = 0; g < n; ++g) {
      first[g] = steps;
      steps += count[g] = ceil_div(sizes[g], STEP);
    }
  }
  int size() const { return int(count.size()); }
  // Index of the first tile of a group in a panel.
  size_t tile(int panel, int g) const { return 2 * (size_t(panel) * steps + first[g]); }
};

// ---------------------------------------------------------------------------------------- packing

// 16 x 16 elements of 32 bits, in four rounds of swapping at twice the distance.
void transpose(__m512i v[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      t[i + j] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(v[i + j], v[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    v[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    v[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}

// Up to 32 elements as 16-bit words, zeros behind them.
__m512i words(const uint16_t* p, int n) {
  return _mm512_maskz_loadu_epi16(n >= 32 ? ~0u : (1u << n) - 1, p);
}
__m512i words(const uint8_t* p, int n) {
  return _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(n >= 32 ? ~0u : (1u << n) - 1, p));
}

void store(const __m512i v[16], uint16_t* tile) {
  for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + 32 * i, v[i]);
}
// Rows 2i and 2i + 1 of the tile interleaved by 8 bytes: what `expand` takes apart by unpacking.
void store(const __m512i v[16], uint8_t* tile) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (int i = 0; i < 16; i += 2) {
    __m512i both = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(v[i]));
    both = _mm512_inserti64x4(both, _mm512_cvtepi16_epi8(v[i + 1]), 1);
    _mm512_store_si512(tile + 32 * i, _mm512_permutexvar_epi64(order, both));
  }
}

// One tile from `rows` rows and `n` k at `in`; `stride` elements from row to row if k is the last
// axis, else from k to k.
template <class T>
void pack_tile(const T* in, int64_t stride, int rows, int n, bool k_last, bool right, T* tile) {
  __m512i v[16];
  if (k_last) {  // v[row] holds pairs of k
    for (int i = 0; i < 16; ++i) v[i] = i < rows ? words(in + i * stride, n) : _mm512_setzero_si512();
  } else {  // v[pair of k] holds rows
    for (int i = 0; i < 16; ++i) {
      __m512i even = words(in + 2 * i * stride, 2 * i < n ? rows : 0);
      __m512i odd = words(in + (2 * i + 1) * stride, 2 * i + 1 < n ? rows : 0);
      even = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(even));
      odd = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(odd));
      v[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    }
  }
  if (k_last == right) transpose(v);
  store(v, tile);
}

template <class T>
void pack(Pool pool, int threads, const T* values, int64_t stride, int rows, const int* sizes,
          int n_groups, bool k_last, bool right, T* tiles) {
  const Groups groups(sizes, n_groups);
  struct Step {
    int k, n, group, index;
  };
  std::vector<Step> steps;
  for (int g = 0, k = 0; g < n_groups; k += sizes[g++])
    for (int s = 0; s < groups.count[g]; ++s)
      steps.push_back({k + s * STEP, std::min(STEP, sizes[g] - s * STEP), g, s});
  const int blocks = 2 * ceil_div(rows, PANEL);
  auto one = [&](int block, const Step& s) {
    const int row = block * BLOCK;
    const size_t index =
        groups.tile(block / 2, s.group) + block % 2 * groups.count[s.group] + s.index;
    const T* in = k_last ? values + row * stride + s.k : values + s.k * stride + row;
    pack_tile(in, stride, std::clamp(rows - row, 0, BLOCK), s.n, k_last, right,
              tiles + index * (BLOCK * STEP));
  };
  // Memory is read along its rows: blocks outside where k is the last axis, else steps.
  const int outer = k_last ? blocks : groups.steps, inner = k_last ? groups.steps : blocks;
  const int pieces = std::min(outer, 4 * threads);
  share(pool, threads, pieces, [&](int piece) {
    int stop = int64_t(outer) * (piece + 1) / pieces;
    for (int o = int64_t(outer) * piece / pieces; o < stop; ++o)
      for (int i = 0; i < inner; ++i) k_last ? one(o, steps[i]) : one(i, steps[o]);
  });
}

// ---------------------------------------------------------------------------------------- product

// The BF16 bytes of the 128 magnitudes of E4M3, in registers while codes are expanded. Look-ups and
// not arithmetic: the process may flush subnormal FP32 numbers to zero.
struct Table {
  alignas(64) uint8_t low[128], high[128];
  constexpr Table() : low(), high() {
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> 3, mantissa = code & 7;
      int bits = (exponent + 120) << 7 | mantissa << 4;
      if (exponent == 0) {
        int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
        bits = mantissa == 0 ? 0 : (118 + top) << 7 | ((mantissa << (7 - top)) & 127);
      }
      if (code == 127) bits = 0x7fc0;
      low[code] = bits & 255;
      high[code] = bits >> 8;
    }
  }
};
constexpr Table TABLE;

// `lines` times 64 codes into twice as many bytes of BF16.
void expand(const char* codes, char* out, int lines) {
  const __m512i low0 = _mm512_load_si512(TABLE.low), low1 = _mm512_load_si512(TABLE.low + 64);
  const __m512i high0 = _mm512_load_si512(TABLE.high), high1 = _mm512_load_si512(TABLE.high + 64);
  const __m512i sign = _mm512_set1_epi8(char(0x80));
  for (int i = 0; i < lines; ++i) {
    _mm_prefetch(codes + 64 * i + AHEAD, _MM_HINT_T0);
    __m512i code = _mm512_load_si512(codes + 64 * i);
    __m512i low = _mm512_permutex2var_epi8(low0, code, low1);
    __m512i high = _mm512_permutex2var_epi8(high0, code, high1);
    high = _mm512_or_si512(high, _mm512_and_si512(code, sign));
    _mm512_store_si512(out + 128 * i, _mm512_unpacklo_epi8(low, high));
    _mm512_store_si512(out + 128 * i + 64, _mm512_unpackhi_epi8(low, high));
  }
  publish(out);
}

struct Job {
  const char *left, *right;
  const float *left_scales, *right_scales;
  void* out;
  int m, n;
  bool codes, bf16;
};

// What a thread holds while it works, in its L1 cache: WIDE panels of 32 x 32 elements of C by tiles,
// and one group's sums for one of them.
constexpr int WIDE = 4;
struct Scratch {
  alignas(64) float c[WIDE][2][2][BLOCK][BLOCK];
  alignas(64) float sums[2][2][BLOCK][BLOCK];
};

// Sums that wait to be scaled and added to C.
struct Pending {
  float (*c)[2][BLOCK][BLOCK];
  const float *sa, *sb;
  bool first;
};

// Scales and adds one of four quarters (8 rows) of what waits.
void settle(const Scratch& w, const Pending& p, int quarter) {
  const int i = quarter / 2, half = quarter % 2 * 8;
  const __mmask16 old = p.first ? 0 : 0xffff;
  const __m512 sb[2] = {_mm512_load_ps(p.sb), _mm512_load_ps(p.sb + BLOCK)};
#pragma GCC unroll 8
  for (int r = half; r < half + 8; ++r) {
    const __m512 sa = _mm512_set1_ps(p.sa[i * BLOCK + r]);
    for (int j = 0; j < 2; ++j) {
      float* c = p.c[i][j][r];
      const __m512 scale = _mm512_mul_ps(sa, sb[j]), sum = _mm512_load_ps(w.sums[i][j][r]);
      _mm512_store_ps(c, _mm512_fmadd_ps(sum, scale, _mm512_maskz_load_ps(old, c)));
    }
  }
}

// One group's sums of a 32 x 32 panel: tiles 0..3 over tiles of A in 4, 5 and of B in 6, 7. The
// previous sums are settled between the steps, in the shadow of the matrix unit. once: these tiles
// of B are used once while A and C stay in the L1 cache, and are kept from evicting those.
template <bool once>
void multiply(const char* a, const char* b, int steps, Scratch& w, const Pending& pending) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const size_t half = size_t(steps) * TILE;
  for (int s = 0; s < steps; ++s, a += TILE, b += TILE) {
    if constexpr (once) {
      _tile_stream_loadd(6, b, 64);
      _tile_stream_loadd(7, b + half, 64);
    } else {
      _tile_loadd(6, b, 64);
      _tile_loadd(7, b + half, 64);
    }
    _tile_loadd(4, a, 64);
    _tile_loadd(5, a + half, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    if (s < 4 && pending.c) settle(w, pending, s);
  }
  for (int s = steps; s < 4 && pending.c; ++s) settle(w, pending, s);
  _tile_stored(0, w.sums[0][0], 64);
  _tile_stored(1, w.sums[0][1], 64);
  _tile_stored(2, w.sums[1][0], 64);
  _tile_stored(3, w.sums[1][1], 64);
}

void write_out(const Job& job, const float (*c)[2][BLOCK][BLOCK], int row, int column) {
  const int rows = std::min(PANEL, job.m - row), columns = std::min(PANEL, job.n - column);
  const uint32_t mask = columns == PANEL ? ~0u : (1u << columns) - 1;
  for (int r = 0; r < rows; ++r) {
    const size_t at = size_t(row + r) * job.n + column;
    const __m512 low = _mm512_load_ps(c[r / BLOCK][0][r % BLOCK]);
    const __m512 high = _mm512_load_ps(c[r / BLOCK][1][r % BLOCK]);
    if (job.bf16) {
      _mm512_mask_storeu_epi16(static_cast<uint16_t*>(job.out) + at, mask,
                               (__m512i)_mm512_cvtne2ps_pbh(high, low));
    } else {
      _mm512_mask_storeu_ps(static_cast<float*>(job.out) + at, mask, low);
      _mm512_mask_storeu_ps(static_cast<float*>(job.out) + at + BLOCK, mask >> BLOCK, high);
    }
  }
}

// C at panels m0..m1 x n0..n1.
void rectangle(const Job& job, const Groups& groups, int m0, int m1, int n0, int n1) {
  const size_t panel_bytes = groups.tile(1, 0) * TILE;
  const int width = std::max(1, int(KEPT / panel_bytes));
  const int padded_m = ceil_div(job.m, PANEL) * PANEL, padded_n = ceil_div(job.n, PANEL) * PANEL;
  // Codes that several panels of rows use are expanded once, with the first.
  const bool keep = m1 - m0 > 1;
  const int wide = keep || !job.codes ? WIDE : 1;
  static thread_local std::vector<char> memory;
  char* expanded = nullptr;
  if (job.codes) {
    memory.resize((keep ? width : 1) * panel_bytes + 64);
    expanded = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  }
  Scratch w;
  for (int from = n0, to; from < n1; from = to) {
    to = std::min(n1, from + width);
    for (int m = m0; m < m1; ++m)
      for (int n = from; n < to; n += wide) {
        const int count = std::min(wide, to - n);
        Pending pending{};
        auto right = [&](int j, int g) -> const char* {
          if (!job.codes) return job.right + groups.tile(n + j, g) * TILE;
          return expanded + groups.tile(keep ? n + j - from : 0, g) * TILE;
        };
        for (int g = 0; g < groups.size(); ++g) {
          const char* a = job.left + groups.tile(m, g) * TILE;
          const int steps = groups.count[g];
          for (int j = 0; j < count; ++j) {
            const char* b = right(j, g);
            if (job.codes && m == m0) {
              expand(job.right + groups.tile(n + j, g) * CODES, const_cast<char*>(b),
                     2 * steps * (CODES / 64));
              multiply<false>(a, b, steps, w, pending);
            } else {
              multiply<true>(a, b, steps, w, pending);
            }
            pending = {w.c[j], job.left_scales + size_t(g) * padded_m + m * PANEL,
                       job.right_scales + size_t(g) * padded_n + (n + j) * PANEL, g == 0};
          }
        }
        for (int q = 0; q < 4; ++q) settle(w, pending, q);
        for (int j = 0; j < count; ++j) write_out(job, w.c[j], m * PANEL, (n + j) * PANEL);
      }
  }
}

// Sets the thread up for a scope: eight tiles of 16 rows by 64 bytes, and FP32 arithmetic as usual,
// whether or not the process flushes subnormals. Then back to what it was.
struct SetUp {
  alignas(64) uint8_t mine[64] = {1}, before[64];
  unsigned arithmetic = _mm_getcsr();
  SetUp() {
    for (int t = 0; t < 8; ++t) mine[16 + 2 * t] = 64, mine[48 + t] = BLOCK;
    publish(this);
    _tile_storeconfig(before);
    _tile_loadconfig(mine);
    publish(this);
    _mm_setcsr(0x1f80);
  }
  ~SetUp() {
    _mm_setcsr(arithmetic);
    publish(this);
    _tile_loadconfig(before);
  }
};

void pack_scales(const float* scales, int64_t by_row, int64_t by_group, int rows, int groups,
                 float* out) {
  const int padded = ceil_div(rows, PANEL) * PANEL;
  for (int g = 0; g < groups; ++g)
    for (int r = 0; r < padded; ++r)
      *out++ = r < rows ? scales[r * by_row + g * by_group] : 0.0f;
}

}  // namespace

extern "C" {

// Asks the kernel for the right to use the matrix unit, once per process; 0 or an errno.
int fp8rl_enable() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 ? 0 : errno;
}

// values: BF16 words, or E4M3 bytes if `codes`. stride: elements from row to row if `k_last`, else
// from k to k.
void fp8rl_pack(void* pool, int threads, const void* values, int64_t stride, int rows,
                const int* sizes, int groups, int k_last, int right, int codes, void* tiles,
                const float* scales, int64_t by_row, int64_t by_group, float* packed_scales) {
  Pool run = reinterpret_cast<Pool>(pool);
  if (codes)
    pack(run, threads, static_cast<const uint8_t*>(values), stride, rows, sizes, groups, k_last,
         right, static_cast<uint8_t*>(tiles));
  else
    pack(run, threads, static_cast<const uint16_t*>(values), stride, rows, sizes, groups, k_last,
         right, static_cast<uint16_t*>(tiles));
  pack_scales(scales, by_row, by_group, rows, groups, packed_scales);
}

void fp8rl_product(void* pool, int threads, const void* left, const float* left_scales,
                   const void* right, const float* right_scales, const int* sizes, int n_groups,
                   int m, int n, int codes, int bf16, void* out) {
  const Groups groups(sizes, n_groups);
  const Job job{static_cast<const char*>(left), static_cast<const char*>(right), left_scales,
                right_scales, out, m, n, codes != 0, bf16 != 0};
  // C is cut into threads_m x threads_n rectangles such that the largest is smallest.
  const int panels_m = ceil_div(m, PANEL), panels_n = ceil_div(n, PANEL);
  int threads_m = 1, largest = INT32_MAX;
  for (int t = 1; t <= threads; ++t) {
    if (threads % t != 0) continue;
    const int size = ceil_div(panels_m, t) * ceil_div(panels_n, threads / t);
    if (size < largest) largest = size, threads_m = t;
  }
  const int threads_n = threads / threads_m;
  share(reinterpret_cast<Pool>(pool), threads, threads, [&](int piece) {
    const SetUp here;
    auto cut = [](int panels, int i, int of) { return int(int64_t(panels) * i / of); };
    const int i = piece / threads_n, j = piece % threads_n;
    rectangle(job, groups, cut(panels_m, i, threads_m), cut(panels_m, i + 1, threads_m),
              cut(panels_n, j, threads_n), cut(panels_n, j + 1, threads_n));
  });
}
}
