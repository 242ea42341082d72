// CRC32C (Castagnoli), the checksum of every chunk, header and file.
//
// Chosen because the checksums of parts, computed by different threads in any order, combine into
// that of the whole, and because processors compute it at memory speed.

#ifndef SHARDED_CKPT_CRC32C_H_
#define SHARDED_CKPT_CRC32C_H_

#include <cstddef>
#include <cstdint>

namespace sharded_ckpt {

// The CRC32C of the bytes that gave `crc` followed by these `nbytes`. `crc` of nothing is 0.
uint32_t Crc32cExtend(uint32_t crc, const void* data, size_t nbytes);

// The CRC32C of A followed by B, from those of A and B. About half a microsecond.
uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, uint64_t nbytes_b);

// Copies `nbytes` from `source` to `dest` and extends `crc` by the bytes that arrived in `dest`.
// The regions must not overlap.
uint32_t Crc32cCopy(uint32_t crc, void* dest, const void* source, size_t nbytes);

// The implementation in use: "sse4.2+pclmul", "armv8" or "table".
const char* Crc32cImplementation();

// The table implementation, for tests on machines where another one is in use.
uint32_t Crc32cExtendTable(uint32_t crc, const void* data, size_t nbytes);

}  // namespace sharded_ckpt

#endif  // SHARDED_CKPT_CRC32C_H_
