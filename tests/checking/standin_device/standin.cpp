// A second device for tests: memory of the host, computed by torch's kernels for the CPU, with the rules of a GPU.
//
// Each operation that has no kernel here runs on tensors of the CPU that share the memory (fallback). It raises as
// CUDA does where a tensor with dimensions, or a generator, lies on another device.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <set>

namespace {

using c10::DispatchKey;
using c10::IValue;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device HERE(KIND, 0);

void release(void* memory) { std::free(memory); }

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void* memory = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
        return {memory, memory, &release, HERE};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t bytes) const final { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return KIND; }
    c10::Device exchangeDevice(c10::Device) const override { return HERE; }
    c10::Device getDevice() const override { return HERE; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, HERE); }
    c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, HERE); }
    c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, HERE); }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void synchronizeDevice(c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A generator of the device: its numbers are drawn by a generator of the CPU.
struct Generator final : c10::GeneratorImpl {
    at::Generator drawn_by = at::make_generator<at::CPUGeneratorImpl>();

    Generator() : GeneratorImpl(HERE, c10::DispatchKeySet(DispatchKey::PrivateUse1)) {}
    void set_current_seed(uint64_t seed) override { drawn_by.set_current_seed(seed); }
    void set_offset(uint64_t offset) override { drawn_by.set_offset(offset); }
    uint64_t get_offset() const override { return drawn_by.get_offset(); }
    uint64_t current_seed() const override { return drawn_by.current_seed(); }
    uint64_t seed() override { return drawn_by.seed(); }
    void set_state(const c10::TensorImpl& state) override { drawn_by.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return drawn_by.unsafeGetGeneratorImpl()->get_state();
    }
    Generator* clone_impl() const override {
        auto* copy = new Generator();
        copy->drawn_by = drawn_by.clone();
        return copy;
    }
};

const at::Generator& default_generator() {
    static const at::Generator generator = at::make_generator<Generator>();
    return generator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
    at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
    at::Device getDeviceFromPtr(void*) const override { return HERE; }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
        auto grown = memory.allocate(bytes);
        std::memcpy(grown.get(), storage.data(), std::min(bytes, storage.nbytes()));
        storage.unsafeGetStorageImpl()->set_data_ptr(std::move(grown));
        storage.unsafeGetStorageImpl()->set_nbytes(bytes);
    }
};

const bool hooked = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    return true;
}();

at::Tensor empty(at::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &memory,
                                     c10::DispatchKeySet(DispatchKey::PrivateUse1), at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::SymIntArrayRef sizes, at::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &memory,
                                             c10::DispatchKeySet(DispatchKey::PrivateUse1),
                                             at::dtype_or_default(dtype));
}

at::Tensor zero_tensor(at::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                       std::optional<at::Device> device, std::optional<bool> pinned) {
    return empty(sizes, dtype, layout, device, pinned, {}).zero_();
}

// The tensor of the CPU with the same memory.
at::Tensor on_cpu(const at::Tensor& tensor) {
    if (tensor.device().type() != KIND) return tensor;
    auto plain = at::for_blob(tensor.data_ptr(), tensor.sizes())
                     .strides(tensor.strides())
                     .options(at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU))
                     .make_tensor();
    plain._set_conj(tensor.is_conj());
    plain._set_neg(tensor.is_neg());
    return plain;
}

struct Kept {
    at::Tensor tensor;
};

// A tensor of this device that keeps a tensor of the CPU alive and has its memory.
at::Tensor from_cpu(const at::Tensor& given) {
    if (!given.defined() || given.device().type() == KIND) return given;
    auto tensor = given.resolve_conj().resolve_neg();
    if (tensor._is_zerotensor()) tensor = at::zeros(tensor.sizes(), tensor.options());
    if (tensor.layout() != at::kStrided || !tensor.unsafeGetTensorImpl()->has_storage()) return tensor;
    auto* kept = new Kept{tensor};
    c10::DataPtr data(tensor.storage().mutable_data(), kept, [](void* each) { delete static_cast<Kept*>(each); }, HERE);
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), &memory, true);
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                         c10::DispatchKeySet(DispatchKey::PrivateUse1), tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return made;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
    from._is_zerotensor() ? on_cpu(to).zero_() : on_cpu(to).copy_(on_cpu(from));
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    at::native::resize_(to, from.sizes());
    return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return at::native::_local_scalar_dense_cpu(on_cpu(tensor)); }

const std::set<std::string> INDEXING = {"aten::index", "aten::_unsafe_index", "aten::_index_put_impl_"};

// Calls an operation on the same memory as tensors of the CPU.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const auto count = schema.arguments().size();
    const auto begin = stack->size() - count;
    std::optional<c10::Device> home;
    for (size_t at = 0; at < count; ++at) {
        const auto& value = (*stack)[begin + at];
        const auto see = [&](const at::Tensor& each) {
            if (each.defined() && each.device().type() == KIND) home = HERE;
        };
        if (value.isTensor()) see(value.toTensor());
        if (value.isTensorList()) for (const auto& each : value.toTensorVector()) see(each);
        if (value.isOptionalTensorList())
            for (const auto& each : value.toOptionalTensorVector()) if (each) see(*each);
        if (value.isDevice() && value.toDevice().type() == KIND) home = HERE;
    }
    const auto fit = [&](const at::Tensor& each, bool index, bool written) {
        if (!each.defined() || each.device().type() == KIND || !home) return;
        TORCH_CHECK((each.dim() == 0 || index) && !written,
                    "Expected all tensors to be on the same device, but found at least two devices, ", HERE, " and ",
                    each.device(), "! (in ", schema.name(), ")");
    };
    std::vector<at::Tensor> originals, shadows, alive;
    std::vector<bool> outs;
    for (size_t at = 0; at < count; ++at) {
        auto& value = (*stack)[begin + at];
        const auto& argument = schema.arguments()[at];
        const bool written = argument.alias_info() && argument.alias_info()->isWrite();
        const bool out = written && argument.is_out();
        const bool index = argument.name() == "indices" && INDEXING.count(schema.name());
        const auto shadow = [&](const at::Tensor& each) {
            fit(each, index, written);
            if (!each.defined()) return each;
            alive.push_back(each);
            auto same = out ? at::empty({0}, each.options().device(at::kCPU)) : on_cpu(each);
            if (written) {
                originals.push_back(each);
                shadows.push_back(same);
                outs.push_back(out);
            }
            return same;
        };
        if (value.isTensor()) {
            value = shadow(value.toTensor());
        } else if (value.isTensorList()) {
            std::vector<at::Tensor> made;
            for (const auto& each : value.toTensorVector()) made.push_back(shadow(each));
            value = made;
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> made;
            for (const auto& each : value.toOptionalTensorVector())
                made.push_back(each ? std::optional<at::Tensor>(shadow(*each)) : std::nullopt);
            value = made;
        } else if (value.isDevice() && home) {
            value = c10::Device(at::kCPU);
        } else if (value.isGenerator() && home) {
            const auto given = value.toGenerator();
            TORCH_CHECK(!given.defined() || given.device().type() == KIND, "Expected a '", HERE.type(),
                        "' device type for generator but found '", given.device().type(), "'");
            if (given.defined()) value = static_cast<Generator*>(given.unsafeGetGeneratorImpl())->drawn_by;
        } else if (value.isNone() && home && argument.name() == "generator") {
            value = static_cast<Generator*>(default_generator().unsafeGetGeneratorImpl())->drawn_by;
        }
    }
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
    for (size_t at = 0; at < originals.size(); ++at)
        if (outs[at]) copy_from_and_resize(shadows[at], originals[at]);
    const auto returned = [&](const at::Tensor& each, const c10::Argument& described) -> at::Tensor {
        if (!each.defined() || !home) return each;
        for (size_t at = 0; at < shadows.size(); ++at)
            if (each.is_same(shadows[at])) return originals[at];
        TORCH_CHECK(!described.alias_info(), "the stand-in device has no view ", schema.name());
        return from_cpu(each);
    };
    const auto first = stack->size() - schema.returns().size();
    for (size_t at = 0; at < schema.returns().size(); ++at) {
        auto& value = (*stack)[first + at];
        if (value.isTensor()) {
            value = returned(value.toTensor(), schema.returns()[at]);
        } else if (value.isTensorList()) {
            std::vector<at::Tensor> made;
            for (const auto& each : value.toTensorVector()) made.push_back(returned(each, schema.returns()[at]));
            value = made;
        }
    }
}

at::Tensor view(const at::Tensor& self, at::SymIntArrayRef sizes) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor as_strided(const at::Tensor& self, at::SymIntArrayRef sizes, at::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset) {
    return at::native::as_strided_tensorimpl(
        self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
        offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

at::Tensor reshape_alias(const at::Tensor& self, at::SymIntArrayRef sizes, at::SymIntArrayRef strides) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

const at::Tensor& resize(const at::Tensor& self, at::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
    return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, at::SymIntArrayRef sizes,
                        at::SymIntArrayRef strides) {
    return at::native::set_storage_cpu_(self, source, offset.guard_int(__FILE__, __LINE__),
                                        C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("_efficientzerotensor", &zero_tensor);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("_local_scalar_dense", &local_scalar);
    m.impl("as_strided", &as_strided);
    m.impl("view", &view);
    m.impl("view.dtype", &at::native::view_dtype);
    m.impl("view_as_real", &at::native::view_as_real);
    m.impl("view_as_complex", &at::native::view_as_complex);
    m.impl("_reshape_alias", &reshape_alias);
    m.impl("unfold", &at::native::unfold);
    m.impl("resize_", &resize);
    m.impl("set_.source_Tensor", &at::native::set_tensor_);
    m.impl("set_.source_Storage", &at::native::set_);
    m.impl("set_.source_Storage_storage_offset", &set_storage);
}

// `_copy_from` sees these bits itself: torch's fallback would clone, which copies.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, ZeroTensor, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

at::CPUGeneratorImpl* drawn_by() {
    return static_cast<at::CPUGeneratorImpl*>(
        static_cast<Generator*>(default_generator().unsafeGetGeneratorImpl())->drawn_by.unsafeGetGeneratorImpl());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// What `torch.standin` calls: the state of the default generator.
TORCH_LIBRARY(standin, m) {
    m.def("seed", [](int64_t seed) { drawn_by()->set_current_seed(static_cast<uint64_t>(seed)); });
    m.def("get_state", []() { return at::Tensor(drawn_by()->get_state()); });
    m.def("set_state", [](const at::Tensor& state) { drawn_by()->set_state(*state.unsafeGetTensorImpl()); });
}

}  // namespace
