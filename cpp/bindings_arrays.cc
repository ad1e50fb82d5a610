#include "bindings_arrays.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace py = pybind11;

namespace kvstore {

namespace {

constexpr std::string_view kUntyped = "uint8";      // bytes of whatever dtype; fits every spec
constexpr uint64_t kNumpyItemRefcount = 0x01;       // NPY_ITEM_REFCOUNT: the items are pointers
constexpr int kNumpyVoid = 20, kNumpyUserDef = 24;  // NPY_VOID; the first type number not built in

// From DLPack's published, frozen layout: a "dltensor" capsule points to this.
struct DlTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t dims;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in items; null: C order
  uint64_t byte_offset;
};
enum : int { kDlCpu = 1, kDlCudaHost = 3 };                            // devices
enum : int { kDlBool = 6, kDlFloat8E4m3fn = 10, kDlFloat8E5m2 = 12 };  // type codes

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

std::string numbered(std::string_view kind, uint64_t bytes) {
  return std::string(kind) + std::to_string(8 * bytes);
}

std::string numpy_dtype_name(const py::dtype& dtype) {
  std::string name;
  const auto bytes = static_cast<uint64_t>(dtype.itemsize());
  const char kind = dtype.num() < kNumpyUserDef ? dtype.kind() : '\0';
  switch (kind) {
    case 'b':
      return "bool";
    case 'i':
      name = numbered("int", bytes);
      break;
    case 'u':
      name = numbered("uint", bytes);
      break;
    case 'f':
      name = numbered("float", bytes);
      break;
    case 'c':
      name = numbered("complex", bytes);
      break;
    default:
      if (dtype.num() == kNumpyVoid && !dtype.has_fields()) return std::string(kUntyped);
      name = py::str(dtype.attr("name"));
  }
  const char foreign = std::endian::native == std::endian::little ? '>' : '<';
  return dtype.byteorder() == foreign ? "byte-swapped " + name : name;
}

// Of the buffer protocol's format, as module `struct` spells it.
std::string format_dtype_name(const char* format, uint64_t item_bytes) {
  if (format == nullptr) return std::string(kUntyped);
  std::string_view code = format;
  bool swapped = false;
  if (!code.empty() && std::string_view("@=<>!").find(code[0]) != std::string_view::npos) {
    const bool big = code[0] == '>' || code[0] == '!';
    swapped = item_bytes > 1 && (big || code[0] == '<') &&
              big == (std::endian::native == std::endian::little);
    code.remove_prefix(1);
  }
  std::string name;
  if (code == "B" || code == "b" || code == "c") return std::string(kUntyped);
  if (code == "?") return "bool";
  if (code == "e" || code == "f" || code == "d") {
    name = numbered("float", item_bytes);
  } else if (code == "Zf" || code == "Zd") {
    name = numbered("complex", item_bytes);
  } else if (code.size() == 1 && std::string_view("hilqn").find(code) != std::string_view::npos) {
    name = numbered("int", item_bytes);
  } else if (code.size() == 1 && std::string_view("HILQN").find(code) != std::string_view::npos) {
    name = numbered("uint", item_bytes);
  } else {
    return "format '" + std::string(format) + "'";
  }
  return swapped ? "byte-swapped " + name : name;
}

// A format with 'O' in it, outside of field names, holds pointers to Python objects.
bool format_has_objects(const char* format) {
  bool in_name = false;
  for (; format != nullptr && *format != '\0'; ++format) {
    if (*format == ':') in_name = !in_name;
    if (*format == 'O' && !in_name) return true;
  }
  return false;
}

std::string dlpack_dtype_name(const DlTensor& tensor) {
  static constexpr std::array kNumbered = {"int", "uint", "float", "opaque", "bfloat", "complex"};
  if (tensor.code < kNumbered.size()) return numbered(kNumbered[tensor.code], tensor.bits / 8);
  if (tensor.code == kDlBool) return "bool";
  if (tensor.code == kDlFloat8E4m3fn) return "float8_e4m3fn";
  if (tensor.code == kDlFloat8E5m2) return "float8_e5m2";
  return "DLPack's type " + std::to_string(tensor.code);
}

// INT64_MIN, which is refused later, where the product is beyond any memory.
int64_t in_bytes(int64_t items, uint64_t item_bytes) {
  int64_t bytes = 0;
  return __builtin_mul_overflow(items, static_cast<int64_t>(item_bytes), &bytes) ? INT64_MIN
                                                                                 : bytes;
}

// `strides` in units of `unit_bytes`; null: C order (ctypes gives none though they are asked for).
void set_axes(ArrayView* view, const int64_t* shape, const int64_t* strides, uint64_t unit_bytes) {
  auto c_stride = static_cast<int64_t>(view->item_bytes);
  for (size_t axis = view->dims; axis-- > 0;) {
    view->shape[axis] = shape[axis];
    view->strides[axis] = strides != nullptr ? in_bytes(strides[axis], unit_bytes) : c_stride;
    c_stride = in_bytes(c_stride, static_cast<uint64_t>(shape[axis]));
  }
}

// Why an object did not describe itself, from the exception it raised. An interrupt goes on.
std::string refusal_of(const py::error_already_set& error) {
  if (!error.matches(PyExc_Exception)) throw error;
  return "does not describe its memory: " + std::string(py::str(error.value()));
}

// The attribute, or null where there is none; any other exception is thrown.
py::object attribute(py::handle object, const char* name) {
  PyObject* value = PyObject_GetAttrString(object.ptr(), name);
  if (value == nullptr && PyErr_ExceptionMatches(PyExc_AttributeError) == 0) {
    throw py::error_already_set();
  }
  PyErr_Clear();
  return py::reinterpret_steal<py::object>(value);
}

bool is_numpy_scalar(py::handle object) {
  return PyNumber_Check(object.ptr()) != 0 &&
         py::isinstance(object, py::module_::import("numpy").attr("generic"));
}

}  // namespace

std::string show(py::handle value) {
  PyObject* const text = PyObject_Repr(value.ptr());
  if (text == nullptr) {  // integers of thousands of digits have none
    PyErr_Clear();
    return std::string("a huge ") + Py_TYPE(value.ptr())->tp_name;
  }
  std::string shown = py::str(py::reinterpret_steal<py::object>(text));
  return shown.size() <= 100 ? shown : shown.substr(0, 100) + "...";
}

void raise_error(const char* class_name, const std::string& message) {
  const py::object type = py::module_::import("kvstore.errors").attr(class_name);
  PyErr_SetString(type.ptr(), message.c_str());
  throw py::error_already_set();
}

// ---- exports -----------------------------------------------------------------------------------

bool Exports::hold_buffer(py::handle object, int flags) {
  if (PyObject_GetBuffer(object.ptr(), &buffers_.emplace_back(), flags) == 0) return true;
  buffers_.pop_back();
  return false;
}

void Exports::release() {
  // Taken first: letting go may run Python code that calls `release` again.
  const auto objects = std::exchange(objects_, {});
  auto buffers = std::exchange(buffers_, {});
  for (Py_buffer& buffer : buffers) PyBuffer_Release(&buffer);
}

// ---- any array ---------------------------------------------------------------------------------

ArrayReader::ArrayReader(Exports* exports, bool writable, std::optional<std::string> dtype_name)
    : exports_(exports), writable_(writable), dtype_name_(std::move(dtype_name)) {}

void ArrayReader::read(py::handle object, const Place& place, ArrayView* view) {
  switch (kind_of(object)) {
    case Kind::kNumpy:
      read_numpy(object, place, view);
      break;
    case Kind::kTorch:
      read_torch(object, place, view);
      break;
    case Kind::kOther:
      read_other(object, place, view);
      break;
  }
  check_view(*view, place);
}

std::string ArrayReader::describe(const Place& place) const {
  std::string text = writable_ ? "target" : "source";
  if (place.block) text += " block " + std::to_string(*place.block);
  if (place.piece) text += ", piece " + std::to_string(*place.piece) + ",";
  return text;
}

ArrayReader::Kind ArrayReader::kind_of(py::handle object) {
  PyTypeObject* type = Py_TYPE(object.ptr());
  if (last_type_.ptr() == reinterpret_cast<PyObject*>(type)) return last_kind_;
  last_kind_ = Kind::kOther;
  if (py::isinstance<py::array>(object)) {
    last_kind_ = Kind::kNumpy;
  } else if (type->tp_mro != nullptr) {
    // A tensor of any class descends from torch's native one; torch itself is not imported.
    for (const py::handle base : py::reinterpret_borrow<py::tuple>(type->tp_mro)) {
      const char* name = reinterpret_cast<PyTypeObject*>(base.ptr())->tp_name;
      if (std::strncmp(name, "torch._C.", 9) == 0) last_kind_ = Kind::kTorch;
    }
  }
  last_type_ = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
  return last_kind_;
}

void ArrayReader::check_dtype(std::string_view name, const Place& place) const {
  if (!dtype_name_ || name == *dtype_name_ || name == kUntyped) return;
  raise_error("SpecMismatch", describe(place) + " is " + std::string(name) + ", the spec says " +
                                  *dtype_name_ + "; to mean its bytes as they are, view it as " +
                                  std::string(kUntyped));
}

void ArrayReader::check_view(const ArrayView& view, const Place& place) const {
  auto bytes = static_cast<int64_t>(view.item_bytes);
  auto reach = bytes;
  bool too_large = bytes < 0;
  for (size_t axis = 0; axis < view.dims; ++axis) {
    if (view.shape[axis] == 0) return;
    int64_t axis_reach = 0;
    too_large |=
        view.shape[axis] < 0 || view.strides[axis] == INT64_MIN ||
        __builtin_mul_overflow(bytes, view.shape[axis], &bytes) ||
        __builtin_mul_overflow(view.shape[axis] - 1, std::abs(view.strides[axis]), &axis_reach) ||
        __builtin_add_overflow(reach, axis_reach, &reach);
  }
  if (too_large) refuse(place, "has a shape or strides beyond any memory");
  if (view.data == 0 && bytes > 0) refuse(place, "has no memory: its address is 0");
}

void ArrayReader::refuse(const Place& place, const std::string& why) const {
  raise_error("InvalidArgument", describe(place) + " " + why);
}

// ---- numpy -------------------------------------------------------------------------------------

void ArrayReader::read_numpy(py::handle object, const Place& place, ArrayView* view) {
  const auto array = py::reinterpret_borrow<py::array>(object);
  const py::dtype dtype = array.dtype();
  if ((dtype.flags() & kNumpyItemRefcount) != 0) refuse(place, "holds Python objects, not bytes");
  if (writable_ && !array.writeable()) refuse(place, "is read-only");
  if (dtype_name_ && !dtype.is(last_dtype_)) {
    check_dtype(numpy_dtype_name(dtype), place);
    last_dtype_ = dtype;
  }
  view->data = reinterpret_cast<uintptr_t>(array.data());
  view->item_bytes = static_cast<uint64_t>(array.itemsize());
  view->dims = static_cast<size_t>(array.ndim());
  set_axes(view, array.shape(), array.strides(), 1);
  exports_->hold(array);
}

// ---- torch -------------------------------------------------------------------------------------

// Interned, so that the interpreter's cache of attributes finds them.
struct TensorNames {
  static py::object intern(const char* name) {
    return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name));
  }
  py::object is_cpu = intern("is_cpu"), layout = intern("layout"), is_conj = intern("is_conj"),
             is_neg = intern("is_neg"), requires_grad = intern("requires_grad"),
             dtype = intern("dtype"), data_ptr = intern("data_ptr"), shape = intern("shape"),
             stride = intern("stride"), element_size = intern("element_size");
  py::object strided;  // the layout, once seen
};

namespace {

py::object call(py::handle object, const py::object& method) {
  PyObject* result = PyObject_CallMethodNoArgs(object.ptr(), method.ptr());
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// Fills `view`, or says why the tensor's memory is not its contents. Throws what torch throws.
std::string read_tensor(py::handle tensor, TensorNames& names, bool writable, ArrayView* view) {
  if (!tensor.attr(names.is_cpu).cast<bool>()) {
    return "is on device " + std::string(py::str(tensor.attr("device"))) +
           (writable ? "; read into a CPU tensor and copy that to the device"
                     : "; copy it to the CPU first, tensor.cpu()");
  }
  const py::object layout = tensor.attr(names.layout);
  if (!layout.is(names.strided)) {
    const std::string name = py::str(layout);
    if (name != "torch.strided") {
      return "has layout " + name + ", only dense (torch.strided) tensors are memory";
    }
    names.strided = layout;
  }
  if (call(tensor, names.is_conj).cast<bool>() || call(tensor, names.is_neg).cast<bool>()) {
    return "is a lazy conjugate or negative; resolve it first, tensor.resolve_conj().resolve_neg()";
  }
  if (writable && tensor.attr(names.requires_grad).cast<bool>()) {
    return "requires grad and cannot be written behind autograd's back; pass tensor.detach()";
  }
  const py::tuple shape = tensor.attr(names.shape);
  const py::tuple stride = call(tensor, names.stride);
  if (shape.size() != stride.size() || shape.size() > kArrayDimsMax) {
    return "has " + std::to_string(shape.size()) + " dimensions, the most is " +
           std::to_string(kArrayDimsMax);
  }
  view->data = call(tensor, names.data_ptr).cast<uintptr_t>();
  view->item_bytes = call(tensor, names.element_size).cast<uint64_t>();
  view->dims = shape.size();
  for (size_t axis = 0; axis < view->dims; ++axis) {
    view->shape[axis] = shape[axis].cast<int64_t>();
    view->strides[axis] = in_bytes(stride[axis].cast<int64_t>(), view->item_bytes);
  }
  return {};
}

}  // namespace

ArrayReader::~ArrayReader() = default;

void ArrayReader::read_torch(py::handle object, const Place& place, ArrayView* view) {
  if (!tensor_names_) tensor_names_ = std::make_unique<TensorNames>();
  std::string why;
  py::object dtype;
  try {
    why = read_tensor(object, *tensor_names_, writable_, view);
    dtype = object.attr(tensor_names_->dtype);
  } catch (const py::error_already_set& error) {
    why = refusal_of(error);
  }
  if (!why.empty()) refuse(place, why);
  if (dtype_name_ && !dtype.is(last_dtype_)) {
    const std::string name = py::str(dtype);  // "torch.bfloat16"
    check_dtype(name.substr(name.find('.') + 1), place);
    last_dtype_ = dtype;
  }
  exports_->hold(py::reinterpret_borrow<py::object>(object));
}

// ---- everything else ---------------------------------------------------------------------------

void ArrayReader::read_other(py::handle object, const Place& place, ArrayView* view) {
  const std::string no_memory =
      "of type " + type_name(object) + " is no array, tensor or buffer of CPU memory";
  if (is_numpy_scalar(object)) refuse(place, no_memory);
  std::string why;
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    if (read_buffer(object, place, view)) return;
    why = ": it " + refusal_of(py::error_already_set());
  }
  py::object on_gpu, interface, dlpack;
  try {
    on_gpu = attribute(object, "__cuda_array_interface__");
    interface = attribute(object, "__array_interface__");
    dlpack = attribute(object, "__dlpack__");
  } catch (const py::error_already_set& error) {
    why = ": it " + refusal_of(error);
  }
  if (on_gpu) refuse(place, "is in a GPU's memory; copy it to the CPU first");
  if (interface) return read_array_interface(object, interface, place, view);
  if (dlpack) return read_dlpack(object, place, view);
  refuse(place, no_memory + why);
}

// False, with Python's error set, where the object does not export what is needed.
bool ArrayReader::read_buffer(py::handle object, const Place& place, ArrayView* view) {
  if (!exports_->hold_buffer(object, PyBUF_RECORDS_RO | (writable_ ? PyBUF_WRITABLE : 0))) {
    if (!writable_) return false;
    PyErr_Clear();
    if (!exports_->hold_buffer(object, PyBUF_RECORDS_RO)) return false;
    refuse(place, "is read-only");
  }
  const Py_buffer& buffer = exports_->last_buffer();
  const auto item_bytes = static_cast<uint64_t>(buffer.itemsize);
  if (format_has_objects(buffer.format)) refuse(place, "holds Python objects, not bytes");
  if (dtype_name_) check_dtype(format_dtype_name(buffer.format, item_bytes), place);
  if (buffer.ndim > static_cast<int>(kArrayDimsMax)) refuse(place, "has too many dimensions");
  view->data = reinterpret_cast<uintptr_t>(buffer.buf);
  view->item_bytes = item_bytes;
  view->dims = static_cast<size_t>(buffer.ndim);
  set_axes(view, buffer.shape, buffer.strides, 1);
  return true;
}

// numpy reads the description; the address is compared, as it would rather copy than fail.
void ArrayReader::read_array_interface(py::handle object, py::handle interface, const Place& place,
                                       ArrayView* view) {
  py::object array;
  std::string why;
  uintptr_t address = 0;
  try {
    address = interface["data"][py::int_(0)].cast<uintptr_t>();
    array = py::module_::import("numpy").attr("asarray")(object);
  } catch (const py::error_already_set& error) {
    why = refusal_of(error);
  } catch (const py::cast_error&) {
    why = "has an __array_interface__ whose data is not (address, read-only)";
  }
  if (!why.empty()) refuse(place, why);
  read_numpy(array, place, view);
  if (view->data != address) refuse(place, "has an __array_interface__ that numpy cannot share");
}

void ArrayReader::read_dlpack(py::handle object, const Place& place, ArrayView* view) {
  if (writable_) refuse(place, "is known by DLPack only, which does not say it may be written");
  py::object capsule;
  std::string why;
  int device_type = kDlCpu;
  try {
    device_type = object.attr("__dlpack_device__")()[py::int_(0)].cast<int>();
    if (device_type == kDlCpu || device_type == kDlCudaHost) capsule = object.attr("__dlpack__")();
  } catch (const py::error_already_set& error) {
    why = refusal_of(error);
  }
  if (!why.empty()) refuse(place, why);
  if (!capsule) refuse(place, "is in a device's memory; copy it to the CPU first");
  const auto* tensor =
      static_cast<const DlTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (tensor == nullptr) throw py::error_already_set();
  const unsigned item_bits = tensor->bits * tensor->lanes;
  if (item_bits % 8 != 0) refuse(place, "has items that are not whole bytes");
  if (tensor->dims < 0 || tensor->dims > static_cast<int>(kArrayDimsMax)) {
    refuse(place, "has too many dimensions");
  }
  check_dtype(dlpack_dtype_name(*tensor), place);
  view->data = reinterpret_cast<uintptr_t>(tensor->data) + tensor->byte_offset;
  view->item_bytes = item_bits / 8;
  view->dims = static_cast<size_t>(tensor->dims);
  set_axes(view, tensor->shape, tensor->strides, view->item_bytes);
  exports_->hold(capsule);  // never consumed: it lets go of the memory when it is destroyed
}

}  // namespace kvstore
