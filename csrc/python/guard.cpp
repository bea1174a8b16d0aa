// Whether dicts and lists of Python hold what they held.
#include <pybind11/pybind11.h>

#include <vector>

namespace py = pybind11;

namespace metalmm {
namespace {

// Objects are compared by identity: 4 ns each, where a loop of Python takes 40. Keeps all of them
// alive.
class Guard {
 public:
  Guard(const py::list& dicts, const py::list& lists, const py::list& items) {
    for (const py::handle& each : dicts) {
      const auto d = py::reinterpret_borrow<py::dict>(each);
      dicts_.push_back({d, {}});
      for (const auto& [key, value] : d) {
        dicts_.back().held.push_back(py::reinterpret_borrow<py::object>(key));
        dicts_.back().held.push_back(py::reinterpret_borrow<py::object>(value));
      }
    }
    for (const py::handle& each : lists) {
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
  }

  bool same() const {
    for (const auto& [dict, held] : dicts_) {
      if (static_cast<size_t>(PyDict_GET_SIZE(dict.ptr())) * 2 != held.size()) return false;
      if (held.empty()) continue;
      PyObject *key, *value;
      Py_ssize_t at = 0;
      for (size_t i = 0; PyDict_Next(dict.ptr(), &at, &key, &value); i += 2) {
        if (key != held[i].ptr() || value != held[i + 1].ptr()) return false;
      }
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

 private:
  template <class Container>
  struct Seen {
    Container container;
    std::vector<py::object> held;
  };
  struct Item {
    py::dict dict;
    py::object name, value;
  };
  std::vector<Seen<py::dict>> dicts_;
  std::vector<Seen<py::list>> lists_;
  std::vector<Item> items_;
};

}  // namespace

void bind_guard(py::module_& m) {
  py::class_<Guard>(m, "Guard",
                    "Whether dicts and lists hold the objects that they hold as this is made, in "
                    "their order, and the items (dict, key, value) are there.")
      .def(py::init<const py::list&, const py::list&, const py::list&>(), py::arg("dicts"),
           py::arg("lists"), py::arg("items"))
      .def("same", &Guard::same);
}

}  // namespace metalmm
