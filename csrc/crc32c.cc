#include "crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define SHARDED_CKPT_CRC_X86 1
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define SHARDED_CKPT_CRC_ARM 1
#endif

namespace sharded_ckpt {
namespace {

// A polynomial over GF(2) of degree < 32 is held "reflected": bit 31 is the coefficient of x^0.
constexpr uint32_t kPolynomial = 0x82f63b78;  // x^32 mod P
constexpr uint32_t kOne = 0x80000000;         // x^0

// Small enough that a block is still in the L2 cache when its checksum is computed.
constexpr size_t kCopyBlockNbytes = 256 << 10;

// a * b mod P.
uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int i = 0; i < 32; ++i) {
    if (a & kOne) product ^= b;
    a <<= 1;
    b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);  // b *= x
  }
  return product;
}

// x^(2^k) mod P for every bit k of an exponent.
std::array<uint32_t, 64> MakeSquares() {
  std::array<uint32_t, 64> squares{};
  squares[0] = kOne >> 1;  // x^1
  for (size_t k = 1; k < squares.size(); ++k) {
    squares[k] = Multiply(squares[k - 1], squares[k - 1]);
  }
  return squares;
}

// x^n mod P.
uint32_t PowerOfX(uint64_t n) {
  static const std::array<uint32_t, 64> squares = MakeSquares();
  uint32_t power = kOne;
  for (size_t k = 0; n != 0; ++k, n >>= 1) {
    if (n & 1) power = Multiply(power, squares[k]);
  }
  return power;
}

uint64_t Load64(const unsigned char* p) {
  uint64_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

// -- Table: slicing by 8 -------------------------------------------------------------------------

using Tables = std::array<std::array<uint32_t, 256>, 8>;

Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t t = 1; t < tables.size(); ++t) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t previous = tables[t - 1][byte];
      tables[t][byte] = (previous >> 8) ^ tables[0][previous & 0xff];
    }
  }
  return tables;
}

// The functions below work on the inverted register; Crc32cExtend inverts on the way in and out.
uint32_t ExtendTable(uint32_t crc, const unsigned char* p, size_t nbytes) {
  static const Tables tables = MakeTables();
  for (; nbytes >= 8; nbytes -= 8, p += 8) {
    uint32_t next = 0;
    for (size_t i = 0; i < 8; ++i) {
      const uint32_t byte = i < 4 ? p[i] ^ ((crc >> (8 * i)) & 0xff) : p[i];
      next ^= tables[7 - i][byte];
    }
    crc = next;
  }
  for (; nbytes > 0; --nbytes, ++p) crc = (crc >> 8) ^ tables[0][(crc ^ *p) & 0xff];
  return crc;
}

// -- Hardware: three independent lanes hide the latency of the CRC instruction -------------------
//
// Lanes A, B, C of `kLane` bytes each: crc = A * x^(16 kLane) + B * x^(8 kLane) + C.

#if defined(SHARDED_CKPT_CRC_X86)

constexpr size_t kLongLane = 4096;
constexpr size_t kShortLane = 256;

struct LaneShift {
  uint32_t one;  // Moves a register over one lane.
  uint32_t two;  // ... over two lanes.
};

// A carry-less product of two reflected values stands for their product times x, and the CRC
// instruction multiplies by x^32, so the constant for n bits is x^(n - 33).
LaneShift MakeLaneShift(size_t lane) { return {PowerOfX(8 * lane - 33), PowerOfX(16 * lane - 33)}; }

__attribute__((target("sse4.2,pclmul"))) inline uint32_t ShiftX86(uint32_t crc, uint32_t power) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(crc), _mm_cvtsi64_si128(power), 0);
  return static_cast<uint32_t>(_mm_crc32_u64(0, _mm_cvtsi128_si64(product)));
}

template <size_t kLane>
__attribute__((target("sse4.2,pclmul"))) inline uint32_t LanesX86(uint32_t crc,
                                                                  const unsigned char*& p,
                                                                  size_t& nbytes) {
  static const LaneShift shift = MakeLaneShift(kLane);
  for (; nbytes >= 3 * kLane; nbytes -= 3 * kLane, p += 3 * kLane) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < kLane; i += 8) {
      a = _mm_crc32_u64(a, Load64(p + i));
      b = _mm_crc32_u64(b, Load64(p + kLane + i));
      c = _mm_crc32_u64(c, Load64(p + 2 * kLane + i));
    }
    crc = ShiftX86(static_cast<uint32_t>(a), shift.two) ^
          ShiftX86(static_cast<uint32_t>(b), shift.one) ^ static_cast<uint32_t>(c);
  }
  return crc;
}

__attribute__((target("sse4.2,pclmul"))) uint32_t ExtendX86(uint32_t crc, const unsigned char* p,
                                                            size_t nbytes) {
  crc = LanesX86<kLongLane>(crc, p, nbytes);
  crc = LanesX86<kShortLane>(crc, p, nbytes);
  for (; nbytes >= 8; nbytes -= 8, p += 8) {
    crc = static_cast<uint32_t>(_mm_crc32_u64(crc, Load64(p)));
  }
  for (; nbytes > 0; --nbytes, ++p) crc = _mm_crc32_u8(crc, *p);
  return crc;
}

// Copies and checksums in one pass: what is stored is what is checksummed, from registers and the
// L1 cache, and the stores bypass the cache, which the trainer needs more than the staging buffer
// does. About as fast as a bare memcpy of the same size, where copying first and checksumming the
// copy afterwards takes twice as long.
template <size_t kLane>
__attribute__((target("sse4.2,pclmul"))) inline uint32_t CopyLanesX86(uint32_t crc,
                                                                      unsigned char*& to,
                                                                      const unsigned char*& from,
                                                                      size_t& nbytes) {
  // Far enough ahead of three streams that memory answers in time; measured, and not critical.
  constexpr size_t kPrefetch = 512;
  constexpr size_t kLine = 64;
  static const LaneShift shift = MakeLaneShift(kLane);
  for (; nbytes >= 3 * kLane; nbytes -= 3 * kLane, from += 3 * kLane, to += 3 * kLane) {
    uint64_t lanes[3] = {crc, 0, 0};
    for (size_t i = 0; i < kLane; i += kLine) {
      for (size_t lane = 0; lane < 3; ++lane) {
        const unsigned char* source = from + lane * kLane + i;
        unsigned char* dest = to + lane * kLane + i;
        _mm_prefetch(reinterpret_cast<const char*>(source + kPrefetch), _MM_HINT_T0);
        for (size_t k = 0; k < kLine; k += 16) {
          _mm_stream_si128(reinterpret_cast<__m128i*>(dest + k),
                           _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + k)));
        }
      }
      for (size_t k = i; k < i + kLine; k += 8) {
        lanes[0] = _mm_crc32_u64(lanes[0], Load64(from + k));
        lanes[1] = _mm_crc32_u64(lanes[1], Load64(from + kLane + k));
        lanes[2] = _mm_crc32_u64(lanes[2], Load64(from + 2 * kLane + k));
      }
    }
    crc = ShiftX86(static_cast<uint32_t>(lanes[0]), shift.two) ^
          ShiftX86(static_cast<uint32_t>(lanes[1]), shift.one) ^ static_cast<uint32_t>(lanes[2]);
  }
  return crc;
}

uint32_t CopyX86(uint32_t crc, unsigned char* to, const unsigned char* from, size_t nbytes) {
  const size_t head = (16 - reinterpret_cast<uintptr_t>(to) % 16) % 16;
  if (nbytes >= head + 3 * kLongLane) {
    std::memcpy(to, from, head);
    crc = ExtendX86(crc, to, head);
    to += head;
    from += head;
    nbytes -= head;
    crc = CopyLanesX86<kLongLane>(crc, to, from, nbytes);
    _mm_sfence();  // Orders the stores before the lock that hands the chunk on.
  }
  std::memcpy(to, from, nbytes);
  return ExtendX86(crc, to, nbytes);
}

#elif defined(SHARDED_CKPT_CRC_ARM)

// Long lanes make the two software multiplications per block cheap without needing PMULL.
constexpr size_t kLongLane = 8192;

__attribute__((target("+crc"))) uint32_t ExtendArm(uint32_t crc, const unsigned char* p,
                                                   size_t nbytes) {
  static const uint32_t one = PowerOfX(8 * kLongLane);
  static const uint32_t two = PowerOfX(16 * kLongLane);
  for (; nbytes >= 3 * kLongLane; nbytes -= 3 * kLongLane, p += 3 * kLongLane) {
    uint32_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < kLongLane; i += 8) {
      a = __crc32cd(a, Load64(p + i));
      b = __crc32cd(b, Load64(p + kLongLane + i));
      c = __crc32cd(c, Load64(p + 2 * kLongLane + i));
    }
    crc = Multiply(a, two) ^ Multiply(b, one) ^ c;
  }
  for (; nbytes >= 8; nbytes -= 8, p += 8) crc = __crc32cd(crc, Load64(p));
  for (; nbytes > 0; --nbytes, ++p) crc = __crc32cb(crc, *p);
  return crc;
}

#endif

// Copies block by block, each checksummed while it is in the cache.
template <uint32_t (*kExtend)(uint32_t, const unsigned char*, size_t)>
uint32_t CopyBlocks(uint32_t crc, unsigned char* to, const unsigned char* from, size_t nbytes) {
  while (nbytes > 0) {
    const size_t block = std::min(nbytes, kCopyBlockNbytes);
    std::memcpy(to, from, block);
    crc = kExtend(crc, to, block);
    to += block;
    from += block;
    nbytes -= block;
  }
  return crc;
}

struct Implementation {
  const char* name;
  uint32_t (*extend)(uint32_t crc, const unsigned char* p, size_t nbytes);
  uint32_t (*copy)(uint32_t crc, unsigned char* to, const unsigned char* from, size_t nbytes);
};

Implementation Choose() {
#if defined(SHARDED_CKPT_CRC_X86)
  if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) {
    return {"sse4.2+pclmul", ExtendX86, CopyX86};
  }
#elif defined(SHARDED_CKPT_CRC_ARM)
  if (getauxval(AT_HWCAP) & HWCAP_CRC32) return {"armv8", ExtendArm, CopyBlocks<ExtendArm>};
#endif
  return {"table", ExtendTable, CopyBlocks<ExtendTable>};
}

const Implementation& Chosen() {
  static const Implementation chosen = Choose();
  return chosen;
}

}  // namespace

uint32_t Crc32cExtend(uint32_t crc, const void* data, size_t nbytes) {
  return ~Chosen().extend(~crc, static_cast<const unsigned char*>(data), nbytes);
}

uint32_t Crc32cExtendTable(uint32_t crc, const void* data, size_t nbytes) {
  return ~ExtendTable(~crc, static_cast<const unsigned char*>(data), nbytes);
}

uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, uint64_t nbytes_b) {
  // P is (x + 1) times a primitive polynomial of degree 31, so x^(2^31 - 1) = 1 modulo P: the
  // exponent may be reduced, and 8 * nbytes_b cannot overflow.
  constexpr uint64_t kPeriod = 0x7fffffff;
  return Multiply(PowerOfX(8 * (nbytes_b % kPeriod)), crc_a) ^ crc_b;
}

uint32_t Crc32cCopy(uint32_t crc, void* dest, const void* source, size_t nbytes) {
  if (nbytes == 0) return crc;
  return ~Chosen().copy(~crc, static_cast<unsigned char*>(dest),
                        static_cast<const unsigned char*>(source), nbytes);
}

const char* Crc32cImplementation() { return Chosen().name; }

}  // namespace sharded_ckpt
