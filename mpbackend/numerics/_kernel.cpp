// Dot products of matrix units, bit for bit and many at once. `oracle.py` is the definition; the tests hold every path here equal to it.
//
// Operands come with their exponents, so that a step can find the exponent E that it aligns to before it multiplies. Tiles (`_tiles.h`) do the ordinary case in
// vectors; `step` below is the definition in scalar code and serves whatever a tile cannot do exactly. Nothing here knows Python: `kernel.py` calls the
// functions at the end through ctypes.

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum { NONE = -8192, SPECIAL = 12288 };  // exponents of zeros, and of infinities and NaNs: sums of two stay within 16 bits and keep their meaning
enum { RNE = 0, RZ = 1, RNA = 2 };
enum { DEPTH = 256 };  // rows of b between two writes of the sums: a tile of them stays in the first cache

struct Unit {
    int32_t products;         // to a step
    int32_t fraction_bits;    // kept below the largest exponent of a step
    int32_t zero_exponent;    // lowest exponent of alignment
    int32_t register_bits;    // fraction bits of the register
    int32_t register_emin;    // exponent of its smallest normal number
    int32_t register_emax;    // exponent of its largest number
    int32_t rounding;         // of a step's sum to the register
    int32_t promotion_steps;  // steps after which the register moves to the outer sum; 0 for never
    int32_t promoted_bits;    // fraction bits of the outer sum: 23 or 10
};

struct Operands {
    const float *a;         // rows x depth
    const int16_t *a_exp;
    const float *b;         // tiles x depth x tile width
    const int16_t *b_exp;
    float *running;         // rows x (tiles x tile width): the registers
    float *outer;           // the same of the outer sums, where there is promotion
    int64_t depth;          // a multiple of the products of a step
    int64_t width;          // columns of `running`
};

// Return total * 2^scale rounded to a format, as `oracle.to_register` does.
static double round_to(int64_t total, int scale, int bits, int emin, int emax, int rounding) {
    if (!total) return 0.0;
    const uint64_t magnitude = total < 0 ? -(uint64_t)total : (uint64_t)total;
    const int exponent = 63 - __builtin_clzll(magnitude) + scale;
    const int shift = (exponent > emin ? exponent : emin) - bits - scale;
    double value;
    if (shift <= 0) {
        value = std::ldexp((double)magnitude, scale);
    } else {
        const uint64_t whole = shift > 63 ? 0 : magnitude >> shift;
        const uint64_t rest = shift > 63 ? magnitude : magnitude & ((1ull << shift) - 1);
        const uint64_t half = shift > 64 ? UINT64_MAX : 1ull << (shift - 1);
        const bool up = rounding != RZ && (rest > half || (rest == half && (rounding == RNA || (whole & 1))));
        value = std::ldexp((double)(whole + up), scale + shift);
    }
    if (value >= std::ldexp(1.0, emax + 1)) value = INFINITY;
    return total < 0 && value != 0 ? -value : value;  // registers have no negative zero
}

// Return one register after one step, as `oracle.add_step` does; `stride` is the distance of two numbers of b.
static float step(const float *a, const int16_t *a_exp, const float *b, const int16_t *b_exp, int stride, float running, const Unit &unit) {
    double special = std::isfinite(running) ? 0.0 : running;
    int top = NONE;
    if (running != 0 && std::isfinite(running)) {
        top = std::ilogb(running);
        if (top < unit.register_emin) top = unit.register_emin;
    }
    for (int k = 0; k < unit.products; ++k) {
        const double product = (double)a[k] * b[k * stride];
        const int exponent = a_exp[k] + b_exp[k * stride];
        if (!std::isfinite(product)) special += product;
        else if (product != 0 && exponent > top) top = exponent;
    }
    if (special != 0) return (float)special;  // NaN differs from zero too
    if (top == NONE) return 0.0f;
    if (top < unit.zero_exponent) top = unit.zero_exponent;
    const int scale = top - unit.fraction_bits;
    int64_t total = (int64_t)std::ldexp((double)running, -scale);
    for (int k = 0; k < unit.products; ++k) total += (int64_t)std::ldexp((double)a[k] * b[k * stride], -scale);
    return (float)round_to(total, scale, unit.register_bits, unit.register_emin, unit.register_emax, unit.rounding);
}

// Return a number rounded to nearest even in fp16, overflow to infinity.
static float to_half(double x) {
    if (x == 0 || !std::isfinite(x)) return (float)x;
    const int exponent = std::ilogb(x);
    const int ulp = (exponent > -14 ? exponent : -14) - 10;
    const double value = std::ldexp(std::nearbyint(std::ldexp(x, -ulp)), ulp);
    return std::fabs(value) >= 65536.0 ? std::copysign(INFINITY, (float)x) : (float)value;
}

// Return the outer sum with the register added, as `oracle.promote` does. For fp16 the sum of fp16 and single precision is first rounded to double precision,
// which is exact wherever the sum stands near a half of an fp16 ulp.
static float promote(float outer, float running, int bits) { return bits == 23 ? outer + running : to_half((double)outer + running); }

// The text of the tiles, once for each set of instructions that a processor may have.
#define TILES portable
#define VECTOR_BYTES 16
#include "_tiles.h"
#undef TILES
#undef VECTOR_BYTES

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CHOOSES 1
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define TILES avx2
#define VECTOR_BYTES 32
#include "_tiles.h"
#undef TILES
#undef VECTOR_BYTES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define TILES avx512
#define VECTOR_BYTES 64
#include "_tiles.h"
#undef TILES
#undef VECTOR_BYTES
#pragma GCC pop_options
#endif

static int instructions() {
#if defined(CHOOSES)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) return 512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 256;
#endif
    return 128;
}

// Return the function of the processor at hand.
#if defined(CHOOSES)
#define BEST(name) (instructions() == 512 ? avx512::name : instructions() == 256 ? avx2::name : portable::name)
#else
#define BEST(name) portable::name
#endif

extern "C" {

// Return the columns of a tile.
int mp_tile_width() { return instructions() / 16; }

// Write the exponents of numbers, subnormals with `emin`.
void mp_exponents(const float *x, int16_t *exponents, int64_t count, int emin) { BEST(write_exponents)(x, exponents, count, emin); }

// Bring the columns of b (depth x columns) from `first` tiles to `last` into tiles.
void mp_pack(const float *b, int64_t depth, int64_t columns, float *packed, int64_t padded, int64_t first, int64_t last) {
    const int64_t tile = mp_tile_width();
    for (int64_t t = first; t < last; ++t) {
        const int64_t count = columns - t * tile < tile ? columns - t * tile : tile;
        for (int64_t k = 0; k < depth; ++k) {
            float *to = packed + (t * padded + k) * tile;
            std::memcpy(to, b + k * columns + t * tile, count * sizeof *to);
            for (int64_t j = count; j < tile; ++j) to[j] = 0.0f;
        }
        std::memset(packed + (t * padded + depth) * tile, 0, (padded - depth) * tile * sizeof *packed);
    }
}

// Add all products to the sums of rows first_row .. last_row and tiles first_tile .. last_tile. The kernel numbers: 0 steps of any unit; 1 vectors; 2 vectors
// with checks for sums beyond 32 bits; 3 vectors with an fp16 register; 4 fused multiply-adds.
void mp_accumulate(const Operands *operands, const Unit *unit, int kernel, int64_t first_row, int64_t last_row, int64_t first_tile, int64_t last_tile) {
    BEST(accumulate)(*operands, *unit, kernel, first_row, last_row, first_tile, last_tile);
}
}

// An empty module: building it as one puts the library where kernel.py finds it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyModuleDef_Slot slots[] = {{0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernel", "Functions for ctypes; see kernel.py.", 0, nullptr, slots, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__kernel() { return PyModuleDef_Init(&definition); }
