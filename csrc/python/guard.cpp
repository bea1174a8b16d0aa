// Whether dicts and lists of Python hold what they held.
#include <pybind11/pybind11.h>

#include <unordered_map>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace metalmm {
namespace {

// Tells of a dict that nobody has written to it, without a look at its items.
#if PY_VERSION_HEX < 0x030C0000
class Writes {
 public:
  explicit Writes(PyObject* dict)
      : dict_(reinterpret_cast<PyDictObject*>(dict)), seen_(version()) {}
  bool none() const { return seen_ == version(); }
  void forget() { seen_ = version(); }

 private:
  uint64_t version() const { return dict_->ma_version_tag; }
  const PyDictObject* dict_;
  uint64_t seen_;
};
#else
// From Python 3.12 on a callback is told of each.
class Writes {
 public:
  explicit Writes(PyObject* dict) : dict_(dict), watched_(&all()[dict]) {
    if (++watched_->holders == 1 && PyDict_Watch(watcher(), dict) != 0) {
      throw py::error_already_set();
    }
    forget();
  }
  Writes(Writes&& other) noexcept
      : dict_(std::exchange(other.dict_, nullptr)), watched_(other.watched_), seen_(other.seen_) {}
  Writes(const Writes&) = delete;
  Writes& operator=(const Writes&) = delete;
  ~Writes() {
    if (!dict_ || --watched_->holders > 0) return;
    PyDict_Unwatch(watcher(), dict_);
    all().erase(dict_);
  }
  bool none() const { return seen_ == watched_->count; }
  void forget() { seen_ = watched_->count; }

 private:
  struct Watched {
    uint64_t count = 0;
    int holders = 0;
  };
  // Map elements stay where they are. Never destroyed: dicts outlive the statics of a process.
  static std::unordered_map<PyObject*, Watched>& all() {
    static auto* dicts = new std::unordered_map<PyObject*, Watched>;
    return *dicts;
  }
  static int watcher() {
    static const int id = PyDict_AddWatcher(&told);
    if (id < 0) throw py::error_already_set();
    return id;
  }
  static int told(PyDict_WatchEvent, PyObject* dict, PyObject*, PyObject*) {
    const auto found = all().find(dict);
    if (found != all().end()) ++found->second.count;
    return 0;
  }
  PyObject* dict_;
  Watched* watched_;
  uint64_t seen_ = 0;
};
#endif

// The dict itself, or that of a class, which Python shows as a proxy alone.
py::dict dict_of(const py::handle& each) {
  if (PyDict_Check(each.ptr())) return py::reinterpret_borrow<py::dict>(each);
  if (!PyType_Check(each.ptr())) throw py::type_error("dicts: an element is no dict and no class");
  auto* const type = reinterpret_cast<PyTypeObject*>(each.ptr());
#if PY_VERSION_HEX < 0x030C0000
  return py::reinterpret_borrow<py::dict>(type->tp_dict);
#else
  return py::reinterpret_steal<py::dict>(PyType_GetDict(type));
#endif
}

// Objects are compared by identity where a dict was written to. Keeps all of them alive.
class Guard {
 public:
  Guard(const py::list& dicts, const py::list& lists, const py::list& items,
        const py::list& objects) {
    for (const py::handle& each : dicts) {
      const py::dict d = dict_of(each);
      dicts_.push_back({d, {}});
      writes_.emplace_back(d.ptr());
      for (const auto& [key, value] : d) {
        dicts_.back().held.push_back(py::reinterpret_borrow<py::object>(key));
        dicts_.back().held.push_back(py::reinterpret_borrow<py::object>(value));
      }
    }
    for (const py::handle& each : lists) {
      if (!PyList_Check(each.ptr())) throw py::type_error("lists: an element is no list");
      const auto l = py::reinterpret_borrow<py::list>(each);
      lists_.push_back({l, {}});
      for (const py::handle& value : l) {
        lists_.back().held.push_back(py::reinterpret_borrow<py::object>(value));
      }
    }
    for (const py::handle& item : items) {
      const auto each = py::reinterpret_borrow<py::tuple>(item);
      items_.push_back({py::dict(each[0]), each[1], each[2]});
    }
    for (const py::handle& each : objects) {
      objects_.push_back(
          {py::reinterpret_borrow<py::object>(each),
           py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(each.ptr())))});
    }
  }

  bool same() {
    for (const auto& [object, type] : objects_) {
      if (reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) != type.ptr()) return false;
    }
    for (size_t i = 0; i < dicts_.size(); ++i) {
      if (writes_[i].none()) continue;
      if (!is_same(dicts_[i])) return false;
      writes_[i].forget();
    }
    for (const auto& [list, held] : lists_) {
      if (static_cast<size_t>(PyList_GET_SIZE(list.ptr())) != held.size()) return false;
      for (size_t i = 0; i < held.size(); ++i) {
        if (PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)) != held[i].ptr()) return false;
      }
    }
    for (const auto& [dict, name, value] : items_) {
      if (PyDict_GetItemWithError(dict.ptr(), name.ptr()) != value.ptr()) return false;
    }
    return true;
  }

  // For Python's search for cycles: a model has its steps, whose guard has the model.
  int traverse(visitproc visit, void* arg) const {
    const auto seen = [&](const auto& container) {
      Py_VISIT(container.container.ptr());
      for (const py::object& each : container.held) Py_VISIT(each.ptr());
      return 0;
    };
    for (const auto& each : dicts_) {
      if (const int stop = seen(each)) return stop;
    }
    for (const auto& each : lists_) {
      if (const int stop = seen(each)) return stop;
    }
    for (const auto& [dict, name, value] : items_) {
      Py_VISIT(dict.ptr());
      Py_VISIT(name.ptr());
      Py_VISIT(value.ptr());
    }
    for (const auto& [object, type] : objects_) {
      Py_VISIT(object.ptr());
      Py_VISIT(type.ptr());
    }
    return 0;
  }
  void clear() {
    // Whatever runs as an object goes finds a guard that is empty already.
    Guard gone(std::move(*this));
    *this = Guard();
  }

 private:
  Guard() = default;
  template <class Container>
  struct Seen {
    Container container;
    std::vector<py::object> held;
  };
  static bool is_same(const Seen<py::dict>& seen) {
    const auto& [dict, held] = seen;
    if (static_cast<size_t>(PyDict_GET_SIZE(dict.ptr())) * 2 != held.size()) return false;
    PyObject *key, *value;
    Py_ssize_t at = 0;
    for (size_t i = 0; PyDict_Next(dict.ptr(), &at, &key, &value); i += 2) {
      if (key != held[i].ptr() || value != held[i + 1].ptr()) return false;
    }
    return true;
  }
  struct Item {
    py::dict dict;
    py::object name, value;
  };
  std::vector<Seen<py::dict>> dicts_;
  std::vector<Writes> writes_;  // of dicts_, behind which they go
  std::vector<Seen<py::list>> lists_;
  struct Typed {
    py::object object, type;
  };
  std::vector<Item> items_;
  std::vector<Typed> objects_;
};

Guard* made(PyObject* self) {
  const auto of = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
  return of.holder_constructed() ? static_cast<Guard*>(of.value_ptr()) : nullptr;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const Guard* guard = made(self);
  return guard ? guard->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
  if (Guard* guard = made(self)) guard->clear();
  return 0;
}

void with_cycles(PyHeapTypeObject* type) {
  type->ht_type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->ht_type.tp_traverse = &traverse;
  type->ht_type.tp_clear = &clear;
}

}  // namespace

void bind_guard(py::module_& m) {
  py::class_<Guard>(m, "Guard", py::custom_type_setup(&with_cycles),
                    "Whether dicts, or those of classes, and lists hold the objects that they hold "
                    "as this is made, in their order, the items (dict, key, value) are there, and "
                    "objects are of the classes that they are of.")
      .def(py::init<const py::list&, const py::list&, const py::list&, const py::list&>(),
           py::arg("dicts"), py::arg("lists"), py::arg("items"), py::arg("objects"))
      .def("same", &Guard::same);
}

}  // namespace metalmm
