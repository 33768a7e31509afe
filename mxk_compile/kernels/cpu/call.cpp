// The way from Python to the kernel of a call like one that was made before: what tells calls apart is read from the
// tensors, looked up in a dict of kernels/__init__.py, and run. All else goes to that file's functions.
//
// A tensor tells its address, shape, strides and dtype through DLPack's exchange functions, which torch offers since 2.10;
// of Python, what every version of 3.10 and later exports is used, declared below. So neither needs headers at build, and
// the library stays one for all. Without either symbols stay null, and nothing here is called (kernels/cpu/__init__.py).
#include <cstddef>
#include <cstring>

#include "abi.h"

extern "C" {
struct PyObject;
using PyFunction = PyObject* (*)(PyObject* self, PyObject* const* args, ptrdiff_t count, PyObject* names);
struct PyMethodDef {
  const char* name;
  PyFunction function;
  int flags;
  const char* doc;
};
#define PYTHON __attribute__((weak))
PYTHON void Py_IncRef(PyObject*);
PYTHON void Py_DecRef(PyObject*);
PYTHON PyObject* PyErr_Occurred();
PYTHON void PyErr_Clear();
PYTHON PyObject* PyBytes_FromStringAndSize(const char*, ptrdiff_t);
PYTHON char* PyBytes_AsString(PyObject*);
PYTHON unsigned long long PyLong_AsUnsignedLongLongMask(PyObject*);
PYTHON PyObject* PyTuple_New(ptrdiff_t);
PYTHON ptrdiff_t PyTuple_Size(PyObject*);
PYTHON PyObject* PyTuple_GetItem(PyObject*, ptrdiff_t);
PYTHON int PyTuple_SetItem(PyObject*, ptrdiff_t, PyObject*);
PYTHON ptrdiff_t PyList_Size(PyObject*);
PYTHON PyObject* PyList_GetItem(PyObject*, ptrdiff_t);
PYTHON PyObject* PyDict_New();
PYTHON int PyDict_SetItem(PyObject*, PyObject*, PyObject*);
PYTHON PyObject* PyDict_GetItemWithError(PyObject*, PyObject*);
PYTHON int PyObject_IsTrue(PyObject*);
PYTHON PyObject* PyObject_GetAttr(PyObject*, PyObject*);
PYTHON PyObject* PyObject_Call(PyObject*, PyObject*, PyObject*);
PYTHON PyObject* PyObject_CallNoArgs(PyObject*);
PYTHON PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
PYTHON PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
PYTHON void* PyCapsule_GetPointer(PyObject*, const char*);
PYTHON PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module);
PYTHON PyObject* PyEval_SaveThread();
PYTHON void PyEval_RestoreThread(PyObject*);
}

namespace {

constexpr int kFastCallWithNames = 0x0080 | 0x0002;  // METH_FASTCALL | METH_KEYWORDS

// DLPack 1.x: a tensor, and where the table of a type's exchange functions has the one that fills it.
struct DLTensor {
  void* data;
  int32_t device_type, device_id, ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
constexpr int32_t kCpu = 1;
struct Exchange {
  uint32_t major, minor;
  void* older;
  void* owning[3];
  int (*tensor)(PyObject*, DLTensor*);  // 0, or -1 and a Python exception
};

// What kernels/__init__.py gives: a tuple, in this order.
enum Given {
  kKnown,        // dict: key -> Prepared of kernels/cpu/__init__.py
  kLearn,        // (key, *args, **attributes): a call that is not in it
  kGeneral,      // (*all, **attributes): any call
  kKeysets,      // None, or (mask, value, whether a call needs a gradient) of a first argument, a DispatchKeySet
  kRawRepr,      // of DispatchKeySet
  kGradEnabled,  // torch.is_grad_enabled
  kProfiling,    // whether a profiler runs
  kThreads,      // torch.get_num_threads
  kNames,        // ("_fixed", "_new_out", "_address"): of Prepared
  kNone,
  kGivens,
};
struct Entry {
  PyObject* given[kGivens];
  const Exchange* exchange;
  bool lists;
};
constexpr char kEntry[] = "mxk entry";
constexpr int kRouting = 3;  // the first arguments, whose addresses may differ

// A reference that ends with its scope.
struct Owned {
  PyObject* object;
  explicit Owned(PyObject* owned) : object(owned) {}
  Owned(const Owned&) = delete;
  ~Owned() {
    if (object) Py_DecRef(object);
  }
  explicit operator bool() const { return object != nullptr; }
};

PyObject* another(PyObject* object) {
  Py_IncRef(object);
  return object;
}

bool is_true(PyObject* function) {
  const Owned result(PyObject_CallNoArgs(function));
  return result && PyObject_IsTrue(result.object) == 1;
}

uint64_t number(const Owned& result) { return result ? PyLong_AsUnsignedLongLongMask(result.object) : 0; }

// Layouts and addresses as bytes. Lists of thousands of experts fit; longer ones take the general way.
struct Key {
  char bytes[1 << 16];
  size_t size = 0;
  bool fits = true;

  void add(const void* from, size_t count) {
    if ((fits = fits && size + count <= sizeof bytes)) std::memcpy(bytes + size, from, count), size += count;
  }
  void add(int64_t value) { add(&value, sizeof value); }
  void add_layout(const DLTensor& t) {
    add(&t.ndim, sizeof t.ndim), add(&t.dtype, sizeof t.dtype);
    add(t.shape, size_t(t.ndim) * 8), add(t.strides, size_t(t.ndim) * 8);
  }
};

bool same_layout(const DLTensor& a, const DLTensor& b) {
  const size_t bytes = size_t(a.ndim) * 8;
  return a.ndim == b.ndim && std::memcmp(&a.dtype, &b.dtype, sizeof a.dtype) == 0 &&
         std::memcmp(a.shape, b.shape, bytes) == 0 && std::memcmp(a.strides, b.strides, bytes) == 0;
}

int64_t address(const DLTensor& t) { return int64_t(t.data) + int64_t(t.byte_offset); }

bool describe(const Entry& entry, PyObject* object, DLTensor& to) {
  return entry.exchange->tensor(object, &to) == 0 && to.device_type == kCpu;
}

// False where what was given is no call that could be known, maybe with an exception.
bool describe_all(const Entry& entry, PyObject* const* args, ptrdiff_t count, Key& key, int64_t (&routing)[kRouting]) {
  for (ptrdiff_t i = 0; i < count; ++i) {
    DLTensor tensor;
    if (args[i] == entry.given[kNone]) {
      key.add(-1);
    } else if (i < kRouting || !entry.lists) {
      if (!describe(entry, args[i], tensor)) return false;
      key.add_layout(tensor);
      if (i < kRouting)
        routing[i] = address(tensor);
      else
        key.add(address(tensor));
    } else {
      const ptrdiff_t size = PyList_Size(args[i]);
      if (size < 0) return false;
      key.add(size);
      DLTensor first;
      for (ptrdiff_t e = 0; e < size; ++e) {
        if (!describe(entry, PyList_GetItem(args[i], e), tensor)) return false;
        if (e == 0) key.add_layout(first = tensor);
        if (!same_layout(first, tensor)) return false;  // copied in every call, or refused
        key.add(address(tensor));
      }
    }
  }
  return key.fits && count >= kRouting;
}

// function(*first, *args, **attributes)
PyObject* pass_on(PyObject* function, PyObject* first, PyObject* const* args, ptrdiff_t count, PyObject* names) {
  const Owned tuple(PyTuple_New(count + (first != nullptr))), attributes(PyDict_New());
  if (!tuple || !attributes) return nullptr;
  if (first) PyTuple_SetItem(tuple.object, 0, another(first));
  for (ptrdiff_t i = 0; i < count; ++i) PyTuple_SetItem(tuple.object, i + (first != nullptr), another(args[i]));
  for (ptrdiff_t i = 0; names && i < PyTuple_Size(names); ++i)
    if (PyDict_SetItem(attributes.object, PyTuple_GetItem(names, i), args[count + i])) return nullptr;
  return PyObject_Call(function, tuple.object, attributes.object);
}

PyObject* run(const Entry& entry, PyObject* prepared, PyObject* const* args, const int64_t (&routing)[kRouting]) {
  const Owned fixed(PyObject_GetAttr(prepared, PyTuple_GetItem(entry.given[kNames], 0)));
  const Owned new_out(PyObject_GetAttr(prepared, PyTuple_GetItem(entry.given[kNames], 1)));
  const Owned function(PyObject_GetAttr(prepared, PyTuple_GetItem(entry.given[kNames], 2)));
  if (!fixed || !new_out || !function) return nullptr;
  Owned out(PyObject_CallNoArgs(new_out.object));
  DLTensor result;
  if (!out || !describe(entry, out.object, result)) return nullptr;
  MxkMoe call;
  std::memcpy(static_cast<void*>(&call.w13), PyBytes_AsString(fixed.object), sizeof call - offsetof(MxkMoe, w13));
  call.x = reinterpret_cast<const void*>(routing[0]), call.ids = reinterpret_cast<const void*>(routing[1]);
  call.weights = reinterpret_cast<const void*>(routing[2]), call.out = result.data;
  call.threads = int64_t(number(Owned(PyObject_CallNoArgs(entry.given[kThreads]))));
  const auto kernel = reinterpret_cast<decltype(&mxk_cpu_moe)>(number(function));
  PyObject* thread = PyEval_SaveThread();
  const int failed = kernel(&call);
  PyEval_RestoreThread(thread);
  if (failed) return PyObject_CallFunctionObjArgs(prepared, args[0], args[1], args[2], nullptr);  // it says what is wrong
  return another(out.object);
}

// Null without an exception: for the general way.
PyObject* known_call(const Entry& entry, PyObject* const* args, ptrdiff_t count, PyObject* names) {
  Key key;
  int64_t routing[kRouting] = {};
  if (!describe_all(entry, args, count, key, routing)) {
    PyErr_Clear();
    return nullptr;
  }
  const ptrdiff_t attributes = names ? PyTuple_Size(names) : 0;
  const Owned whole(PyTuple_New(2 + attributes));
  if (!whole) return nullptr;
  PyTuple_SetItem(whole.object, 0, PyBytes_FromStringAndSize(key.bytes, ptrdiff_t(key.size)));
  PyTuple_SetItem(whole.object, 1, another(names ? names : entry.given[kNone]));
  for (ptrdiff_t i = 0; i < attributes; ++i) PyTuple_SetItem(whole.object, 2 + i, another(args[count + i]));
  PyObject* found = PyDict_GetItemWithError(entry.given[kKnown], whole.object);
  if (found == nullptr)
    return PyErr_Occurred() ? nullptr : pass_on(entry.given[kLearn], whole.object, args, count, names);
  const Owned prepared(another(found));  // another thread may empty the dict
  return run(entry, prepared.object, args, routing);
}

// A call that came with a keyset: that the device is next, and no gradient is needed.
bool may_enter(const Entry& entry, PyObject* const* args, ptrdiff_t count) {
  PyObject* keysets = entry.given[kKeysets];
  if (keysets == entry.given[kNone]) return true;
  const auto mask = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(keysets, 0));
  const auto value = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(keysets, 1));
  const auto keyset = number(Owned(PyObject_CallFunctionObjArgs(entry.given[kRawRepr], args[0], nullptr)));
  if ((keyset & mask) != value) return false;
  if (!is_true(entry.given[kGradEnabled])) return true;
  const Owned needs(pass_on(PyTuple_GetItem(keysets, 2), nullptr, args + 1, count - 1, nullptr));
  return needs && PyObject_IsTrue(needs.object) == 0;
}

PyObject* call(PyObject* self, PyObject* const* args, ptrdiff_t count, PyObject* names) {
  const Entry& entry = *static_cast<Entry*>(PyCapsule_GetPointer(self, kEntry));
  const ptrdiff_t keyset = entry.given[kKeysets] != entry.given[kNone];
  if (count > keyset && !is_true(entry.given[kProfiling]) && may_enter(entry, args, count)) {
    PyObject* result = known_call(entry, args + keyset, count - keyset, names);
    if (result || PyErr_Occurred()) return result;
  }
  if (PyErr_Occurred()) return nullptr;
  return pass_on(entry.given[kGeneral], nullptr, args, count, names);
}

PyMethodDef method = {"moe", call, kFastCallWithNames, nullptr};

}  // namespace

// A Python function, kept for good; None where `exchange`, DLPack's capsule, has no such table; null with an exception.
MXK_EXPORT PyObject* mxk_cpu_entry(PyObject* exchange, int lists, PyObject* given) {
  const auto table = static_cast<const Exchange*>(PyCapsule_GetPointer(exchange, "dlpack_exchange_api"));
  if (table == nullptr) return nullptr;
  if (table->major != 1 || table->tensor == nullptr) return another(PyTuple_GetItem(given, kNone));
  Entry* entry = new Entry{{}, table, lists != 0};
  for (int i = 0; i < kGivens; ++i) entry->given[i] = another(PyTuple_GetItem(given, i));
  const Owned self(PyCapsule_New(entry, kEntry, nullptr));
  return self ? PyCFunction_NewEx(&method, self.object, nullptr) : nullptr;
}
