// A device of torch for tests, "pretend": its memory is the host's, but no host code gets at it. Every operation without
// a kernel here runs on the CPU over the same memory, unless tensors of the CPU are among its operands: then it fails as
// on a GPU. Copies to the host that do not block leave garbage until `pretend::synchronize`.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// ---- what torch asks of a device

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t count) override {
    void* found = count ? std::aligned_alloc(64, (count + 63) / 64 * 64) : nullptr;
    return {found, found, &std::free, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* into, const void* from, size_t count) const override { default_copy_data(into, from, count); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(DEVICE); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

// ---- memory

// A tensor of the CPU over the same memory.
at::Tensor alias_on_host(const at::Tensor& tensor) {
  auto* begin = static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * tensor.element_size();
  return at::for_blob(begin, tensor.sizes())
      .strides(tensor.strides())
      .deleter([tensor](void*) {})
      .options(tensor.options().device(c10::kCPU).requires_grad(false))
      .make_tensor();
}

bool is_pretend(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

at::Tensor on_host(const at::Tensor& tensor) { return is_pretend(tensor) ? alias_on_host(tensor) : tensor; }

at::Tensor move_to_device(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
  auto found = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(DEVICE));
  alias_on_host(found).copy_(tensor);
  return found;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  const size_t needed = (self.numel() + self.storage_offset()) * self.element_size();
  if (self.storage().nbytes() < needed) {
    self.storage().set_data_ptr_noswap(memory.allocate(needed));
    self.storage().set_nbytes(needed);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_storage_offset(offset);
  if (stride.data() == nullptr)
    tensor->set_sizes_contiguous(size);
  else
    tensor->set_sizes_and_strides(size, stride);
  return self;
}

// ---- copies

std::mutex lock;
std::vector<std::pair<at::Tensor, at::Tensor>> pending;  // into, from
int64_t waits = 0;

void synchronize() {
  std::lock_guard<std::mutex> held(lock);
  ++waits;
  for (auto& [into, from] : pending) into.copy_(from);
  pending.clear();
}

int64_t count_waits() { return waits; }

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& into, bool non_blocking) {
  const auto source = on_host(self);
  if (into.device().is_cpu() && non_blocking && into.is_contiguous()) {
    std::lock_guard<std::mutex> held(lock);
    pending.emplace_back(into, source.clone());
    std::memset(into.mutable_data_ptr(), 0x7f, into.nbytes());
    return into;
  }
  if (into.device().is_cpu()) synchronize();
  on_host(into).copy_(source);
  return into;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& into) {
  into.resize_(self.sizes());
  return copy_from(self, into, false);
}

c10::Scalar local_scalar(const at::Tensor& self) {
  synchronize();
  return alias_on_host(self).item();
}

// ---- everything else runs on the CPU

class Operands {
 public:
  at::Tensor take(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!is_pretend(tensor)) {
      foreign_ = foreign_ || (tensor.device().is_cpu() && tensor.dim() > 0);
      return tensor;
    }
    auto alias = alias_on_host(tensor);
    originals_.emplace(alias.unsafeGetTensorImpl(), tensor);
    aliases_.push_back(alias);
    return alias;
  }

  at::Tensor give_back(const at::Tensor& tensor) const {
    const auto found = tensor.defined() ? originals_.find(tensor.unsafeGetTensorImpl()) : originals_.end();
    return found == originals_.end() ? move_to_device(tensor) : found->second;
  }

  void check(const c10::OperatorHandle& op) const {
    TORCH_CHECK(!foreign_ || aliases_.empty(), "Expected all tensors to be on the same device, but found at least two ",
                "devices, pretend:0 and cpu! (", op.schema().name(), ")");
  }

 private:
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals_;
  std::vector<at::Tensor> aliases_;
  bool foreign_ = false;
};

template <typename Change>
c10::IValue change_tensors(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& each : value.toTensorVector()) changed.push_back(change(each));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
      changed.push_back(each.has_value() ? std::optional<at::Tensor>(change(*each)) : std::nullopt);
    return changed;
  }
  if (value.isDevice() && value.toDevice().type() == KIND) return c10::Device(c10::kCPU);
  return value;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Operands operands;
  const size_t arguments = op.schema().arguments().size(), begin = stack->size() - arguments;
  for (size_t place = begin; place < stack->size(); ++place)
    (*stack)[place] = change_tensors((*stack)[place], [&](const at::Tensor& each) { return operands.take(each); });
  operands.check(op);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t place = stack->size() - op.schema().returns().size(); place < stack->size(); ++place)
    (*stack)[place] = change_tensors((*stack)[place], [&](const at::Tensor& each) { return operands.give_back(each); });
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  const auto offset = bias.has_value() ? std::optional<at::Tensor>(on_host(*bias)) : std::nullopt;
  return move_to_device(at::convolution(on_host(input), on_host(weight), offset, stride, padding, dilation, transposed,
                                        output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  const std::vector<int64_t> bias_sizes{gradient.size(1)};
  auto [first, second, third] =
      at::convolution_backward(on_host(gradient), on_host(input), on_host(weight), bias_sizes, stride, padding,
                               dilation, transposed, output_padding, groups, mask);
  return {move_to_device(first), move_to_device(second), move_to_device(third)};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY(pretend, library) {
  library.def("synchronize() -> ()", synchronize);
  library.def("count_waits() -> int", count_waits);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the macros call it m
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
}

static const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
