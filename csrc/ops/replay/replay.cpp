#include "replay.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <stdexcept>

#include "ops/aten.h"

namespace metalmm::replay {
namespace {

bool is_of(const at::Tensor& t, const at::Tensor& memory) {
  return t.has_storage() && t.storage().is_alias_of(memory.storage());
}

// Where its first element lies. Not data_ptr(), which throws where a storage has been let go.
const void* start_of(const at::Tensor& t) {
  if (!t.has_storage()) return nullptr;
  const auto* storage = static_cast<const char*>(t.storage().data());
  return storage + t.storage_offset() * static_cast<int64_t>(t.itemsize());
}

}  // namespace

Replay::Held Replay::held(const at::Tensor& t) {
  return {start_of(t), t.scalar_type(), t.sizes().vec(), t.strides().vec()};
}

Replay::Replay(const Recording& step, const std::vector<at::Tensor>& results,
               const std::vector<at::Tensor>& shown)
    : outside_(step.outside),
      made_(step.made),
      memory_(step.memory),
      stays_(!step.memory.empty()),
      engine_(engine_changes()) {
  const auto add = [&](const at::Tensor& t, bool is_shown) {
    const Source* found = step.find(t);
    if (!found || found->is_outside)
      throw std::invalid_argument("a result that no op of the step made");
    results_.push_back({*found, is_shown, found->place, {}});
  };
  for (const at::Tensor& t : results) add(t, false);
  for (const at::Tensor& t : shown) add(t, true);
  for (const at::Tensor& t : outside_) held_.push_back(held(t));
  for (const OpCall& c : step.calls) {
    if (stays_ && c.is_launched()) {
      add_launches(c);
    } else if (!stays_ || !c.is_view) {
      list_.emplace_back(c);
    }
  }
  if (!stays_) {
    hoist();
    release_early();
  }
  for (Result& r : results_) renew(r);
}

void Replay::add_launches(const OpCall& c) {
  Block* last = list_.empty() ? nullptr : std::get_if<Block>(&list_.back());
  if (!last || last->launcher != c.launcher || last->device != *c.device) {
    list_.emplace_back(Block{c.launcher, *c.device, {}});
    last = &std::get<Block>(list_.back());
  }
  last->launches.insert(last->launches.end(), c.launches.begin(), c.launches.end());
}

// The launches that read or write the memory of a result are bound to that of another tensor in
// each step. Not where an op is called on it: then the result is copied.
void Replay::renew(Result& r) {
  if (!stays_ || r.is_shown) return;
  const at::Tensor& result = made_[r.source.place];
  const auto root = std::find_if(made_.begin(), made_.end(),
                                 [&](const at::Tensor& t) { return is_of(t, result); });
  const bool is_whole = root->is_contiguous() && root->storage_offset() == 0 &&
                        root->nbytes() == root->storage().nbytes();
  if (!is_whole || is_called_on(result) || is_shown(result)) return;
  r.root = static_cast<size_t>(root - made_.begin());
  const void* base = result.storage().data();
  for (Entry& entry : list_) {
    Block* block = std::get_if<Block>(&entry);
    if (!block) continue;
    for (BoundPlan& each : block->launches) {
      for (Buffer& b : each.buffers) {
        if (b.base == base) r.bound.push_back(&b);
      }
    }
  }
}

bool Replay::is_called_on(const at::Tensor& memory) const {
  for (const Entry& entry : list_) {
    const OpCall* c = std::get_if<OpCall>(&entry);
    if (!c) continue;
    for (const Argument& a : c->arguments) {
      for (const Source& s : a.sources) {
        if (s.place != Source::kNone && is_of(at(s), memory)) return true;
      }
    }
    for (const int64_t place : c->results) {
      if (place >= 0 && is_of(made_[place], memory)) return true;
    }
  }
  return false;
}

bool Replay::is_shown(const at::Tensor& memory) const {
  return std::any_of(results_.begin(), results_.end(), [&](const Result& r) {
    return r.is_shown && is_of(made_[r.source.place], memory);
  });
}

// A view of memory from outside is the same in each step: its op is done.
void Replay::hoist() {
  std::vector<bool> is_fixed(made_.size());
  const auto fixed = [&](const Source& s) { return s.is_outside || is_fixed[s.place]; };
  std::vector<Entry> kept;
  for (Entry& entry : list_) {
    const OpCall& c = std::get<OpCall>(entry);
    bool stays = !c.is_view;
    for (const Argument& a : c.arguments) {
      for (const Source& s : a.sources) stays |= !fixed(s);
    }
    if (stays) {
      kept.push_back(std::move(entry));
      continue;
    }
    for (const int64_t place : c.results) {
      if (place >= 0) is_fixed[place] = true;
    }
  }
  list_ = std::move(kept);
  for (size_t i = 0; i < made_.size(); ++i) {
    if (!is_fixed[i]) made_[i] = at::Tensor();
  }
}

// A tensor is let go behind the last op that reads it, so that the next has its memory.
void Replay::release_early() {
  std::vector<bool> is_read(made_.size());
  for (const Result& r : results_) is_read[r.source.place] = true;
  for (size_t i = 0; i < made_.size(); ++i) {
    if (made_[i].defined()) is_read[i] = true;  // stays for all steps
  }
  for (auto entry = list_.rbegin(); entry != list_.rend(); ++entry) {
    OpCall* c = &std::get<OpCall>(*entry);
    c->last.clear();
    const auto see = [&](size_t place) {
      if (!is_read[place]) c->last.push_back(place);
      is_read[place] = true;
    };
    for (const int64_t place : c->results) {
      if (place >= 0) see(static_cast<size_t>(place));
    }
    for (const Argument& a : c->arguments) {
      for (const Source& s : a.sources) {
        if (!s.is_outside) see(s.place);
      }
    }
  }
}

bool Replay::holds() const {
  if (stays_ && engine_ != engine_changes()) return false;
  for (size_t i = 0; i < outside_.size(); ++i) {
    const at::Tensor& t = outside_[i];
    const Held& h = held_[i];
    if (start_of(t) != h.data || t.scalar_type() != h.dtype || t.sizes() != h.sizes ||
        t.strides() != h.strides) {
      return false;
    }
  }
  return true;
}

void Replay::push(torch::jit::Stack& stack, const Argument& a) const {
  if (a.kind == Argument::Kind::kValue) {
    stack.push_back(a.value);
  } else if (a.kind == Argument::Kind::kTensor) {
    stack.emplace_back(at(a.sources[0]));
  } else if (a.value.isNone()) {
    c10::List<at::Tensor> list;
    for (const Source& s : a.sources) list.push_back(at(s));
    stack.emplace_back(std::move(list));
  } else {
    c10::List<std::optional<at::Tensor>> list;
    for (const Source& s : a.sources) {
      list.push_back(s.place == Source::kNone ? std::nullopt : std::optional<at::Tensor>(at(s)));
    }
    stack.emplace_back(std::move(list));
  }
}

// In place of the result of the recorded step.
void Replay::take(const OpCall& c, size_t result, const at::Tensor& t) {
  const int64_t place = c.results[result];
  if (place < 0) return;
  if (stays_) {
    TORCH_CHECK(made_[place].sizes() == t.sizes(), c.op.schema().name(), ": a result of ",
                t.sizes(), " in a replayed step, ", made_[place].sizes(), " in the recorded one");
    made_[place].copy_(t);
  } else {
    made_[place] = t;
  }
}

void Replay::call(const OpCall& c, torch::jit::Stack& stack) {
  stack.clear();
  for (const Argument& a : c.arguments) push(stack, a);
  c.op.callBoxed(&stack);
  size_t i = 0;
  for (c10::IValue& value : stack) {
    if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) take(c, i++, t);
    } else if (value.isTensor()) {
      take(c, i++, value.toTensor());
    } else {
      ++i;
    }
  }
  for (const size_t place : c.last) made_[place] = at::Tensor();
}

// The result of a step in memory of its own, to which the launches are bound.
at::Tensor Replay::renewed(const Result& r) {
  const at::Tensor &root = made_[r.root], &recorded = made_[r.source.place];
  const at::Tensor now = at::empty(root.sizes(), root.options());
  for (Buffer* b : r.bound) b->base = now.storage().mutable_data();
  if (r.root == r.source.place) return now;
  return now.as_strided(recorded.sizes(), recorded.strides(), recorded.storage_offset());
}

std::vector<at::Tensor> Replay::run() {
  const at::AutoDispatchBelowADInplaceOrView guard;  // a step has no gradient
  std::vector<at::Tensor> out;
  for (const Result& r : results_) out.push_back(r.bound.empty() ? at::Tensor() : renewed(r));
  torch::jit::Stack stack;
  for (const Entry& entry : list_) {
    if (const OpCall* c = std::get_if<OpCall>(&entry)) {
      call(*c, stack);
    } else {
      const Block& b = std::get<Block>(entry);
      (*b.launcher)(b.launches, b.device);
    }
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i].defined()) continue;
    const Result& r = results_[i];
    const at::Tensor& made = made_[r.source.place];
    out[i] = stays_ && !r.is_shown ? made.clone() : made;
  }
  if (!stays_) {
    for (const Result& r : results_) made_[r.source.place] = at::Tensor();
  }
  return out;
}

std::vector<std::string> Replay::called() const {
  std::vector<std::string> names;
  for (const Entry& entry : list_) {
    if (const OpCall* c = std::get_if<OpCall>(&entry)) names.push_back(c->op.schema().name());
  }
  return names;
}

size_t Replay::passes() const {
  size_t count = 0;
  for (const Entry& entry : list_) {
    const Block* block = std::get_if<Block>(&entry);
    if (!block) continue;
    for (const BoundPlan& each : block->launches) count += each.plan.passes.size();
  }
  return count;
}

}  // namespace metalmm::replay
