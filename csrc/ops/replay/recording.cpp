#include "recording.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>

#include "ops/aten.h"

namespace metalmm::replay {
namespace {

thread_local Recording* t_recording = nullptr;

std::string shape_of(const at::Tensor& t) { return c10::str(t.scalar_type(), " ", t.sizes()); }

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

// A number that an op was given where its schema has a tensor.
bool is_number(const at::Tensor& t) {
  return t.dim() == 0 && t.unsafeGetTensorImpl()->is_wrapped_number();
}

bool same_number(const at::Tensor& a, const at::Tensor& b) {
  return is_number(a) && is_number(b) && a.scalar_type() == b.scalar_type() &&
         a.item().toDouble() == b.item().toDouble();
}

bool is_view(const c10::FunctionSchema& schema) {
  return !schema.returns().empty() && !schema.is_mutable() &&
         std::all_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& r) {
           return r.alias_info() && !r.alias_info()->isWrite();
         });
}

// Whether the size of its result depends on values. Of index the tag is for masks alone, for which
// it calls an op that has it, too.
bool is_sized_by_values(const c10::OperatorHandle& op) {
  return op.operator_name().name != "aten::index" && op.hasTag(at::Tag::dynamic_output_shape);
}

// Of an op that another calls: ours, below autograd or a composed one, computes by launches and by
// what else it calls; memory without values is no work.
constexpr const char* kSized = " has a result whose size depends on values";

bool leaves_it_to_launches(const std::string& name) {
  return name.rfind("metalmm::", 0) == 0 || name.rfind("aten::empty", 0) == 0;
}

}  // namespace

struct Observer : at::ObserverContext {
  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& f) {
    if (t_recording) t_recording->noted([&] { t_recording->began(f); });
    return nullptr;
  }
  static void end(const at::RecordFunction& f, at::ObserverContext*) {
    if (t_recording) t_recording->noted([&] { t_recording->ended(f); });
  }
};

// Torch goes on where an observer throws.
template <class Note>
void Recording::noted(const Note& note) {
  try {
    note();
  } catch (const std::exception& error) {
    refuse(error.what());
  }
}

void Recording::refuse(const std::string& why) {
  if (problem.empty()) problem = why;
}

void Recording::start() {
  TORCH_CHECK(!t_recording, "a step is being recorded on this thread");
  t_recording = this;
  runs_ = true;
  auto callback = at::RecordFunctionCallback(&Observer::start, &Observer::end);
  callback.needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION});
  handle_ = at::addThreadLocalCallback(std::move(callback));
}

void Recording::stop() {
  if (!runs_) return;
  runs_ = false;
  at::removeCallback(handle_);
  t_recording = nullptr;
}

const Source* Recording::find(const at::Tensor& t) const {
  const auto found = sources_.find(t.unsafeGetTensorImpl());
  return found == sources_.end() ? nullptr : &found->second;
}

// Python's factories give another handle to what their op made, as Tensor.data does.
const Source* Recording::same_memory(const at::Tensor& t) const {
  if (!t.has_storage()) return nullptr;
  const auto [from, to] = storages_.equal_range(t.storage().unsafeGetStorageImpl());
  for (auto each = from; each != to; ++each) {
    const at::Tensor& other = made[each->second];
    if (same_layout(t, other) && t.storage_offset() == other.storage_offset()) return find(other);
  }
  return nullptr;
}

Source Recording::source(const at::Tensor& t) {
  if (!find(t)) {
    if (const Source* same = same_memory(t)) {
      const Source found = *same;
      handles_.push_back(t);
      return sources_[t.unsafeGetTensorImpl()] = found;
    }
  }
  const auto [found, is_new] =
      sources_.try_emplace(t.unsafeGetTensorImpl(), Source{true, outside.size()});
  if (is_new) outside.push_back(t);
  return found->second;
}

Argument Recording::argument(const c10::IValue& value) {
  Argument a;
  const auto is_tensor = [](const c10::IValue& v) {
    return v.isTensor() && v.toTensor().defined();
  };
  if (is_tensor(value)) {
    a.kind = Argument::Kind::kTensor;
    a.sources.push_back(source(value.toTensor()));
  } else if (value.isTensorList()) {
    a.kind = Argument::Kind::kList;
    for (const at::Tensor& t : value.toTensorVector()) a.sources.push_back(source(t));
  } else {
    if (value.isList()) {
      const auto list = value.toListRef();
      // A list of tensors or none, as indices are.
      if (std::any_of(list.begin(), list.end(), is_tensor)) {
        a.kind = Argument::Kind::kList;
        for (const c10::IValue& v : list) {
          a.sources.push_back(is_tensor(v) ? source(v.toTensor()) : Source{true, Source::kNone});
        }
      }
    }
    a.value = value.isList() ? value.deepcopy() : value;
  }
  return a;
}

int64_t Recording::result(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) {
    if (!value.isNone() && !value.isTensor()) {
      refuse(c10::str(calls.back().op.schema().name(), " gives the host a value"));
    }
    return -1;
  }
  const at::Tensor& t = value.toTensor();
  const auto [found, is_new] =
      sources_.try_emplace(t.unsafeGetTensorImpl(), Source{false, made.size()});
  if (!is_new) return -1;
  made.push_back(t);
  if (t.has_storage()) {
    storages_.emplace(t.storage().unsafeGetStorageImpl(), found->second.place);
  }
  return static_cast<int64_t>(found->second.place);
}

void Recording::launched(const Launcher& launcher, BoundPlan launch, c10::Device device,
                         std::vector<at::Tensor> parts) {
  if (calls.empty() || !problem.empty()) return;
  OpCall& call = calls.back();
  call.launcher = &launcher;
  call.device = device;
  call.launches.push_back(std::move(launch));
  memory.insert(memory.end(), parts.begin(), parts.end());
}

namespace {
std::atomic<uint64_t> g_changes{0};
}  // namespace

void change_engine() { ++g_changes; }
uint64_t engine_changes() { return g_changes; }

at::Tensor scratch(int64_t bytes, at::TensorOptions options) {
  const auto made = [&] { return at::empty({bytes}, options.dtype(at::kByte)); };
  if (!t_recording) return made();
  at::Tensor& held = t_recording->scratch;
  if (!held.defined() || held.device() != options.device() || held.numel() < bytes) held = made();
  return held.narrow(0, 0, bytes);
}

void launch(const Launcher& launcher, BoundPlan launch, c10::Device device,
            std::vector<at::Tensor> memory) {
  BoundPlans one;
  one.push_back(std::move(launch));
  launcher(one, device);
  if (t_recording) t_recording->launched(launcher, one.front(), device, std::move(memory));
}

void Recording::began(const at::RecordFunction& f) {
  const bool is_outermost = ++depth_ == 1;
  if (!problem.empty()) return;
  const auto name = f.operator_name();
  const auto op = name.has_value() ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (!is_outermost) {
    called_by_last(op, name);
    return;
  }
  if (!op) {
    refuse(c10::str(f.name(), " is no op"));
    return;
  }
  OpCall call{*op};
  call.is_view = is_view(op->schema());
  for (const c10::IValue& v : f.inputs()) call.arguments.push_back(argument(v));
  calls.push_back(std::move(call));
  if (is_sized_by_values(*op)) refuse(name->name + kSized);
  // What the host writes into such memory is seen by nobody (torch.tensor does).
  if (name->name.rfind("aten::empty", 0) == 0) {
    refuse(name->name + " makes memory that no op fills");
  }
}

void Recording::called_by_last(const std::optional<c10::OperatorHandle>& op,
                               const std::optional<c10::OperatorName>& name) {
  OpCall& call = calls.back();
  const bool computes = !op || !is_view(op->schema());
  if (computes) call.is_view = false;
  call.calls_others |= computes && !(name.has_value() && leaves_it_to_launches(name->name));
  if (op && is_sized_by_values(*op)) refuse(call.op.schema().name() + kSized);
}

void Recording::ended(const at::RecordFunction& f) {
  if (--depth_ > 0 || !problem.empty()) return;
  std::vector<int64_t> results;
  for (const c10::IValue& value : f.outputs()) {
    if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) results.push_back(result(t));
    } else {
      results.push_back(result(value));
    }
  }
  calls.back().results = std::move(results);
}

namespace {

std::string difference(const OpCall& a, const OpCall& b) {
  const std::string name = a.op.schema().name();
  if (a.op.operator_name() != b.op.operator_name()) {
    return c10::str(name, " in one step, ", b.op.schema().name(), " in the next");
  }
  if (a.results != b.results) return name + " has other results in the next step";
  for (size_t i = 0; i < a.arguments.size(); ++i) {
    const Argument &x = a.arguments[i], &y = b.arguments[i];
    const std::string& which = a.op.schema().arguments()[i].name();
    if (x.kind != y.kind || x.sources != y.sources) {
      return c10::str(name, " reads another tensor as ", which, " in the next step");
    }
    if (x.kind == Argument::Kind::kValue && !(x.value == y.value)) {
      return c10::str(name, " has ", which, " ", x.value, " in one step, ", y.value,
                      " in the next");
    }
  }
  return "";
}

}  // namespace

std::string difference(const Recording& first, const Recording& second) {
  const size_t count = std::min(first.calls.size(), second.calls.size());
  for (size_t i = 0; i < count; ++i) {
    const std::string found = difference(first.calls[i], second.calls[i]);
    if (!found.empty()) return found;
  }
  if (first.calls.size() != second.calls.size()) {
    return c10::str(first.calls.size(), " ops in one step, ", second.calls.size(), " in the next");
  }
  // The calls agree, so places do.
  for (size_t i = 0; i < first.outside.size(); ++i) {
    const at::Tensor &a = first.outside[i], &b = second.outside[i];
    if (!a.is_same(b) && !same_number(a, b)) {
      return c10::str("a tensor ", shape_of(b), " that no op made is another in each step");
    }
  }
  for (size_t i = 0; i < first.made.size(); ++i) {
    if (!same_layout(first.made[i], second.made[i])) {
      return c10::str("a tensor ", shape_of(first.made[i]), " in one step is ",
                      shape_of(second.made[i]), " in the next");
    }
  }
  return "";
}

}  // namespace metalmm::replay
