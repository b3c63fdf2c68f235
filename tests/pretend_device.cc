// A device of torch for tests, "pretend": its memory is the host's, at addresses that the host cannot read. Every
// operation without a kernel here runs on the CPU over the same memory, unless tensors of the CPU are among its operands:
// then it fails as on a GPU. Copies to the host that do not block leave garbage until the host waits for them; copies to
// the device that do not block notice where their pinned source changes before; and work on one stream notices where it
// uses what another stream computes, without waiting for that.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// ---- streams: a moment says how much of each stream's work has been done or is waited for

constexpr int STREAMS = 32;
using Moment = std::array<int64_t, STREAMS>;

struct Copy {
  at::Tensor host;      // target, or pinned source
  at::Tensor contents;  // what it gets, or must still have
  bool to_host;
  int64_t stream, number;
};

std::mutex lock;  // not held where references to tensors are made or dropped, for which torch may take Python's lock
std::array<Moment, STREAMS> known{};  // by stream: what its next work comes after
Moment host{};                        // what the host has waited for
std::vector<Copy> pending;
int64_t waits = 0, streams = 0;
thread_local int64_t current = 0;

void merge(Moment& into, const Moment& from) {
  for (int each = 0; each < STREAMS; ++each) into[each] = std::max(into[each], from[each]);
}

Moment moment_of(int64_t stream) {
  std::lock_guard<std::mutex> held(lock);
  return known[stream];
}

int64_t begin_work() {
  std::lock_guard<std::mutex> held(lock);
  merge(known[current], host);
  return ++known[current][current];
}

bool overlap(const at::Tensor& one, const at::Tensor& other) {
  const auto *first = static_cast<const char*>(one.const_data_ptr()),
             *second = static_cast<const char*>(other.const_data_ptr());
  return first < second + other.nbytes() && second < first + one.nbytes();
}

// Complete the copies up to a moment that the host waits for; with `of`, those alone that use this memory of the host.
void reach(const Moment& moment, int waited, const at::Tensor* of = nullptr) {
  std::vector<Copy> done, left;
  bool intact = true;
  {
    std::lock_guard<std::mutex> held(lock);
    waits += waited;
    for (auto& each : pending) {
      const bool completes = each.number <= moment[each.stream] && (of == nullptr || overlap(each.host, *of));
      (completes ? done : left).push_back(std::move(each));
    }
    pending.swap(left);
    if (of == nullptr) merge(host, moment);
    for (const auto& each : done) {
      const auto* contents = each.contents.const_data_ptr();
      if (each.to_host)
        std::memcpy(each.host.mutable_data_ptr(), contents, each.host.nbytes());
      else
        intact = intact && std::memcmp(each.host.const_data_ptr(), contents, each.host.nbytes()) == 0;
    }
  }
  TORCH_CHECK(intact, "pinned memory was changed before its copy to the device had completed: wait for an event that is "
              "recorded after the copy.");
}

void begin_copy(Copy copy) {
  std::lock_guard<std::mutex> held(lock);
  pending.push_back(std::move(copy));
}

void synchronize_stream(int64_t stream) { reach(moment_of(stream), 1); }

void synchronize() {
  Moment all{};
  for (int64_t each = 0; each < STREAMS; ++each) merge(all, moment_of(each));
  reach(all, 1);
}

int64_t count_waits() { return waits; }

// ---- memory

constexpr uintptr_t HIDDEN = uintptr_t{1} << 55;  // no address of a process has this bit

struct Block {
  void* memory;
  int64_t stream, number;  // the work that wrote it last
};

void release(void* context) {
  std::free(static_cast<Block*>(context)->memory);
  delete static_cast<Block*>(context);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t count) override {
    void* found = count ? std::aligned_alloc(64, (count + 63) / 64 * 64) : nullptr;
    void* address = found ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(found) | HIDDEN) : nullptr;
    return {address, new Block{found, 0, 0}, &release, DEVICE};
  }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "copy_data is not implemented."); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

void* memory_of(const c10::Storage& storage) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(storage.data()) & ~HIDDEN);
}

Block& block_of(const c10::Storage& storage) {
  static thread_local Block unknown{};  // torch's own storage over memory of another one
  const auto& data = storage.data_ptr();
  return data.get_deleter() == &release ? *static_cast<Block*>(data.get_context()) : unknown = Block{};
}

void check_order(const at::Tensor& tensor) {
  const Block& block = block_of(tensor.storage());
  std::lock_guard<std::mutex> held(lock);
  TORCH_CHECK(block.number <= known[current][block.stream], "a tensor that stream ", block.stream,
              " computes is used on stream ", current, ", which does not wait for it: call wait_event or wait_stream.");
}

void mark_written(const at::Tensor& tensor, int64_t number) {
  Block& block = block_of(tensor.storage());
  block.stream = current, block.number = number;
}

void resize_storage(const c10::Storage& storage, size_t count) {
  auto grown = memory.allocate(count);
  const auto& block = block_of(storage);
  auto* found = static_cast<Block*>(grown.get_context());
  found->stream = block.stream, found->number = block.number;
  if (const size_t kept = std::min(count, storage.nbytes())) std::memcpy(found->memory, memory_of(storage), kept);
  storage.set_data_ptr_noswap(std::move(grown));
  storage.set_nbytes(count);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t count) override {
    void* found = std::aligned_alloc(64, (count + 64) / 64 * 64);
    std::lock_guard<std::mutex> held(ranges_lock);
    ranges[found] = count;
    return {found, found, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* into, const void* from, size_t count) const override { default_copy_data(into, from, count); }
  static bool owns(const void* address) {
    std::lock_guard<std::mutex> held(ranges_lock);
    auto next = ranges.upper_bound(const_cast<void*>(address));
    if (next == ranges.begin()) return false;
    --next;
    return static_cast<const char*>(address) <= static_cast<char*>(next->first) + next->second;
  }
  static void unpin(void* address) {
    std::lock_guard<std::mutex> held(ranges_lock);
    ranges.erase(address);
    std::free(address);
  }
  static inline std::mutex ranges_lock;
  static inline std::map<void*, size_t> ranges;
};
PinnedMemory pinned_memory;

// ---- random numbers: kernels of the CPU draw them, from generators of the device

struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(uint64_t seed) : at::CPUGeneratorImpl(seed) { device_ = DEVICE, key_set_ = KEYS; }
};

at::Generator& default_generator() {
  static at::Generator generator = at::make_generator<DeviceGenerator>(c10::detail::getNonDeterministicRandom());
  return generator;
}

// ---- what torch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard<std::mutex> held(lock);
    return stream(1 + streams++ % (STREAMS - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream chosen) const override { return stream(std::exchange(current, chosen.id())); }
  bool queryStream(const c10::Stream& chosen) const override {
    reach(moment_of(chosen.id()), 0);
    return true;
  }
  void synchronizeStream(const c10::Stream& chosen) const override { synchronize_stream(chosen.id()); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize(); }
  void record(void** event, const c10::Stream& chosen, c10::DeviceIndex, c10::EventFlag) const override {
    std::lock_guard<std::mutex> held(lock);
    if (*event == nullptr) *event = new Moment;
    *static_cast<Moment*>(*event) = known[chosen.id()];
  }
  void block(void* event, const c10::Stream& chosen) const override {
    std::lock_guard<std::mutex> held(lock);
    merge(known[chosen.id()], *static_cast<Moment*>(event));
  }
  bool queryEvent(void* event) const override {
    reach(*static_cast<Moment*>(event), 0);
    return true;
  }
  void synchronizeEvent(void* event) const override { reach(*static_cast<Moment*>(event), 1); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* address) const override { return PinnedMemory::owns(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>(c10::detail::getNonDeterministicRandom());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t count) const override {
    resize_storage(storage, count);
  }
};

// ---- tensors

// A tensor of the CPU over the same memory.
at::Tensor alias_on_host(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr data(memory_of(storage), new c10::Storage(storage),
                    [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::Device(c10::kCPU));
  c10::Storage aliased(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true);
  auto found = at::detail::make_tensor<c10::TensorImpl>(std::move(aliased), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                        tensor.dtype());
  found.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return found;
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
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t needed = (self.numel() + self.storage_offset()) * self.element_size();
  if (self.storage().nbytes() < needed) resize_storage(self.storage(), needed);
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

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage storage) {
  const int64_t count = storage.nbytes() / self.element_size();
  return set_storage(self, std::move(storage), 0, {count}, {});
}

// ---- copies

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& into, bool non_blocking) {
  const int64_t number = begin_work();
  if (is_pretend(self)) check_order(self);
  if (is_pretend(into)) check_order(into), mark_written(into, number);
  const at::Tensor& here = is_pretend(self) ? into : self;
  if (here.device().is_cpu() && here.is_contiguous()) reach(moment_of(current), 0, &here);  // in the order of the stream
  const auto source = on_host(self);
  if (into.device().is_cpu() && non_blocking && into.is_contiguous()) {
    const auto contents = source.to(into.scalar_type()).expand_as(into).clone(at::MemoryFormat::Contiguous);
    std::memset(into.mutable_data_ptr(), 0x7f, into.nbytes());
    begin_copy({into, contents, true, current, number});
    return into;
  }
  if (self.device().is_cpu() && non_blocking && self.is_contiguous() && PinnedMemory::owns(self.const_data_ptr())) {
    begin_copy({self, self.clone(), false, current, number});
  } else if (self.device() != into.device() && !(non_blocking && self.device().is_cpu())) {
    synchronize_stream(current);
  }
  on_host(into).copy_(source);
  return into;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& into) {
  into.resize_(self.sizes());
  return copy_from(self, into, false);
}

c10::Scalar local_scalar(const at::Tensor& self) {
  begin_work();
  check_order(self);
  synchronize_stream(current);
  return alias_on_host(self).item();
}

// ---- everything else runs on the CPU

class Operands {
 public:
  explicit Operands(const c10::OperatorHandle& op) : op_(op), number_(begin_work()) {}

  at::Tensor take(const at::Tensor& tensor, bool written, bool may_be_foreign) {
    if (!tensor.defined()) return tensor;
    if (!is_pretend(tensor)) {
      foreign_ = foreign_ || (tensor.device().is_cpu() && !may_be_foreign && (tensor.dim() > 0 || written));
      return tensor;
    }
    check_order(tensor);
    if (written) mark_written(tensor, number_);
    aliases_.emplace_back(alias_on_host(tensor), tensor);
    return aliases_.back().first;
  }

  void check() const {
    TORCH_CHECK(!foreign_ || aliases_.empty(), "Expected all tensors to be on the same device, but found at least two ",
                "devices, pretend:0 and cpu! (", op_.schema().name(), ")");
  }

  // Operands that the operation resized have new memory.
  void resize_originals() const {
    for (const auto& [alias, original] : aliases_) {
      const auto& storage = original.storage();
      if (alias.storage().data() != memory_of(storage)) {
        resize_storage(storage, alias.storage().nbytes());
        std::memcpy(memory_of(storage), alias.storage().data(), storage.nbytes());
      }
      if (alias.sizes() != original.sizes() || alias.strides() != original.strides())
        original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
    }
  }

  at::Tensor give_back(const at::Tensor& tensor) const {
    if (!tensor.defined()) return tensor;
    for (const auto& [alias, original] : aliases_) {
      if (alias.is_same(tensor)) return original;
      if (!tensor.device().is_cpu() || !tensor.is_alias_of(alias)) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(original.storage()), KEYS, tensor.dtype());
      view.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
      return view;
    }
    auto moved = move_to_device(tensor);
    if (is_pretend(moved)) mark_written(moved, number_);
    return moved;
  }

 private:
  const c10::OperatorHandle& op_;
  int64_t number_;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases_;  // on the host, original
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

// Whether a GPU computes the shape or the answer, for which the host waits.
bool needs_wait(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  if (op.hasTag(at::Tag::data_dependent_output)) return true;
  if (!op.hasTag(at::Tag::dynamic_output_shape)) return false;
  if (arguments.size() < 2 || !arguments[1].isOptionalTensorList()) return true;
  for (const std::optional<at::Tensor>& each : arguments[1].toOptionalTensorList())
    if (each.has_value() && (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte)) return true;
  return false;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Operands operands(op);
  const auto& schema = op.schema();
  const size_t begin = stack->size() - schema.arguments().size();
  std::optional<at::Generator> generator, drawn;
  for (size_t place = begin; place < stack->size(); ++place) {
    auto& value = (*stack)[place];
    const auto& argument = schema.arguments()[place - begin];
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    const bool may_be_foreign = value.isOptionalTensorList();  // indices
    value = change_tensors(value, [&](const at::Tensor& each) { return operands.take(each, written, may_be_foreign); });
    if (argument.name() != "generator") continue;
    generator = value.isNone() ? default_generator() : value.toGenerator();
    TORCH_CHECK(generator->device() == DEVICE, "Expected a 'pretend' device type for generator but found 'cpu'");
    drawn = at::make_generator<at::CPUGeneratorImpl>();
    value = *drawn;
  }
  operands.check();
  if (needs_wait(op, c10::ArrayRef<c10::IValue>(*stack).slice(begin))) synchronize_stream(current);
  if (generator) {
    std::lock_guard<std::mutex> held(generator->mutex());
    drawn->set_state(generator->get_state());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    generator->set_state(drawn->get_state());
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  operands.resize_originals();
  for (size_t place = stack->size() - schema.returns().size(); place < stack->size(); ++place)
    (*stack)[place] = change_tensors((*stack)[place], [&](const at::Tensor& each) { return operands.give_back(each); });
}

// The CPU's kernel takes no generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto kept = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * kept * (p == 1 ? 0.0 : 1 / (1 - p)), kept};
}

void check_convolution(std::initializer_list<at::Tensor> tensors) {
  for (const auto& each : tensors) {
    TORCH_CHECK(!each.defined() || is_pretend(each), "Expected all tensors to be on the same device, but found at least ",
                "two devices, pretend:0 and cpu! (convolution)");
    if (each.defined()) check_order(each);
  }
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  check_convolution({input, weight, bias.value_or(at::Tensor())});
  const auto offset = bias.has_value() ? std::optional<at::Tensor>(on_host(*bias)) : std::nullopt;
  return move_to_device(at::convolution(on_host(input), on_host(weight), offset, stride, padding, dilation, transposed,
                                        output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  check_convolution({gradient, input, weight});
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
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("record_stream", [](at::Tensor&, at::Stream) {});
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("native_dropout", native_dropout);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY(pretend, library) {
  library.def("count_waits() -> int", count_waits);
  library.def("get_rng_state() -> Tensor", [] {
    std::lock_guard<std::mutex> held(default_generator().mutex());
    return default_generator().get_state();
  });
  library.def("set_rng_state(Tensor state) -> ()", [](const at::Tensor& state) {
    std::lock_guard<std::mutex> held(default_generator().mutex());
    default_generator().set_state(state);
  });
  library.def("manual_seed(int seed) -> ()", [](int64_t seed) {
    std::lock_guard<std::mutex> held(default_generator().mutex());
    default_generator().set_current_seed(seed);
  });
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the macros call it m
  using namespace at;  // for them, too
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}

static const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
