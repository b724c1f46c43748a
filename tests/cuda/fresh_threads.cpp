// Every kernel called from host threads that have not used CUDA before, also the first one of the process: eight threads per
// kernel, all results the same. Device memory comes from the driver API, so that this program itself makes no runtime call.
// Prints a line for each kernel; the exit code is 0 if all are right.
#include <dlfcn.h>
#include <libflash.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kThreads = 8;
constexpr int64_t kRows = 64, kHeads = 2;

// The functions of the driver API that are used.
struct Driver {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    template <class Function>
    Function* find(const char* name) const {
        void* found = library ? dlsym(library, name) : nullptr;
        if (!found) std::fprintf(stderr, "the driver has no %s\n", name), std::exit(2);
        return reinterpret_cast<Function*>(found);
    }
    static void must(int code, const char* what) {
        if (code != 0) std::fprintf(stderr, "%s: %d\n", what, code), std::exit(2);
    }
    using Address = unsigned long long;

    Address allocate(size_t bytes) const {
        Address memory = 0;
        must(find<int(Address*, size_t)>("cuMemAlloc_v2")(&memory, bytes), "cuMemAlloc");
        must(find<int(Address, unsigned char, size_t)>("cuMemsetD8_v2")(memory, 0, bytes), "cuMemsetD8");
        return memory;
    }
    void write(Address to, const std::vector<char>& from) const {
        must(find<int(Address, const void*, size_t)>("cuMemcpyHtoD_v2")(to, from.data(), from.size()), "cuMemcpyHtoD");
    }
    std::vector<char> read(Address from, size_t bytes) const {
        must(find<int()>("cuCtxSynchronize")(), "cuCtxSynchronize");
        std::vector<char> to(bytes);
        must(find<int(void*, Address, size_t)>("cuMemcpyDtoH_v2")(to.data(), from, bytes), "cuMemcpyDtoH");
        return to;
    }
    // Makes the first device's primary context current on the calling thread.
    void start() const {
        int device = 0;
        void* context = nullptr;
        must(find<int(unsigned)>("cuInit")(0), "cuInit");
        must(find<int(int*, int)>("cuDeviceGet")(&device, 0), "cuDeviceGet");
        must(find<int(void**, int)>("cuDevicePrimaryCtxRetain")(&context, device), "cuDevicePrimaryCtxRetain");
        must(find<int(void*)>("cuCtxSetCurrent")(context), "cuCtxSetCurrent");
    }
};

size_t bytes_of(int32_t dtype) {
    switch (dtype) {
        case FLASH_DTYPE_BOOL: return 1;
        case FLASH_DTYPE_FLOAT32: return 4;
        case FLASH_DTYPE_INT32: return 4;
        case FLASH_DTYPE_FLOAT64: return 8;
        default: return 2;
    }
}

int32_t dtype_of(const std::string& type) {
    if (type == "f64") return FLASH_DTYPE_FLOAT64;
    if (type == "f32") return FLASH_DTYPE_FLOAT32;
    return type == "f16" ? FLASH_DTYPE_FLOAT16 : FLASH_DTYPE_BFLOAT16;
}

int32_t lse_dtype(int32_t dtype) { return dtype == FLASH_DTYPE_FLOAT64 ? dtype : FLASH_DTYPE_FLOAT32; }

struct Tensor {
    flash_tensor_t view{};
    size_t bytes = 0;

    Tensor(const Driver& driver, int32_t dtype, const std::vector<int64_t>& shape, bool fill) {
        int64_t size = 1;
        for (const int64_t n : shape) size *= n;
        for (int64_t n : shape) view.shape[view.ndim++] = n;
        for (int i = view.ndim - 1, step = 1; i >= 0; step *= static_cast<int>(view.shape[i--])) view.stride[i] = step;
        bytes = static_cast<size_t>(size) * bytes_of(dtype);
        view.dtype = dtype, view.device_type = FLASH_DEVICE_CUDA;
        const auto memory = driver.allocate(bytes);
        std::memcpy(&view.data, &memory, sizeof view.data);
        // 16-bit patterns 0x3000 to 0x33ff: numbers between 2^-32 and 1/4 in either type, and of floats too.
        std::vector<char> numbers(bytes);
        for (size_t i = 0; fill && i < bytes; ++i) numbers[i] = static_cast<char>(i % 2 ? 0x30 + i * 7 % 13 % 4 : i * 31);
        if (dtype == FLASH_DTYPE_BOOL) numbers.assign(bytes, 1);
        driver.write(memory, numbers);
    }
    Driver::Address address() const { return reinterpret_cast<uintptr_t>(view.data); }
};

// A call of one kernel, with its own outputs.
struct Call {
    const flash_kernel_info_t& kernel;
    std::vector<Tensor> x;  // inputs, shared by all calls
    std::vector<Tensor> made;
    void* workspace = nullptr;
    size_t workspace_bytes = 0;
    std::string error;

    const flash_tensor_t* in(size_t n) const { return &x[n].view; }
    const flash_tensor_t* out(size_t n) const { return &made[n].view; }

    flash_status_t run(bool query) {
        const std::string operation = kernel.operation;
        flash_attention_options_t options = FLASH_ATTENTION_OPTIONS_INIT;
        flash_decode_options_t decoding = FLASH_DECODE_OPTIONS_INIT;
        flash_merge_options_t merging = FLASH_MERGE_OPTIONS_INIT;
        options.kernel = decoding.kernel = merging.kernel = kernel.name;
        size_t* const size = &workspace_bytes;
        if (operation == "forward") {
            if (query) return flash_attention_forward_workspace_size(in(0), in(1), in(2), out(0), out(1), &options, size);
            return flash_attention_forward(in(0), in(1), in(2), out(0), out(1), &options, workspace, *size, nullptr);
        }
        if (operation == "backward") {
            if (query) {
                return flash_attention_backward_workspace_size(in(3), in(0), in(1), in(2), in(3), in(4), out(0), out(1), out(2),
                                                               &options, size);
            }
            return flash_attention_backward(in(3), in(0), in(1), in(2), in(3), in(4), out(0), out(1), out(2), &options, workspace,
                                            *size, nullptr);
        }
        if (operation == "decode") {
            if (query) return flash_attention_decode_workspace_size(in(0), in(1), in(2), out(0), out(1), &decoding, size);
            return flash_attention_decode(in(0), in(1), in(2), out(0), out(1), &decoding, workspace, *size, nullptr);
        }
        if (operation == "merge")
            return query ? FLASH_STATUS_OK : flash_attention_merge(in(3), in(4), 1, out(0), out(1), &merging, nullptr);
        if (operation == "cache_write") return write_to_cache(query);
        if (operation == "forward_tangent" || operation == "backward_tangent") return run_tangent(options, query);
        const flash_block_lists_t lists = {made[0].view, made[1].view, made[2].view, made[3].view};
        return query ? FLASH_STATUS_OK : flash_block_mask_compress(in(5), &lists, nullptr);
    }
    // From out and LSE, so that the kernel of the operation alone runs; every input is its own tangent.
    flash_status_t run_tangent(const flash_attention_options_t& options, bool query) {
        flash_tangents_t tangents = FLASH_TANGENTS_INIT;
        tangents.q = in(0), tangents.k = in(1), tangents.v = in(2);
        size_t* const size = &workspace_bytes;
        if (std::string(kernel.operation) == "forward_tangent") {
            tangents.flags = FLASH_FLAG_FROM_LSE, tangents.out = out(0), tangents.lse = out(1);
            if (query)
                return flash_attention_forward_tangent_workspace_size(in(0), in(1), in(2), in(3), in(4), &tangents, &options,
                                                                      size);
            return flash_attention_forward_tangent(in(0), in(1), in(2), in(3), in(4), &tangents, &options, workspace, *size,
                                                   nullptr);
        }
        tangents.out = tangents.dout = in(3), tangents.lse = in(4);
        tangents.dq = out(0), tangents.dk = out(1), tangents.dv = out(2);
        if (query) {
            return flash_attention_backward_tangent_workspace_size(in(3), in(0), in(1), in(2), in(3), in(4), nullptr, nullptr,
                                                                   nullptr, &tangents, &options, size);
        }
        return flash_attention_backward_tangent(in(3), in(0), in(1), in(2), in(3), in(4), nullptr, nullptr, nullptr, &tangents,
                                                &options, workspace, *size, nullptr);
    }
    flash_status_t write_to_cache(bool query) {
        flash_cache_write_options_t writing = FLASH_CACHE_WRITE_OPTIONS_INIT;
        writing.kernel = kernel.name;
        if (query) return flash_cache_write_workspace_size(in(6), in(6), out(0), out(1), in(7), &writing, &workspace_bytes);
        return flash_cache_write(in(6), in(6), out(0), out(1), in(7), &writing, nullptr);
    }
    void run_and_say() {
        if (run(false) != FLASH_STATUS_OK) error = flash_last_error();
    }
};

Call make_call(const Driver& driver, const flash_kernel_info_t& kernel, const std::vector<Tensor>& inputs, int32_t dtype) {
    const std::string operation = kernel.operation;
    const int64_t dim = kernel.head_dim ? kernel.head_dim : 64, dim_v = kernel.head_dim_v ? kernel.head_dim_v : 64;
    const auto tensor = [&](int32_t type, const std::vector<int64_t>& shape) { return Tensor(driver, type, shape, false); };
    Call call{kernel, inputs, {}, nullptr, 0, ""};
    if (operation == "backward" || operation == "backward_tangent") {
        for (const int64_t channels : {dim, dim, dim_v}) call.made.push_back(tensor(dtype, {1, kRows, kHeads, channels}));
    } else if (operation == "compress") {
        for (const int n : {3, 4, 3, 4})
            call.made.push_back(
                tensor(FLASH_DTYPE_INT32, n == 3 ? std::vector<int64_t>{1, 2, 4} : std::vector<int64_t>{1, 2, 4, 4}));
    } else if (operation == "cache_write") {
        for (int n = 0; n < 2; ++n) call.made.push_back(tensor(dtype, {1, kRows, kHeads, dim}));
    } else {
        call.made = {tensor(dtype, {1, kRows, kHeads, dim_v}), tensor(lse_dtype(dtype), {1, kHeads, kRows})};
    }
    return call;
}

// The error, or an empty string.
std::string check(const Driver& driver, const flash_kernel_info_t& kernel) {
    const int32_t dtype = dtype_of(kernel.dtype);
    const int64_t dim = kernel.head_dim ? kernel.head_dim : 64, dim_v = kernel.head_dim_v ? kernel.head_dim_v : 64;
    std::vector<Tensor> inputs;
    for (const int64_t channels : {dim, dim, dim_v, dim_v})
        inputs.emplace_back(driver, dtype, std::vector<int64_t>{1, kRows, kHeads, channels}, true);
    const bool values_in_keys = std::string(kernel.operation) == "decode" && std::string(kernel.backend) == "sm90";
    if (values_in_keys) inputs[2].view = inputs[1].view, inputs[2].view.shape[3] = dim_v;
    inputs.emplace_back(driver, lse_dtype(dtype), std::vector<int64_t>{1, kHeads, kRows}, true);
    inputs.emplace_back(driver, FLASH_DTYPE_BOOL, std::vector<int64_t>{1, 2, 4, 4}, true);
    inputs.emplace_back(driver, dtype, std::vector<int64_t>{kRows, kHeads, dim}, true);
    inputs.emplace_back(driver, FLASH_DTYPE_INT32, std::vector<int64_t>{kRows}, false);
    std::vector<char> slots(inputs.back().bytes);
    for (int32_t row = 0; row < kRows; ++row) std::memcpy(&slots[static_cast<size_t>(row) * sizeof row], &row, sizeof row);
    driver.write(inputs.back().address(), slots);
    std::vector<Call> calls;
    for (int n = 0; n < kThreads; ++n) calls.push_back(make_call(driver, kernel, inputs, dtype));
    for (Call& call : calls) {
        // Also called by a fresh thread, since it does not access a device.
        std::thread([&] {
            if (call.run(true) != FLASH_STATUS_OK) call.error = flash_last_error();
        }).join();
        if (!call.error.empty()) return "workspace: " + call.error;
        const auto memory = driver.allocate(call.workspace_bytes + 256);
        std::memcpy(&call.workspace, &memory, sizeof memory);
    }
    std::vector<std::thread> threads;
    for (int n = 1; n < kThreads; ++n) threads.emplace_back([&calls, n] { calls[static_cast<size_t>(n)].run_and_say(); });
    for (std::thread& thread : threads) thread.join();
    calls[0].run_and_say();  // this thread has a context
    for (const Call& call : calls) {
        if (!call.error.empty()) return (&call == &calls[0] ? "main thread: " : "fresh thread: ") + call.error;
        for (size_t n = 0; n < call.made.size(); ++n) {
            const bool summed_in_any_order = std::string(kernel.operation) == "backward" && n == 0;
            const auto bytes = [&](const Call& of) { return driver.read(of.made[n].address(), of.made[n].bytes); };
            if (!summed_in_any_order && bytes(call) != bytes(calls[0])) return "another result";
        }
    }
    return "";
}

}  // namespace

int main() {
    const Driver driver;
    driver.start();
    int failures = 0, checked = 0;
    for (int32_t index = 0; index < flash_kernel_count(); ++index) {
        flash_kernel_info_t kernel{};
        kernel.struct_size = sizeof kernel;
        if (flash_kernel_info(index, &kernel) != FLASH_STATUS_OK) return 2;
        const std::string operation = kernel.operation;
        if (operation == "prefill" || operation == "decode_prefix") continue;  // which calls of decode choose
        if (!kernel.usable || std::string(kernel.backend) == "cpu") continue;
        if (std::string(kernel.name).find("_statistics") != std::string::npos) continue;  // for other calls
        const std::string wrong = check(driver, kernel);
        std::printf("%s %s %s\n", wrong.empty() ? "ok" : "FAILED", kernel.name, wrong.c_str());
        failures += !wrong.empty();
        ++checked;
    }
    std::printf("%d kernels\n", checked);
    return failures > 0 || checked == 0;
}
