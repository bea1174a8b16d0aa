#include "format.h"

#include <stdexcept>
#include <unordered_map>

#include "metal/geometry.h"
#include "names.h"

namespace metalmm {
namespace {

std::vector<Format> affine_variants(const char* name, Codec codec, int64_t bits) {
  std::vector<Format> out;
  for (int64_t group : {32, 64, 128}) {
    for (DType type : {DType::kF16, DType::kBF16, DType::kF32}) {
      const std::string suffix = type == DType::kF16 ? "" : std::string("_") + to_string(type);
      out.push_back({std::string(name) + "_g" + std::to_string(group) + suffix, codec,
                     Layout::kAffine, group, group * bits / 8 + 2 * dtype_bytes(type),
                     kAffineRowAlignment, true, bits, type});
    }
  }
  return out;
}

std::vector<Format> make_formats() {
  std::vector<Format> out;
#define MM_DENSE(name, Struct, bytes, ...) \
  out.push_back({#name, Codec::Struct, Layout::kDense, 1, bytes, bytes});
#define MM_BLOCK(name, Struct, values, bytes, alignment, piece, weave, wide, packs, ...) \
  out.push_back({#name, Codec::Struct, Layout::kBlock, values, bytes, alignment, packs != 0});
#define MM_AFFINE(name, Struct, bits, ...)                        \
  for (Format& f : affine_variants(#name, Codec::Struct, bits)) { \
    out.push_back(std::move(f));                                  \
  }
#include "metal/formats.def"
  return out;
}

}  // namespace

const std::vector<Format>& all_formats() {
  static const auto* formats = new std::vector<Format>(make_formats());
  return *formats;
}

const Format& format_by_name(std::string_view name) {
  static const auto* index = [] {  // every call of an op looks one of many names up
    auto* map = new std::unordered_map<std::string, const Format*>();
    for (const Format& f : all_formats()) map->emplace(f.name, &f);
    return map;
  }();
  auto it = index->find(lower(name));
  if (it != index->end()) return *it->second;
  throw std::invalid_argument(unknown_name("format", name, static_cast<int>(all_formats().size()),
                                           [](int i) { return all_formats()[i].name; }));
}

}  // namespace metalmm
