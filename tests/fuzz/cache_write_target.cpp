// flash_cache_write: after a valid call every byte of the caches and scales must be the expected one; an invalid call must be
// refused, name the argument and change nothing.
#include "cache_write_case.h"
#include "kernels.h"
#include "target.h"

namespace fuzz {
namespace {

// The bits of a NaN that was written may differ.
void check_bytes(const Tensor& got, const Tensor& expected, const Tensor& before, WriteRole role) {
    const int64_t size = bytes_of(before.view.dtype), elements = static_cast<int64_t>(before.size_bytes()) / size;
    const auto value = [&](const Tensor& t, int64_t n) {
        return libflash::cpu::load_as(static_cast<DType>(t.view.dtype), t.block(), n);
    };
    for (int64_t n = 0; n < elements; ++n) {
        const size_t at = static_cast<size_t>(n * size), length = static_cast<size_t>(size);
        if (std::memcmp(got.block() + at, expected.block() + at, length) == 0) continue;
        const bool written = std::memcmp(expected.block() + at, before.block() + at, length) != 0;
        FUZZ_CHECK(written && std::isnan(value(expected, n)) && std::isnan(value(got, n)),
                   "%s, element %lld of the memory: %.17g, expected %.17g, %s", name_of(role), static_cast<long long>(n),
                   value(got, n), value(expected, n), written ? "written" : "not to be written");
    }
}

void compare(const WriteCase& problem, WriteCall call, const char* kernel) {
    WriteCall expected_call = call;
    const StoredTensors got(problem, call);
    StoredTensors expected(problem, expected_call);
    write_expected(problem, expected_call, expected);
    call.options.kernel = kernel;
    call.bind();
    size_t bytes = 1;
    check_status(call.workspace_size(&bytes), FLASH_STATUS_OK, "workspace_size");
    FUZZ_CHECK(bytes == 0, "workspace of %zu bytes", bytes);
    check_status(call.run(), FLASH_STATUS_OK, "cache_write");
    for (const WriteRole role : kStored)
        if (problem.tensor[role].present()) check_bytes(got.tensor[role], expected.tensor[role], problem.tensor[role], role);
}

// Whether the text is "argument: ...", with any argument if `argument` is empty.
bool names_argument(const std::string& text, const std::string& argument) {
    if (!argument.empty()) return text.rfind(argument + ": ", 0) == 0;
    for (int role = 0; role < kWriteRoles; ++role)
        if (names_argument(text, name_of(static_cast<WriteRole>(role)))) return true;
    return false;
}

void refuse(const WriteCase& problem, WriteCall call, const WriteFault& fault) {
    const Contents before(problem.tensor);
    call.bind();
    size_t bytes = 0;
    call.workspace_size(&bytes);  // may accept the call: it reads no data
    check_status(call.run(), fault.expected, fault.what.c_str());
    FUZZ_CHECK(names_argument(flash_last_error(), fault.argument), "%s: the text does not name %s: \"%s\"", fault.what.c_str(),
               fault.argument.empty() ? "an argument" : fault.argument.c_str(), flash_last_error());
    before.check_unchanged(fault.what);
}

}  // namespace

void cache_write_target(Bytes& bytes) {
    static const std::vector<std::string> kernels = usable_kernels("cache_write");
    WriteCase problem(bytes);
    WriteCall call = problem.call();
    if (!problem.supported()) {
        const bool keys = problem.channels_k + problem.channels_rope > 576;
        return refuse(problem, call, {"too many channels", keys ? "head_dim" : "head_dim_v", FLASH_STATUS_UNSUPPORTED});
    }
    if (!bytes.chance(128)) return compare(problem, call, pick_kernel(kernels, bytes));
    const WriteFault fault = invalidate(problem, call, bytes);
    if (!fault.what.empty()) refuse(problem, call, fault);
}

}  // namespace fuzz
