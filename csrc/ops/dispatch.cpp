// What torch makes of the signature of an op, to box its arguments and to call it, is 0.2 s of a
// compiler: here once for all that call an op or register a kernel.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "args.h"

namespace metalmm {

template <class Args>
typename OpOf<Args>::Result call(const Args& a) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(OpOf<Args>::kQualified, "")
                             .template typed<typename OpOf<Args>::Signature>();
  return with_fields(a, [](const Args&, const auto&... field) { return op.call(field.value...); });
}

template <class Args>
void implement(torch::Library& m, typename OpOf<Args>::Signature* kernel) {
  m.impl(OpOf<Args>::kName, kernel);
}

#define MM_OP(name, ...)                                     \
  template OpOf<args::name>::Result call(const args::name&); \
  template void implement<args::name>(torch::Library&, OpOf<args::name>::Signature*);
#include "ops.def"

}  // namespace metalmm
