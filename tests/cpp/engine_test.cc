// Engine and reader with many threads: random jobs, rings, external producers, cancellation. Meant
// for ThreadSanitizer; also checks every byte.

#include "engine.h"

#include <dirent.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "crc32c.h"
#include "reader.h"

namespace sharded_ckpt {
namespace {

constexpr Job::Seconds kLong{60};
constexpr uint64_t kChunk = 4096;
constexpr uint64_t kHeader = 4096;

// Puts `data` into the arena, chunk by chunk, as its slots become free.
void Produce(Job& job, const Arena& arena, const std::string& data) {
  const uint64_t slots = arena.nbytes() / kChunk;
  for (uint64_t at = 0; at < data.size(); at += kChunk) {
    if (job.WaitSlotFor(at, kLong) != Waited::kYes) return;
    const uint64_t nbytes = std::min<uint64_t>(kChunk, data.size() - at);
    std::memcpy(arena.address() + at / kChunk % slots * kChunk, data.data() + at, nbytes);
    CHECK(job.Advance(at + nbytes).ok());
  }
}

std::vector<uint32_t> ChunkCrcs(const std::string& data) {
  std::vector<uint32_t> crcs;
  for (size_t at = 0; at < data.size(); at += kChunk) {
    crcs.push_back(Crc32cExtend(0, data.data() + at, std::min<size_t>(kChunk, data.size() - at)));
  }
  return crcs;
}

Status Read(const std::string& path, const std::string& data, std::vector<Span> spans) {
  ShardReader reader;
  ReadRequest request;
  request.path = path;
  request.header_nbytes = kHeader;
  request.data_nbytes = data.size();
  request.chunk_nbytes = kChunk;
  request.crcs = ChunkCrcs(data);
  request.spans = std::move(spans);
  Status status = reader.Start(std::move(request), 4);
  if (!status.ok()) return status;
  CHECK(reader.Wait(kLong));
  return reader.status();
}

void OneJob(Engine& engine, const std::string& path, unsigned seed) {
  const std::string data = RandomBytes(seed, 20'000 + seed * 997 % 90'000);
  const bool external = seed % 3 == 0;
  const bool ring = seed % 2 == 0;
  std::shared_ptr<Arena> arena;
  CHECK(Arena::Map(ring ? 3 * kChunk : data.size(), &arena).ok());
  std::vector<Source> sources;
  const size_t piece = 100 + seed * 31 % 9000;
  for (size_t at = 0; !external && at < data.size(); at += piece) {
    sources.push_back({data.data() + at, std::min(piece, data.size() - at)});
  }
  if (external) sources.push_back({nullptr, data.size()});
  std::shared_ptr<Job> job;
  CHECK(engine.Start(arena, std::move(sources), kChunk, &job).ok());
  CHECK(job->WriteTo(path, std::string(kHeader, 'h'), 0).ok());
  if (external) Produce(*job, *arena, data);
  if (seed % 7 == 5) {
    CHECK(job->Cancel().ok());
    const Waited waited = job->WaitQuiet(kLong);
    CHECK(waited == Waited::kFailed || waited == Waited::kYes);
    return;
  }
  CHECK(job->WaitStaged(kLong) == Waited::kYes);
  CHECK(job->WaitQuiet(kLong) == Waited::kYes);
  CHECK(job->staged_nbytes() == data.size());
  const std::string file = ReadFile(path);
  CHECK(file.substr(kHeader) == data);
  CHECK(job->written().file_crc32c == Crc32cExtend(0, file.data(), file.size()));
  std::string whole(data.size(), '\0'), middle(data.size() / 2, '\0');
  CHECK(Read(path, data,
             {{data.size() / 4, middle.size(), middle.data()}, {0, whole.size(), whole.data()}})
            .ok());
  CHECK(whole == data);
  CHECK(middle == data.substr(data.size() / 4, middle.size()));
}

void ManyJobs(TempDir& dir) {
  Engine engine(3, 3, IoMode::kAuto);
  std::vector<std::string> paths;
  for (int i = 0; i < 48; ++i) paths.push_back(dir.NewPath());
  std::vector<std::thread> owners;
  for (unsigned owner = 0; owner < 4; ++owner) {
    owners.emplace_back([&, owner] {
      for (unsigned i = owner; i < paths.size(); i += 4) OneJob(engine, paths[i], i);
    });
  }
  for (std::thread& owner : owners) owner.join();
  CHECK(engine.Close(kLong).ok());
}

// Jobs in every stage when the engine goes away; handles that outlive it.
void CloseUnderWay(TempDir& dir, bool by_destructor) {
  std::vector<std::shared_ptr<Job>> jobs;
  const std::string data = RandomBytes(9, 400'000);
  {
    Engine engine(2, 2, IoMode::kBuffered);
    for (int i = 0; i < 4; ++i) {
      std::shared_ptr<Arena> arena;
      CHECK(Arena::Map(i % 2 ? data.size() : 2 * kChunk, &arena).ok());
      jobs.emplace_back();
      CHECK(engine.Start(arena, {{data.data(), data.size()}}, kChunk, &jobs.back()).ok());
      if (i < 3) CHECK(jobs.back()->WriteTo(dir.NewPath(), std::string(kHeader, 'h'), 0).ok());
    }
    if (!by_destructor) CHECK(engine.Close(kLong).ok());
  }
  for (const auto& job : jobs) {
    const Waited waited = job->WaitQuiet(kLong);
    CHECK(waited != Waited::kTimeout);
    if (waited == Waited::kFailed) CHECK(job->status().code == Code::kCancelled);
  }
}

void DamageIsFound(TempDir& dir) {
  const std::string data = RandomBytes(10, 50'000);
  const std::string path = dir.NewPath();
  std::string file = std::string(kHeader, 'h') + data;
  file[kHeader + 3 * kChunk + 1] ^= 1;
  std::ofstream(path, std::ios::binary) << file;
  std::string whole(data.size(), '\0');
  const Status status = Read(path, data, {{0, whole.size(), whole.data()}});
  CHECK(status.code == Code::kCorrupt);
  CHECK(status.start == kHeader + 3 * kChunk && status.end == status.start + kChunk);
}

size_t CountThreads() {
  size_t count = 0;
  DIR* tasks = ::opendir("/proc/self/task");
  CHECK(tasks != nullptr);
  while (::readdir(tasks) != nullptr) ++count;
  ::closedir(tasks);
  return count;
}

// Chunks 0 and 1 are damaged, and the slow one of them is read by one thread until the other
// thread has reported and ended. Chunk 0 must be reported either way.
std::atomic<int> g_reading{0};
off_t g_slow = 0;
size_t g_threads_before = 0;

ssize_t OneIsSlow(int fd, void* data, size_t nbytes, off_t offset) {
  ++g_reading;
  for (int tries = 0; tries < 10'000; ++tries) {
    const bool both = g_reading == 2;
    if (both && (offset != g_slow || CountThreads() == g_threads_before + 1)) break;
    ::usleep(1000);
  }
  return RealSyscalls().pread(fd, data, nbytes, offset);
}

void TheFirstDamageIsReported(TempDir& dir) {
  const std::string data = RandomBytes(11, 2 * kChunk);
  const std::string path = dir.NewPath();
  std::string file = std::string(kHeader, 'h') + data;
  file[kHeader] ^= 1;
  file[kHeader + kChunk] ^= 1;
  std::ofstream(path, std::ios::binary) << file;
  Syscalls slow = RealSyscalls();
  slow.pread = OneIsSlow;
  SetSyscalls(&slow);
  for (uint64_t chunk : {0, 1}) {
    g_reading = 0;
    g_slow = static_cast<off_t>(kHeader + chunk * kChunk);
    g_threads_before = CountThreads();
    std::string whole(data.size(), '\0');
    const Status status = Read(path, data, {{0, whole.size(), whole.data()}});
    CHECK(g_reading == 2);
    CHECK(status.code == Code::kCorrupt && status.start == kHeader);
  }
  SetSyscalls(nullptr);
}

}  // namespace
}  // namespace sharded_ckpt

int main() {
  using namespace sharded_ckpt;
  TempDir dir;
  ManyJobs(dir);
  CloseUnderWay(dir, false);
  CloseUnderWay(dir, true);
  DamageIsFound(dir);
  TheFirstDamageIsReported(dir);
  return 0;
}
