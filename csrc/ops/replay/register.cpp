// torch.classes.metalmm.Step: a step of a model, recorded twice and replayed.
#include <torch/custom_class.h>

#include <memory>

#include "replay.h"

namespace metalmm::replay {
namespace {

struct Step : torch::CustomClassHolder {
  // Between start() and stop() the ops of this thread are recorded.
  void start() {
    earlier = std::move(now);
    now = std::make_unique<Recording>();
    now->start();
  }
  // is_whole: else what was recorded of the step is forgotten, and what was before.
  void stop(bool is_whole) {
    if (now) now->stop();
    if (is_whole) return;
    now.reset();
    earlier.reset();
  }
  // Why the last two recordings make no list, or ""; of a single one why it would not.
  std::string problem(const std::vector<at::Tensor>& results) {
    if (!now) return "nothing is recorded";
    if (!now->problem.empty()) return now->problem;
    for (const at::Tensor& t : results) {
      const Source* found = now->find(t);
      if (!found || found->is_outside) return "a result that no op of the step made";
    }
    return earlier ? difference(*earlier, *now) : "";
  }
  void keep(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& shown) {
    TORCH_CHECK(now && earlier, "a step is recorded twice before it is kept");
    list = std::make_unique<Replay>(*now, results, shown);
    now.reset();
    earlier.reset();
  }
  bool holds() const { return list && list->holds(); }
  std::vector<at::Tensor> run() {
    TORCH_CHECK(list, "no step is kept");
    return list->run();
  }
  // The ops that the list calls, in order.
  std::vector<std::string> called() const {
    return list ? list->called() : std::vector<std::string>();
  }
  // Passes that an engine launches, and lists of them.
  std::tuple<int64_t, int64_t> launched() const {
    if (!list) return {0, 0};
    return {static_cast<int64_t>(list->passes()), static_cast<int64_t>(list->blocks())};
  }

  std::unique_ptr<Recording> earlier, now;
  std::unique_ptr<Replay> list;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(metalmm, m) {
  m.class_<Step>("Step")
      .def(torch::init<>())
      .def("start", &Step::start)
      .def("stop", &Step::stop)
      .def("problem", &Step::problem)
      .def("keep", &Step::keep)
      .def("holds", &Step::holds)
      .def("run", &Step::run)
      .def("called", &Step::called)
      .def("launched", &Step::launched);
}

}  // namespace metalmm::replay
