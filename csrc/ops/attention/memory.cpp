#include "memory.h"

#include <algorithm>
#include <vector>

#include "plan/round.h"

namespace metalmm {
namespace {

// Bytes from one index of a dimension to the next, and the last index.
struct Steps {
  int64_t bytes, last;
};

void add_steps(std::vector<Steps>& to, int64_t bytes, int64_t last) {
  if (last == 0 || bytes == 0) return;
  const auto same = [=](const Steps& s) { return s.bytes == bytes; };
  const auto at = std::find_if(to.begin(), to.end(), same);
  if (at != to.end()) {
    at->last += last;
  } else {
    to.push_back({bytes, last});
  }
}

void add_steps(std::vector<Steps>& to, const at::Tensor& t) {
  const int64_t size = t.element_size();
  for (int64_t d = 0; d < t.dim(); ++d) add_steps(to, t.stride(d) * size, t.size(d) - 1);
  add_steps(to, 1, size - 1);
}

int64_t extent(const Steps* first, const Steps* last) {
  int64_t out = 0;
  for (; first != last; ++first) out += first->bytes * first->last;
  return out;
}

// Whether `bytes` is a sum of the steps, each taken at most `last` times. Large steps come first.
// Few counts are possible for each stride of a view; a search that is long says yes.
bool reaches(int64_t bytes, const Steps* first, const Steps* last, int& budget) {
  if (first == last) return bytes == 0;
  if (--budget < 0) return true;
  const int64_t rest = extent(first + 1, last);
  const int64_t least = bytes > rest ? ceil_div(bytes - rest, first->bytes) : 0;
  for (int64_t i = std::min(first->last, bytes / first->bytes); i >= least; --i) {
    if (reaches(bytes - i * first->bytes, first + 1, last, budget)) return true;
  }
  return false;
}

constexpr int kBudget = 1 << 14;

// Whether two elements of t may lie at one place: a step is not longer than all shorter ones.
bool may_repeat(const at::Tensor& t) {
  if (t.numel() == 0) return false;
  std::vector<Steps> steps{{1, t.element_size() - 1}};
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) > 1) steps.push_back({t.stride(d) * t.element_size(), t.size(d) - 1});
  }
  const auto is_shorter = [](const Steps& a, const Steps& b) { return a.bytes < b.bytes; };
  std::stable_sort(steps.begin(), steps.end(), is_shorter);
  int64_t reached = 0;
  for (const Steps& s : steps) {
    if (s.bytes <= reached) return true;
    reached += s.bytes * s.last;
  }
  return false;
}

int64_t first_byte(const at::Tensor& t) { return t.storage_offset() * t.element_size(); }

// Whether two tensors are the same elements in the same order.
bool is_same(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().is_alias_of(b.storage()) && first_byte(a) == first_byte(b) &&
         a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

// Whether two tensors have a byte in common, by their storages, strides and sizes alone.
bool shares_memory(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || !a.storage().is_alias_of(b.storage())) return false;
  // first_byte(a) + steps of a = first_byte(b) + steps of b, the latter counted from their ends.
  std::vector<Steps> of_b, steps;
  add_steps(of_b, b);
  add_steps(steps, a);
  const int64_t bytes =
      first_byte(b) - first_byte(a) + extent(of_b.data(), of_b.data() + of_b.size());
  for (const Steps& s : of_b) add_steps(steps, s.bytes, s.last);
  const Steps *first = steps.data(), *last = first + steps.size();
  if (bytes < 0 || bytes > extent(first, last)) return false;
  std::sort(steps.begin(), steps.end(),
            [](const Steps& x, const Steps& y) { return x.bytes > y.bytes; });
  int budget = kBudget;
  return reaches(bytes, first, last, budget);
}

}  // namespace

void check_places(const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(!may_repeat(t), name, ": shape ", t.sizes(), ", strides ", t.strides(),
                    "; each element must have its own place in memory, as after contiguous()");
}

void check_apart(const char* name, const at::Tensor& t, const char* other,
                 const OptionalTensor& read) {
  TORCH_CHECK_VALUE(!read.has_value() || !shares_memory(t, *read), other, ": shares memory with ",
                    name, ", which is written; pass ", other, ".clone()");
}

void check_cache_memory(const at::Tensor& keys, const at::Tensor& values, bool are_the_same_rows) {
  TORCH_CHECK_VALUE((is_same(keys, values) && are_the_same_rows) || !shares_memory(keys, values),
                    "values: share memory with keys; they must be apart, or be keys where v is k");
}

void check_memory(const args::cache_append& a) {
  check_written(a);
  check_cache_memory(a.keys, a.values, is_same(a.k, a.v));
}

void check_memory(const args::rope_append& a) {
  check_written(a);
  check_cache_memory(a.keys, a.values, false);
}

}  // namespace metalmm
