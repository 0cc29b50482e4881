// What is not a matrix product in a decoder layer: loops that a compiler turns into vector code. engine/kernels.py compiles and
// calls them.
//
// Every row (token, or token and head) is computed by one thread in a fixed order, so the result does not depend on the number
// of threads or on the rest of the batch. NaN passes through: no step may hide it, because a poisoned request must fail.
//
// The loops that take an Element exist for float32 and for bfloat16: what the products read and write, weights of norms, and
// the cache. Between load and store all arithmetic is float32, and so is the residual stream.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// exp to 1 ulp or so for x <= 0 (Cephes' polynomial); a NaN stays one
inline float exp_negative(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float n = std::nearbyintf(x * 1.44269504088896341f);
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  union { int32_t i; float f; } scale;
  scale.i = (static_cast<int32_t>(n) + 127) << 23;
  return p * scale.f;
}

struct bfloat16 {
  uint16_t bits;  // the upper half of a float
};

inline float read(float x) { return x; }

inline float read(bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void write(float* to, float x) { *to = x; }

// to nearest, ties to even; a NaN stays one
inline void write(bfloat16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

template <typename Weight, typename Element>
inline void normalize(const float* x, const Weight* weight, float eps, Element* out, int64_t n) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(n) + eps);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) write(out + i, read(weight[i]) * (x[i] * scale));
}

template <int FIXED, typename Element>
inline float dot(const float* a, const Element* b, int64_t size) {
  const int64_t n = FIXED ? FIXED : size;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * read(b[i]);
  return sum;
}

typedef float vec __attribute__((vector_size(64)));

inline vec load(const float* x) {
  vec v;
  std::memcpy(&v, x, sizeof(v));
  return v;
}

inline vec load(const bfloat16* x) {
  typedef uint16_t halves __attribute__((vector_size(32)));
  typedef uint32_t words __attribute__((vector_size(64)));
  halves h;
  std::memcpy(&h, x, sizeof(h));
  const words w = __builtin_convertvector(h, words) << 16;
  vec v;
  std::memcpy(&v, &w, sizeof(v));
  return v;
}

template <typename Element>
inline void prefetch(const Element* row, int64_t elements) {
  for (int64_t i = 0; i < elements; i += 64 / static_cast<int64_t>(sizeof(Element))) __builtin_prefetch(row + i);
}

// All heads of one sequence. Tokens go by in runs that the first-level cache holds, so that each row of K and of V
// comes from memory once for all heads, and the next run is on its way meanwhile.
template <int FIXED, typename Element>
void attend(const float* query, const Element* keys, const Element* values, const int64_t* rows, int64_t length,
            int64_t heads, int64_t kv_heads, int64_t size, float scale, float* scores, float* out) {
  const int64_t n = FIXED ? FIXED : size;
  const int64_t stride = kv_heads * n, group = heads / kv_heads;
  const int64_t run = 16;
  for (int64_t begin = 0; begin < length; begin += run) {
    const int64_t end = begin + run < length ? begin + run : length;
    const int64_t ahead = end + run < length ? end + run : length;
    for (int64_t t = end; t < ahead; ++t) prefetch(keys + rows[t] * stride, stride);
    for (int64_t kv = 0; kv < kv_heads; ++kv)
      for (int64_t h = kv * group; h < (kv + 1) * group; ++h)
        for (int64_t t = begin; t < end; ++t)
          scores[h * length + t] = dot<FIXED, Element>(query + h * n, keys + rows[t] * stride + kv * n, n) * scale;
  }
  for (int64_t h = 0; h < heads; ++h) {
    float* row = scores + h * length;
    float top = row[0];
#pragma omp simd reduction(max : top)
    for (int64_t t = 0; t < length; ++t) top = row[t] > top ? row[t] : top;
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t t = 0; t < length; ++t) {
      row[t] = exp_negative(row[t] - top);
      total += row[t];
    }
    const float share = 1.0f / total;
#pragma omp simd
    for (int64_t t = 0; t < length; ++t) row[t] *= share;
  }
  for (int64_t i = 0; i < heads * n; ++i) out[i] = 0.0f;
  for (int64_t begin = 0; begin < length; begin += run) {
    const int64_t end = begin + run < length ? begin + run : length;
    const int64_t ahead = end + run < length ? end + run : length;
    for (int64_t t = end; t < ahead; ++t) prefetch(values + rows[t] * stride, stride);
    for (int64_t h = 0; h < heads; ++h) {
      const Element* value = values + (h / group) * n;
      float* to = out + h * n;
      constexpr int parts = FIXED / 16;
      vec sum[parts ? parts : 1];  // in registers: the loops over parts are unrolled
#pragma GCC unroll 16
      for (int i = 0; i < parts; ++i) sum[i] = load(to + 16 * i);
      for (int64_t t = begin; t < end; ++t) {
        const float weight = scores[h * length + t];
        const Element* row = value + rows[t] * stride;
#pragma GCC unroll 16
        for (int i = 0; i < parts; ++i) sum[i] += weight * load(row + 16 * i);
        if (parts == 0)
          for (int64_t i = 0; i < n; ++i) to[i] += weight * read(row[i]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < parts; ++i) std::memcpy(to + 16 * i, &sum[i], sizeof(vec));
    }
  }
}

// x += delta (if there is one); out = RMS norm of x
template <typename Element>
void add_norm(float* x, const Element* delta, const Element* weight, float eps, Element* out, int64_t tokens,
              int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; ++t) {
    float* row = x + t * size;
    if (delta != nullptr) {
      const Element* add = delta + t * size;
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) row[i] += read(add[i]);
    }
    normalize(row, weight, eps, out + t * size, size);
  }
}

// qkv [T, H + 2 KV, D]: norms (if any) and rotation of q and k in place; k and v into the cache at each token's slot
template <typename Element>
void rotate_and_store(Element* qkv, const float* cos, const float* sin, int64_t rotary, const Element* q_norm,
                      const Element* k_norm, float eps, const int64_t* slots, Element* keys, Element* values,
                      int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size, int threads) {
  const int64_t half = rotary / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; ++t) {
    Element* row = qkv + t * (heads + 2 * kv_heads) * size;
    const float* c = cos + t * rotary;
    const float* s = sin + t * rotary;
    thread_local std::vector<float> head;
    head.resize(size);
    float* x = head.data();
    for (int64_t h = 0; h < heads + kv_heads; ++h) {
      Element* place = row + h * size;
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) x[i] = read(place[i]);
      if (q_norm != nullptr) normalize(x, h < heads ? q_norm : k_norm, eps, x, size);
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const float low = x[i], high = x[i + half];
        x[i] = low * c[i] - high * s[i];
        x[i + half] = high * c[i + half] + low * s[i + half];
      }
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) write(place + i, x[i]);
    }
    const Element* k = row + heads * size;
    const Element* v = k + kv_heads * size;
    const size_t bytes = kv_heads * size * sizeof(Element);
    std::memcpy(keys + slots[t] * kv_heads * size, k, bytes);
    std::memcpy(values + slots[t] * kv_heads * size, v, bytes);
  }
}

// one query a sequence over its blocks; rows [N, H + 2 KV, D] hold the rotated queries, out [N, H, D]
template <typename Element>
void decode_attention(const Element* rows, const Element* keys, const Element* values, const int64_t* blocks,
                      const int64_t* offsets, const int64_t* lengths, Element* out, int64_t sequences, int64_t heads,
                      int64_t kv_heads, int64_t size, int64_t block, int64_t window, float scale, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t n = 0; n < sequences; ++n) {
    const int64_t first = window > 0 && lengths[n] > window ? lengths[n] - window : 0;
    const int64_t length = lengths[n] - first;
    thread_local std::vector<float> scores, query, result;
    thread_local std::vector<int64_t> where;
    scores.resize(heads * length);
    query.resize(heads * size);
    result.resize(heads * size);
    where.resize(length);
    const int64_t* table = blocks + offsets[n];
    for (int64_t t = 0; t < length; ++t) where[t] = table[(first + t) / block] * block + (first + t) % block;
    const Element* own = rows + n * (heads + 2 * kv_heads) * size;
    for (int64_t i = 0; i < heads * size; ++i) query[i] = read(own[i]);
    const auto function = size == 64 ? attend<64, Element> : size == 128 ? attend<128, Element> : attend<0, Element>;
    function(query.data(), keys, values, where.data(), length, heads, kv_heads, size, scale, scores.data(),
             result.data());
    for (int64_t i = 0; i < heads * size; ++i) write(out + n * heads * size + i, result[i]);
  }
}

// silu(gate) * up for rows [gate, up]
template <typename Element>
void gated_silu(const Element* rows, Element* out, int64_t tokens, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; ++t) {
    const Element* gate = rows + t * 2 * size;
    const Element* up = gate + size;
    Element* to = out + t * size;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const float g = read(gate[i]);
      const float e = exp_negative(-std::fabs(g));
      const float sigmoid = (g < 0.0f ? e : 1.0f) / (1.0f + e);
      write(to + i, g * sigmoid * read(up[i]));
    }
  }
}

}  // namespace

extern "C" {

#define LOOPS(Element, suffix)                                                                                         \
  void add_norm_##suffix(float* x, const Element* delta, const Element* weight, float eps, Element* out,               \
                         int64_t tokens, int64_t size, int threads) {                                                  \
    add_norm(x, delta, weight, eps, out, tokens, size, threads);                                                       \
  }                                                                                                                    \
  void rotate_and_store_##suffix(Element* qkv, const float* cos, const float* sin, int64_t rotary,                     \
                                 const Element* q_norm, const Element* k_norm, float eps, const int64_t* slots,        \
                                 Element* keys, Element* values, int64_t tokens, int64_t heads, int64_t kv_heads,      \
                                 int64_t size, int threads) {                                                          \
    rotate_and_store(qkv, cos, sin, rotary, q_norm, k_norm, eps, slots, keys, values, tokens, heads, kv_heads, size,   \
                     threads);                                                                                         \
  }                                                                                                                    \
  void decode_attention_##suffix(const Element* rows, const Element* keys, const Element* values,                      \
                                 const int64_t* blocks, const int64_t* offsets, const int64_t* lengths, Element* out,  \
                                 int64_t sequences, int64_t heads, int64_t kv_heads, int64_t size, int64_t block,      \
                                 int64_t window, float scale, int threads) {                                           \
    decode_attention(rows, keys, values, blocks, offsets, lengths, out, sequences, heads, kv_heads, size, block,       \
                     window, scale, threads);                                                                          \
  }                                                                                                                    \
  void gated_silu_##suffix(const Element* rows, Element* out, int64_t tokens, int64_t size, int threads) {             \
    gated_silu(rows, out, tokens, size, threads);                                                                      \
  }

LOOPS(float, float32)
LOOPS(bfloat16, bfloat16)

// one scale a row: largest magnitude / 127; out = x / scale + 128, to nearest
void quantize_rows_float32(const float* x, uint8_t* out, float* scales, int64_t tokens, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; ++t) {
    const float* row = x + t * size;
    float top = 0.0f, sum = 0.0f;
#pragma omp simd reduction(max : top) reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) {
      const float magnitude = std::fabs(row[i]);
      top = magnitude > top ? magnitude : top;
      sum += row[i];
    }
    const float scale = top > 127e-12f ? top / 127.0f : 1e-12f;
    scales[t] = std::isfinite(sum) ? scale : NAN;  // a maximum does not see a NaN, a sum does
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) out[t * size + i] = static_cast<uint8_t>(static_cast<int32_t>(row[i] / scale + 128.5f));
  }
}

// each row times its scale, plus the bias (if any)
void scale_rows_float32(float* x, const float* scales, const float* bias, int64_t tokens, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; ++t) {
    float* row = x + t * size;
    const float scale = scales[t];
    if (bias != nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) row[i] = row[i] * scale + bias[i];
    } else {
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) row[i] *= scale;
    }
  }
}

}
