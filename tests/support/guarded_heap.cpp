// A heap for one process, preloaded: from guard_heap() on, tensors and other memory of a given
// alignment end at a page that traps. Bytes are NaN until they are written.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <vector>

extern "C" void __libc_free(void* p);

namespace {

constexpr size_t kArena = size_t{1} << 38;  // addresses, of which few become memory
constexpr int kBehind = 0xA5;               // between a block and its page, as alignment asks
constexpr size_t kMagic = 0x5AFE5AFE5AFE5AFE;

struct Head {  // right before a block
  char* first;
  size_t room, size, magic;
};

std::mutex one_at_a_time;
char *arena = nullptr, *next = nullptr;
std::map<size_t, std::vector<char*>> freed;  // by room: pages that were a block's

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

char* pages(size_t room) {
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  std::vector<char*>& of = freed[room];
  if (of.empty()) {
    char* first = next;
    next += room + sysconf(_SC_PAGESIZE);
    if (mprotect(first, room, PROT_READ | PROT_WRITE)) std::abort();
    return first;
  }
  char* first = of.back();
  of.pop_back();
  return first;
}

void* allocate(size_t alignment, size_t size) {
  const size_t block = round_up(size, alignment);
  if (!arena) return aligned_alloc(alignment, block);
  const size_t room = round_up(sizeof(Head) + block, sysconf(_SC_PAGESIZE));
  const Head head{pages(room), room, size, kMagic};
  char* at = head.first + room - block;
  std::memcpy(at - sizeof(Head), &head, sizeof(Head));
  std::memset(at, 0xFF, size);
  std::memset(at + size, kBehind, block - size);
  return at;
}

}  // namespace

extern "C" {

void guard_heap() {
  void* at = mmap(nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) std::abort();
  next = arena = static_cast<char*>(at);
}

int posix_memalign(void** to, size_t alignment, size_t size) {
  *to = allocate(alignment, size);
  return *to ? 0 : ENOMEM;
}

// Ends the process where what is around the block was written to.
void free(void* p) {
  char* at = static_cast<char*>(p);
  if (!arena || at < arena || at >= arena + kArena) return __libc_free(p);
  Head head;
  std::memcpy(&head, at - sizeof(Head), sizeof(Head));
  const bool kept = std::all_of(at + head.size, head.first + head.room,
                                [](unsigned char byte) { return byte == kBehind; });
  if (head.magic != kMagic || !kept) std::abort();
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  freed[head.room].push_back(head.first);
}
}

void* operator new(size_t size, std::align_val_t alignment) {
  void* p = allocate(static_cast<size_t>(alignment), size);
  if (!p) throw std::bad_alloc();
  return p;
}
