#include "exact_rows.h"

#include <torch/library.h>

namespace metalmm {
namespace {

thread_local bool g_exact = false;

}  // namespace

bool exact_rows() { return g_exact; }

TORCH_LIBRARY_FRAGMENT(metalmm, m) {
  m.def("_exact_rows(bool on) -> ()", [](bool on) { g_exact = on; });
}

}  // namespace metalmm
