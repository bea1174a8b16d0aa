// A recorded step as a list to run again.
#pragma once

#include "recording.h"

namespace metalmm::replay {

class Replay {
 public:
  // The second of two recordings between which there is no difference, and what the step gives.
  // Throws std::invalid_argument: a result that no op of the step made.
  Replay(const Recording& step, const std::vector<at::Tensor>& results);

  // Whether the tensors from outside lie where they lay, in the dtypes and shapes that they had.
  bool holds() const;
  // The results of the step: new tensors, as the ops give them. Throws what an op throws.
  std::vector<at::Tensor> run();

  size_t count() const { return calls_.size(); }

 private:
  const at::Tensor& at(const Source& s) const {
    return s.is_outside ? outside_[s.place] : made_[s.place];
  }
  void push(torch::jit::Stack& stack, const Argument& a) const;
  void call(const OpCall& c, torch::jit::Stack& stack);
  void hoist();
  void release_early();

  struct Held {
    const void* data;
    at::ScalarType dtype;
    std::vector<int64_t> sizes, strides;
  };
  static Held held(const at::Tensor& t);

  std::vector<OpCall> calls_;
  std::vector<at::Tensor> outside_, made_;
  std::vector<Held> held_;  // of outside_
  std::vector<Source> results_;
};

}  // namespace metalmm::replay
