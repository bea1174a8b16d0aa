// A recorded step as a list to run again.
//
// Where an engine launches what its ops compute, the tensors of the recorded step stay, so that the
// launches are the same in each step: one call of the engine has all those between two ops that are
// not the engine's, whose results are copied to where the recorded ones lie. Elsewhere the ops are
// called, and a tensor is let go behind the last that reads it.
#pragma once

#include <variant>

#include "recording.h"

namespace metalmm::replay {

class Replay {
 public:
  // The second of two recordings between which there is no difference, and what the step gives;
  // the tensors of the recording are the list's from here on. shown: tensors between its ops, which
  // run() gives behind the results. Throws std::invalid_argument: a result that no op of the step
  // made.
  Replay(const Recording& step, const std::vector<at::Tensor>& results,
         const std::vector<at::Tensor>& shown);

  // Whether the tensors from outside lie where they lay, in the dtypes and shapes that they had,
  // and the engine is the one that launched.
  bool holds() const;
  // The results of the step: new tensors, as the ops give them, and those that are shown, which
  // the next step may overwrite. Throws what an op throws.
  std::vector<at::Tensor> run();

  // The names of the ops that are called, in order.
  std::vector<std::string> called() const;
  // Lists of launches, and passes in them.
  size_t blocks() const { return list_.size() - called().size(); }
  size_t passes() const;

 private:
  struct Block {
    const Launcher* launcher;
    c10::Device device;
    BoundPlans launches;
  };
  using Entry = std::variant<OpCall, Block>;
  struct Held {
    const void* data;
    at::ScalarType dtype;
    std::vector<int64_t> sizes, strides;
  };
  // A result whose memory is new in each step: that of the tensor `root`, which `bound` are.
  struct Result {
    Source source;
    bool is_shown = false;
    size_t root = 0;
    std::vector<Buffer*> bound;
  };

  const at::Tensor& at(const Source& s) const {
    return s.is_outside ? outside_[s.place] : made_[s.place];
  }
  static Held held(const at::Tensor& t);
  void add_launches(const OpCall& c);
  void hoist();
  void release_early();
  void renew(Result& result);
  at::Tensor renewed(const Result& result);
  bool is_called_on(const at::Tensor& memory) const;
  bool is_shown(const at::Tensor& memory) const;
  void push(torch::jit::Stack& stack, const Argument& a) const;
  void call(const OpCall& c, torch::jit::Stack& stack);
  void take(const OpCall& c, size_t result, const at::Tensor& t);

  std::vector<Entry> list_;
  std::vector<at::Tensor> outside_, made_, memory_;
  std::vector<Held> held_;  // of outside_
  std::vector<Result> results_;
  bool stays_;       // the tensors, for all steps
  uint64_t engine_;  // how often it had changed
};

}  // namespace metalmm::replay
