#include "replay.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <stdexcept>

namespace metalmm::replay {

Replay::Held Replay::held(const at::Tensor& t) {
  const void* data = t.has_storage() ? t.storage().data() : nullptr;
  return {data, t.scalar_type(), t.sizes().vec(), t.strides().vec()};
}

Replay::Replay(const Recording& step, const std::vector<at::Tensor>& results)
    : calls_(step.calls), outside_(step.outside), made_(step.made) {
  for (const at::Tensor& t : results) {
    const Source* found = step.find(t);
    if (!found || found->is_outside)
      throw std::invalid_argument("a result that no op of the step made");
    results_.push_back(*found);
  }
  for (const at::Tensor& t : outside_) held_.push_back(held(t));
  hoist();
  release_early();
}

// A view of memory from outside is the same in each step: its op is done.
void Replay::hoist() {
  std::vector<bool> is_fixed(made_.size());
  const auto fixed = [&](const Source& s) { return s.is_outside || is_fixed[s.place]; };
  std::vector<OpCall> kept;
  for (OpCall& c : calls_) {
    bool stays = !c.is_view;
    for (const Argument& a : c.arguments) {
      for (const Source& s : a.sources) stays |= !fixed(s);
    }
    if (stays) {
      kept.push_back(std::move(c));
      continue;
    }
    for (const int64_t place : c.results) {
      if (place >= 0) is_fixed[place] = true;
    }
  }
  calls_ = std::move(kept);
  for (size_t i = 0; i < made_.size(); ++i) {
    if (!is_fixed[i]) made_[i] = at::Tensor();
  }
}

// A tensor is let go behind the last op that reads it, so that the next has its memory.
void Replay::release_early() {
  std::vector<bool> is_read(made_.size());
  for (const Source& s : results_) is_read[s.place] = true;
  for (size_t i = 0; i < made_.size(); ++i) {
    if (made_[i].defined()) is_read[i] = true;  // stays for all steps
  }
  for (auto c = calls_.rbegin(); c != calls_.rend(); ++c) {
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
  for (size_t i = 0; i < outside_.size(); ++i) {
    const at::Tensor& t = outside_[i];
    const Held& h = held_[i];
    const void* data = t.has_storage() ? t.storage().data() : nullptr;
    if (data != h.data || t.scalar_type() != h.dtype || t.sizes() != h.sizes ||
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
      list.push_back(s.place == SIZE_MAX ? std::nullopt : std::optional<at::Tensor>(at(s)));
    }
    stack.emplace_back(std::move(list));
  }
}

void Replay::call(const OpCall& c, torch::jit::Stack& stack) {
  stack.clear();
  for (const Argument& a : c.arguments) push(stack, a);
  c.op.callBoxed(&stack);
  size_t i = 0;
  const auto take = [&](const at::Tensor& t) {
    if (c.results[i] >= 0) made_[c.results[i]] = t;
    ++i;
  };
  for (c10::IValue& value : stack) {
    if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) take(t);
    } else if (value.isTensor()) {
      take(value.toTensor());
    } else {
      ++i;
    }
  }
  for (const size_t place : c.last) made_[place] = at::Tensor();
}

std::vector<at::Tensor> Replay::run() {
  const at::AutoDispatchBelowADInplaceOrView guard;  // a step has no gradient
  torch::jit::Stack stack;
  for (const OpCall& c : calls_) call(c, stack);
  std::vector<at::Tensor> out;
  for (const Source& s : results_) {
    out.push_back(at(s));
    made_[s.place] = at::Tensor();
  }
  return out;
}

}  // namespace metalmm::replay
