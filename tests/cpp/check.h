// What the plain test executables share: a check that says where it failed, files, and faults.

#ifndef SHARDED_CKPT_TESTS_CPP_CHECK_H_
#define SHARDED_CKPT_TESTS_CPP_CHECK_H_

#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                               \
    }                                                                              \
  } while (false)

namespace sharded_ckpt {

// A directory of its own, removed with what is in it (files only).
class TempDir {
 public:
  TempDir() {
    const char* base = std::getenv("TMPDIR");
    path_ = std::string(base ? base : "/tmp") + "/sharded_ckpt_XXXXXX";
    CHECK(::mkdtemp(path_.data()) != nullptr);
  }
  ~TempDir() {
    for (int i = 0; i < next_; ++i) ::unlink(Name(i).c_str());
    ::rmdir(path_.c_str());
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string NewPath() { return Name(next_++); }

 private:
  std::string Name(int i) const { return path_ + "/" + std::to_string(i); }

  std::string path_;
  int next_ = 0;
};

inline std::string RandomBytes(unsigned seed, size_t nbytes) {
  std::mt19937 random(seed);
  std::string bytes(nbytes, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

}  // namespace sharded_ckpt

#endif  // SHARDED_CKPT_TESTS_CPP_CHECK_H_
