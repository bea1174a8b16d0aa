// A step of a model as the list of the ops that it called, which runs again without Python.
//
// Torch's observers of ops (ATen/record_function.h) see every call of the dispatcher. The outermost
// calls are the recording: what these call themselves, they call again. Two recordings of steps
// that follow each other are compared; where these agree in all but the values of the tensors they
// read, the list is what any further step computes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "launched.h"

namespace metalmm::replay {

// Where a tensor of an argument comes from: from outside (its place among Recording::outside), or
// from an op of the step.
struct Source {
  static constexpr size_t kNone = SIZE_MAX;  // no tensor, in a list of tensors
  bool is_outside = false;
  size_t place = 0;
  bool operator==(const Source& other) const {
    return is_outside == other.is_outside && place == other.place;
  }
};

struct Argument {
  c10::IValue value;            // where it has no tensor
  std::vector<Source> sources;  // of a tensor, or of the elements of a list
  enum class Kind { kValue, kTensor, kList } kind = Kind::kValue;
};

struct OpCall {
  c10::OperatorHandle op;
  std::vector<Argument> arguments{};
  // Places among the step's tensors; -1: none, or one that it was given.
  std::vector<int64_t> results{};
  std::vector<size_t> last{};  // places that no later op reads
  bool is_view = false;        // its result is memory of its arguments, and no op in it wrote any
  // What an engine launched for it, which is all that it does where no other op in it computes.
  const Launcher* launcher = nullptr;
  std::vector<BoundPlan> launches{};
  std::optional<c10::Device> device{};
  bool is_launched() const { return launcher && !calls_others; }
  bool calls_others = false;
};

// What was seen of one step. Tensors are kept alive, so that none gets another's address.
class Recording {
 public:
  // On this thread, until stop().
  void start();
  void stop();
  ~Recording() { stop(); }

  // Why the step cannot be replayed, or "".
  std::string problem;
  std::vector<OpCall> calls;
  std::vector<at::Tensor> outside;  // read, and made by no op of the step
  std::vector<at::Tensor> made;

  // Where the tensor comes from, or none.
  const Source* find(const at::Tensor& t) const;

  // What was launched for the op that runs, and the memory that this needs.
  void launched(const Launcher& launcher, BoundPlan launch, c10::Device device,
                std::vector<at::Tensor> memory);
  std::vector<at::Tensor> memory;  // of all launches
  at::Tensor scratch;              // the largest so far

 private:
  friend struct Observer;
  template <class Note>
  void noted(const Note& note);
  void refuse(const std::string& why);
  void began(const at::RecordFunction& f);
  void ended(const at::RecordFunction& f);
  void called_by_last(const std::optional<c10::OperatorHandle>& op,
                      const std::optional<c10::OperatorName>& name);
  Argument argument(const c10::IValue& value);
  Source source(const at::Tensor& t);
  const Source* same_memory(const at::Tensor& t) const;
  int64_t result(const c10::IValue& value);

  at::CallbackHandle handle_ = 0;
  bool runs_ = false;
  int depth_ = 0;
  std::unordered_map<const c10::TensorImpl*, Source> sources_;
  std::unordered_multimap<const c10::StorageImpl*, size_t> storages_;  // of `made`
  std::vector<at::Tensor> handles_;                                    // others of `made`
};

// In what the second differs from the first, or "".
std::string difference(const Recording& first, const Recording& second);

}  // namespace metalmm::replay
